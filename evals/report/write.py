"""Writes the reports of runs."""

from collections.abc import Sequence
from pathlib import Path

from personae.evals.harness.records import Run
from personae.evals.report.markdown import markdown
from personae.evals.report.page import page


def write_reports(runs: Sequence[Run], folder: Path) -> tuple[Path, Path]:
    """Writes `report.html` and `report.md` to a folder. Several runs are each compared with the first."""
    folder.mkdir(parents=True, exist_ok=True)
    html, plain = folder / "report.html", folder / "report.md"
    html.write_text(page(runs), encoding="utf-8")
    plain.write_text(markdown(runs), encoding="utf-8")
    return html, plain
