"""The survey of mutations: what is in its log is not made again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from personae.evals import kernels


def entry(change: str, outcome: str, reason: str = "") -> dict[str, Any]:
    return {
        "change": change,
        "group": "barrier",
        "target": "sm_90",
        "outcome": outcome,
        "reason": reason,
        "source": "x.py:1:1",
        "text": "bar.sync 0",
    }


MADE = [entry("a", "noticed"), entry("b", "harmless", "nothing"), entry("c", "unexplained")]


def test_a_survey_goes_on_where_its_log_ends_and_prints_the_table_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[set[str]] = []
    stops = True

    def survey(_seed: int, _kind: str, _places: int, known: set[str]) -> Iterator[dict[str, Any]]:
        asked.append(set(known))
        for made in MADE:
            if made["change"] not in known:
                yield made
                if stops and made["change"] == "b":
                    raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "_survey", survey)
    log = tmp_path / "log"
    assert kernels.mutate(0, "", 4, log) == 0
    stops = False
    assert kernels.mutate(0, "", 4, log) == 1, "one is unexplained"
    assert asked == [set(), {"a", "b"}]
    assert [json.loads(line)["change"] for line in log.read_text().splitlines()] == ["a", "b", "c"]
    table = capsys.readouterr().out
    assert "| barrier | sm_90 | 3 | 1 | 1 | 1 | 50% |" in table
    assert "| barrier | nothing | 1 |" in table
