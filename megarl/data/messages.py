"""Columns of a row in the form that the chat template is given: messages and tools.

Templates print tools and calls of them as JSON. A column of Parquet has one order of keys for all its rows, whatever it
was in each, so lists of them are put into an order that is the same in all formats; JSON text stays as it is.
"""

from typing import Any

from megarl.config_data import DataConfig
from megarl.data.row_errors import has_column, short
from megarl.data.sources import parse_json

OPTIONAL_KEYS = {"tool_calls": list, "tool_call_id": str, "name": str, "reasoning_content": str}  # of a message
FIRST_KEYS = ("id", "type", "function", "name", "description", "parameters", "arguments", "properties", "required")


def parse_messages(row: dict, place: str, data_config: DataConfig, errors: list[str]) -> list[dict[str, Any]]:
    """Messages of which the last one is the user's or a tool's, with data.system_prompt unless the row has one; none
    where something was added to `errors`."""
    key = data_config.prompt_key
    if not has_column(row, place, key, "data.prompt_key", errors):
        return []
    value = row[key]
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        errors.append(f"{place}: {key}: wanted a string or a non-empty list of messages, given {short(value)}")
        return []
    # A message that calls tools often says nothing.
    messages = [{"content": ""} | m if isinstance(m, dict) and m.get("tool_calls") else m for m in messages]
    wrong = [text for message in messages if (text := _why_wrong(message))]
    if not wrong and messages[-1]["role"] not in ("user", "tool"):
        wrong = [f"the last message is the user's or a tool's, given role {short(messages[-1]['role'])}"]
    if wrong:
        errors.append(f"{place}: {key}: {wrong[0]}")
        return []
    for message in messages:
        if "tool_calls" in message:
            message["tool_calls"] = in_order(message["tool_calls"])
    if data_config.system_prompt is not None and all(message["role"] != "system" for message in messages):
        messages = [{"role": "system", "content": data_config.system_prompt}, *messages]
    return messages


def _why_wrong(message: Any) -> str | None:
    if not isinstance(message, dict) or not {"role", "content"} <= set(message) <= {"role", "content", *OPTIONAL_KEYS}:
        return f'wanted messages {{"role", "content"}}, with {", ".join(OPTIONAL_KEYS)} or not, given {short(message)}'
    if not isinstance(message["role"], str) or not isinstance(message["content"], str):
        return f"role and content are strings, given {short(message)}"
    for key in OPTIONAL_KEYS.keys() & message.keys():
        if not isinstance(message[key], OPTIONAL_KEYS[key]):
            return f"{key}: wanted a {OPTIONAL_KEYS[key].__name__}, given {short(message[key])}"
    if not message["content"].strip() and message["role"] != "tool" and not message.get("tool_calls"):
        return f"empty {message['role']} text"
    return None


def parse_tools(row: dict, place: str, key: str | None, errors: list[str]) -> list[dict] | None:
    """Tools as JSON schemas, from a list or the JSON text of one; None where the row has none, or where something was
    added to `errors`."""
    value = in_order(row.get(key))
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except (ValueError, RecursionError):
            pass  # and so it is no list
    if value in (None, []):
        return None
    if not isinstance(value, list) or not all(map(_is_tool, value)):
        wanted = 'a list of tools {"name"} or {"type": "function", "function": {"name"}}, or the JSON text of one'
        errors.append(f"{place}: {key}: wanted {wanted}, given {short(row[key])}; data.tools_key: null reads none")
        return None
    return value


def _is_tool(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def in_order(value: Any) -> Any:
    """With the keys of its mappings as tools are usually written, and then by name."""
    if isinstance(value, list):
        return [in_order(item) for item in value]
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value, key=_place)}
    return value


def _place(key: str) -> tuple[int, str]:
    return (FIRST_KEYS.index(key) if key in FIRST_KEYS else len(FIRST_KEYS), key)
