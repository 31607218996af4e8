"""A benchmark as one self-contained HTML page: styles and plots are inside, and there is no script."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from personae.evals import report as reports
from personae.evals.bench import plots
from personae.evals.bench.figures import MEASURES, Figures, measure
from personae.evals.bench.session import BenchReport
from personae.evals.bench.tables import errors, milliseconds, ratio_text

HERE = Path(__file__).parent
EXTRA = """
.plots { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; margin: .75rem 0 0; }
figure { margin: 0; }
figcaption { color: var(--dim); font-size: .8rem; padding-left: 44px; }
.plot .line { fill: none; stroke: var(--s0); stroke-width: 1.8; stroke-linejoin: round; }
.plot .line.s1 { stroke: var(--s1); }
.plot .line.s2 { stroke: var(--s2); }
.plot .line.s3 { stroke: var(--s3); }
.plot .label { font-size: 10px; fill: var(--dim); }
"""
_RATES = ("tokens/s", "requests/s", "goodput/s")


def page(report: BenchReport) -> str:
    """The whole page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    names = [server.name for server in report.servers]

    def plot(cell: str, what: str) -> Markup:
        series = {
            name: sorted(
                sample
                for one in report.played
                if (one.cell, one.server) == (cell, name)
                for sample in getattr(one, what)
            )
            for name in names
        }
        return plots.shares(series)

    def timeline(cell: str) -> Markup:
        return plots.over_time(
            {one.server: one.done for one in report.played if (one.cell, one.round) == (cell, 0)}
        )

    return environment.get_template("page.html.jinja").render(
        report=report,
        style=(Path(reports.__file__).parent / "style.css").read_text(encoding="utf-8") + EXTRA,
        measures=list(MEASURES),
        shown=_shown,
        fairness=lambda runs: statistics.median(run.fairness for run in runs),
        ratio=ratio_text,
        errors=errors,
        plot=plot,
        timeline=timeline,
    )


def _shown(runs: Sequence[Figures], name: str) -> str:
    value = statistics.median(measure(run, name) for run in runs)
    return f"{value:.1f}" if name in _RATES else milliseconds(value)
