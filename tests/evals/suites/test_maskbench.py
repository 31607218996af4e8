"""The suite on schemas of our own, and on samples of the public ones where they are at hand."""

import base64
import json

import pytest
from sandbox_limits import PATIENT

from personae.evals.suites.maskbench import DATA, byte_vocabulary, read_tokenizer, run
from personae.evals.suites.schema_files import SchemaCase, read_schemas
from personae.grammar.compiler import GrammarCompiler

OWN = [
    SchemaCase(
        "order",
        "own",
        {
            "type": "object",
            "properties": {
                "id": {"type": "string", "format": "uuid"},
                "placed": {"type": "string", "format": "date"},
                "lines": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {
                            "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
                            "count": {"type": "integer", "minimum": 1},
                        },
                        "required": ["sku", "count"],
                        "additionalProperties": False,
                    },
                },
                "note": {"type": ["string", "null"], "maxLength": 10},
            },
            "required": ["placed", "lines"],
            "additionalProperties": False,
        },
        (
            ("whole", {"placed": "2024-02-29", "lines": [{"sku": "AB-1", "count": 2}], "note": None}, True),
            ("other order", {"lines": [{"count": 2, "sku": "AB-1"}], "placed": "2024-02-29"}, True),
            ("no lines", {"placed": "2024-02-29", "lines": []}, False),
            ("no such day", {"placed": "2023-02-29", "lines": [{"sku": "AB-1", "count": 2}]}, False),
            ("long note", {"placed": "2024-02-29", "lines": [{"sku": "A-1", "count": 2}]}, False),
            ("more", {"placed": "2024-02-29", "lines": [{"sku": "AB-1", "count": 2}], "x": 1}, False),
        ),
    ),
    SchemaCase(
        "either",
        "own",
        {
            "oneOf": [
                {"type": "object", "properties": {"card": {"type": "string"}}, "required": ["card"]},
                {"type": "object", "properties": {"iban": {"type": "string"}}, "required": ["iban"]},
            ]
        },
        (("one", {"card": "1"}, True), ("both", {"card": "1", "iban": "2"}, False), ("none", {}, False)),
    ),
    SchemaCase(
        "distinct",
        "own",
        {"type": "array", "uniqueItems": True, "items": {"type": "integer", "multipleOf": 2}},
        (("twice", [2, 2], False), ("once", [2], True)),
    ),
    SchemaCase("nothing", "own", {"allOf": [{"type": "string"}, {"type": "null"}]}, ()),
]


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(byte_vocabulary(), limits=PATIENT)
    yield compiler
    compiler.close()


def encode(text):
    return list(text.encode())


def test_strict_answers_are_bound_or_refused_by_keyword(compiler):
    report = run(OWN, compiler, encode, strict=True, masks=True)
    assert report.false_accepts == []
    assert report.false_rejects == []
    assert report.other_order == 1
    assert [*report.refusals] == ["nothing"]
    assert (report.schemas, report.compiled, report.checked) == (4, 3, 1)
    assert len(report.seconds) == 4
    assert len(report.mask_seconds) > 50
    text = "\n".join(report.lines())
    assert "strict: 3 of 4 schemas taken (75.0 %), 1 of them checked token by token" in text
    assert "1 refused: " in text


def test_in_any_order_every_instance_is_tried_reversed_too(compiler):
    report = run(OWN, compiler, encode, strict=True, any_order=True)
    assert (report.false_accepts, report.false_rejects, report.other_order) == ([], [], 0)
    forward = run(OWN, compiler, encode, strict=True)
    assert report.instances == forward.instances + 7  # two instances have no object of two properties


def test_without_strict_all_are_taken_and_what_gets_past_is_listed(compiler):
    report = run(OWN, compiler, encode, strict=False)
    assert report.compiled == 4
    assert report.false_accepts == [("distinct", "twice")]
    assert report.false_rejects == []


@pytest.mark.skipif(not (DATA / "jsonschemabench").is_dir(), reason="the data are not beside the repository")
def test_a_sample_of_maskbench_is_bound_as_promised(compiler):
    cases = read_schemas(DATA / "jsonschemabench", every=24)
    strict = run(cases, compiler, encode, strict=True)
    assert strict.false_accepts == []
    assert len({case for case, _ in strict.false_rejects}) <= 0.01 * strict.schemas
    assert strict.share >= 0.9
    assert run(cases, compiler, encode, strict=False).share >= 0.99


@pytest.mark.skipif(
    not (DATA / "json-schema-test-suite").is_dir(), reason="the data are not beside the repository"
)
def test_the_json_schema_test_suite_finds_no_invalid_instance_accepted(compiler):
    cases = read_schemas(DATA / "json-schema-test-suite" / "tests" / "draft2020-12")
    report = run(cases, compiler, encode, strict=True)
    assert report.false_accepts == []
    assert report.share >= 0.75


def test_a_tokenizer_of_mistral_is_read_with_room_for_its_special_tokens(tmp_path):
    texts = [*(bytes([byte]) for byte in range(256)), b"ab", b"abc"]
    tokens = [{"token_bytes": base64.b64encode(text).decode(), "rank": n} for n, text in enumerate(texts)]
    config = {"pattern": ".+", "default_vocab_size": 268, "default_num_special_tokens": 10}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": tokens}))
    tokenizer = read_tokenizer(tmp_path / "tekken.json")
    assert tokenizer.get_vocab_size() == 268
    assert tokenizer.encode("abca").ids == [10 + 257, 10 + ord("a")]
