"""Answers that may be a call or JSON of a schema, in formats whose calls begin as JSON does."""

import json
import random
import re
from collections.abc import Callable
from functools import cache, partial
from itertools import cycle
from typing import Any

import jsonschema_rs
import pytest
from answers import parse, vocabulary
from worst import WORST, answer, text_of, text_vocabulary, veto

from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.checked.grammar import CheckedGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.elements import Json, compacted, in_any_order
from personae.grammar.structure.parser import CallPiece, TextPiece
from personae.grammar.tools.function import Function
from personae.grammar.tools.registry import tool_format

PARAM = "tools[0].function.parameters"
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


def of(required: tuple[str, ...] = (), more: Any = False, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": more,
    }


RESPONSES: dict[str, dict[str, Any]] = {
    "unlike a call": of(("a",), a=WHOLE, b=TEXT),
    "a name": of(("name",), name=TEXT, age=WHOLE),
    "a longer name": of(more=WHOLE, names=TEXT, name=TEXT),
    "like a call": of(name=TEXT, parameters={"type": "object"}),
    "like this call": of(("name",), name={"enum": ["f", "x"]}, parameters=of(("c",), c={}, d=WHOLE)),
    "a list": of(("parameters",), name=TEXT, parameters={"type": "array", "items": of(x=WHOLE)}),
    "any object": {"type": "object"},
    "counted": {"type": "object", "minProperties": 1, "maxProperties": 2},
    "object or array": {"anyOf": [of(("n",), n=WHOLE), {"type": "array", "items": WHOLE}]},
    "a set": of(s={"type": "array", "items": WHOLE, "uniqueItems": True}, name=TEXT),
}
ARGUMENTS = [
    of(("c",), c=TEXT, d=WHOLE),
    of(),
    {"type": "object"},
    of(c={"type": "array", "items": TEXT}, e=WHOLE),
    of(("c",), more=WHOLE, c=TEXT),
]
MODES: dict[str, Callable[[GrammarSpec], GrammarSpec]] = {
    "in order": lambda spec: spec,
    "in any order": in_any_order,
    "compact": compacted,
}
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"[fg]"\s*,\s*"parameters"\s*:')


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary(), sandboxed=False)


def allows(grammar: BudgetGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    ids = [*text.encode()]
    return matcher.feed(ids) == len(ids) and matcher.accept(256)


def value(schema: dict[str, Any], rng: random.Random, depth: int = 0) -> Any:
    """A value, mostly of the schema."""
    if "enum" in schema or "anyOf" in schema:
        one = rng.choice(schema.get("enum") or schema["anyOf"])
        return value(one, rng, depth) if "anyOf" in schema else one
    kind = schema.get("type", rng.choice(["string", "integer"]))
    if kind == "string":
        return rng.choice(["", "f", "x", "name", "g"])
    if kind == "integer":
        return rng.choice([0, 1, -7, 23])
    if kind == "array":
        return [value(schema.get("items", {}), rng, depth + 1) for _ in range(rng.randint(0, 2))]
    listed = schema.get("properties", {})
    needed = schema.get("required", ())
    made = {
        name: value(one, rng, depth + 1)
        for name, one in listed.items()
        if name in needed or rng.random() < 0.7
    }
    more = schema.get("additionalProperties", {})
    for name in rng.sample(["name", "parameters", "c", "z"], rng.randint(0, 2)) if more is not False else ():
        made.setdefault(name, value(more, rng, depth + 1))
    return made


def written(value: Any, blank: Callable[[], str]) -> str:
    """The value as JSON, with blanks."""
    if not isinstance(value, dict | list):
        return json.dumps(value)
    named = value.items() if isinstance(value, dict) else (("", one) for one in value)
    members = [
        (json.dumps(name) + blank() + ":" + blank() if isinstance(value, dict) else "") + written(one, blank)
        for name, one in named
    ]
    open, close = "{}" if isinstance(value, dict) else "[]"
    return open + blank() + (blank() + "," + blank()).join(members) + blank() + close


def one_answer(response: dict[str, Any], functions: tuple[Function, ...], rng: random.Random) -> Any:
    """A response, a call, or something between the two."""
    function = rng.choice(functions)
    match rng.randrange(4):
        case 0 | 1:
            return value(response, rng)
        case 2:
            return {"name": function.name, "parameters": value(function.parameters, rng)}
    name = rng.choice([function.name, function.name, "no function"])
    return {"name": name, "parameters": rng.choice([{"c": 3}, {"d": "x", "c": "x"}, {"z": 1}, 7, []])}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", RESPONSES)
def test_an_answer_is_a_whole_call_or_a_response_that_does_not_begin_as_a_call(kind: str, mode: str) -> None:
    response, rng = RESPONSES[kind], random.Random(f"{kind} {mode}")
    functions = tuple(Function(name, rng.choice(ARGUMENTS), True, PARAM) for name in "fg")
    content = Json(response, True, "response_format")
    format = tool_format("llama3_json")
    shape = AnswerShape(tools=format, functions=functions, use="auto", content=content)
    shapes = (
        shape,
        AnswerShape(tools=format, functions=functions, use="required"),
        AnswerShape(content=content),
    )
    both, calls, alone = (compiler().compile(MODES[mode](one.spec())) for one in shapes)
    seen = set()
    for _ in range(40):
        most = 0 if mode == "compact" else rng.choice([0, 0, 1, 2, 9])
        blanks = [" " * most, "\n", "\t", "", "", ""] if most else [""]
        text = written(one_answer(response, functions, rng), partial(rng.choice, blanks))
        allowed, begun = allows(both, text), HEAD.match(text)
        said = repr(text)
        if begun is None:
            assert allowed == allows(alone, text), said
        elif most <= 2:
            assert allowed == allows(calls, text), said
        seen.add((allowed, begun is not None))
        parsed = parse(shape, text)
        assert parse(shape, text, cuts=range(0, len(text), 3)) == parsed
        if allowed and begun:
            [(name, arguments)] = parsed.arguments
            called = next(one for one in functions if one.name == name)
            assert (parsed.completed, parsed.content) == (1, "")
            assert jsonschema_rs.is_valid(called.parameters, arguments), said
        elif allowed:
            assert (parsed.calls, parsed.content) == ([], text)
            assert jsonschema_rs.is_valid(response, json.loads(text)), said
    assert seen >= {(True, False), (True, True)}


def test_several_calls_are_allowed_beside_a_response_and_a_call_before_one_is_not() -> None:
    functions = tuple(Function(name, ARGUMENTS[0], True, PARAM) for name in "fg")
    content = Json(RESPONSES["any object"], True, "response_format")
    shape = AnswerShape(tools=tool_format("llama3_json"), functions=functions, use="auto", content=content)
    grammar = compiler().compile(shape.spec())
    one, other = (json.dumps({"name": name, "parameters": {"c": "x"}}) for name in "fg")
    assert allows(grammar, f"{one}; {other}")
    assert [name for name, _ in parse(shape, f"{one}; {other}").calls] == ["f", "g"]
    for wrong in ('{"c": "x"}', '{"name": "h", "parameters": {"c": "x"}}', '{"name": "g", "parameters": 7}'):
        assert not allows(grammar, f"{one}; {wrong}")
        assert not allows(grammar, f"{wrong}; {one}")


def test_no_text_is_streamed_that_may_yet_be_a_call() -> None:
    functions = (Function("f", ARGUMENTS[0], True, PARAM),)
    content = Json(RESPONSES["any object"], True, "response_format")
    shape = AnswerShape(tools=tool_format("llama3_json"), functions=functions, use="auto", content=content)
    call, response = '{"name": "f", "parameters": {"c": "x"}}', '{"name": "fun", "parameters": {"c": "x"}}'
    parser = shape.parser({})
    for char in call:
        assert all(isinstance(piece, CallPiece) for piece in parser.push(char).pieces)
    assert (parser.begun, parser.completed) == (1, 1)
    parser, said = shape.parser({}), ""
    for length, char in enumerate(response, 1):
        for piece in parser.push(char).pieces:
            assert isinstance(piece, TextPiece)
            said += piece.text
        assert said == (response[:length].rstrip() if length > response.index('", ') else "")


def test_pythonic_calls_and_arrays_are_told_apart() -> None:
    functions = (Function("true", ARGUMENTS[0], True, PARAM), Function("f", of(), True, PARAM))
    items = {"type": ["integer", "boolean", "array", "string"], "items": WHOLE}
    content = Json({"type": "array", "items": items}, True, "response_format")
    shape = AnswerShape(tools=tool_format("pythonic"), functions=functions, use="auto", content=content)
    grammar = compiler().compile(shape.spec())
    for text, calls in (
        ("[]", None),
        ("[1, 2]", None),
        ("[ 1,2]", None),
        ("[ true, 3]", None),
        ("[[7 ], []]", None),
        ('["f()"]', None),
        ('[true(c="x")]', ["true"]),
        ('[ true(c="x"), f()]', ["true", "f"]),
    ):
        assert allows(grammar, text), text
        parsed = parse(shape, text)
        assert ([name for name, _ in parsed.calls] or None) == calls
        assert parsed.content == ("" if calls else text)
    for text in ("[true(c=3)]", "[f(), 1]", "[1, f()]", "[nothing()]"):
        assert not allows(grammar, text), text


@pytest.mark.parametrize("kind", ["unlike a call", "a name", "like this call", "any object", "a set"])
def test_calls_and_responses_end_within_their_budgets(kind: str) -> None:
    words = text_vocabulary(())
    functions = (Function("f", ARGUMENTS[0], True, PARAM),)
    content = Json(RESPONSES[kind], True, "response_format")
    shape = AnswerShape(tools=tool_format("llama3_json"), functions=functions, use="auto", content=content)
    grammar = GrammarCompiler(words, sandboxed=False).compile(shape.spec())
    assert isinstance(grammar, BudgetGrammar)
    for spare, taste in zip(cycle((0, 7, 40)), WORST):
        for begun in (b"", b'{"name":"f",'):
            budget = grammar.shortest + len(begun) + spare
            matcher = grammar.matcher(budget)
            ids = []
            for token in begun:
                if veto(matcher, token) is not None or not matcher.accept(token):
                    break
                ids.append(token)
            ids += answer(matcher, words, WORST[taste], budget - len(ids), spare)
            text = text_of(ids, words)
            parsed = parse(shape, text.decode())
            for _, arguments in parsed.arguments:
                assert jsonschema_rs.is_valid(ARGUMENTS[0], arguments), text
            if not parsed.calls:
                assert jsonschema_rs.is_valid(RESPONSES[kind], json.loads(parsed.content)), text
            assert len(parsed.calls) == parsed.completed


def test_what_is_checked_token_by_token_does_not_begin_as_a_call_either() -> None:
    called = of(("c",), c=WHOLE) | {"not": {"properties": {"c": {"multipleOf": 5}}}}
    response = of(("name",), name=TEXT, parameters={"type": "object"}) | {
        "not": {"required": ["parameters"], "properties": {"name": {"const": "x"}}}
    }
    shape = AnswerShape(
        tools=tool_format("llama3_json"),
        functions=(Function("f", called, True, PARAM),),
        use="auto",
        content=Json(response, True, "response_format"),
    )
    grammar = compiler().compile(shape.spec())
    assert isinstance(grammar, CheckedGrammar)
    for text, allowed in (
        ('{"name": "f", "parameters": {"c": 3}}', True),
        ('{"name": "f", "parameters": {"c": 5}}', False),
        ('{"name": "f", "parameters": {}}', False),
        ('{"name": "f"}', True),
        ('{"name": "g", "parameters": {"c": 5}}', True),
        ('{"name": "x", "parameters": {"c": 5}}', False),
    ):
        assert allows(grammar, text) == allowed, text
