"""From the tools of a request to the functions that its answer may call, and the shape of that answer."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from personae.api.family import Family
from personae.api.params import grammar_spec
from personae.api.schema import (
    ChatRequest,
    CustomTool,
    CustomToolChoice,
    JsonSchemaFormat,
    NamedTool,
    Tool,
)
from personae.errors import RequestError, UnsupportedParameter
from personae.grammar.reasoning.format import Thinks
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.answer import AnswerShape, ToolUse
from personae.grammar.structure.elements import Json
from personae.grammar.tools.format import Function

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST = 128
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def functions_of(tools: Sequence[Tool | CustomTool] | None) -> tuple[Function, ...]:
    """The functions that a request offers. Raises RequestError naming the field that is wrong."""
    if len(tools or ()) > _MOST:
        raise RequestError(f"`tools` may have at most {_MOST}.", param="tools")
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools or ()):
        if isinstance(tool, CustomTool):
            raise UnsupportedParameter(
                f"`tools[{index}]` is a custom tool; only functions are served.", param=f"tools[{index}].type"
            )
        name, where = tool.function.name, f"tools[{index}].function"
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"`{where}.name` must have 1 to 64 letters, digits, `_`, `.` and `-`.", param=f"{where}.name"
            )
        if name in functions:
            raise RequestError(f"`{where}.name`: there are two tools of that name.", param=f"{where}.name")
        functions[name] = Function(
            name, _object(tool.function.parameters), bool(tool.function.strict), f"{where}.parameters"
        )
    return tuple(functions.values())


def shown_tools(tools: Sequence[Tool | CustomTool] | None) -> list[dict[str, Any]] | None:
    """The tools as chat templates know them: whether one is strict is between the caller and the grammar."""
    shown = []
    for tool in tools or ():
        assert isinstance(tool, Tool), "functions_of has refused others"
        function = msgspec.to_builtins(tool.function)
        del function["strict"]
        known = {name: value for name, value in function.items() if value is not None}
        shown.append({"type": "function", "function": known})
    return shown or None


def answer_shape(body: ChatRequest, family: Family, prompt: str) -> AnswerShape | None:
    """What the answer to `prompt` consists of; None if all of it is text, or JSON alone.

    Raises RequestError when the tools, or the choice among them, make no sense.
    """
    functions, use = _choice(body, functions_of(body.tools))
    reasoning, thinks = family.reasoning, Thinks.NO
    if reasoning is not None and not body.continue_final_message:
        thinks = reasoning.thinks(prompt)
    if not functions and (reasoning is None or thinks is Thinks.NO):
        return None
    if functions and family.tools is None:
        raise RequestError(
            "The format in which this model calls tools is not known; the server's `--tool-format` names it.",
            param="tools",
        )
    json = _json(body)
    if json is not None and use == "auto" and family.tools is not None and not family.tools.anywhere:
        raise RequestError(
            "`response_format` and `tools` cannot be told apart in this model's answers; set `tool_choice` "
            'to "none" or "required".',
            param="response_format",
        )
    return AnswerShape(
        reasoning=reasoning,
        thinks=thinks,
        tools=family.tools if functions else None,
        functions=functions,
        use=use,
        parallel=body.parallel_tool_calls is not False,
        json=json,
    )


def grammar_of(body: ChatRequest, shape: AnswerShape | None) -> GrammarSpec | None:
    """What binds the answer."""
    plain = grammar_spec(body.response_format)
    if shape is None or (shape.thinks is Thinks.NO and shape.tools is None):
        return plain
    return shape.spec()


def _choice(body: ChatRequest, functions: tuple[Function, ...]) -> tuple[tuple[Function, ...], ToolUse]:
    """The functions that may be called, and whether one has to be."""
    choice = body.tool_choice
    if isinstance(choice, CustomToolChoice):
        raise UnsupportedParameter("`tool_choice`: custom tools are not served.", param="tool_choice.type")
    if choice is None or isinstance(choice, str):
        if choice == "required" and not functions:
            raise RequestError('`tool_choice` "required" needs `tools`.', param="tool_choice")
        return functions, choice or "auto" if functions else "none"
    if isinstance(choice, NamedTool):
        return (_named(choice, functions, "tool_choice.function.name"),), "required"
    selected = [
        _named(tool, functions, f"tool_choice.allowed_tools.tools[{index}].function.name")
        for index, tool in enumerate(choice.allowed_tools.tools)
    ]
    if not selected:
        raise RequestError(
            "`tool_choice.allowed_tools.tools` is empty.", param="tool_choice.allowed_tools.tools"
        )
    return tuple({function.name: function for function in selected}.values()), choice.allowed_tools.mode


def _named(tool: NamedTool, functions: Sequence[Function], where: str) -> Function:
    for function in functions:
        if function.name == tool.function.name:
            return function
    raise RequestError(f"`{where}` is not the name of one of the `tools`.", param=where)


def _object(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object whatever it says of that."""
    if parameters is None:
        return _NO_ARGUMENTS
    if parameters.get("type") == "object":
        return parameters
    if parameters.keys().isdisjoint({"type", "$ref", "allOf", "anyOf", "oneOf", "enum", "const"}):
        return {"type": "object", **parameters}
    return {"allOf": [parameters, {"type": "object"}]}


def _json(body: ChatRequest) -> Json | None:
    """What `response_format` asks for, as an element."""
    spec = grammar_spec(body.response_format)
    if spec is None:
        return None
    if isinstance(body.response_format, JsonSchemaFormat):
        schema = body.response_format.json_schema.schema
        return Json(schema, spec.strict, "response_format.json_schema.schema")
    return Json({"type": "object"}, True, "response_format")
