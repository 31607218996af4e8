"""Tool calls judged as the leaderboard judges them, and asked for as it asks."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from bfcl_recorded import VERDICTS, recorded, valid
from virtual_clock import virtual_clock

from personae.errors import GrammarError, RequestError
from personae.evals.harness.subject import Subject
from personae.evals.suites.bfcl import suite
from personae.evals.suites.bfcl.compare import compare
from personae.evals.suites.bfcl.leaderboard import leaderboard
from personae.evals.suites.bfcl.literals import read_java, read_javascript
from personae.evals.suites.bfcl.schema import tool
from personae.evals.suites.bfcl.suite import CATEGORIES, SAMPLE, Bfcl, BfclSettings, judge, read_entries
from personae.evals.suites.suite import Case

SUITE = Bfcl(BfclSettings())


def on_both(test: Any) -> Any:
    """On asyncio and on trio."""
    for mark in virtual_clock:
        test = mark(test)
    return test


def test_every_verdict_is_that_of_the_leaderboards_package() -> None:
    verdicts = json.loads(VERDICTS.read_text())["verdicts"]
    seen = []
    for number, (category, entry, gold, _) in enumerate(recorded(SAMPLE)):
        known = verdicts[f"{entry['id']}:{number}"]
        assert valid(compare, category, entry, gold, known["calls"]) is known["valid"], (entry["id"], known)
        said = [
            {"function": {"name": name, "arguments": json.dumps(given)}}
            for call in known["calls"]
            for name, given in call.items()
        ]
        assert (judge(category, entry["function"], gold, said) is None) is known["valid"], (
            entry["id"],
            known,
        )
        seen.append(known["valid"])
    assert len(seen) == len(verdicts) > 500
    assert min(seen.count(True), seen.count(False)) > 100


@pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="needs bfcl-eval, which `make setup` installs")
def test_the_package_itself_judges_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = leaderboard()
    assert theirs is not None
    verdicts = json.loads(VERDICTS.read_text())["verdicts"]
    for number, (category, entry, gold, _) in enumerate(recorded(SAMPLE)):
        known = verdicts[f"{entry['id']}:{number}"]
        assert valid(theirs, category, entry, gold, known["calls"]) is known["valid"], (entry["id"], known)
    monkeypatch.setattr(suite, "compare", lambda *_: pytest.fail("our own comparison was asked"))
    [entry] = [one for one in read_entries(SAMPLE, "simple_python") if one["id"] == "simple_python_0"]
    answers = [{"weather.lookup": {"town": ["Kiel"], "days": [2]}}]
    call = {"name": "weather_lookup", "arguments": '{"town": "Bonn", "days": 2}'}
    assert "Bonn" in str(judge("simple_python", entry["function"], answers, [{"function": call}]))


def test_where_the_package_ends_with_an_error_our_own_comparison_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ends(*_: object) -> str | None:
        raise NotImplementedError

    monkeypatch.setattr(suite, "leaderboard", lambda: ends)
    [entry] = [one for one in read_entries(SAMPLE, "simple_python") if one["id"] == "simple_python_0"]
    answers = [{"weather.lookup": {"town": ["Kiel"], "days": [2]}}]
    call = {"name": "weather_lookup", "arguments": '{"town": "Kiel", "days": 2}'}
    assert judge("simple_python", entry["function"], answers, [{"function": call}]) is None
    call["arguments"] = '{"town": "Bonn", "days": 2}'
    assert judge("simple_python", entry["function"], answers, [{"function": call}]) is not None


def test_the_sample_has_every_category_and_its_answers_are_right() -> None:
    cases = SUITE.cases()
    assert {case.task for case in cases} == set(CATEGORIES)
    assert len({case.id for case in cases}) == len(cases)


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_function_becomes_a_tool_with_a_json_schema(category: str) -> None:
    for entry in read_entries(SAMPLE, category):
        before = json.dumps(entry)
        for function in entry["function"]:
            made = tool(function, category, strict=True)["function"]
            assert "." not in made["name"]
            assert made["strict"] is True
            jsonschema.Draft202012Validator.check_schema(made["parameters"])
            kinds = {schema["type"] for schema in made["parameters"]["properties"].values()}
            if "java" in category:
                assert kinds == {"string"}
        assert json.dumps(entry) == before, "the entry is still needed as it was"


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("12", "integer", 12),
        ("12", "long", "12"),
        ("12L", "long", 12),
        ("1.5f", "float", 1.5),
        ("1e3", "double", 1000.0),
        ("yes", "boolean", "yes"),
        ("new int[]{1, 2}", "Array", [1, 2]),
        ('new HashMap<String, Object>() {{ put("a", 1); put("b", "x"); }}', "HashMap", {"a": 1, "b": "x"}),
        ("new ArrayList<>()", "ArrayList", []),
        ("list", "ArrayList", "list"),
    ],
)
def test_java_is_read_or_stays_text(text: str, kind: str, value: Any) -> None:
    assert read_java(text, kind) == value


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("'a'", "String", "a"),
        ("7n", "Bigint", 7),
        ("[1, 'two', true]", "array", [1, "two", True]),
        ("[[1, 2], [3]]", "array", [[1, 2], [3]]),
        ("new Array(1, 2)", "array", [1, 2]),
        ("{a: [1, 2], 'b': false}", "dict", {"a": [1, 2], "b": False}),
        ("{}", "dict", {}),
    ],
)
def test_javascript_is_read_or_stays_text(text: str, kind: str, value: Any) -> None:
    assert read_javascript(text, kind) == value


def test_a_type_that_the_leaderboard_cannot_read_is_an_error_and_no_verdict() -> None:
    with pytest.raises(RequestError, match="Queue"):
        read_java("x", "Queue")


def test_the_reason_names_what_is_wrong() -> None:
    [entry] = [one for one in read_entries(SAMPLE, "simple_python") if one["id"] == "simple_python_0"]
    answers = [{"weather.lookup": {"town": ["Kiel"], "days": [2]}}]

    def reason(calls: list[Any]) -> str | None:
        return compare("simple_python", entry["function"], calls, answers)

    assert reason([{"weather_lookup": {"town": "kiel", "days": 2}}]) is None
    assert reason([]) == "0 calls where there should be 1"
    assert reason([{"weather.lookup": {}}]) == "weather_lookup is not called"
    assert reason([{"weather_lookup": {"days": 2}}]) == "town is required"
    assert reason([{"weather_lookup": {"town": "Kiel"}}]) == "days is missing"
    assert reason([{"weather_lookup": {"town": 3, "days": 2}}]) == "town: 3 is no string"
    assert reason([{"weather_lookup": {"town": "Bonn", "days": 2}}]) == "town: 'Bonn' is none of ['Kiel']"
    assert reason([{"weather_lookup": {"town": "Kiel", "days": 2, "x": 1}}]) == "x is unexpected"


def test_missing_and_malformed_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"BFCL_v4_multiple\.json"):
        Bfcl(BfclSettings(data=str(tmp_path))).cases()
    (tmp_path / "multiple.jsonl").write_text("{")
    with pytest.raises(RequestError, match=r"multiple\.jsonl"):
        Bfcl(BfclSettings(data=str(tmp_path))).cases()
    (tmp_path / "multiple.jsonl").write_text('{"question": []}\n')
    with pytest.raises(RequestError, match="no 'id'"):
        Bfcl(BfclSettings(data=str(tmp_path))).cases()


class Caller:
    """A server that makes the given calls, or refuses."""

    url = key = source = None
    about = "a caller"

    def __init__(self, *calls: tuple[str, str], refuses: bool = False) -> None:
        self.calls = calls
        self.refuses = refuses
        self.body: dict[str, Any] = {}

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        self.body = body
        if self.refuses:
            raise GrammarError("No.")
        calls = [{"function": {"name": name, "arguments": text}} for name, text in self.calls]
        return {"choices": [{"message": {"content": "" if calls else "I cannot.", "tool_calls": calls}}]}


async def outcome(case_id: str, caller: Caller, mode: str = "free") -> Any:
    [case] = [case for case in SUITE.cases() if case.id == case_id]
    assert SUITE.plays(case, "m", mode, base=True)
    subject = Subject(caller, "m", True, mode, {"temperature": 0})  # type: ignore[arg-type]  # chats only
    [found] = await SUITE.play(case, subject)
    return found


@on_both
async def test_calls_are_judged_and_shown() -> None:
    found = await outcome("simple_python_0", Caller(("weather_lookup", '{"town": "Bonn", "days": 2}')))
    assert not found.passed
    assert "Bonn" in found.note
    right = Caller(("weather_lookup", '{"town": "St Peter-Ording", "days": 2}'))
    assert (await outcome("simple_python_0", right)).passed
    assert not (await outcome("simple_python_0", Caller())).passed
    assert not (await outcome("simple_python_0", Caller(("weather_lookup", '{"town": ')))).passed


@on_both
async def test_strict_tools_only_when_constrained_and_required_when_asked() -> None:
    caller = Caller()
    await outcome("multiple_0", caller)
    assert "strict" not in caller.body["tools"][0]["function"]
    await outcome("multiple_0", caller, "constrained")
    assert caller.body["tools"][0]["function"]["strict"] is True
    assert "tool_choice" not in caller.body
    await outcome("multiple_0", caller, "required")
    assert caller.body["tool_choice"] == "required"


@on_both
async def test_relevance_is_about_calling_at_all() -> None:
    call = ("whatever", '{"a": 1}')
    assert (await outcome("irrelevance_0", Caller())).passed
    assert not (await outcome("irrelevance_0", Caller(call))).passed
    assert (await outcome("irrelevance_0", Caller(("f", "{broken")))).passed
    assert (await outcome("live_relevance_0", Caller(call))).passed
    assert not (await outcome("live_relevance_0", Caller())).passed


@on_both
async def test_a_refusal_is_a_failure_that_says_why() -> None:
    found = await outcome("parallel_0", Caller(refuses=True), "constrained")
    assert not found.passed
    assert found.scores == {"accepted": 0.0}
    assert found.note == "The tools were refused: No."


def test_required_makes_no_sense_where_nothing_should_be_called() -> None:
    assert not SUITE.plays(Case("x", "irrelevance"), "m", "required", base=True)
