"""Were the goals of the GPU day met? From the kit's tables, and from what was served.

    python -m personae.evals.bench.gpu.goals FOLDER        writes FOLDER/summary.md and prints it

FOLDER is what the calls have left: gpu.json, bundled/gpu.json, load-*/report.json, transformers.json. What is
missing is "not measured".
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ReportRow = dict[str, Any]
Tables = Mapping[str, Sequence[ReportRow]]
DECODE_STEPS = "A decode step, context 1024, with adapters"
SLOWER, ROOFLINE = "slower by %", "of the roofline"
LOW = 0.7  # of the roofline: below, a kernel needs a reason or a mend
SHORT = 5.0  # us; what would take less is as long as its launches


@dataclass(frozen=True, slots=True)
class Goal:
    """name: what is held to `most`. found: the figure; None if it was not measured."""

    name: str
    most: float
    found: float | None
    unit: str = " %"

    @property
    def verdict(self) -> str:
        """ "pass", "MISS" or "not measured"."""
        if self.found is None:
            return "not measured"
        return "pass" if self.found <= self.most else "MISS"  # NaN misses


def kernel_goals(tables: Tables) -> list[Goal]:
    """The goals of decode steps of an 8B shape."""
    rows = tables.get(DECODE_STEPS, ())

    def worst(take: Callable[[ReportRow], bool]) -> float | None:
        return max((row[SLOWER] for row in rows if SLOWER in row and take(row)), default=None)

    shares = [row[ROOFLINE] for row in rows if ROOFLINE in row]
    return [
        Goal("all rows base beside a step without adapters", 0.5, worst(_of_nobody)),
        Goal("one adapter of rank 16", 5.0, worst(lambda row: row["adapters"] == "one adapter, r16")),
        Goal(
            "64 rows of 64 adapters of rank 16",
            31.0,
            worst(lambda row: (row["rows"], row["adapters"]) == (64, "all different, r16")),
        ),
        Goal("a step beside its roofline", 1.15, 1 / min(shares) if shares else None, "x"),
    ]


def _of_nobody(row: ReportRow) -> bool:
    return str(row["adapters"]).startswith("none")


def goal_lines(goals: Iterable[Goal]) -> list[str]:
    """A Markdown table."""
    lines = ["| goal | at most | found | |", "|---|---|---|---|"]
    for goal in goals:
        found = "" if goal.found is None else f"{goal.found:.2f}{goal.unit}"
        lines.append(f"| {goal.name} | {goal.most:g}{goal.unit} | {found} | {goal.verdict} |")
    return lines


def low_lines(tables: Tables) -> list[str]:
    """A line for each measured row below LOW of its roofline, with the reason if the row shows it."""
    lines = []
    for title, rows in tables.items():
        for row in rows:
            share = row.get(ROOFLINE)
            if share is None or share >= LOW:
                continue
            time = next(value for name, value in row.items() if name.split()[0] == "us")
            what = ", ".join(
                f"{name} {value}" for name, value in row.items() if not isinstance(value, float | None)
            )
            why = (
                f"its floor of {share * time:.1f} us is about what launches take"
                if share * time < SHORT
                else "NO REASON IS KNOWN"
            )
            lines.append(f"- {title}: {what}: {share:.2f}; {why}")
    return lines


def served_table(folder: Path) -> list[ReportRow]:
    """A row for each load: tokens per second, and seconds to the first token and between tokens."""
    found = []
    for path in sorted(folder.glob("load-*/report.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        kind, clients = path.parent.name.removeprefix("load-").rsplit("-", 1)
        for played in report["played"]:
            figures = played["figures"]
            found.append(
                {
                    "load": kind,
                    "clients": int(clients),
                    "tokens/s": figures["output_tokens"] / figures["seconds"],
                    "first s, p50": figures["first"]["p50"],
                    "first s, p99": figures["first"]["p99"],
                    "gap ms, p50": 1000 * figures["gap"]["p50"],
                    "failed": figures["requests"] - figures["completed"],
                }
            )
    return sorted(found, key=lambda row: (row["clients"], row["load"]))


def served_goals(loads: Sequence[ReportRow], bundled: Sequence[ReportRow] | None) -> list[Goal]:
    """CPU parity of the bundled model, the price of a schema, and that no request failed."""
    rate = {(row["load"], row["clients"]): row["tokens/s"] for row in loads}
    bound, free = rate.get(("bound", 64)), rate.get(("adapters", 64))
    price = None if bound is None or free is None else 100 * (free / bound - 1)
    wrong = None if not bundled else sum(not check["passed"] for check in bundled)
    failed = sum(row["failed"] for row in loads) if loads else None
    return [
        Goal("answers of the bundled model that differ from a CPU's", 0, wrong, ""),
        Goal("the price of a schema at 64 clients", 2.0, price),
        Goal("requests that failed", 0, failed, ""),
    ]


def summary(folder: Path) -> str:
    """Everything that the calls have found, as Markdown."""
    from personae.evals.bench.gpu.report import table

    def read(name: str) -> Any:
        path = folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    kit, bundled, peer = read("gpu.json"), read("bundled/gpu.json"), read("transformers.json")
    loads = served_table(folder)
    goals = kernel_goals(kit["tables"] if kit else {})
    goals += served_goals(loads, bundled["checks"] if bundled else None)
    where = f" on {kit['device']}" if kit else ""
    lines = [f"# The GPU day{where}", "", "## Goals", "", *goal_lines(goals)]
    for title, rows in {"Served": loads, "Transformers with PEFT": peer}.items():
        if rows:
            lines += ["", f"## {title}", "", *table(rows)]
    return "\n".join(lines) + "\n"


def main(folder: Path) -> None:
    """Write and print the summary."""
    text = summary(folder)
    (folder / "summary.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
