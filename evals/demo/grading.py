"""Grades an answer to one of the demo's held-out conversations."""

import itertools
import json
from typing import Any

import jsonschema_rs

from personae.evals.demo import data
from personae.evals.demo.sample import Sample, read_calls

Scores = dict[str, float]


def held_out(task: str, count: int) -> list[Sample]:
    """The samples that a task is measured on."""
    return list(
        itertools.islice(data.samples((data.TASKS | data.ADAPTER_TASKS)[task], "test", "measure"), count)
    )


def visible(text: str) -> str:
    """The text after the thoughts with which it begins, if it has any."""
    text = text.strip()
    return text.partition("</think>")[2].strip() if text.startswith("<think>") else text


def grade(sample: Sample, text: str) -> Scores:
    """The scores of one answer, each 0 or 1.

    exact: the whole visible answer. For calls also tool (the right names, in order) and valid (they parse and
    satisfy the offered schema); for records only valid; for requests that no tool fits, quiet (nothing is
    called).
    """
    said, gold = visible(text), sample.answer
    scores = {"exact": float(said == gold)}
    calls, wanted = read_calls(said), read_calls(gold)
    if wanted:
        calls = calls or []
        names = [call["name"] for call in calls]
        schemas = _schemas(sample)
        scores["tool"] = float(names == [call["name"] for call in wanted])
        scores["valid"] = float(
            bool(calls) and all(_satisfies(call["arguments"], schemas.get(call["name"])) for call in calls)
        )
        scores["exact"] = float(calls == wanted)
    elif sample.task == "no_call":
        scores["quiet"] = float("<tool_call>" not in said)
    elif sample.schema or gold.startswith("{"):
        try:
            record = json.loads(said)
        except ValueError:
            return scores | {"valid": 0.0, "exact": 0.0}
        scores["exact"] = float(record == json.loads(gold))
        scores["valid"] = float(_satisfies(record, sample.schema or {}))
    return scores


def malformed(sample: Sample, text: str) -> bool:
    """Whether something was called or written that does not parse, or does not satisfy its schema.

    An answer in words instead of a call is wrong, but not malformed.
    """
    said = visible(text)
    if sample.tools:
        calls, schemas = read_calls(said), _schemas(sample)
        return calls is None or not all(
            _satisfies(call["arguments"], schemas.get(call["name"])) for call in calls
        )
    return grade(sample, text).get("valid") == 0.0


def _schemas(sample: Sample) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools or []}


def _satisfies(instance: Any, schema: dict[str, Any] | None) -> bool:
    return schema is not None and jsonschema_rs.Draft202012Validator(schema).is_valid(instance)
