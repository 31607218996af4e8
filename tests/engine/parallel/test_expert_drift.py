"""Moving experts, played without a model: favourites that drift, and ranks that all have to agree."""

import numpy as np
import pytest

from personae.actors.simulation.ranks import SimulatedRanks
from personae.engine.parallel.expert_placement import imbalance
from personae.engine.worker import expert_balancing

STEPS = 50


class Played:
    """Ranks with a rank of a model for each group."""

    def __init__(self, seed: int) -> None:
        self.ranks = SimulatedRanks(8, skew=0.8, spare=2, seed=seed)
        assert self.ranks.balancing is not None
        self.balancing = self.ranks.balancing

    def step(self) -> None:
        """One step of 64 tokens. Before it each rank reads at most one tensor, and all agree."""
        for rank in self.ranks.experts:
            rank.read = 0
        self.ranks.compute(64)
        first, *others = self.ranks.experts
        assert all(other.placements == first.placements for other in others)
        assert all(rank.read <= 1 for rank in self.ranks.experts)

    def imbalance(self) -> float:
        """Of the layers' popularity, in the mean."""
        placements = self.ranks.experts[0].placements
        return float(
            np.mean(
                [
                    imbalance(popular.tolist(), placements[layer])
                    for layer, popular in enumerate(self.ranks.popularity)
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
    played.ranks.experts[3].fails = True
    for _ in range(20 * STEPS):
        played.step()
    moved = played.balancing.balance.moved
    for _ in range(5 * STEPS):
        played.step()
    assert played.balancing.balance.moved == moved
