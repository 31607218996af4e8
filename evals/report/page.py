"""A report as one self-contained HTML page: styles and plots are inside, and there is no script."""

from collections.abc import Sequence
from pathlib import Path

import jinja2

from personae.evals.harness.records import Run
from personae.evals.report import plots, text
from personae.evals.report.tables import tables

HERE = Path(__file__).parent
SHOWN = 20
"""The most failing cases of one task, model and mode on the page. The results file has all."""


def page(runs: Sequence[Run], title: str = "") -> str:
    """The whole page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "percent": text.percent,
        "interval": text.interval,
        "quantity": text.quantity,
        "duration": text.duration,
        "marked": text.marked,
        "share": plots.share,
        "change": plots.change,
    }
    return environment.get_template("page.html.jinja").render(
        title=title or ", ".join(run.head.name for run in runs),
        style=(HERE / "style.css").read_text(encoding="utf-8"),
        runs=runs,
        tables=tables(runs),
        shown=SHOWN,
    )
