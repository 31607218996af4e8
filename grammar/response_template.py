"""Derives formats from a `response_template`, by which a tokenizer_config.json describes answers.

https://huggingface.co/docs/transformers/main/chat_response_parsing

It describes how answers are read, in part by regular expressions. To bind answers, the text around a call
must be known exactly. So these are supported: reasoning between two texts, and calls that are JSON between
two texts, one by one or as a list. For anything else the result is None; `--tool-format` can still name the
format.
"""

from typing import Any

from personae.grammar.reasoning.format import ReasoningFormat
from personae.grammar.tools.format import ToolFormat

NAME = "response_template"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTENT = "{content}"


def imported_reasoning(template: Any) -> ReasoningFormat | None:
    """The reasoning that a template describes. None if it describes none, or one that cannot be bound."""
    for name in _REASONING:
        field = _field(template, name)
        open, close = _literal(field, "open"), _literal(field, "close")
        if open and close and field.get("content", "text") == "text":
            return ReasoningFormat(NAME, (), open, close)
    return None


def imported_tools(template: Any) -> ToolFormat | None:
    """The calls that a template describes. None if it describes none, or calls that cannot be bound."""
    field = _field(template, "tool_calls")
    open, close = _literal(field, "open"), _literal(field, "close")
    if not open or not close or field.get("content") != "json" or field.get("content_args"):
        return None
    keys = _keys(field.get("transform"), each=field.get("transform_each") is True)
    if keys is None:
        return None
    before_name, after_name = f'{{ "{keys[0]}" : "', f'" , "{keys[1]}" : '
    if field.get("transform_each") is True:
        return ToolFormat(
            NAME,
            signs=(),
            trigger=open,
            open=f"{open} [ ",
            before_name=before_name,
            after_name=after_name,
            after_arguments=" }",
            between=" , ",
            close=f" ] {close}",
        )
    return ToolFormat(
        NAME,
        signs=(),
        trigger=open,
        before_name=f"{open} {before_name}",
        after_name=after_name,
        after_arguments=f" }} {close}",
        single=field.get("repeats") is not True,
    )


def _field(template: Any, name: str) -> dict[str, Any]:
    fields = template.get("fields") if isinstance(template, dict) else None
    field = fields.get(name) if isinstance(fields, dict) else None
    return field if isinstance(field, dict) else {}


def _literal(field: dict[str, Any], name: str) -> str | None:
    """The text of an anchor, without blanks around it. The first one if there are several."""
    value = field.get(name)
    if isinstance(value, list) and value:
        value = value[0]
    text = value.strip() if isinstance(value, str) else ""
    return text if text and " " not in text and "#" not in text else None


def _keys(transform: Any, *, each: bool) -> tuple[str, str] | None:
    """The JSON keys of the function's name and its arguments."""
    if transform is None:
        return None if each else ("name", "arguments")
    function = transform.get("function", transform) if isinstance(transform, dict) else None
    if function == _CONTENT and not each:
        return "name", "arguments"
    if not isinstance(function, dict):
        return None
    found = [_key(function.get(name), each) for name in ("name", "arguments")]
    return (found[0], found[1]) if found[0] and found[1] else None


def _key(placeholder: Any, each: bool) -> str | None:
    """The name in `{content.name}`, or in `{name}` if each element of a list is transformed."""
    start = "{" if each else "{content."
    if not isinstance(placeholder, str) or not placeholder.startswith(start) or placeholder[-1:] != "}":
        return None
    name = placeholder[len(start) : -1]
    return name if name.isidentifier() else None
