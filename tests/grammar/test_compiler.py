import json
import random
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import msgspec
import pytest
from byte_bpe import byte_level_vocabulary
from grammar_walks import accepts, walk
from sandbox_limits import PATIENT

import personae.grammar.schema.rewritten as rewritten_module
from personae.errors import GrammarError
from personae.grammar.budget.automaton import AutomatonGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.formats import FORMATS
from personae.grammar.schema.validate import validate_answer
from personae.grammar.spec import GrammarSpec, ReasoningLimit
from personae.grammar.structure.elements import Exactly, Json, structure_spec

VOCABULARY = byte_level_vocabulary()


def spec(name: str) -> GrammarSpec:
    return GrammarSpec("json_schema", f'{{"type":"object","properties":{{"{name}":{{"type":"string"}}}}}}')


def test_an_equal_spec_finds_the_compiled_grammar():
    compiler = GrammarCompiler(byte_level_vocabulary(), limits=PATIENT)
    grammar = compiler.compile(spec("a"))
    assert compiler.get(spec("a")) is None
    compiler.put(spec("a"), grammar)
    assert compiler.get(spec("a")) is grammar
    assert compiler.get(spec("b")) is None
    assert compiler.cache.nbytes == grammar.nbytes > 0


def test_the_least_recently_used_grammar_leaves_when_the_bytes_are_over():
    one = GrammarCompiler(byte_level_vocabulary(), limits=PATIENT).compile(spec("a")).nbytes
    compiler = GrammarCompiler(byte_level_vocabulary(), cache_bytes=2 * one, limits=PATIENT)
    for name in "ab":
        compiler.put(spec(name), compiler.compile(spec(name)))
    compiler.get(spec("a"))
    compiler.put(spec("c"), compiler.compile(spec("c")))
    assert compiler.get(spec("b")) is None
    assert compiler.get(spec("a")) is not None
    assert compiler.get(spec("c")) is not None
    assert compiler.cache.nbytes <= 2 * one


def test_what_a_tenant_has_had_compiled_is_not_there_for_another():
    compiler = GrammarCompiler(byte_level_vocabulary(), sandboxed=False)
    spec = GrammarSpec("json_schema", '{"type": "integer"}')
    limited = msgspec.structs.replace(
        structure_spec(Exactly("yes")), reasoning=ReasoningLimit(4, "<think>", "</think>")
    )
    for one in (spec, limited):
        compiler.put(one, compiler.compile(one, "a"), "a")
        assert compiler.get(one, "a") is not None
        assert compiler.get(one, "b") is None
    inner = msgspec.structs.replace(limited, reasoning=None)
    assert compiler.get(inner, "a") is not None, "a limit's inner grammar is kept, too"
    assert compiler.get(inner, "b") is None


def test_a_grammar_larger_than_the_whole_cache_evicts_nothing():
    small = GrammarCompiler(byte_level_vocabulary(), limits=PATIENT).compile(spec("a"))
    compiler = GrammarCompiler(byte_level_vocabulary(), cache_bytes=small.nbytes, limits=PATIENT)
    compiler.put(spec("a"), small)
    names = ",".join(f'"{name}":{{"type":"integer"}}' for name in "abcdefgh")
    large = GrammarSpec("json_schema", f'{{"type":"object","properties":{{{names}}}}}')
    compiler.put(large, compiler.compile(large))
    assert compiler.get(large) is None
    assert compiler.get(spec("a")) is small


def test_putting_a_spec_twice_counts_its_bytes_once():
    compiler = GrammarCompiler(byte_level_vocabulary(), limits=PATIENT)
    grammar = compiler.compile(spec("a"))
    compiler.put(spec("a"), grammar)
    compiler.put(spec("a"), compiler.compile(spec("a")))
    assert compiler.get(spec("a")) is grammar
    assert compiler.cache.nbytes == grammar.nbytes


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(VOCABULARY, limits=PATIENT)
    yield compiler
    compiler.close()


def schema_spec(schema, strict=True) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), strict)


REWRITTEN = [
    {"type": "integer", "oneOf": [{"minimum": 1}, {"maximum": 3}]},
    {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "x": {"type": "integer"}, "y": {"type": "string"}},
        "required": ["kind"],
        "additionalProperties": False,
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["x"]},
        "else": {"required": ["y"]},
    },
    {"type": "string", "not": {"enum": ["", "a", "ab"]}, "maxLength": 3},
    {
        "type": "object",
        "propertyNames": {"pattern": "^[a-c]{1,2}$"},
        "additionalProperties": {"type": "null"},
    },
    {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "dependentRequired": {"a": ["b"]},
    },
    {"type": ["string", "number"], "not": {"type": "string"}},
]


@pytest.mark.parametrize("schema", REWRITTEN, ids=range(len(REWRITTEN)))
def test_schemas_that_have_to_be_rewritten_bind_all_the_same(compiler, schema):
    grammar = compiler.compile(schema_spec(schema))
    for seed in range(10):
        text = walk(grammar.matcher(), VOCABULARY, random.Random(seed))
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"type": "array", "prefixItems": [{"type": "integer"}], "uniqueItems": True},
            "'uniqueItems' at #/uniqueItems|'prefixItems' at #/prefixItems",
        ),
        (
            {"properties": {"a/b": {"type": "array", "items": {"type": "object"}, "uniqueItems": True}}},
            "'(uniqueItems|items)' at #/properties/a~1b/",
        ),
        ({"type": "string", "not": {"format": "uri-template"}}, "'not' at #/not"),
        ({"type": "number", "oneOf": [{"type": "integer"}, {"minimum": 2.5}]}, "'oneOf' at #/oneOf"),
        ({"type": "string", "pattern": r"(a)\1"}, "'pattern' at #/pattern"),
        (False, "No finite answer"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "No finite answer"),
        (
            {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(600)}},
            "'properties' at #/properties",
        ),
        (
            {"type": "integer", "minimum": 3, "maximum": 2},
            "both 'minimum' at #/minimum and 'maximum' at #/maximum",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_keyword_and_place(compiler, schema, message):
    with pytest.raises(GrammarError, match=message) as refusal:
        compiler.compile_here(schema_spec(schema))
    assert refusal.value.param == "response_format.json_schema.schema"
    assert refusal.value.code == "invalid_schema"


@pytest.mark.parametrize(
    ("schema", "bound"),
    [
        (
            {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            {"type": "array", "items": {"type": "integer"}},
        ),
        ({"type": "string", "pattern": r"()\1"}, {"type": "string"}),
        ({"type": "number", "oneOf": [{"type": "integer"}, {"minimum": 3}]}, {"type": "number"}),
        (
            {"type": "object", "required": ["a"], "not": {"required": ["b"]}, "contains": True},
            {"required": ["a"]},
        ),
    ],
)
def test_without_strict_what_can_be_bound_is_bound_and_the_answer_is_judged(compiler, schema, bound):
    spec = schema_spec(schema, strict=False)
    grammar = compiler.compile(spec)
    outcomes = set()
    for seed in range(30):
        answer = walk(grammar.matcher(), VOCABULARY, random.Random(seed), budget=12).decode()
        jsonschema.validate(json.loads(answer), bound)
        outcome = validate_answer(spec, answer).valid
        assert outcome == jsonschema.Draft202012Validator(schema).is_valid(json.loads(answer))
        outcomes.add(outcome)
    assert True in outcomes


def test_strictness_changes_nothing_where_all_is_enforced(compiler):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    for strict in (True, False):
        grammar = compiler.compile(schema_spec(schema, strict))
        assert accepts(grammar.matcher(), VOCABULARY, b'{"a": 1}')
        assert not accepts(grammar.matcher(), VOCABULARY, b'{"b": 1}')


@pytest.mark.parametrize("source", ["[]", "false", '{"type": "text"}', '{"type":'])
@pytest.mark.parametrize("strict", [True, False])
def test_a_malformed_schema_is_refused_strict_or_not(compiler, source, strict):
    with pytest.raises(GrammarError):
        compiler.compile_here(GrammarSpec("json_schema", source, strict))


@pytest.mark.parametrize(("draft", "longest"), [("draft-04", 3), ("draft-07", 3), ("draft/2019-09", 1)])
def test_what_stands_beside_a_reference_counts_as_its_draft_says(compiler, draft, longest):
    schema = {
        "$schema": f"https://json-schema.org/{draft}/schema",
        "type": "object",
        "properties": {"a": {"$ref": "#/definitions/short", "maxLength": 1}},
        "definitions": {"short": {"type": "string", "maxLength": 3}},
    }
    grammar = compiler.compile(schema_spec(schema))
    for length in (1, 3, 4):
        answer = json.dumps({"a": "x" * length}).encode()
        assert accepts(grammar.matcher(), VOCABULARY, answer) == (length <= longest)


@pytest.mark.parametrize(
    "hidden",
    [
        {"type": "object", "required": 3},
        {"type": 5},
        {"properties": {"a": 1}, "enum": 2},
        {"type": "array", "minItems": "x"},
        {"maximum": "x", "oneOf": {"a": []}},
        {"$ref": 7},
        [],
        None,
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_what_a_reference_finds_outside_of_all_schemas_is_refused_or_taken_and_nothing_else(
    compiler, hidden, strict
):
    spec = schema_spec({"properties": {"x": {"$ref": "#/own/place"}}, "own": {"place": hidden}}, strict)
    try:
        grammar = compiler.compile(spec)
    except GrammarError as refusal:
        assert refusal.param is not None  # noqa: PT017 - either outcome is right, no other is
    else:
        assert accepts(grammar.matcher(), VOCABULARY, b"{}")


@pytest.mark.parametrize("source", ["{}", "true"])
def test_a_schema_that_allows_everything_gives_any_json(compiler, source):
    grammar = compiler.compile(GrammarSpec("json_schema", source))
    for seed in range(4):
        json.loads(walk(grammar.matcher(), VOCABULARY, random.Random(seed)))
    for text in [b"1", b"null", b'"x"', b"[{}]", b'{"a": true}']:
        assert accepts(grammar.matcher(), VOCABULARY, text)


def test_a_schema_cannot_loosen_its_own_grammar(compiler):
    schema = {"type": "number", "not": {"multipleOf": 0.7}, "x-guidance": {"lenient": True}}
    with pytest.raises(GrammarError, match="not"):
        compiler.compile_here(schema_spec(schema))


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("json_object", "", b'{"a": 1}'),
        ("regex", "[ab]+c", b"abac"),
        ("choice", '["yes", "no"]', b"no"),
        ("lark", 'start: "a" /[0-9]/', b"a7"),
        ("ebnf", 'root ::= "a" [0-9]', b"a7"),
    ],
)
def test_each_kind_of_spec_finds_its_backend(compiler, kind, source, text):
    grammar = compiler.compile_here(GrammarSpec(kind, source))
    assert accepts(grammar.matcher(), VOCABULARY, text)
    assert not accepts(grammar.matcher(), VOCABULARY, b"-")


def test_threads_compile_side_by_side(compiler):
    specs = [
        schema_spec({"const": n} if n % 2 else {"type": "integer", "not": {"const": n}}) for n in range(16)
    ]
    with ThreadPoolExecutor(4) as pool:
        grammars = list(pool.map(compiler.compile, specs))
    for n, grammar in enumerate(grammars):
        assert accepts(grammar.matcher(), VOCABULARY, str(n).encode()) == bool(n % 2)


def test_the_widest_object_that_is_let_in_can_be_written(compiler):
    names = [f"p{n}" for n in range(450)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 3} for name in names},
        "additionalProperties": False,
    }
    grammar = compiler.compile(schema_spec(schema))
    answer = json.dumps(dict.fromkeys(names, "x"))
    assert accepts(grammar.matcher(), VOCABULARY, answer.encode())
    assert accepts(grammar.matcher(), VOCABULARY, b"{}")


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_an_answer_of_every_format_that_is_enforced_closes(format: str) -> None:
    compiler = GrammarCompiler(byte_level_vocabulary(), sandboxed=False)
    source = json.dumps({"type": "string", "format": format})
    assert compiler.compile(GrammarSpec("json_schema", source)).shortest > 1


@pytest.mark.parametrize("step", [50, 256, 385, 1000, 3600])
def test_an_answer_that_is_a_multiple_closes(step: int) -> None:
    compiler = GrammarCompiler(byte_level_vocabulary(), sandboxed=False)
    schema = {"type": "integer", "exclusiveMinimum": step, "multipleOf": step}
    grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
    assert 1 < grammar.shortest <= len(str(2 * step))


def test_a_pattern_that_cannot_be_read_is_named_where_it_stands_alone_and_in_a_call():
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"(x)\1"}}}
    whole = GrammarSpec("json_schema", json.dumps(schema))
    call = structure_spec(Json(schema, True, "tools[0].function.parameters"))
    compiler = GrammarCompiler(byte_level_vocabulary(), sandboxed=False)
    for spec in (whole, call):
        with pytest.raises(GrammarError, match="'pattern' at #/properties/a/pattern"):
            compiler.compile_here(spec)


@pytest.mark.parametrize(
    ("spec", "small"),
    [
        (GrammarSpec("choice", '["yes", "no"]'), True),
        (GrammarSpec("regex", r"^\d{4}-\d{2}-\d{2}$"), True),
        (GrammarSpec("regex", ".*"), False),
        (GrammarSpec("regex", "[ab]*a[ab]{20}"), False),
        (GrammarSpec("choice", '["yes", "no"]', backend="llguidance"), False),
    ],
    ids=str,
)
def test_small_automata_are_given_to_outlines_unless_another_is_asked_for(compiler, spec, small):
    assert isinstance(compiler.compile(spec), AutomatonGrammar) is small


def test_a_backend_asked_for_by_name_refuses_what_it_does_not_enforce(compiler):
    spec = GrammarSpec("regex", "a(?=b)?.*", backend="outlines")
    with pytest.raises(GrammarError, match="outlines does not support this regex") as refused:
        compiler.compile_here(spec)
    assert refused.value.param == "structured_outputs.regex"
    with pytest.raises(GrammarError, match="outlines does not support a json_schema"):
        compiler.compile_here(GrammarSpec("json_schema", "{}", backend="outlines"))


def test_what_is_not_strict_is_rewritten_once(monkeypatch):
    asked = []
    canonicalise = rewritten_module.canonicalise
    monkeypatch.setattr(rewritten_module, "canonicalise", lambda one: asked.append(one) or canonicalise(one))
    schema = {"type": "array", "items": {"type": "string", "pattern": r"(a)\1"}, "uniqueItems": True}
    loose = GrammarSpec("json_schema", json.dumps(schema), strict=False)
    assert GrammarCompiler(byte_level_vocabulary(), sandboxed=False).compile(loose).shortest
    assert asked == [schema]


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        (r"(?!ab)[a-c]{2}", ["ba", "bb"], ["ab", "a", "abc"]),
        (r"a(?=b)[bc]+", ["ab", "abc"], ["ac", "a"]),
        (r"\bfoo\b.*", ["foo", "foo x"], ["foox"]),
        (r"[a-z]+(?<!x)", ["ab", "xa"], ["ax"]),
        (r"(?=.*[0-9])(?=.*[a-z])[a-z0-9]{3}", ["a1b", "12c"], ["123", "abc"]),
    ],
)
def test_a_regular_expression_that_looks_around_binds_the_whole_answer(pattern, texts, others):
    compiler = GrammarCompiler(VOCABULARY, limits=PATIENT)
    grammar = compiler.compile(GrammarSpec("regex", pattern))
    assert [text for text in texts if not accepts(grammar.matcher(), VOCABULARY, text.encode())] == []
    assert [text for text in others if accepts(grammar.matcher(), VOCABULARY, text.encode())] == []
    compiler.close()


@pytest.mark.parametrize(("pattern", "why"), [("a(?=b)", "no text matches it"), (r"(a)(?=b)\1", "back-ref")])
def test_one_that_cannot_be_enforced_is_refused_with_the_reason(pattern, why):
    compiler = GrammarCompiler(VOCABULARY, limits=PATIENT)
    with pytest.raises(GrammarError, match=why) as refused:
        compiler.compile(GrammarSpec("regex", pattern))
    assert refused.value.param == "structured_outputs.regex"
    compiler.close()
