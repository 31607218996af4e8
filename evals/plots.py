"""Plots of lines, as SVG without anything else."""

import math
from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 480, 260, 56, 110, 34, 40

Points = Sequence[tuple[float, float]]
"""What is given, and what was found for it."""


def lines(title: str, given: str, found: Mapping[str, Points], colours: Mapping[str, str]) -> str:
    """A line for each name, in its colour, over the values of `given`, which lie side by side."""
    values = sorted({x for points in found.values() for x, _ in points})
    most = max(y for points in found.values() for _, y in points) * 1.1 or 1.0
    step = (_WIDTH - _LEFT - _RIGHT) / max(len(values) - 1, 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + step * values.index(x), _HEIGHT - _BOTTOM - y / most * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="11" fill="#1f2933">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18" font-size="12" font-weight="bold">{title}</text>',
    ]
    for tick in range(5):
        y = _HEIGHT - _BOTTOM - tick / 4 * (_HEIGHT - _TOP - _BOTTOM)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e7eb"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(tick / 4 * most)}</text>'
        )
    for index, value in enumerate(values):
        x = _LEFT + step * index
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{value:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{given}</text>')
    for index, (name, colour) in enumerate(colours.items()):
        places = [place(*point) for point in sorted(found.get(name, ()))]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        y = _TOP + 16 * index + 8
        parts.append(
            f'<rect x="{_WIDTH - _RIGHT + 14}" y="{y - 8}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{_WIDTH - _RIGHT + 30}" y="{y + 1}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _short(value: float) -> str:
    """A number for an axis."""
    digits = max(2 - math.ceil(math.log10(value)), 0) if value > 0 else 0
    return f"{value:.{digits}f}"
