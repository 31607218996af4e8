"""BFCL's single-turn categories through tool calls of the chat API, judged by AST comparison.

free: tools without `strict`, as the leaderboard sends them. constrained: strict tools. required: strict, and
`tool_choice` is "required"; runs only if it is named.
"""

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from personae.errors import GrammarError, RequestError
from personae.evals.harness.subject import Subject
from personae.evals.suites.bfcl.compare import Call, compare
from personae.evals.suites.bfcl.leaderboard import leaderboard
from personae.evals.suites.bfcl.schema import tool
from personae.evals.suites.suite import CONSTRAINED, FREE, Case, Outcome, Suite, SuiteSettings

CATEGORIES = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "irrelevance",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "live_irrelevance",
    "live_relevance",
)
REQUIRED = "required"
SAMPLE = Path(__file__).parent / "sample"


class BfclSettings(SuiteSettings, frozen=True):
    """data: a folder with the leaderboard's files; without it our own small sample. count: entries per
    category, 0 for all. sample: a seed to draw them; without it the first ones. limit: tokens of an
    answer."""

    data: str = ""
    count: int = 0
    sample: str = ""
    limit: int = 512


class Bfcl(Suite):
    """One case per entry."""

    settings: ClassVar = BfclSettings
    about: ClassVar = "tool calling: BFCL v4's single-turn categories, AST comparison"
    modes: ClassVar = (FREE, CONSTRAINED)

    def __init__(self, settings: BfclSettings) -> None:
        self._settings = settings

    def cases(self) -> Sequence[Case]:
        """The entries of all categories that have files."""
        folder = Path(self._settings.data) if self._settings.data else SAMPLE
        cases = [case for category in CATEGORIES for case in self._category(folder, category)]
        if not cases:
            raise RequestError(f"{folder} has no files such as BFCL_v4_multiple.json or multiple.jsonl.")
        return cases

    def _category(self, folder: Path, category: str) -> list[Case]:
        entries = read_entries(folder, category)
        if self._settings.sample:
            random.Random(self._settings.sample).shuffle(entries)
        entries = entries[: self._settings.count or None]
        answers: dict[str, Any] = {}
        if "relevance" not in category and entries:
            found = read_entries(folder / "possible_answer", category)
            answers = {entry["id"]: entry["ground_truth"] for entry in found}
        try:
            return [Case(entry["id"], category, (entry, answers.get(entry["id"], []))) for entry in entries]
        except (KeyError, TypeError) as error:
            raise RequestError(f"{folder}: an entry of {category} has no {error}.") from None

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """Every model plays everything."""
        if mode == REQUIRED:
            return "irrelevance" not in case.task
        return mode in self.modes

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """If the server rejects the tools, the case fails with that message."""
        entry, answers = case.data
        strict = subject.mode != FREE
        fields: dict[str, Any] = {
            "tools": [tool(function, case.task, strict=strict) for function in entry["function"]]
        }
        if subject.mode == REQUIRED:
            fields["tool_choice"] = "required"
        shown: dict[str, Any] = {
            "prompt": "\n\n".join(f"{m['role']}: {m['content']}" for m in entry["question"][0])
            + f"\n\n{json.dumps(entry['function'], indent=1, ensure_ascii=False)}",
            "expected": "\n".join(json.dumps(answer, ensure_ascii=False) for answer in answers)
            or ("a call" if case.task == "live_relevance" else "no call"),
        }
        try:
            answer = await subject.chat(entry["question"][0], max_tokens=self._settings.limit, **fields)
        except GrammarError as refusal:
            note = f"The tools were refused: {refusal.message}"
            return [Outcome(passed=False, scores={"accepted": 0.0}, note=note, **shown)]
        message = answer["choices"][0]["message"]
        said = message.get("tool_calls") or []
        reason = judge(case.task, entry["function"], answers, said)
        written = "\n".join(f"{c['function']['name']} {c['function']['arguments']}" for c in said)
        return [
            Outcome(
                passed=reason is None,
                scores={"accepted": 1.0},
                answer=written or str(message.get("content") or ""),
                note=reason or "",
                **shown,
            )
        ]


def judge(category: str, functions: Any, answers: Any, tool_calls: Sequence[Any]) -> str | None:
    """Why the tool calls of an answer are wrong; None if they are right.

    The package `bfcl-eval` compares them where it is installed, and our own `compare` elsewhere and where the
    package ends with an error. Their verdicts are the same.
    """
    try:
        calls: list[Call] | None = [
            {call["function"]["name"]: json.loads(call["function"]["arguments"])} for call in tool_calls
        ]
    except ValueError:
        calls = None
    readable = calls is not None and all(isinstance(next(iter(call.values())), dict) for call in calls)
    if "relevance" in category:
        called = bool(calls) and readable
        if "irrelevance" in category:
            return "something was called" if called else None
        return None if called else "nothing was called"
    if not tool_calls:
        return "nothing was called"
    if calls is None or not readable:
        return "the arguments are no JSON object"
    if (theirs := leaderboard()) is not None:
        with suppress(Exception):  # then our own comparison decides
            return theirs(category, functions, calls, answers)
    return compare(category, functions, calls, answers)


def read_entries(folder: Path, category: str) -> list[dict[str, Any]]:
    """The lines of a category's file, with the leaderboard's name or a plain one; empty without a file."""
    for name in (f"BFCL_v4_{category}.json", f"{category}.jsonl", f"{category}.json"):
        path = folder / name
        if path.exists():
            try:
                return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
            except ValueError as error:
                raise RequestError(f"{path}: {error}.") from None
    return []
