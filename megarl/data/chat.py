"""The only caller of the chat template, and the only loader of tokenizers. Importing it does not load transformers."""

from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config_checks import TOKENIZER_FILES
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model_path: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a local Hugging Face folder; never the network.

    Raises ConfigError where the folder, its tokenizer, its chat template or its end-of-turn token is missing.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise ConfigError(f"model.path: {folder} is not a folder")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model.path: no tokenizer in {folder}: {' or '.join(TOKENIZER_FILES)}")

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: the tokenizer in {folder} cannot be loaded: {error}") from error
    check_chat_template(tokenizer)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: the tokenizer in {folder} has no eos_token, so no response could end")
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
