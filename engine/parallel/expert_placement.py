"""Which group of ranks has which experts of a layer, and where they would be computed most evenly.

The plan is a pure function of the measured loads and of where experts are. It exchanges some experts of the
heaviest group with others. If that is not even enough, it begins anew: experts with a high load get copies,
the copies are put on groups, the heaviest first and each where least is, and then experts are exchanged.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Placement = tuple[tuple[int, ...], ...]
"""By group, the expert in each of its slots. All groups have as many slots."""

EMPTY = -1
"""A slot without an expert."""

WORTH = 0.05  # of the mean: moving experts must take at least as much from the heaviest group
_EVEN = 1.02  # the load of the heaviest group by the mean, from which on nothing is exchanged
_EXCHANGES = 100  # at most, for a layer


class ExpertGroups(NamedTuple):
    """How the ranks that share a layer divide its experts: among a `number` of groups, which have as many.

    `spare`: a group has slots for so many more experts of a layer, and experts move to where their load is
    even. None: experts stay where they are.
    """

    number: int = 1
    spare: int | None = None


NO_GROUPS = ExpertGroups()


class LayerExperts(NamedTuple):
    """The experts of a layer: how many rows each has had, and where they are."""

    loads: list[int]
    placement: Placement


def first_placement(experts: int, groups: ExpertGroups) -> Placement:
    """The experts in order, equally many in each group, which has its spare slots last."""
    each = experts // groups.number
    spare = (EMPTY,) * (groups.spare or 0)
    return tuple((*range(group * each, (group + 1) * each), *spare) for group in range(groups.number))


def group_loads(loads: Sequence[float], placement: Placement) -> list[float]:
    """The load of each group. The copies of an expert have equal parts of its load."""
    copies = np.zeros(len(loads), np.int64)
    for own in placement:
        copies[[expert for expert in own if expert != EMPTY]] += 1
    return [sum(loads[expert] / copies[expert] for expert in own if expert != EMPTY) for own in placement]


def imbalance(loads: Sequence[float], placement: Placement) -> float:
    """The highest load of a group by the mean: 1.0 is even. 1.0 without any load."""
    found = group_loads(loads, placement)
    return max(found) * len(found) / sum(found) if sum(found) else 1.0


def moves(before: Placement, after: Placement) -> int:
    """How many experts come to a group that did not have them."""
    return sum(len({*new} - {*old, EMPTY}) for old, new in zip(before, after, strict=True))


def balanced(loads: Sequence[float], current: Placement) -> Placement:
    """A placement with an even load, in as many groups and slots as the `current` one, and near to it. The
    current one, if no other is worth moving experts."""
    found = _exchanged(loads, current)
    anew = _anew(loads, current)
    if imbalance(loads, found) - imbalance(loads, anew) > WORTH:
        found = anew
    return found if imbalance(loads, current) - imbalance(loads, found) > WORTH else current


def _exchanged(loads: Sequence[float], current: Placement) -> Placement:
    """The placement after exchanges."""
    placed = np.array(current, np.int64)
    copies = np.bincount(placed[placed != EMPTY], minlength=len(loads))
    _exchange(placed, _shares(loads, copies))
    return tuple(map(tuple, placed.tolist()))


def _anew(loads: Sequence[float], current: Placement) -> Placement:
    """A placement that does not depend on the current one, but for the order of groups and slots."""
    groups, slots = len(current), len(current[0])
    copies = _copies(loads, groups, groups * slots)
    shares = _shares(loads, copies)
    placed = _placed(shares, copies, groups, slots)
    _exchange(placed, shares)
    return _nearest(placed.tolist(), current)


def _shares(loads: Sequence[float], copies: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The load of a copy of each expert, and as the last that of an empty slot."""
    return np.append(np.array(loads, np.float64) / copies, 0.0)


def _copies(loads: Sequence[float], groups: int, slots: int) -> npt.NDArray[np.int64]:
    """How often each expert is there. The spare slots go, one by one, to the expert whose copies have the
    highest load."""
    copies = np.ones(len(loads), np.int64)
    heaviest = [(-load, expert) for expert, load in enumerate(loads)]
    heapify(heaviest)
    for _ in range(slots - len(loads)):
        share, expert = heaviest[0]
        if not share or groups == 1:
            break
        copies[expert] += 1
        share = -loads[expert] / int(copies[expert]) if copies[expert] < groups else 0.0
        heapreplace(heaviest, (share, expert))
    return copies


def _placed(
    shares: npt.NDArray[np.float64], copies: npt.NDArray[np.int64], groups: int, slots: int
) -> npt.NDArray[np.int64]:
    """[groups, slots] experts: the copies, the heaviest first, each in the group that has the least load of
    those with room. A copy is left out if each group with room has the expert already."""
    placed = np.full((groups, slots), EMPTY, np.int64)
    totals, used = [0.0] * groups, [0] * groups
    for expert in np.argsort(-shares[:-1], kind="stable").tolist():
        for _ in range(int(copies[expert])):
            room = [
                group
                for group in range(groups)
                if used[group] < slots and expert not in placed[group, : used[group]]
            ]
            if room:
                group = min(room, key=lambda group: (totals[group], used[group]))
                placed[group, used[group]] = expert
                used[group] += 1
                totals[group] += shares[expert]
    left_out = copies - np.bincount(placed[placed != EMPTY], minlength=len(copies))
    shares[:-1] *= copies / (copies - left_out)
    return placed


def _exchange(placed: npt.NDArray[np.int64], shares: npt.NDArray[np.float64]) -> None:
    """Exchange the experts of two slots, of the heaviest group and another, as long as the heavier of both
    gets lighter by it."""
    for _ in range(_EXCHANGES):
        loads = shares[placed]
        totals = loads.sum(1)
        heaviest = int(totals.argmax())
        if totals[heaviest] <= _EVEN * totals.mean():
            return
        own = placed[heaviest]
        gain = loads[heaviest][:, None, None] - loads[None]  # [own slot, group, slot]
        after = np.maximum(totals[heaviest] - gain, totals[None, :, None] + gain)
        after[:, heaviest] = np.inf
        after[(placed[None] == own[:, None, None]).any(2) & (own != EMPTY)[:, None]] = np.inf
        after[:, np.isin(placed, own) & (placed != EMPTY)] = np.inf
        slot, group, other = np.unravel_index(int(after.argmin()), after.shape)
        if after[slot, group, other] >= totals[heaviest] * (1 - 1e-9):
            return
        placed[heaviest, slot], placed[group, other] = placed[group, other], placed[heaviest, slot]


def _nearest(placed: list[list[int]], current: Placement) -> Placement:
    """The same groups in another order, and their experts in other slots, so that most stay where they are:
    groups are alike."""
    shared = sorted(
        (-len({*new} & {*old} - {EMPTY}), number, group)
        for number, new in enumerate(placed)
        for group, old in enumerate(current)
    )
    chosen: dict[int, list[int]] = {}
    taken: set[int] = set()
    for _, number, group in shared:
        if group not in chosen and number not in taken:
            chosen[group] = placed[number]
            taken.add(number)
    return tuple(_in_slots(chosen[group], old) for group, old in enumerate(current))


def _in_slots(experts: list[int], old: tuple[int, ...]) -> tuple[int, ...]:
    """The experts, in the slots where they are already if they are there."""
    coming = iter([expert for expert in experts if expert != EMPTY and expert not in old])
    return tuple(expert if expert != EMPTY and expert in experts else next(coming, EMPTY) for expert in old)
