"""Keys that were given and that nobody would read."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.config_errors import covers
from megarl.config_section import changed_keys
from megarl.config_violation import Violation, in_yaml

if TYPE_CHECKING:
    from megarl.config import Config

# key or section -> (why nobody reads it, the key that this rests on); None: it is read. The first that covers a key
# counts.
Unread = dict[str, tuple[str, str] | None]


def unread(config: "Config", reasons: Unread) -> Iterator[Violation]:
    """A violation for each key that `reasons` covers and that is not as the preset, or else the schema, has it."""
    required = {"name": config.name, "model": config.model, "data": {"train": config.data.train}}
    usual = type(config).model_validate(required | {"algorithm": {"name": config.algorithm.name}})
    for key, value, other in changed_keys(config, usual):
        reason = next((reason for name, reason in reasons.items() if covers([name], key)), None)
        if reason is not None:
            why, decides = reason
            yield Violation(f"given {in_yaml(value)}, but {why}; valid: {in_yaml(other)}", (key, decides))
