"""Moving experts, played without a model: favourites that drift, and ranks that all have to agree."""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from personae.engine.parallel.expert_placement import (
    EMPTY,
    ExpertGroups,
    LayerExperts,
    Placement,
    first_placement,
    imbalance,
)
from personae.engine.worker import expert_balancing
from personae.engine.worker.expert_balancing import ExpertBalancing
from personae.errors import ModelLoadError

EXPERTS, LAYERS, STEPS = 64, 3, 50
GROUPS = ExpertGroups(8, 2)


class PlayedRank:
    """The ExpertMemory of a rank of one group. It has only the experts that it has read."""

    def __init__(self, group: int) -> None:
        first = first_placement(EXPERTS, GROUPS)
        self.group, self.fails, self.read_at_once = group, False, 0
        self.placements = dict.fromkeys(range(LAYERS), first)
        self.loads = np.zeros((LAYERS, EXPERTS), np.int64)
        self.held = {layer: {*first[group]} for layer in range(LAYERS)}

    def layers(self) -> dict[int, LayerExperts]:
        found = {
            layer: LayerExperts(self.loads[layer].tolist(), placement)
            for layer, placement in self.placements.items()
        }
        self.loads[:] = 0
        return found

    def reading(self, layer: int, placement: Placement) -> Iterator[None]:
        for expert in {*placement[self.group]} - self.held[layer]:
            for _ in range(3):
                self.read_at_once += 1
                yield
            if self.fails:
                raise ModelLoadError("the disk is gone")
            self.held[layer].add(expert)

    def place(self, layer: int, placement: Placement) -> None:
        assert {*placement[self.group]} <= self.held[layer] | {EMPTY}
        self.placements[layer] = placement
        self.held[layer] = {*placement[self.group]}


class PlayedRanks:
    """See ExpertRanks."""

    def __init__(self) -> None:
        self.ranks = [PlayedRank(group) for group in range(GROUPS.number)]

    def all(self, work: Callable[[Any], Any]) -> list[Any]:
        return [work(rank) for rank in self.ranks]

    def together(self, pieces: Sequence[Iterator[None]]) -> Generator[None, None, list[Any]]:
        ends: list[Any] = [None] * len(pieces)
        left = dict(enumerate(pieces))
        while left:
            for number, piece in list(left.items()):
                try:
                    next(piece)
                except StopIteration:
                    del left[number]
                except ModelLoadError as error:
                    ends[number] = error
                    del left[number]
            yield
        return ends


class Played:
    """`popularity`: [layers, experts]."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.popularity: npt.NDArray[np.float64] = np.stack(
            [self.rng.permutation((np.arange(EXPERTS) + 1.0) ** -0.8) for _ in range(LAYERS)]
        )
        self.ranks = PlayedRanks()
        self.balancing = ExpertBalancing(self.ranks)

    def step(self) -> None:
        """One step of 256 rows. Before it each rank reads at most one tensor, and all agree."""
        for rank in self.ranks.ranks:
            rank.read_at_once = 0
        self.balancing.before_step()
        first, *others = self.ranks.ranks
        assert all(other.placements == first.placements for other in others)
        assert all(rank.read_at_once <= 1 for rank in self.ranks.ranks)
        self.popularity *= np.exp(self.rng.normal(0, 0.004, self.popularity.shape))
        for layer, shares in enumerate(self.popularity):
            rows = self.rng.multinomial(256, shares / shares.sum())
            for rank in self.ranks.ranks:
                rank.loads[layer] += rows

    def imbalance(self) -> float:
        """Of the layers' popularity, in the mean."""
        placements = self.ranks.ranks[0].placements
        return float(
            np.mean(
                [
                    imbalance(shares.tolist(), placements[layer])
                    for layer, shares in enumerate(self.popularity)
                ]
            )
        )


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_balancing, "BALANCE_STEPS", STEPS)


def test_groups_stay_even_while_favourites_drift_and_no_rank_reads_two_tensors_before_a_step() -> None:
    played = Played(1)
    before, found = played.imbalance(), []
    for step in range(30 * STEPS):
        played.step()
        if step > 10 * STEPS:
            found.append(played.imbalance())
    assert np.mean(found) < 1.1 < before
    assert played.balancing.balance.moved > 0
    assert played.balancing.balance.busiest > played.balancing.balance.mean


def test_if_a_rank_cannot_read_an_expert_all_stay_where_they_were() -> None:
    played = Played(2)
    for _ in range(4 * STEPS):
        played.step()
    played.ranks.ranks[3].fails = True
    for _ in range(20 * STEPS):
        played.step()
    moved = played.balancing.balance.moved
    for _ in range(5 * STEPS):
        played.step()
    assert played.balancing.balance.moved == moved
