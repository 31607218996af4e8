"""Estimates how many replicas some traffic needs.

One replica is simulated with its share of the traffic, for one more replica after the other, until it meets
the goal. This assumes a load balancer that chooses replicas at random, and nothing about where adapters are.
The chart is a single self-contained SVG file.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import ceil

from personae.actors.simulation.scenario import Scenario, SimulationReport
from personae.actors.simulation.world import simulate

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 360, 64, 64, 56, 48
_INK, _FIRST, _EACH, _GOAL = "#1f2933", "#2563eb", "#d97706", "#9aa5b1"


@dataclass(frozen=True, slots=True)
class LatencyGoal:
    """Seconds to the first token, and seconds per token after that. Each must hold for a `share` of all
    requests."""

    first: float = 1.0
    token: float = 0.1
    share: float = 0.99


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """The result for one of `replicas` replicas: quantiles at the goal's share, in seconds."""

    replicas: int
    first: float
    token: float
    refused: int
    busy: float
    met: bool


def answers(scenario: Scenario, goal: LatencyGoal, most: int) -> Iterator[CapacityAnswer]:
    """Yield the results for 1, 2, ... replicas, up to the first that meets the goal and one more, or up to
    `most`."""
    met = 0
    for replicas in count(1):
        share = replace(
            scenario.workload,
            rate=scenario.workload.rate / replicas,
            requests=ceil(scenario.workload.requests / replicas),
        )
        answer = judge(simulate(replace(scenario, workload=share, lull=share.requests)), replicas, goal)
        yield answer
        met += answer.met
        if met == 2 or replicas == most:
            return


def judge(report: SimulationReport, replicas: int, goal: LatencyGoal) -> CapacityAnswer:
    """Judge whether a run meets a goal. A refused request counts as an infinite wait."""
    refused = report.outcomes.get("refused", 0)
    first = quantile([*report.waits, *[float("inf")] * refused], goal.share)
    token = quantile(report.paces, goal.share)
    met = first <= goal.first and token <= goal.token
    return CapacityAnswer(replicas, first, token, refused, report.busy / report.seconds, met)


def quantile(values: list[float], share: float) -> float:
    """The smallest value that a share of all values does not exceed; 0 if there are no values."""
    return sorted(values)[max(ceil(share * len(values)) - 1, 0)] if values else 0.0


def chart(found: list[CapacityAnswer], scenario: Scenario, goal: LatencyGoal) -> str:
    """Draw an SVG: both quantiles as multiples of their goals, by number of replicas."""
    parts = [(a.first / goal.first, a.token / goal.token) for a in found]
    finite = [value for pair in parts for value in pair if value != float("inf")]
    top = min(max([*finite, 1.2]) * 1.1, 8.0)
    step = (_WIDTH - _LEFT - _RIGHT) / max(len(found) - 1, 1)

    def x(index: int) -> float:
        return _LEFT + index * step

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - min(value, top) / top * (_HEIGHT - _TOP - _BOTTOM)

    load = scenario.workload
    title = f"{load.rate:g} requests/s, {load.adapters} adapters"
    share = f"{goal.share:.0%}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{_INK}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="22" font-size="15" font-weight="bold">Replicas for {title}</text>',
        f'<text x="{_LEFT}" y="40">slowest of {share}, as a multiple of its goal: '
        f'<tspan fill="{_FIRST}">first token ({goal.first:g} s)</tspan>, '
        f'<tspan fill="{_EACH}">each token after ({goal.token * 1000:g} ms)</tspan></text>',
    ]
    left, right = _LEFT, _WIDTH - _RIGHT
    for value in _ticks(top):
        at = y(value)
        lines += (
            f'<line x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e4e7eb"/>',
            f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>',
        )
    lines += (
        f'<line x1="{left}" x2="{right}" y1="{y(1):.1f}" y2="{y(1):.1f}" stroke="{_GOAL}" stroke-width="2" '
        'stroke-dasharray="6 4"/>',
        f'<text x="{right + 8}" y="{y(1) + 4:.1f}">goal</text>',
    )
    for which, colour in ((0, _FIRST), (1, _EACH)):
        points = " ".join(f"{x(i):.1f},{y(pair[which]):.1f}" for i, pair in enumerate(parts))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for i, pair in enumerate(parts):
            fill = "#ffffff" if pair[which] > top else colour
            label = "refused" if pair[which] == float("inf") else f"{pair[which]:.1f} times its goal"
            place = f'cx="{x(i):.1f}" cy="{y(pair[which]):.1f}"'
            title = f"<title>{label}</title>"
            lines.append(f'<circle {place} r="4" fill="{fill}" stroke="{colour}">{title}</circle>')
    under = _HEIGHT - _BOTTOM + 18
    for i, answer in enumerate(found):
        weight = ' font-weight="bold"' if answer.met else ""
        place = f'x="{x(i):.1f}" y="{under}" text-anchor="middle"'
        lines.append(f"<text {place}{weight}>{answer.replicas}</text>")
    label = "replicas (bold: both goals met; hollow: off the scale, or requests were refused)"
    middle = (left + right) / 2
    lines.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{label}</text></svg>')
    return "\n".join(lines)


def _ticks(top: float) -> list[float]:
    step = next(step for step in (0.2, 0.5, 1.0, 2.0) if top / step <= 8 or step == 2.0)
    return [round(i * step, 1) for i in range(int(top / step) + 1)]
