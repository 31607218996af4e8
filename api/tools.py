"""From the tools of a request to the functions that its answer may call, and the shape of that answer."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from personae.api.bound import Bound
from personae.api.dialect import CHAT, Dialect
from personae.api.family import Family
from personae.api.templates.template import begun_reasoning
from personae.api.wire.conversation import (
    AllowedTools,
    BoundInput,
    CustomTool,
    NamedCustomTool,
    NamedTool,
    Tool,
)
from personae.api.wire.schema import ChatRequest
from personae.errors import RequestError, as_json
from personae.grammar.reasoning.format import Thinks
from personae.grammar.schema.gate import ASSERTIONS
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.answer import AnswerShape, ToolUse
from personae.grammar.structure.elements import Lark, Regex
from personae.grammar.tools.custom import custom_function, input_schema
from personae.grammar.tools.function import Function

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_BUDGETS = ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def functions_of(
    tools: Sequence[Tool | CustomTool] | None, *, strict: bool = False, dialect: Dialect = CHAT
) -> tuple[Function, ...]:
    """The functions that a request of `dialect` offers. `strict` applies to those that do not say.

    Raises RequestError naming the field that is wrong.
    """
    if len(tools or ()) > dialect.most_tools:
        raise RequestError(f"`tools` may have at most {dialect.most_tools}.", param="tools")
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools or ()):
        custom = isinstance(tool, CustomTool)
        name = tool.custom.name if isinstance(tool, CustomTool) else tool.function.name
        where = f"tools[{index}].{'custom' if custom else 'function'}"
        check_name(name, f"{where}.name", dialect.longest_name)
        if name in functions:
            raise RequestError(f"`{where}.name`: there are two tools of that name.", param=f"{where}.name")
        if isinstance(tool, CustomTool):
            param = f"{where}.format.grammar.definition"
            functions[name] = custom_function(name, _input(tool, param), param)
        else:
            schema = _object(tool.function.parameters, f"{where}.parameters")
            said = tool.function.strict
            functions[name] = Function(name, schema, strict if said is None else said, f"{where}.parameters")
    return tuple(functions.values())


def check_name(name: str, where: str, longest: int) -> None:
    """Raises RequestError naming the field `where` if this cannot be a tool's name."""
    if len(name) > longest or not _NAME.fullmatch(name):
        raise RequestError(
            f"`{where}` must have 1 to {longest} letters, digits, `_`, `.` and `-`.", param=where
        )


def _input(tool: CustomTool, param: str) -> Regex | Lark | None:
    """What binds a custom tool's input."""
    if not isinstance(tool.custom.format, BoundInput):
        return None
    grammar = tool.custom.format.grammar
    if grammar.syntax == "regex":
        return Regex(grammar.definition, param)
    return Lark(grammar.definition, param)


def shown_tools(tools: Sequence[Tool | CustomTool] | None) -> list[dict[str, Any]] | None:
    """The tools as chat templates know them: functions. Whether one is strict matters only to the grammar."""
    shown = []
    for tool in tools or ():
        if isinstance(tool, CustomTool):
            value: dict[str, Any] = {"type": "string"}
            if isinstance(tool.custom.format, BoundInput):
                grammar = tool.custom.format.grammar
                value["description"] = f"Text of this {grammar.syntax} grammar: {grammar.definition}"
            function: dict[str, Any] = {
                "name": tool.custom.name,
                "description": tool.custom.description,
                "parameters": input_schema(value),
            }
        else:
            function = msgspec.to_builtins(tool.function)
            del function["strict"]
        known = {name: value for name, value in function.items() if value is not None}
        shown.append({"type": "function", "function": known})
    return shown or None


def answer_shape(
    body: ChatRequest,
    family: Family,
    prompt: str,
    bound: Bound | None,
    *,
    strict: bool = False,
    dialect: Dialect = CHAT,
) -> AnswerShape | None:
    """What the answer to `prompt` consists of. None if all of it is text, bound or not.

    Raises RequestError if the tools, the choice among them or the thinking budget are inconsistent.
    """
    functions, use = _choice(body, functions_of(body.tools, strict=strict, dialect=dialect))
    limit = _thinking_budget(body, family)
    reasoning, thinks = family.reasoning, Thinks.NO
    if reasoning is not None:
        if not body.continue_final_message:
            thinks = reasoning.thinks(prompt)
        elif reasoning.continues(begun_reasoning(body.messages[-1], reasoning) or ""):
            thinks = Thinks.WITHIN
    if not functions and (reasoning is None or thinks is Thinks.NO):
        return None
    if functions and family.tools is None:
        raise RequestError(
            "The format in which this model calls tools is not known; the server's `--tool-format` names it, "
            "or `--tool-format generic` has the server describe the tools.",
            param="tools",
        )
    shape = AnswerShape(
        reasoning=reasoning,
        thinks=thinks,
        tools=family.tools if functions else None,
        functions=functions,
        use=use,
        parallel=body.parallel_tool_calls is not False,
        content=None if bound is None else bound.element(),
        limit=limit,
    )
    if bound is not None and not shape.tells_calls:
        raise RequestError(
            f"This model's calls may look like an answer to `{bound.param}`, unless that is a schema; set "
            '`tool_choice` to "none" or "required".',
            param=bound.param,
        )
    return shape


def _thinking_budget(body: ChatRequest, family: Family) -> int | None:
    """The most tokens of reasoning. None for no limit."""
    given = {name: asked for name in _BUDGETS if (asked := getattr(body, name)) is not None}
    for name, asked in given.items():
        if asked < -1:
            raise RequestError(
                f"`{name}` must be -1 (no limit) or more; it is {asked}.", param=name, code="out_of_range"
            )
        if family.reasoning is None:
            raise RequestError(
                f"`{name}`: the format of this model's reasoning is not known, if it reasons at all; the "
                "server's `--reasoning-format` names it.",
                param=name,
                code="unsupported_parameter",
            )
    if len(set(given.values())) > 1:
        raise RequestError(f"{' and '.join(map('`{}`'.format, given))} must not differ.", param=max(given))
    budget = next(iter(given.values()), -1)
    return budget if budget >= 0 else None


def grammar_of(bound: Bound | None, shape: AnswerShape | None) -> GrammarSpec | None:
    """What binds the answer."""
    if shape is None or (shape.thinks is Thinks.NO and shape.tools is None):
        return None if bound is None else bound.spec
    return shape.spec()


def binding_field(body: ChatRequest, bound: Bound | None) -> str | None:
    """The field that binds the answer, if one does: the field of `bound`, the tools, or the thinking
    budget."""
    if bound is not None:
        return bound.param
    return next((name for name in ("tools", *_BUDGETS) if getattr(body, name)), None)


def loose_functions(shape: AnswerShape | None) -> dict[str, dict[str, Any]]:
    """The schemas, by name, against which the arguments of calls must be checked at the end."""
    functions = shape.functions if shape is not None and shape.use != "none" else ()
    return {function.name: function.parameters for function in functions if not function.strict}


def _choice(body: ChatRequest, functions: tuple[Function, ...]) -> tuple[tuple[Function, ...], ToolUse]:
    """The functions that may be called, and whether a call is required."""
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        if choice == "required" and not functions:
            raise RequestError('`tool_choice` "required" needs `tools`.', param="tool_choice")
        return functions, choice or "auto" if functions else "none"
    if not isinstance(choice, AllowedTools):
        return (_named(choice, functions, "tool_choice"),), "required"
    selected = [
        _named(tool, functions, f"tool_choice.allowed_tools.tools[{index}]")
        for index, tool in enumerate(choice.allowed_tools.tools)
    ]
    if not selected:
        raise RequestError(
            "`tool_choice.allowed_tools.tools` is empty.", param="tool_choice.allowed_tools.tools"
        )
    return tuple({function.name: function for function in selected}.values()), choice.allowed_tools.mode


def _named(tool: NamedTool | NamedCustomTool, functions: Sequence[Function], where: str) -> Function:
    custom = isinstance(tool, NamedCustomTool)
    name = tool.custom.name if isinstance(tool, NamedCustomTool) else tool.function.name
    for function in functions:
        if function.name == name and function.custom == custom:
            return function
    where += ".custom.name" if custom else ".function.name"
    raise RequestError(f"`{where}` is not the name of one of the `tools`.", param=where)


def _object(parameters: dict[str, Any] | None, where: str) -> dict[str, Any]:
    """The schema of a function's arguments, which are always an object."""
    if parameters is None:
        return _NO_ARGUMENTS
    kind = parameters.get("type", ["object"])
    if kind != "object" and (not isinstance(kind, list) or "object" not in kind):
        raise RequestError(
            f"`{where}` must describe an object; its `type` (at #/type) is {as_json(kind)}.",
            param=where,
            code="invalid_schema",
        )
    if "$ref" not in parameters:
        return {**parameters, "type": "object"}
    # Up to draft 7 other keywords next to a reference are ignored, and so would be a type.
    said = {keyword: value for keyword, value in parameters.items() if keyword in ASSERTIONS}
    other = {keyword: value for keyword, value in parameters.items() if keyword not in ASSERTIONS}
    return {**other, "allOf": [said, {"type": "object"}]}
