"""A benchmark's plots as SVG text, coloured by the reports' style sheet."""

import math
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup, escape

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 420, 190, 44, 22, 26, 8
COLOURS = 4


def shares(series: Mapping[str, Sequence[float]], unit: float = 1000.0) -> Markup:
    """A line per server: the share of samples (y) that took at most that long (x; samples times `unit`)."""
    top = rounded(max((samples[-1] for samples in series.values() if samples), default=1.0) * unit)
    lines = []
    for place, samples in enumerate(series.values()):
        count = len(samples)
        points = [(0.0, 0.0), *((value * unit, (at + 1) / count) for at, value in enumerate(samples))]
        lines.append(_steps(points, top, 1.0, place))
    return _frame(lines, top, 1.0, lambda value: f"{value:.0%}", list(series))


def over_time(series: Mapping[str, Sequence[int]]) -> Markup:
    """A line per server: tokens (y) by second (x)."""
    top = rounded(max((len(counts) for counts in series.values()), default=1))
    high = rounded(max((max(counts, default=0) for counts in series.values()), default=1))
    lines = []
    for place, counts in enumerate(series.values()):
        points = [(float(second), float(count)) for second, count in enumerate(counts)]
        lines.append(_steps(points, top, high, place))
    return _frame(lines, top, high, lambda value: f"{value:.0f}", list(series))


def rounded(most: float) -> float:
    """The end of an axis: at least `most`, such that its quarters are short numbers."""
    if most <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(most))
    return next(step * unit for step in (1, 2, 4, 6, 8, 10) if step * unit >= most * (1 - 1e-9))


def _x(value: float, top: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / top


def _y(value: float, high: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / high


def _steps(points: Sequence[tuple[float, float]], top: float, high: float, place: int) -> str:
    path = " ".join(f"{_x(x, top):.1f},{_y(y, high):.1f}" for x, y in points)
    return f'<polyline class="line s{place % COLOURS}" points="{path}"/>'


def _frame(
    lines: Sequence[str], top: float, high: float, text: Callable[[float], str], names: Sequence[str]
) -> Markup:
    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = _x(share * top, top), _y(share * high, high)
        parts.append(f'<line class="tick" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<line class="tick" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="label" x="{x:.1f}" y="{HEIGHT - 9}" text-anchor="middle">{share * top:,.6g}</text>'
        )
        side = f'x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end"'
        parts.append(f'<text class="label" {side}>{text(share * high)}</text>')
    label = escape(", ".join(names))
    return Markup(  # noqa: S704  numbers of our own, and names that are escaped
        f'<svg class="plot" role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}">{"".join(parts)}{"".join(lines)}</svg>'
    )
