"""Small pictures as SVG text, coloured by the page's style sheet, so that they follow light and dark."""

from collections.abc import Sequence

from markupsafe import Markup

from personae.evals.harness.statistics import Difference, Interval

WIDTH, ROW, PAD = 220, 16, 6


def shares(intervals: Sequence[Interval]) -> Markup:
    """One line a share, from 0 to 100 %: a dot where it is, a bar over its interval."""
    height = ROW * len(intervals)
    parts = [_grid(height, (0.0, 0.25, 0.5, 0.75, 1.0), 0.0, 1.0)]
    for place, (share, low, high) in enumerate(intervals):
        if share == share:
            label = f"{100 * share:.1f} %, 95 % interval {100 * low:.1f} to {100 * high:.1f} %"
            parts.append(
                _whisker(place, _at(low, 0, 1), _at(share, 0, 1), _at(high, 0, 1), f"s{place % 4}", label)
            )
    return _svg(height, parts)


def change(difference: Difference) -> Markup:
    """One line from -100 to 100 points: green when surely better, red when surely worse."""
    verdict = "better" if difference.low > 0 else "worse" if difference.high < 0 else "same"
    label = (
        f"{100 * difference.change:+.1f} points, "
        f"95 % interval {100 * difference.low:+.1f} to {100 * difference.high:+.1f}"
    )
    low, middle, high = (_at(edge, -1, 1) for edge in (difference.low, difference.change, difference.high))
    return _svg(
        ROW,
        [_grid(ROW, (-1.0, -0.5, 0.0, 0.5, 1.0), -1.0, 1.0), _whisker(0, low, middle, high, verdict, label)],
    )


def _at(value: float, low: float, high: float) -> float:
    return PAD + (WIDTH - 2 * PAD) * (value - low) / (high - low)


def _grid(height: int, marks: Sequence[float], low: float, high: float) -> str:
    lines = []
    for mark in marks:
        x = _at(mark, low, high)
        kind = "axis" if mark == 0 else "tick"
        lines.append(f'<line class="{kind}" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height}"/>')
    return "".join(lines)


def _whisker(place: int, low: float, middle: float, high: float, kind: str, label: str) -> str:
    y = ROW * place + ROW / 2
    return (
        f'<g class="{kind}"><title>{label}</title>'
        f'<rect class="span" x="{low:.1f}" y="{y - 3:.1f}" height="6" rx="3" '
        f'width="{max(1.0, high - low):.1f}"/>'
        f'<circle cx="{middle:.1f}" cy="{y:.1f}" r="4.5"/></g>'
    )


def _svg(height: int, parts: Sequence[str]) -> Markup:
    # Everything in it is numbers and words of this file.
    return Markup(  # noqa: S704
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
        + "".join(parts)
        + "</svg>"
    )
