"""The data's section of the config: where rows come from, and which of their columns mean what."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from megarl.config_section import Section


class SourceConfig(Section):
    """Rows of one file, or of one dataset of the Hugging Face hub."""

    path: str | None = Field(None, description="JSONL or Parquet file")
    name: str | None = Field(None, description="dataset, as datasets.load_dataset takes it: openai/gsm8k")
    subset: str | None = Field(None, description="of the dataset: main")
    split: str = Field("train", description="of the dataset")
    weight: float | None = Field(
        None, gt=0, description="share of the prompts, relative to the others' weights; all sources have one or none"
    )

    def __str__(self) -> str:
        return self.path or "/".join(filter(None, (self.name, self.subset, self.split)))


def as_sources(given: Any) -> Any:
    """A file's name, or one mapping, stands for a list of it; so do names of files within a list."""
    items = given if isinstance(given, list) else [given]
    return given if given is None else [{"path": item} if isinstance(item, str) else item for item in items]


def in_short(sources: list[SourceConfig]) -> list[str | dict]:
    """As a config has them."""
    given = [source.model_dump(exclude_defaults=True) for source in sources]
    return [source["path"] if source.keys() == {"path"} else source for source in given]


Sources = Annotated[list[SourceConfig], BeforeValidator(as_sources), PlainSerializer(in_short)]


class DataConfig(Section):
    train: Sources = Field(
        min_length=1,
        description="JSONL or Parquet file of prompts, with a response each for sft, with two for dpo, ipo and "
        "reward_model; or {name, subset, split} of a Hugging Face dataset; or a list of these, with weights",
    )
    validation: Sources | None = Field(None, description="the same of held-out rows")
    prompt_key: str = Field("prompt", description="column with the user's text, or with a list of messages")
    answer_key: str | None = Field("answer", description="column with the reference answer; null: none")
    tools_key: str | None = Field(
        "tools", description="column with the tools that the chat template is given, where a row has one; null: none"
    )
    response_key: str = Field("response", description="column with the text that sft and a warm start train on")
    chosen_key: str = Field("chosen", description="column with the preferred of two responses")
    rejected_key: str = Field("rejected", description="column with the other one")
    system_prompt: str | None = None
    chat_template: str | None = Field(
        None, description="a file with a Jinja template, the name of one of the tokenizer's, or chatml; null: its own"
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="templated length")
    overlong: Literal["drop", "refuse", "truncate_left", "truncate_right"] = Field(
        "drop",
        description="longer prompts: left out, with a count; an error; or the last message loses its beginning or its "
        "end. Rows with responses are always refused",
    )
