"""Answers to schemas are judged by a validator, and files are read in both forms."""

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from scripted_target import ScriptedTarget

from personae.errors import GrammarError, RequestError
from personae.evals.harness.subject import Subject
from personae.evals.suites.acceptance import Acceptance, AcceptanceSettings
from personae.evals.suites.schema_files import SAMPLE, read_schemas
from personae.evals.suites.schemas import Schemas, SchemaSettings, why_invalid

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])]


def subject(say: Any, mode: str) -> Subject:
    return Subject(ScriptedTarget(say, seconds=0.0), "m", True, mode, {"temperature": 0})


async def test_the_samples_instances_are_what_they_are_said_to_be() -> None:
    schemas = read_schemas(SAMPLE)
    assert len(schemas) == 30
    formats = jsonschema.FormatChecker()
    for schema in schemas:
        kind = jsonschema.validators.validator_for(schema.schema, jsonschema.Draft202012Validator)
        for name, instance, valid in schema.instances:
            assert kind(schema.schema, format_checker=formats).is_valid(instance) == valid, (
                schema.name,
                name,
            )


async def test_an_answer_passes_if_it_is_valid() -> None:
    suite = Schemas(SchemaSettings())
    [case] = [case for case in suite.cases() if case.data.name == "person"]
    good, bad = '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 200}'
    target = subject(lambda body: good, "constrained")
    [outcome] = await suite.play(case, target)
    assert outcome.passed
    [body] = target.target.asked  # type: ignore[attr-defined]  # scripted
    assert body["response_format"]["json_schema"]["schema"] == case.data.schema
    assert body["response_format"]["json_schema"]["strict"] is True
    target = subject(lambda body: bad, "free")
    [outcome] = await suite.play(case, target)
    assert not outcome.passed
    assert "200" in outcome.note
    assert "response_format" not in target.target.asked[0]  # type: ignore[attr-defined]  # scripted
    assert json.dumps(case.data.schema) in target.target.asked[0]["messages"][0]["content"]  # type: ignore[attr-defined]  # scripted


async def test_a_refused_schema_is_counted_and_not_an_error() -> None:
    def refuse(body: Any) -> str:
        raise GrammarError("`uniqueItems` cannot be enforced.")

    suite = Schemas(SchemaSettings())
    [outcome] = await suite.play(suite.cases()[0], subject(refuse, "constrained"))
    assert outcome.scores == {"accepted": 0.0}
    assert "uniqueItems" in outcome.note


async def test_why_an_answer_is_invalid_is_said() -> None:
    assert why_invalid({"type": "string", "format": "date"}, '"2024-02-29"') is None
    assert "no JSON" in str(why_invalid({}, '{"a": '))
    assert "2023-02-29" in str(why_invalid({"type": "string", "format": "date"}, '"2023-02-29"'))


async def test_both_forms_of_files_are_read(tmp_path: Path) -> None:
    row = {
        "id": "a",
        "schema": {"type": "null"},
        "tests": [{"description": "d", "data": None, "valid": True}],
    }
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((json.dumps(row) + "\n").encode()))
    group = {"description": "g", "schema": True, "tests": [{"description": "d", "data": 1, "valid": True}]}
    (tmp_path / "c.json").write_text(json.dumps([group, group]))
    (tmp_path / "README.md").write_text("no data")
    assert [case.name for case in read_schemas(tmp_path)] == ["a", "c: g", "c: g"]
    assert len(read_schemas(tmp_path, every=2)) == 2
    assert read_schemas(tmp_path / "b.jsonl.gz")[0].instances == (("d", None, True),)
    (tmp_path / "c.json").write_text("[{}]")
    with pytest.raises(RequestError, match=r"c\.json"):
        read_schemas(tmp_path)
    with pytest.raises(RequestError, match="no schemas"):
        read_schemas(SAMPLE.parent.parent / "lm_eval_tasks")


async def test_grammars_are_asked_what_they_accept() -> None:
    suite = Acceptance(AcceptanceSettings())
    by_name = {case.data.name: case for case in suite.cases()}
    try:
        for name in ("order", "tree", "conditional"):
            [outcome] = await suite.play(by_name[name], subject(None, "strict"))
            assert outcome.passed, outcome.note
            assert outcome.scores == {"taken": 1.0, "sound": 1.0, "complete": 1.0}
        [strict] = await suite.play(by_name["tags"], subject(None, "strict"))
        [lenient] = await suite.play(by_name["tags"], subject(None, "lenient"))
    finally:
        suite.close()
    assert strict.scores == {"taken": 0.0} or strict.passed
    assert lenient.scores["taken"] == 1.0
    if not lenient.passed:
        assert "accepts what is invalid: twice" in lenient.note
