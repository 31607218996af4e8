"""Schemas that no grammar enforces, in calls, after reasoning and in structural tags."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from answers import encode, marked, parse_marked
from grammar_walks import allowed_tokens
from patience import eventually
from sandbox_limits import PATIENT
from worst import WORST, answer, text_of, text_vocabulary

from personae.errors import GrammarError
from personae.grammar.backend import BoundGrammar
from personae.grammar.bitmask import allows, words_of
from personae.grammar.checked.grammar import CheckedGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.reasoning.format import Thinks
from personae.grammar.reasoning.registry import NAMES as REASONING
from personae.grammar.reasoning.registry import reasoning_format
from personae.grammar.sandbox.masks import UNDECIDED, RemoteGrammar
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.elements import (
    Concat,
    Element,
    Exactly,
    Json,
    Lark,
    OneOf,
    Regex,
    Repeat,
    Verbatim,
    structure_spec,
)
from personae.grammar.tools.arguments import KeyedArguments
from personae.grammar.tools.function import Function
from personae.grammar.tools.registry import NAMES, tool_format
from personae.grammar.vocabulary import Vocabulary

PARAM = "tools[0].function.parameters"
_TAG = re.compile(r"<\|\"\|>|<\|[^|<>]+\|>|<｜[^｜]+｜>|</?[a-z_:]+>|\[[A-Z_]+\]|<escape>")
OVERLAPPING = {"type": "number", "oneOf": [{"type": "integer"}, {"minimum": 2.5}]}
REPEATED = {"type": "string", "pattern": r"^(a|b)\1$"}


def of_object(properties: dict[str, Any], required: Sequence[str], **more: Any) -> dict[str, Any]:
    listed = {"type": "object", "properties": properties, "required": [*required]}
    return {**listed, "additionalProperties": False, **more}


BY_ARGUMENT = of_object({"a": OVERLAPPING, "b": REPEATED}, ["a"])
NOT_FIVES = of_object(
    {
        "sizes": {"type": "array", "items": {"type": "integer", "multipleOf": 7}, "uniqueItems": True},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    ["sizes", "count"],
    **{"not": {"properties": {"count": {"multipleOf": 5}}}},
)
DEPENDENT = of_object(
    {
        "kind": {"enum": ["a", "b"]},
        "n": {"type": "number"},
        "tags": {
            "type": "array",
            "items": {"type": "integer"},
            "contains": {"multipleOf": 3},
            "minContains": 2,
        },
    },
    ["kind", "n"],
    dependentSchemas={"tags": {"properties": {"n": {"multipleOf": 0.7, "not": {"multipleOf": 1.4}}}}},
)
PLAIN = of_object({"x": {"type": "integer", "minimum": 3}}, ["x"])
KEYED = [name for name in NAMES if isinstance(tool_format(name).arguments, KeyedArguments)]


def valid(schema: dict[str, Any], value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def function(schema: dict[str, Any], name: str = "f", param: str = PARAM) -> Function:
    return Function(name, schema, True, param)


def tags(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_TAG.findall(text)))


@cache
def compiler(special: tuple[str, ...]) -> tuple[GrammarCompiler, Vocabulary]:
    vocabulary = text_vocabulary(special)
    return GrammarCompiler(vocabulary, sandboxed=False), vocabulary


def compiled(shape: AnswerShape, special: tuple[str, ...] = ()) -> tuple[BoundGrammar, Vocabulary]:
    compile, vocabulary = compiler(special)
    spec = shape.spec()
    assert spec is not None
    grammar = compile.compile(spec)
    assert not isinstance(grammar, RemoteGrammar)
    return grammar, vocabulary


def of_element(element: Element, special: tuple[str, ...] = ()) -> tuple[CheckedGrammar, Vocabulary]:
    compile, vocabulary = compiler(special)
    grammar = compile.compile(structure_spec(element))
    assert isinstance(grammar, CheckedGrammar)
    return grammar, vocabulary


def calls(shape: AnswerShape, ids: list[int], vocabulary: Vocabulary) -> list[tuple[str, Any]]:
    """The calls as the format's parser reads them; all are complete."""
    parser = shape.parser(vocabulary.special)
    found = parse_marked(parser, marked(ids, vocabulary, parser)).arguments
    assert parser.completed == len(found)
    return [(str(name), arguments) for name, arguments in found]


def can_be_written(grammar: BoundGrammar, text: str, vocabulary: Vocabulary) -> bool:
    """Whether `text` is a complete answer of the grammar."""
    matcher = grammar.matcher(1000)
    return all(matcher.accept(token) for token in [*encode(text, vocabulary), 256])


@pytest.mark.parametrize("special", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", NAMES)
def test_required_calls_are_whole_and_valid_within_their_budget_in_every_format(
    name: str, special: bool
) -> None:
    format = tool_format(name)
    tastes = list(WORST)
    schemas = [BY_ARGUMENT] if name in KEYED else [BY_ARGUMENT, NOT_FIVES, DEPENDENT]
    for place, schema in enumerate(schemas):
        shape = AnswerShape(tools=format, functions=(function(schema),), use="required")
        grammar, vocabulary = compiled(shape, tags(format.texts) if special else ())
        assert isinstance(grammar, CheckedGrammar)
        assert grammar.shortest > 3, "a call is more than a token"
        for spare, taste in ((0, "long"), (1, "digits"), (32, tastes[place % len(tastes)])):
            budget = grammar.shortest + spare
            ids = answer(grammar.matcher(budget), vocabulary, WORST[taste], budget, spare)
            found = calls(shape, ids, vocabulary)
            assert found, text_of(ids, vocabulary)
            for called, arguments in found:
                assert called == "f"
                assert valid(schema, arguments), text_of(ids, vocabulary)


@pytest.mark.parametrize("name", ["hermes", "mistral_v11", "kimi_k2", "qwen3_coder", "harmony", "pythonic"])
def test_a_call_that_begins_late_is_whole_or_is_not_begun(name: str) -> None:
    format = tool_format(name)
    special = tags(format.texts)
    shape = AnswerShape(tools=format, functions=(function(BY_ARGUMENT),), use="auto")
    grammar, vocabulary = compiled(shape, special)
    assert isinstance(grammar, CheckedGrammar)
    trigger = encode(format.trigger, vocabulary)
    text = [] if not format.anywhere else [*b"I call it."]
    called = 0
    for left in (8, 40, 90):
        budget = len(text) + len(trigger) + left
        matcher = grammar.matcher(budget)
        begun = [*text]
        assert matcher.feed(begun) == len(begun)
        for token in trigger:
            if not matcher.accept(token):
                break
            begun.append(token)
        ids = begun + answer(matcher, vocabulary, WORST["digits"], budget - len(begun), left)
        found = calls(shape, ids, vocabulary)
        called += len(found)
        assert all(valid(BY_ARGUMENT, arguments) for _, arguments in found), text_of(ids, vocabulary)
    assert called


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "deepseek_v3"])
def test_each_of_several_calls_is_bound_by_its_own_function(name: str) -> None:
    format = tool_format(name)
    functions = (
        function(NOT_FIVES, "first"),
        function(BY_ARGUMENT, "second"),
        function(NOT_FIVES, "third"),
        function(PLAIN, "fourth"),
    )
    shape = AnswerShape(tools=format, functions=functions, use="required")
    grammar, vocabulary = compiled(shape)
    written = {
        "first": ('{"sizes":[7,14],"count":3}', '{"sizes":[7],"count":5}'),
        "second": ('{"a":2}', '{"a":3}'),
        "third": ('{"sizes":[],"count":99}', '{"sizes":[7,7],"count":1}'),
        "fourth": ('{"x":3}', '{"x":2}'),
    }

    def said(*chosen: tuple[str, str]) -> str:
        begun = f"{format.open}{format.before_name}", f"{format.between}{format.before_name}"
        texts = (
            begun[place > 0] + called + format.after_name + arguments + format.after_arguments
            for place, (called, arguments) in enumerate(chosen)
        )
        return "".join(texts) + format.close

    good = [(called, texts[0]) for called, texts in written.items()]
    assert can_be_written(grammar, said(*good), vocabulary)
    for called, (_, bad) in written.items():
        assert not can_be_written(grammar, said((called, bad)), vocabulary)
        assert not can_be_written(grammar, said(*good[:2], (called, bad)), vocabulary)


@pytest.mark.parametrize("name", KEYED)
def test_what_is_said_of_all_arguments_together_is_refused_by_name_where_they_are_written_one_by_one(
    name: str,
) -> None:
    for schema, keyword in ((NOT_FIVES, "not"), (DEPENDENT, "dependentSchemas")):
        shape = AnswerShape(tools=tool_format(name), functions=(function(schema),), use="required")
        with pytest.raises(GrammarError, match=f"'{keyword}' at #/{keyword} cannot be enforced") as refusal:
            shape.spec()
        assert refusal.value.param == PARAM


@pytest.mark.parametrize("limit", [None, 6])
@pytest.mark.parametrize("thinks", [Thinks.OPEN, Thinks.MAYBE])
@pytest.mark.parametrize("name", [name for name in REASONING if name != "harmony"])
def test_only_the_answer_after_reasoning_is_checked(name: str, thinks: Thinks, limit: int | None) -> None:
    format = reasoning_format(name)
    content = Json(BY_ARGUMENT, True, "schema")
    shape = AnswerShape(reasoning=format, thinks=thinks, content=content, limit=limit)
    grammar, vocabulary = compiled(shape, tags(format.texts))
    opening = encode("" if thinks is Thinks.OPEN else format.open, vocabulary)
    tagged = len(opening) + len(encode(format.close, vocabulary))
    for spare, thought in ((0, b""), (30, b'{"a":3}'), (30, b"so")):
        budget = grammar.shortest + tagged + len(thought) + spare
        matcher = grammar.matcher(budget)
        begun = [*opening, *thought]
        assert matcher.feed(begun) == len(begun)
        ids = begun + answer(matcher, vocabulary, WORST["digits"], budget - len(begun), spare)
        parser = shape.parser(vocabulary.special)
        read = parse_marked(parser, marked(ids, vocabulary, parser))
        assert valid(BY_ARGUMENT, json.loads(read.content)), text_of(ids, vocabulary)
        assert read.reasoning.startswith(thought.decode())


def test_a_structure_whose_parts_grammars_enforce_is_not_checked() -> None:
    shape = AnswerShape(tools=tool_format("hermes"), functions=(function(PLAIN),), use="required")
    grammar, _ = compiled(shape)
    assert not isinstance(grammar, CheckedGrammar)


def test_alternatives_are_valid_for_one_of_their_schemas() -> None:
    plain, checked = Json({"type": "integer", "minimum": 7}, True, "x"), Json(OVERLAPPING, True, "x")
    for parts in ((plain, checked), (checked, plain)):
        grammar, vocabulary = of_element(Concat((Verbatim("<n>"), OneOf(parts), Verbatim("</n>"))))
        for number, expected in ((2, True), (2.75, True), (3, False), (6, False), (7, True), (2.25, False)):
            assert can_be_written(grammar, f"<n>{number}</n>", vocabulary) is expected, number


def test_repeated_parts_among_texts_of_an_expression_are_all_valid() -> None:
    name = Regex("[a-z]+[0-9]?", "structural_tag")
    part = Concat((Verbatim("<"), name, Verbatim(" "), Json(OVERLAPPING, True, "x"), Exactly(" > ")))
    grammar, vocabulary = of_element(Repeat(part, 1, 3))
    assert can_be_written(grammar, "<ab1 2><x 2.5>\n", vocabulary)
    assert not can_be_written(grammar, "<ab1 2><x 5>", vocabulary)
    assert not can_be_written(grammar, "<ab12 2>", vocabulary)
    assert not can_be_written(grammar, "<a 1><a 1><a 1><a 1>", vocabulary)
    for seed, taste in enumerate(WORST):
        budget = grammar.shortest + 5 * seed
        ids = answer(grammar.matcher(budget), vocabulary, WORST[taste], budget, seed)
        for found in re.findall(r"<[a-z]+[0-9]? ([^ >]*?)\s*>", text_of(ids, vocabulary).decode()):
            assert valid(OVERLAPPING, json.loads(found))


def test_beside_a_clients_grammar_schemas_are_refused() -> None:
    compile, _ = compiler(())
    grammar = Lark("start: /[a-z]+/", "structural_tag")
    spec = structure_spec(Concat((grammar, Verbatim(" "), Json(OVERLAPPING, True, "schema"))))
    with pytest.raises(GrammarError):
        compile.compile(spec)


def test_the_error_names_the_function_that_has_no_valid_arguments() -> None:
    nothing = of_object(
        {"a": {"type": "integer"}}, ["a"], **{"not": {"properties": {"a": {"type": "number"}}}}
    )
    functions = (function(NOT_FIVES, "f"), function(nothing, "g", "tools[1].function.parameters"))
    shape = AnswerShape(tools=tool_format("hermes"), functions=functions, use="auto")
    with pytest.raises(GrammarError) as refusal:
        compiled(shape)
    assert refusal.value.param == "tools[1].function.parameters"


def test_a_matcher_that_replays_or_goes_back_within_calls_is_in_the_same_state() -> None:
    format = tool_format("hermes")
    shape = AnswerShape(tools=format, functions=(function(BY_ARGUMENT),), use="auto")
    grammar, vocabulary = compiled(shape, tags(format.texts))
    begun = [*"日".encode(), *encode(format.trigger, vocabulary)]
    matcher = grammar.matcher(60)
    assert matcher.feed(begun) == len(begun)
    tokens = begun + answer(matcher, vocabulary, WORST["long"], 60 - len(begun), 1)
    going, replayed = grammar.matcher(60), grammar.matcher(60)
    for token in tokens:
        before = going.snapshot()
        assert going.accept(token)
        going.restore(before)
        assert allowed_tokens(going, vocabulary) == allowed_tokens(replayed, vocabulary)
        assert going.accept(token)
        assert replayed.accept(token)


@pytest.fixture(scope="module")
def sandboxed() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(
        text_vocabulary(("<think>", "</think>", "<tool_call>", "</tool_call>")), limits=PATIENT
    )
    yield compiler
    compiler.close()


def test_calls_after_limited_reasoning_are_checked_in_a_process_of_their_own(
    sandboxed: GrammarCompiler,
) -> None:
    shape = AnswerShape(
        reasoning=reasoning_format("think"),
        thinks=Thinks.OPEN,
        tools=tool_format("hermes"),
        functions=(function(BY_ARGUMENT),),
        use="required",
        parallel=False,
        limit=3,
    )
    spec = shape.spec()
    assert spec is not None
    grammar = sandboxed.compile(spec)
    assert isinstance(grammar, RemoteGrammar)
    here = sandboxed.compile_here(msgspec.structs.replace(spec, checked=True))
    assert grammar.shortest == here.shortest
    vocabulary = sandboxed.vocabulary
    budget = grammar.shortest + 12
    remote, rng = grammar.begin(budget, ()), random.Random(3)
    written: list[int] = []
    while len(written) < budget:
        eventually(lambda: remote.ready, "the mask has come")
        row = np.zeros((1, words_of(vocabulary.size)), np.int32)
        remote.fill(row, 0)
        if allows(row[0], 256):
            break
        token = None
        while token is None:
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            token = int(rng.choice(np.flatnonzero(bits)))
            found = None
            while remote.verifies and (found := remote.veto(token, 1.0)) is UNDECIDED:
                pass
            if found is not None:
                row[0] &= ~found.view(np.int32)
                token = None
        remote.accept(token)
        written.append(token)
    assert remote.failure is None
    [(_, arguments)] = calls(shape, written, vocabulary)
    assert valid(BY_ARGUMENT, arguments)
    replayed = here.matcher(budget)
    assert replayed.feed(written) == len(written)
    assert replayed.accept(256)
