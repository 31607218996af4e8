import json
import random
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from byte_bpe import byte_level_vocabulary
from grammar_walks import accepts, allowed_tokens, spell, walk

from personae.errors import GrammarError
from personae.grammar.registry import make_backend
from personae.grammar.schema.document import MAX_WHITESPACE
from personae.grammar.spec import GrammarSpec

VOCABULARY = byte_level_vocabulary()
BACKEND = make_backend("xgrammar", VOCABULARY)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"type": "string", "enum": ["happy", "grim", 'a "quoted" one']},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age", "next"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {"type": "object"},
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"type": "string"}, {"const": [1, {"a": None}]}]},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
]


def compiled(schema, **options):
    return BACKEND.compile(GrammarSpec("json_schema", json.dumps(schema), **options))


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_random_answers_parse_and_validate(schema):
    grammar = compiled(schema)
    for seed in range(8):
        text = walk(grammar.matcher(), VOCABULARY, random.Random(seed))
        jsonschema.validate(json.loads(text), schema)


def test_json_object_binds_to_any_object():
    grammar = BACKEND.compile(GrammarSpec("json_object"))
    for seed in range(8):
        assert isinstance(json.loads(walk(grammar.matcher(), VOCABULARY, random.Random(seed))), dict)
    assert accepts(grammar.matcher(), VOCABULARY, b'{"any": [1, {"thing": null}]}')
    assert not accepts(grammar.matcher(), VOCABULARY, b"[1]")


def test_special_and_padded_ids_are_never_allowed_and_stop_tokens_only_at_the_end():
    matcher = BACKEND.compile(GrammarSpec("json_object")).matcher()
    silent = {token for token, text in enumerate(VOCABULARY.tokens) if not text} | {350, 351}
    rng = random.Random(3)
    while not matcher.terminated:
        tokens = allowed_tokens(matcher, VOCABULARY)
        assert not silent & set(tokens) or tokens == [0]
        for token in silent - set(tokens) - {350, 351}:
            assert not matcher.accept(token)
        matcher.accept(rng.choice(tokens))


def test_after_the_end_only_the_stop_token_is_allowed_and_nothing_is_accepted():
    matcher = compiled({"const": 1}).matcher()
    assert accepts(matcher, VOCABULARY, b"1")
    assert matcher.terminated
    assert allowed_tokens(matcher, VOCABULARY) == [0]
    assert not matcher.accept(0)


def test_a_refused_token_changes_nothing():
    matcher = compiled(PERSON).matcher()
    before = allowed_tokens(matcher, VOCABULARY)
    assert not matcher.accept(*spell(b"x", VOCABULARY))
    assert allowed_tokens(matcher, VOCABULARY) == before


def test_rollback_and_fork_equal_replay():
    grammar = compiled(PERSON)
    for seed in range(6):
        rng = random.Random(seed)
        matcher, taken = grammar.matcher(), []
        for _ in range(40):
            if matcher.terminated or (taken and rng.random() < 0.3):
                count = rng.randint(1, len(taken))
                matcher.rollback(count)
                del taken[-count:]
            else:
                taken.append(rng.choice(allowed_tokens(matcher, VOCABULARY)))
                assert matcher.accept(taken[-1])
            replay = grammar.matcher()
            assert all(replay.accept(token) for token in taken)
            fork = matcher.fork()
            expected = allowed_tokens(replay, VOCABULARY)
            assert allowed_tokens(matcher, VOCABULARY) == allowed_tokens(fork, VOCABULARY) == expected
            assert matcher.terminated == fork.terminated == replay.terminated
            fork.accept(rng.choice(expected))  # must not be seen by the matcher
            assert allowed_tokens(matcher, VOCABULARY) == expected


def test_whitespace_comes_to_an_end():
    grammar = compiled(PERSON)
    assert accepts(grammar.matcher(), VOCABULARY, b'{\n  "name": "Ada",\n  "age": 36,\n  "next": null\n}')
    for opening in [b"{", b'{"name"', b'{"name":', b'{"name": ""']:
        matcher = grammar.matcher()
        assert all(matcher.accept(token) for token in spell(opening, VOCABULARY))
        blanks = 0
        while matcher.accept(*spell(b"\n", VOCABULARY)):
            blanks += 1
        assert 0 < blanks <= MAX_WHITESPACE


def test_several_threads_compile_at_once():
    schemas = [{"const": f"thread {index}"} for index in range(16)]
    with ThreadPoolExecutor(4) as pool:
        grammars = list(pool.map(compiled, schemas))
    for schema, grammar in zip(schemas, grammars, strict=True):
        assert accepts(grammar.matcher(), VOCABULARY, json.dumps(schema["const"]).encode())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{"type": "object"', "not valid JSON"),
        ("", "not valid JSON"),
        ("[]", "an object, true or false"),
        ('"string"', "an object, true or false"),
        ("null", "an object, true or false"),
        ("false", "false"),
        ('{"type": "text"}', "malformed at #/type"),
        ('{"properties": {"a/b": {"minLength": -1}}}', "malformed at #/properties/a~1b/minLength"),
        ('{"type": "string", "pattern": "("}', "pattern"),
        ('{"$ref": "#/$defs/none"}', "malformed"),
        ('{"$ref": "https://example.com/schema.json"}', "malformed"),
        ('{"enum": []}', "enum"),
        ("[" * 100 + "]" * 100, "an object, true or false"),
        ('{"items":' * 100 + "{}" + "}" * 100, "nested more than"),
        ('{"items":' * 100_000 + "{}" + "}" * 100_000, "schema"),
    ],
)
def test_a_malformed_schema_is_refused_by_place(source, message):
    with pytest.raises(GrammarError, match=message) as refusal:
        BACKEND.compile(GrammarSpec("json_schema", source))
    assert refusal.value.param == "response_format.json_schema.schema"
    assert refusal.value.code == "invalid_schema"


def test_a_malformed_schema_after_a_good_one_leaves_the_good_one_working():
    good = compiled(PERSON).matcher()
    with pytest.raises(GrammarError):
        BACKEND.compile(GrammarSpec("json_schema", '{"type": 3}'))
    assert isinstance(json.loads(walk(good, VOCABULARY, random.Random(1))), dict)
    jsonschema.validate(json.loads(walk(compiled(PERSON).matcher(), VOCABULARY, random.Random(2))), PERSON)


@pytest.mark.parametrize("source", ["{}", "true"])
def test_a_schema_that_allows_everything_gives_any_json(source):
    grammar = BACKEND.compile(GrammarSpec("json_schema", source))
    for seed in range(4):
        json.loads(walk(grammar.matcher(), VOCABULARY, random.Random(seed)))
    for text in [b"1", b"null", b'"x"', b"[{}]", b'{"a": true}']:
        assert accepts(grammar.matcher(), VOCABULARY, text)
