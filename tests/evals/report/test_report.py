"""Reports of runs, read as a reader or a browser would."""

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from personae.evals.harness.records import Head, OutcomeRecord, Run
from personae.evals.report.markdown import markdown
from personae.evals.report.page import SHOWN, page
from personae.evals.report.tables import tables
from personae.evals.report.text import duration, marked
from personae.evals.report.write import write_reports


def head(name: str) -> Head:
    return Head(
        name=name,
        target="http://there",
        suites={"sums": {}},
        tasks={"sums": ["odd", "even"]},
        models=["base", "poet"],
        sampling={"temperature": 0.0, "seed": 0},
        version="1",
        started="2026-01-01 00:00:00 UTC",
    )


def records(passing: int, count: int = 30, mode: str = "free", task: str = "even") -> list[OutcomeRecord]:
    return [
        OutcomeRecord(
            suite="sums",
            task=task,
            case=f"{task}/{n}",
            model="base",
            mode=mode,
            passed=n < passing,
            scores={"digits": 0.5},
            values={"length": float(n)},
            prompt=f"<b>{n} & more</b>",
            expected=f"the sum is {n}",
            answer=f"the sum is {n}" if n < passing else f"the <i>sum</i> of {n}",
            seconds=0.5,
        )
        for n in range(count)
    ]


OLD = Run(
    head("old"), [*records(10), *records(30, mode="constrained"), *records(1, 4, task="odd")], 61.0, True
)
NEW = Run(
    head("new"),
    [
        *records(28),
        OutcomeRecord(
            suite="sums", task="even", case="x", model="poet", mode="free", error="RequestFailed: gone"
        ),
        OutcomeRecord(suite="sums", task="even", case="y", model="poet", mode="free", skipped="cannot"),
    ],
    5.0,
    False,
)


class Reader(HTMLParser):
    """Finds unclosed and stray tags, and what a browser would fetch."""

    VOID = frozenset({"meta", "line", "rect", "circle", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        assert not {"src", "onload"} & {name for name, _ in attrs}
        assert all(value and value.startswith("#") for name, value in attrs if name == "href")
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def test_rows_come_in_the_suites_order_and_count_what_was_judged() -> None:
    [table] = tables([OLD, NEW])
    assert [key[0] for key in table.rows] == ["odd", "even", "even", "even"]
    old, new = table.rows["even", "base", "free"]
    assert (old.passed.share, new.passed.share) == (10 / 30, 28 / 30)
    _, poet = table.rows["even", "poet", "free"]
    assert (len(poet.judged), poet.errors, poet.skipped) == (0, 1, 1)
    assert table.skips == [("cannot", 1)]


def test_adapters_are_compared_with_the_base_on_the_same_cases() -> None:
    adapter = [msgspec.structs.replace(record, model="poet") for record in records(28)]
    run = Run(msgspec.structs.replace(head("one"), base="base"), [*records(10), *adapter], 5.0, True)
    [table] = tables([run])
    [change] = table.by_adapter(0, "base")
    assert change.label == ("even", "poet", "free")
    assert (change.before.share, change.after.share) == (10 / 30, 28 / 30)
    assert (change.difference.gained, change.difference.lost) == (18, 0)
    assert "Adapters against base" in page([run])
    assert "### Adapters against base" in markdown([run])
    same = Run(run.head, [record for record in run.records if record.case == "even/1"], 5.0, True)
    assert tables([same])[0].by_adapter(0, "base") == []
    assert "Adapters against" not in page([same, OLD])


def test_differences_are_of_the_same_cases() -> None:
    [table] = tables([OLD, NEW])
    [change] = table.between_runs(1)
    assert (change.difference.gained, change.difference.lost, change.difference.of) == (18, 0, 30)
    [bound] = table.by_constraint(0)
    assert (bound.before.share, bound.after.share) == (10 / 30, 1.0)


@pytest.mark.parametrize("runs", [[OLD], [OLD, NEW]], ids=["one", "two"])
def test_the_page_is_whole_and_fetches_nothing(runs: list[Run]) -> None:
    reader = read(page(runs))
    text = " ".join(reader.text)
    assert "Constrained against free" in text
    assert ("new against old" in text) == (len(runs) > 1)
    assert reader.counts["svg"] >= 4
    assert "prefers-color-scheme" in page(runs) or "light-dark(" in page(runs)


def test_what_models_write_is_text_on_the_page() -> None:
    html = page([OLD])
    assert "<b>" not in re.sub(r"<summary><b>\w+</b>", "", html)
    assert "&lt;b&gt;29 &amp; more&lt;/b&gt;" in html or "&lt;b&gt;10 &amp; more&lt;/b&gt;" in html
    assert f"{20 - SHOWN} more" not in html
    assert html.count('class="case"') == 20 + 3


def test_where_texts_differ_is_marked() -> None:
    assert marked("a blue car", "a red car") == "a <mark>blue</mark> car"
    assert marked("<b>", "") == "&lt;b&gt;"


def test_markdown_has_the_same_figures() -> None:
    text = markdown([OLD, NEW])
    assert "| even | base | free | old | 30 | 33.3 | 19–51 |" in text
    assert "| even | base | free | new | 30 | 93.3 |" in text
    assert "| even | base | free | 30 | 33.3 | 93.3 | +60.0 |" in text
    assert "5.00 s, not complete" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.count("|") > 2 for line in rows)


def test_both_are_written(tmp_path: Path) -> None:
    html, plain = write_reports([OLD], tmp_path / "reports")
    assert html.read_text().startswith("<!doctype html>")
    assert plain.read_text().startswith("# Evaluation: old")


def test_durations() -> None:
    assert [duration(s) for s in (None, 0.5, 48, 185)] == ["–", "0.50 s", "48 s", "3:05 min"]
