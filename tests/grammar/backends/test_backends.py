"""What every backend has to do, whatever library is behind it."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import msgspec
import pytest
from byte_bpe import byte_fallback_json, byte_level_vocabulary
from grammar_walks import accepts, allowed_tokens, spell, walk

from personae.errors import GrammarError
from personae.grammar.registry import make_backend
from personae.grammar.schema.document import MAX_WHITESPACE
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

VOCABULARY = byte_level_vocabulary()
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
    True,
]


def schema_spec(schema):
    return GrammarSpec("json_schema", json.dumps(schema))


def choice_spec(*texts):
    return GrammarSpec("choice", json.dumps(texts))


# By backend: an object with choices to make, and a single text in quotes.
MANY = {
    "llguidance": schema_spec(PERSON),
    "xgrammar": schema_spec(PERSON),
    "outlines": GrammarSpec("regex", r'\{("name": [0-9]{1,9}, ){2}"tags": (true|null)\}'),
}
ONE = {
    "llguidance": lambda text: schema_spec({"const": text}),
    "xgrammar": lambda text: schema_spec({"const": text}),
    "outlines": lambda text: choice_spec(f'"{text}"'),
}


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backend(request):
    return make_backend(request.param, VOCABULARY)


@pytest.fixture(scope="module", params=MANY)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def many(name):
    return make_backend(name, VOCABULARY).compile(MANY[name])


def one(name, text, vocabulary=VOCABULARY):
    return make_backend(name, vocabulary).compile(ONE[name](text))


def compiled(backend, schema):
    return backend.compile(schema_spec(schema))


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_random_answers_parse_and_validate(backend, schema):
    grammar = compiled(backend, schema)
    assert grammar.nbytes > 0
    for seed in range(8):
        text = walk(grammar.matcher(), VOCABULARY, random.Random(seed))
        jsonschema.validate(json.loads(text), schema)


def test_a_vocabulary_of_byte_pieces_and_marks_serves_as_well(backend):
    vocabulary = Vocabulary.from_tokenizer_json(byte_fallback_json(), 320, [2])
    grammar = compiled(type(backend)(vocabulary), PERSON)
    for seed in range(4):
        jsonschema.validate(json.loads(walk(grammar.matcher(), vocabulary, random.Random(seed))), PERSON)


def test_json_object_binds_to_any_object(backend):
    grammar = backend.compile(GrammarSpec("json_object"))
    for seed in range(8):
        assert isinstance(json.loads(walk(grammar.matcher(), VOCABULARY, random.Random(seed))), dict)
    assert accepts(grammar.matcher(), VOCABULARY, b'{"any": [1, {"thing": null}]}')
    assert not accepts(grammar.matcher(), VOCABULARY, b"[1]")


def test_special_and_padded_ids_are_never_allowed_and_stop_tokens_only_at_the_end(many):
    silent = {token for token, text in enumerate(VOCABULARY.tokens) if not text} | {350, 351}
    for seed in range(4):
        matcher, rng = many.matcher(), random.Random(seed)
        for _ in range(60):
            tokens = allowed_tokens(matcher, VOCABULARY)
            assert not silent & set(tokens) or tokens == [0]
            for token in silent - set(tokens) - {350, 351}:
                assert not matcher.accept(token)
            if matcher.terminated:
                break
            matcher.accept(rng.choice(tokens))


def test_every_stop_token_ends_an_answer(name):
    vocabulary = Vocabulary(VOCABULARY.tokens, (0, 1), VOCABULARY.special)
    grammar = one(name, "x", vocabulary)
    for stop in (0, 1):
        matcher = grammar.matcher()
        assert all(matcher.accept(token) for token in spell(b'"x"', vocabulary))
        assert allowed_tokens(matcher, vocabulary) == [0, 1]
        assert matcher.accept(stop)
        assert matcher.terminated


def test_after_the_end_only_the_stop_token_is_allowed_and_nothing_is_accepted(name):
    matcher = one(name, "1").matcher()
    assert accepts(matcher, VOCABULARY, b'"1"')
    assert matcher.terminated
    assert allowed_tokens(matcher, VOCABULARY) == [0]
    assert not matcher.accept(0)
    assert not matcher.accept(*spell(b"1", VOCABULARY))
    matcher.restore(matcher.snapshot() - 1)
    assert not matcher.terminated
    assert matcher.accept(0)


def test_a_refused_token_changes_nothing(many):
    matcher = many.matcher()
    before = allowed_tokens(matcher, VOCABULARY)
    assert not matcher.accept(*spell(b"x", VOCABULARY))
    assert not matcher.accept(0)
    assert allowed_tokens(matcher, VOCABULARY) == before


def test_going_back_and_fork_equal_replay(many):
    for seed in range(6):
        rng = random.Random(seed)
        matcher, taken = many.matcher(), []
        for _ in range(40):
            if matcher.terminated or (taken and rng.random() < 0.3):
                count = rng.randint(1, len(taken))
                matcher.restore(matcher.snapshot() - count)
                del taken[-count:]
            else:
                taken.append(rng.choice(allowed_tokens(matcher, VOCABULARY)))
                assert matcher.accept(taken[-1])
            replay = many.matcher()
            assert all(replay.accept(token) for token in taken)
            fork = matcher.fork()
            expected = allowed_tokens(replay, VOCABULARY)
            assert allowed_tokens(matcher, VOCABULARY) == allowed_tokens(fork, VOCABULARY) == expected
            assert matcher.terminated == fork.terminated == replay.terminated
            fork.accept(rng.choice(expected))  # must not be seen by the matcher
            assert allowed_tokens(matcher, VOCABULARY) == expected


def test_what_is_said_to_follow_is_accepted_and_looking_changes_nothing(many):
    stop = VOCABULARY.stop_ids[0]
    for seed in range(12):
        rng = random.Random(seed)
        whole = spell(walk(many.matcher(), VOCABULARY, rng), VOCABULARY)
        at = rng.randrange(len(whole))
        matcher = many.matcher()
        assert matcher.feed(whole[:at]) == at
        expected = allowed_tokens(matcher, VOCABULARY)
        rest = [*whole[at:], stop]
        assert matcher.follows(rest) == len(rest)
        other = rest.copy()
        other[rng.randrange(len(rest))] = rng.choice([stop, rng.randrange(VOCABULARY.size)])
        assert matcher.follows(other) == matcher.fork().feed(other)
        assert allowed_tokens(matcher, VOCABULARY) == expected
        assert matcher.feed(rest) == len(rest)
        assert matcher.follows([stop]) == 0


def test_going_back_to_where_it_is_changes_nothing(name):
    matcher = one(name, "1").matcher()
    assert accepts(matcher, VOCABULARY, b'"1"')
    matcher.restore(matcher.snapshot())
    assert matcher.terminated


def test_whitespace_comes_to_an_end(backend):
    grammar = compiled(backend, PERSON)
    assert accepts(grammar.matcher(), VOCABULARY, b'{\n  "name": "Ada",\n  "age": 36,\n  "next": null\n}')
    for opening in [b"{", b'{"name"', b'{"name":', b'{"name": ""']:
        matcher = grammar.matcher()
        assert all(matcher.accept(token) for token in spell(opening, VOCABULARY))
        blanks = 0
        while matcher.accept(*spell(b"\n", VOCABULARY)):
            blanks += 1
        assert 0 < blanks <= MAX_WHITESPACE


def test_compact_json_has_no_blanks(backend):
    matcher = backend.compile(msgspec.structs.replace(schema_spec(PERSON), compact=True)).matcher()
    assert accepts(matcher, VOCABULARY, b'{"name":"Ada L","age":36,"next":null}')
    for opening in [b"", b"{", b'{"name"', b'{"name":', b'{"name":""', b'{"name":"","age":1']:
        matcher = backend.compile(msgspec.structs.replace(schema_spec(PERSON), compact=True)).matcher()
        assert all(matcher.accept(token) for token in spell(opening, VOCABULARY))
        assert not any(matcher.fork().accept(*spell(blank, VOCABULARY)) for blank in (b" ", b"\n", b"\t"))


def test_several_threads_compile_at_once(name):
    values = [f"thread {index}" for index in range(16)]
    backend = make_backend(name, VOCABULARY)
    with ThreadPoolExecutor(4) as pool:
        grammars = list(pool.map(lambda value: backend.compile(ONE[name](value)), values))
    for value, grammar in zip(values, grammars, strict=True):
        assert accepts(grammar.matcher(), VOCABULARY, json.dumps(value).encode())


def test_a_malformed_schema_after_a_good_one_leaves_the_good_one_working(backend):
    good = compiled(backend, PERSON).matcher()
    with pytest.raises(GrammarError):
        compiled(backend, {"type": "text"})
    assert isinstance(json.loads(walk(good, VOCABULARY, random.Random(1))), dict)
    text = walk(compiled(backend, PERSON).matcher(), VOCABULARY, random.Random(2))
    jsonschema.validate(json.loads(text), PERSON)


def test_past_the_limits_of_the_library_nothing_is_allowed_and_nothing_accepted():
    names = {f"p{n}": {"type": "null"} for n in range(600)}
    matcher = compiled(
        make_backend("llguidance", VOCABULARY), {"type": "object", "properties": names}
    ).matcher()
    assert not matcher.accept(*spell(b"{", VOCABULARY))
    assert allowed_tokens(matcher, VOCABULARY) == []
    assert not matcher.accept(0)
    assert not matcher.terminated


def test_an_answer_past_the_limits_fails_alone():
    words = {"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "maxLength": 5000}
    grammar = compiled(make_backend("llguidance", VOCABULARY), {"anyOf": [words, {"type": "null"}]})
    matcher = grammar.matcher()
    for token in spell(b'"This is too much', VOCABULARY):
        if token in allowed_tokens(matcher, VOCABULARY):
            matcher.accept(token)
    assert allowed_tokens(matcher, VOCABULARY) == []
    assert accepts(grammar.matcher(), VOCABULARY, b"null")


@pytest.mark.parametrize(
    ("name", "kind", "source", "valid", "invalid"),
    [
        ("llguidance", "regex", r"[a-c]{2,3}(/|\d)", [b"ab/", b"ccc7"], [b"a/", b"ab", b"abcd/"]),
        ("llguidance", "choice", '["yes", "no \\"x\\"", "é\\n/"]', [b"yes", "é\n/".encode()], [b"ye"]),
        ("outlines", "regex", r"[a-c]{2,3}(/|\d)", [b"ab/", b"ccc7"], [b"a/", b"ab", b"abcd/"]),
        ("outlines", "choice", '["yes", "no \\"x\\"", "é\\n/"]', [b"yes", "é\n/".encode()], [b"ye"]),
        ("llguidance", "lark", 'start: "a" b+\nb: /[0-9]+/ ";"', [b"a1;23;"], [b"a", b"1;"]),
        ("xgrammar", "ebnf", 'root ::= "a" b+\nb ::= [0-9]+ ";"', [b"a1;23;"], [b"a", b"1;"]),
    ],
)
def test_other_kinds_of_grammar_bind_text(name, kind, source, valid, invalid):
    grammar = make_backend(name, VOCABULARY).compile(GrammarSpec(kind, source))
    for text in valid:
        assert accepts(grammar.matcher(), VOCABULARY, text)
    for text in invalid:
        assert not accepts(grammar.matcher(), VOCABULARY, text)


@pytest.mark.parametrize(
    ("name", "kind", "source", "param"),
    [
        ("llguidance", "regex", "(", "structured_outputs.regex"),
        ("llguidance", "regex", "a(?=b)", "structured_outputs.regex"),
        ("llguidance", "lark", "start", "structured_outputs.grammar"),
        ("llguidance", "lark", "start: other", "structured_outputs.grammar"),
        ("xgrammar", "ebnf", "root = x", "structured_outputs.grammar"),
    ],
)
def test_a_malformed_grammar_is_refused_with_its_parameter(name, kind, source, param):
    with pytest.raises(GrammarError, match="cannot be compiled") as refusal:
        make_backend(name, VOCABULARY).compile(GrammarSpec(kind, source))
    assert refusal.value.param == param
    assert "<state>" not in refusal.value.message
    said = {"ebnf": "grammar, read as GBNF", "lark": "grammar, read as Lark", "json_schema": "JSON Schema"}
    assert f"The {said.get(kind, kind)}" in refusal.value.message


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        ("lark", "start: start start", "grammar, read as Lark, cannot be compiled: no text matches it"),
        ("regex", ".*" * 2000, "regex cannot be compiled: its automaton is too large"),
    ],
)
def test_what_the_library_says_in_its_own_words_is_told_in_the_callers(kind, source, why):
    with pytest.raises(GrammarError, match=f"{why}$"):
        make_backend("llguidance", VOCABULARY).compile(GrammarSpec(kind, source))


def test_what_is_wrong_with_a_regular_expression_speaks_of_it_alone():
    with pytest.raises(GrammarError, match=r"cannot be compiled: regex parse error: \(a ") as refused:
        make_backend("llguidance", byte_level_vocabulary()).compile(GrammarSpec("regex", "(a"))
    assert "2(8)" not in refused.value.message
