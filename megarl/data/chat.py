"""The only caller of the chat template, and the only loader of tokenizers. Importing it does not load transformers."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config_checks import TOKENIZER_FILES
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model_path: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a local Hugging Face folder; never the network.

    A tokenizer.json is taken as it is; a tokenizer.model (sentencepiece) without one is brought to the same form.
    Raises ConfigError where the folder, its tokenizer, its chat template or its end-of-turn token is missing.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise ConfigError(f"model.path: {folder} is not a folder")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model.path: no tokenizer in {folder}: {' or '.join(TOKENIZER_FILES)}")
    try:
        tokenizer = _load(folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model.path: the tokenizer in {folder} cannot be loaded: {error}") from error
    check_chat_template(tokenizer)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: the tokenizer in {folder} has no eos_token, so no response could end")
    return tokenizer


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


def check_chat_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ConfigError for a tokenizer without chat template: a prompt is never put together by guess."""
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.path: the tokenizer in {tokenizer.name_or_path} has no chat template "
            "(chat_template in tokenizer_config.json, or chat_template.jinja)"
        )


def render(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation with the generation prompt.

    The template alone decides about BOS: the tokenizer adds no special tokens of its own here, so a template that
    begins with bos_token gives exactly one, and a template without it gives none, even with add_bos_token. Raises
    ConfigError without a template, or where the template refuses the messages (roles that do not alternate, say).
    """
    import jinja2

    check_chat_template(tokenizer)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    except jinja2.TemplateError as error:
        roles = [message["role"] for message in messages]
        raise ConfigError(f"the chat template refuses messages with roles {roles}: {error}") from error
