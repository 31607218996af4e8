"""The findings as JSON and as Markdown."""

from collections.abc import Sequence
from typing import Any

from personae.evals.bench.gpu.checks import Check
from personae.evals.bench.gpu.goals import LOW, goal_lines, kernel_goals, low_lines


def markdown(report: dict[str, Any]) -> str:
    """`report`: {"device", "versions", "seconds", "bandwidth", "rate", "checks": [...], "tables": {title:
    [row]}}."""
    failed = [check for check in report["checks"] if not check["passed"]]
    lines = [
        f"# Kernels on {report['device']}",
        "",
        f"{', '.join(f'{name} {version}' for name, version in report['versions'].items())}; "
        f"a copy moves {report['bandwidth'] / 1e6:.2f} TB/s, "
        f"a product does {report['rate'] / 1e6:.0f} TFLOP/s; {report['seconds']:.0f} s in all.",
        "",
        f"Checks: {len(report['checks'])}, of which {len(failed)} failed.",
        "",
        *(f"- FAILED {c['name']}: error {c['error']:.3g}, at most {c['limit']:.3g}" for c in failed),
    ]
    if report["tables"]:
        lines += ["", "## Goals", "", *goal_lines(kernel_goals(report["tables"]))]
    if low := low_lines(report["tables"]):
        lines += ["", f"## Below {LOW} of the roofline", "", *low]
    for title, rows in report["tables"].items():
        lines += ["", f"## {title}", "", *table(rows)]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown lines. The columns are all keys, in the order of their first occurrence."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(_cell(row.get(column)) for column in columns)} |" for row in rows]
    return lines


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)


def check_entry(check: Check) -> dict[str, Any]:
    """A check in the form of the JSON report."""
    return {"name": check.name, "error": check.error, "limit": check.limit, "passed": check.passed}
