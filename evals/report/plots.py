"""Small plots as SVG text, coloured by the page's style sheet, so that they follow light and dark mode."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from personae.api.eval_reports.statistics import Difference, Interval

WIDTH, ROW, PAD = 180, 16, 6
SERIES = 4  # the number of colours in the style sheet


def share(interval: Interval, series: int = 0) -> Markup:
    """From 0 to 100 %: a dot for the share and a bar for its interval, in the colour of a series."""
    parts = [_grid((0.0, 0.25, 0.5, 0.75, 1.0), 0.0, 1.0)]
    if not math.isnan(interval.share):
        middle, low, high = (100 * part for part in interval)
        label = f"{middle:.1f} %, 95 % interval {low:.1f} to {high:.1f} %"
        places = (_at(interval.low, 0, 1), _at(interval.share, 0, 1), _at(interval.high, 0, 1))
        parts.append(_whisker(*places, f"s{series % SERIES}", label))
    return _svg(parts)


def change(difference: Difference) -> Markup:
    """A line from -100 to 100 points: green if surely better, red if surely worse."""
    verdict = "better" if difference.low > 0 else "worse" if difference.high < 0 else "same"
    label = (
        f"{100 * difference.change:+.1f} points, "
        f"95 % interval {100 * difference.low:+.1f} to {100 * difference.high:+.1f}"
    )
    low, middle, high = (_at(edge, -1, 1) for edge in (difference.low, difference.change, difference.high))
    return _svg(
        [_grid((-1.0, -0.5, 0.0, 0.5, 1.0), -1.0, 1.0), _whisker(low, middle, high, verdict, label)],
    )


def _at(value: float, low: float, high: float) -> float:
    return PAD + (WIDTH - 2 * PAD) * (value - low) / (high - low)


def _grid(marks: Sequence[float], low: float, high: float) -> str:
    lines = []
    for mark in marks:
        x = _at(mark, low, high)
        kind = "axis" if mark == 0 else "tick"
        lines.append(f'<line class="{kind}" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{ROW}"/>')
    return "".join(lines)


def _whisker(low: float, middle: float, high: float, kind: str, label: str) -> str:
    y = ROW / 2
    return (
        f'<g class="{kind}"><title>{label}</title>'
        f'<rect class="span" x="{low:.1f}" y="{y - 3:.1f}" height="6" rx="3" '
        f'width="{max(1.0, high - low):.1f}"/>'
        f'<circle cx="{middle:.1f}" cy="{y:.1f}" r="4.5"/></g>'
    )


def _svg(parts: Sequence[str]) -> Markup:
    return Markup(  # noqa: S704  all of it is numbers and words of this file
        f'<svg class="plot" viewBox="0 0 {WIDTH} {ROW}" width="{WIDTH}" height="{ROW}" role="img">'
        + "".join(parts)
        + "</svg>"
    )
