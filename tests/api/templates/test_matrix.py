"""The chat templates of many models with the conversations that clients send: nothing is lost."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from template_matrix import (
    CASES,
    HI,
    PAGE,
    TOOLS,
    Case,
    Outcome,
    called,
    outcome,
    outcomes,
    page,
    result,
    says,
)
from template_matrix import templates as template_files

from personae.api.templates.probes import find_traits
from personae.api.templates.sandbox import CHARACTERS, Program
from personae.api.templates.template import ChatTemplate
from personae.grammar.tools.registry import GENERIC, tool_format

TEMPLATES = template_files()
pytestmark = pytest.mark.skipif(
    not TEMPLATES, reason="there is no shared/data/tokenizers beside this repository"
)


@pytest.fixture(scope="module")
def found() -> dict[Path, list[Outcome]]:
    return outcomes()


def test_nothing_is_lost_and_no_template_fails(found: dict[Path, list[Outcome]]) -> None:
    faults = [
        f"{path.stem}, {case.name}: {each.fault}"
        for path, row in found.items()
        for case, each in zip(CASES, row, strict=True)
        if each.fault
    ]
    assert faults == []


def test_the_page_says_what_is_so(found: dict[Path, list[Outcome]]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(found)


def _random_talk(rng: random.Random) -> list[dict[str, Any]]:
    """A conversation that a client might send, in any order of roles."""
    words = iter(range(10**6))

    def text() -> str:
        return f"word{next(words)}q"

    talk: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 8)):
        match rng.choice("sduuuaacc"):
            case "s":
                talk.append(says("system", text()))
            case "d":
                talk.append(says("developer", text()))
            case "u":
                talk.append(says("user", text()))
            case "a":
                thought = {"reasoning_content": text()} if rng.random() < 0.2 else {}
                talk.append(says("assistant", text(), **thought))
            case "c":
                ids = [f"call_{next(words)}" for _ in range(rng.randint(1, 3))]
                content = rng.choice([None, "", text()])
                results = [result(id, text()) for id in ids]
                rng.shuffle(results)
                talk.append(called(*((id, text()) for id in ids), content=content))
                talk += results[: len(results) - (rng.random() < 0.2)]
    return talk if any(message["role"] == "user" for message in talk) else [*talk, HI]


def test_nothing_of_any_conversation_is_lost() -> None:
    rng = random.Random(1)
    for number in range(60):
        case = Case(str(number), _random_talk(rng), rng.choice([TOOLS, None]))
        for path in rng.sample(TEMPLATES, 20):
            found = outcome(path, case)
            assert not found.fault, (path.stem, case, found)
            assert found.kind != "refused" or "firefunction" in path.stem, (path.stem, case)


def test_a_template_is_asked_quickly_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        return find_traits(*arguments, **options)

    monkeypatch.setattr("personae.api.templates.template.find_traits", counting)
    monkeypatch.setattr("personae.api.templates.template._known_traits", {})
    source = max((path.read_text(encoding="utf-8") for path in TEMPLATES), key=len)
    for _ in range(3):
        ChatTemplate(source, {})
    assert asked == 1
    program = Program(source, {}, characters=CHARACTERS)
    best = 1.0
    for _ in range(3):
        begun = time.perf_counter()
        find_traits(program, tool_format(GENERIC), described=False)
        best = min(best, time.perf_counter() - begun)
    assert best < 0.3
