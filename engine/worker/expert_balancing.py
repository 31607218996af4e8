"""Moves experts between ranks while they serve, so that all groups of ranks compute as much.

After every `BALANCE_STEPS` steps the ranks' counts say how many rows each expert has had. Where another
placement of a layer's experts would be more even, the ranks read the experts that come to them from the
model's files, one tensor before each step. Then all begin to use the placement before the same step. Until
then they compute with the experts that they had, so no answer notices it.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

from personae.engine.parallel.expert_placement import (
    LayerExperts,
    Placement,
    balanced,
    group_loads,
    moves,
)
from personae.engine.plan import ExpertBalance
from personae.engine.worker.worker import ExpertMemory

BALANCE_STEPS = 1000

_log = logging.getLogger("personae.engine")


class ExpertRanks(Protocol):
    """The experts of all ranks, the first rank's first."""

    def all(self, work: Callable[[ExpertMemory], Any], /) -> list[Any]:
        """The result of each rank."""

    def together(self, pieces: Sequence[Iterator[None]], /) -> Generator[None, None, list[Any]]:
        """Run the pieces of all ranks, one of each at a time. Returns what each ended with, its error
        included."""


class ExpertBalancing:
    """`balance`: what it has found and done so far. Call `before_step` once before each step."""

    def __init__(self, ranks: ExpertRanks) -> None:
        self.balance = ExpertBalance()
        self._ranks = ranks
        self._work: Iterator[None] = self._balancing()

    def before_step(self) -> None:
        """Do the next piece of work, if there is any."""
        next(self._work, None)

    def _balancing(self) -> Iterator[None]:
        try:
            yield from self._same_everywhere()
            while True:
                for _ in range(BALANCE_STEPS):
                    yield
                for layer, (loads, placement) in self._layers().items():
                    yield from self._balance(layer, loads, placement)
        except _Unreadable as error:
            _log.warning("the experts stay on the ranks where they are: %s", error)

    def _layers(self) -> dict[int, LayerExperts]:
        """The layers of all stages. The ranks of a stage count the same rows."""
        found: dict[int, LayerExperts] = {}
        for layers in self._ranks.all(lambda experts: experts.layers()):
            found = {**layers, **found}
        return found

    def _same_everywhere(self) -> Iterator[None]:
        """The first rank's process outlives others, and its experts may have moved: all follow it."""
        for layer, (_, placement) in self._layers().items():
            for _ in self._move(layer, placement):
                pass
        yield

    def _balance(self, layer: int, loads: list[int], placement: Placement) -> Iterator[None]:
        groups = group_loads(loads, placement)
        busiest, mean = max(groups), sum(groups) / len(groups)
        before = self.balance
        self.balance = ExpertBalance(before.moved, before.busiest + busiest, before.mean + mean)
        better = balanced(loads, placement)
        if better != placement:
            yield from self._move(layer, better)
            now = self.balance
            self.balance = ExpertBalance(now.moved + moves(placement, better), now.busiest, now.mean)

    def _move(self, layer: int, placement: Placement) -> Iterator[None]:
        reading = self._ranks.all(lambda experts: experts.reading(layer, placement))
        ends = yield from self._ranks.together(reading)
        for end in ends:
            if end is not None:
                raise _Unreadable(str(end))
        self._ranks.all(lambda experts: experts.place(layer, placement))


class _Unreadable(Exception):  # what the files are
    """The model's files cannot be read any more."""
