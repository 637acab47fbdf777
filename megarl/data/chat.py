"""The only caller of the chat template, and the only loader of tokenizers. Importing it does not load transformers."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config_checks import TOKENIZER_FILES
from megarl.data.row_errors import short
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


CHATML = Path(__file__).with_name("chat_templates") / "chatml.jinja"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
PROBES = ("Which number follows 7391?", "Name the colour of snow.")  # any template shows a user's plain text as it is
NUM_SHOWN_CHARACTERS = 400  # of a rendered conversation


def load_tokenizer(model_path: str | Path, chat_template: str | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a local Hugging Face folder with the chat template of `resolve_template`; never the network.

    Raises ConfigError where the folder, its tokenizer, its chat template or its end-of-turn token is missing, and for a
    template that does not show what a user says, has no generation prompt, or gives more than one BOS.
    """
    tokenizer = read_tokenizer(model_path)
    tokenizer.chat_template = resolve_template(tokenizer, chat_template)
    try:
        check_template(tokenizer)
    except ConfigError as error:
        key = "model.path" if chat_template is None else f"data.chat_template: {chat_template}"
        raise ConfigError(f"{key}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: the tokenizer in {model_path} has no eos_token, so no response could end")
    return tokenizer


@contextlib.contextmanager
def blamed_on(key: str) -> Iterator[None]:
    """Within: errors begin with the key that names this tokenizer, in place of model.path."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {str(error).removeprefix('model.path: ')}") from error


def read_tokenizer(model_path: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer as it is, with or without a chat template.

    A tokenizer.json is taken as it is; a tokenizer.model (sentencepiece) without one is brought to the same form.
    Raises ConfigError where the folder or its tokenizer is missing or broken.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise ConfigError(f"model.path: {folder} is not a folder")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model.path: no tokenizer in {folder}: {' or '.join(TOKENIZER_FILES)}")
    try:
        return _load(folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model.path: the tokenizer in {folder} cannot be loaded: {error}") from error


def _load(folder: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer replaces parts of a tokenizer.json by those of the class that tokenizer_config.json names: Llama 2
    # loses the space after <s>, DeepSeek's distilled models lose every space (huggingface/transformers#45488).
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    if (folder / "tokenizer.model").is_file():
        with tempfile.TemporaryDirectory() as converted:
            file = f"{converted}/tokenizer.json"
            convert_sentencepiece(folder / "tokenizer.model").save(file)
            return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True, tokenizer_file=file)
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def convert_sentencepiece(file: Path) -> "Tokenizer":
    """A sentencepiece BPE model in the form of the tokenizer.json that Llama 2 and Mistral 7B were released with.

    A space goes before every text, and before the one after a special token; characters outside the vocabulary become
    bytes. Raises ValueError where the ids would not be sentencepiece's own: for unigram models, for text normalization
    and for user-defined pieces. transformers' own conversion gives one space too few to a text that begins with one.
    """
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    model = SentencePieceProcessor(model_file=str(file))
    ids = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    scores = {piece: model.get_score(i) for piece, i in ids.items()}
    special = [piece for piece, i in ids.items() if model.is_control(i) or model.is_unknown(i)]
    not_text = {*special, *(piece for piece, i in ids.items() if model.is_byte(i))}
    merges = generate_merges(ids, scores, skip_tokens=not_text)
    unknown = model.id_to_piece(model.unk_id())

    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    to_text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*to_text, decoders.Strip(" ", left=1, right=0)])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])

    texts = [piece.replace("▁", " ") for piece in ids if piece not in not_text]
    text = " \ufb01" + "\n".join(texts)  # normalization would change the ligature
    if tokenizer.encode(text, add_special_tokens=False).ids != model.encode(text):
        raise ValueError("tokenizer.model is no plain sentencepiece BPE as Llama 2's is: a tokenizer.json is needed")
    return tokenizer


def resolve_template(tokenizer: "PreTrainedTokenizerBase", chat_template: str | None) -> str | dict[str, str]:
    """The template of a file, or one of the tokenizer's by its name, or `chatml`; None: the tokenizer's own, or all of
    them by name. Raises ConfigError where there is no such one, and for chatml where its tokens are not special."""
    own = tokenizer.chat_template
    if chat_template is None:
        if own:
            return own
        raise ConfigError(
            f"model.path: the tokenizer in {tokenizer.name_or_path} has no chat template; data.chat_template gives it "
            "one: a file, or chatml"
        )
    if os.path.isfile(chat_template):
        try:
            return Path(chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"data.chat_template: {chat_template}: {error}") from error
    if isinstance(own, dict) and chat_template in own:
        return own[chat_template]
    if chat_template != "chatml":
        names = ", ".join([*(own if isinstance(own, dict) else []), "chatml"])
        raise ConfigError(f"data.chat_template: given {chat_template}, which is no file; valid names: {names}")
    vocabulary = tokenizer.get_vocab()
    for token in CHATML_TOKENS:
        if tokenizer.encode(token, add_special_tokens=False) != [vocabulary.get(token)]:
            where = f"the vocabulary of the tokenizer in {tokenizer.name_or_path}"
            raise ConfigError(f"data.chat_template: given chatml, but {token} is no token in {where}")
    return CHATML.read_text(encoding="utf-8")


def check_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ConfigError, with the rendered text, for a template that no conversation can be trusted to."""
    for probe in PROBES:
        text = render_text(tokenizer, [{"role": "user", "content": probe}])
        if probe not in text:
            raise ConfigError(f"the chat template does not show the user's text {probe!r}; {_rendered(text)}")
        _encode(tokenizer, text)
    _check_generation_prompt(tokenizer)


def _check_generation_prompt(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ConfigError for a template that heads an answer with something that no prompt ends with: the model would
    have to write it. Many templates need no heading, as [/INST] is enough; some take no answers at all."""
    user, answer = ({"role": role, "content": probe} for role, probe in zip(("user", "assistant"), PROBES))
    text = render_text(tokenizer, [user])
    if text != render_text(tokenizer, [user], add_generation_prompt=False):
        return
    try:
        before, _, _ = render_text(tokenizer, [user, answer]).partition(answer["content"])
    except ConfigError:
        return
    heading = before.removeprefix(text)
    if heading != before and heading.strip():
        wanted = f"ends a prompt with the {heading!r} that an answer begins with"
        raise ConfigError(f"a chat template {wanted} (add_generation_prompt); {_rendered(text)}")


def render(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], tools: list[dict] | None = None
) -> list[int]:
    """Token ids of a conversation with the generation prompt, with exactly one BOS at the start where the template has
    one, or where the tokenizer puts one before every text (add_bos_token); else with none.

    Raises ConfigError where the template refuses the messages (roles that do not alternate, say), gives two BOS or
    leaves out the tools or a message, and where a text contains the BOS token.
    """
    text = render_text(tokenizer, messages, tools)
    _refuse_left_out(tokenizer, messages, tools, text)
    if tools and text == render_text(tokenizer, messages):
        raise ConfigError(f"the chat template leaves out the tools; data.tools_key: null reads none; {_rendered(text)}")
    bos = tokenizer.bos_token
    for message in messages:
        if bos and bos in message["content"]:
            raise ConfigError(f"the {message['role']} text contains {bos}, the tokenizer's BOS: remove it")
    return _encode(tokenizer, text)


def _refuse_left_out(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], tools: list[dict] | None, text: str
) -> None:
    """A template may change a message (white space, a switch such as /no_think), but another one must give another
    `text`. Of answers many templates leave out the reasoning, or what is said beside a tool call."""
    for i, message in enumerate(messages):
        if message["role"] != "assistant" and message["content"].strip() not in text:
            others = [*messages[:i], message | {"content": PROBES[0]}, *messages[i + 1 :]]
            if render_text(tokenizer, others, tools) == text:
                left_out = f"the {message['role']} text {short(message['content'])}"
                raise ConfigError(f"the chat template leaves out {left_out}; {_rendered(text)}")


def render_text(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict[str, Any]],
    tools: list[dict] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    import jinja2

    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer in {tokenizer.name_or_path} has no chat template")
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"line {error.lineno} of the chat template: {error.message}") from error
    except Exception as error:  # a template is a program, which may fail in every way
        roles = [message["role"] for message in messages]
        raise ConfigError(f"the chat template refuses messages with roles {roles}: {error}") from error


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    token_ids, bos = tokenizer.encode(text, add_special_tokens=False), tokenizer.bos_token_id
    if bos is None:
        return token_ids
    has_bos = token_ids[:1] == [bos]
    if token_ids[:2] == [bos, bos] or (not has_bos and text.lstrip().startswith(tokenizer.bos_token)):
        wanted = f"gives one {tokenizer.bos_token} at the very start, or none"
        raise ConfigError(f"a chat template {wanted}; {_rendered(text)}")
    if has_bos or tokenizer.encode("a")[:1] != [bos]:
        return token_ids
    return [bos, *token_ids]


def _rendered(text: str) -> str:
    return f"rendered: {short(text, NUM_SHOWN_CHARACTERS)}"
