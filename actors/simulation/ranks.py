"""The ranks of a simulated device: how long they take, and that one ends.

Ranks share each layer, so a step takes as long in a stage as the slowest rank. With experts, each rank of a
stage is a group of its own. Some experts are popular (Zipf's law), and their popularity drifts, so one rank
has more rows to compute than another. The engine's own `ExpertBalancing` moves experts if it may.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from personae.engine.parallel.expert_placement import (
    EMPTY,
    ExpertGroups,
    LayerExperts,
    Placement,
    first_placement,
    group_loads,
)
from personae.engine.parallel.ranks import RankEnded
from personae.engine.worker.expert_balancing import ExpertBalancing
from personae.errors import ModelLoadError

EXPERTS, CHOSEN, LAYERS = 64, 4, 3  # of a layer, by a token, and in a stage
SHARE = 0.5  # of a step's time is that of experts, if ranks are even
_DRIFT = 0.004  # the deviation of the logarithm of a popularity, from step to step
_PIECES = 3  # tensors of an expert


class SimulatedExperts:
    """The ExpertMemory of a rank. It has only the experts that it has read. `read`: so many tensors. `fails`:
    it can read no more."""

    def __init__(self, group: int, layers: range, groups: ExpertGroups) -> None:
        first = first_placement(EXPERTS, groups)
        self.group, self.read, self.fails = group, 0, False
        self.placements = dict.fromkeys(layers, first)
        self.loads = {layer: np.zeros(EXPERTS, np.int64) for layer in layers}
        self._held = {layer: {*first[group]} for layer in layers}

    def layers(self) -> dict[int, LayerExperts]:
        """See ExpertMemory."""
        found = {
            layer: LayerExperts(self.loads[layer].tolist(), placement)
            for layer, placement in self.placements.items()
        }
        for loads in self.loads.values():
            loads[:] = 0
        return found

    def reading(self, layer: int, placement: Placement) -> Iterator[None]:
        """See ExpertMemory."""
        if layer not in self.placements:
            return
        for expert in {*placement[self.group]} - self._held[layer] - {EMPTY}:
            for _ in range(_PIECES):
                self.read += 1
                yield
            if self.fails:
                raise ModelLoadError("the disk is gone")
            self._held[layer].add(expert)

    def place(self, layer: int, placement: Placement) -> None:
        """See ExpertMemory. Raises AssertionError if it computes with an expert that it has not read."""
        if layer in self.placements:
            assert {*placement[self.group]} <= self._held[layer] | {EMPTY}
            self.placements[layer] = placement
            self._held[layer] = {*placement[self.group]}


class SimulatedRanks:
    """The ranks of a model, `size` in each of the `stages`. `skew`: the exponent of the experts' popularity;
    0 if there are none. `spare`: as in ExpertGroups. `waits`: called when the first rank has waited for one
    that has ended.

    `slow`: by rank, how many times as long as others it takes.
    """

    def __init__(
        self,
        size: int = 1,
        stages: int = 1,
        *,
        skew: float = 0.0,
        spare: int | None = None,
        seed: int = 0,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        self.size, self.stages = size, stages
        self.slow: dict[int, float] = {}
        self.experts: list[SimulatedExperts] = []
        self.popularity: list[npt.NDArray[np.float64]] = []  # of each layer
        self.balancing: ExpertBalancing | None = None
        self._ended: int | None = None
        self._waits = waits
        self._dice = np.random.default_rng(seed)
        if not skew:
            return
        self.experts = [
            SimulatedExperts(rank, self._layers(stage), ExpertGroups(size, spare))
            for stage in range(stages)
            for rank in range(size)
        ]
        self.popularity = [
            self._dice.permutation((np.arange(EXPERTS) + 1.0) ** -skew) for _ in range(LAYERS * stages)
        ]
        if spare is not None:
            self.balancing = ExpertBalancing(self)

    @property
    def count(self) -> int:
        """How many there are in all stages."""
        return self.size * self.stages

    def end(self, rank: int) -> None:
        """End a rank's process, which the next step notices."""
        self._ended = rank

    def compute(self, rows: int) -> list[float]:
        """Compute a step with so many tokens. Returns for each stage how many times as long it takes as with
        ranks that are even. Raises RankEnded if one has ended."""
        if self._ended is not None:
            self._waits()
            raise RankEnded(f"rank {self._ended} of the model ended with exit code -9")
        if self.balancing is not None:
            self.balancing.before_step()
        for layer, popular in enumerate(self.popularity):
            popular *= np.exp(self._dice.normal(0, _DRIFT, EXPERTS))
            chosen = self._dice.multinomial(rows * CHOSEN, popular / popular.sum())
            for experts in self._of_stage(layer // LAYERS):
                experts.loads[layer] += chosen
        return [self._stage(stage) for stage in range(self.stages)]

    def all(self, work: Callable[[Any], Any]) -> list[Any]:
        """See ExpertRanks."""
        return [work(experts) for experts in self.experts]

    def together(self, pieces: Sequence[Iterator[None]]) -> Generator[None, None, list[Any]]:
        """See ExpertRanks."""
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

    def _layers(self, stage: int) -> range:
        return range(stage * LAYERS, (stage + 1) * LAYERS)

    def _of_stage(self, stage: int) -> list[SimulatedExperts]:
        return self.experts[stage * self.size : (stage + 1) * self.size]

    def _stage(self, stage: int) -> float:
        first = stage * self.size
        slow = [self.slow.get(rank, 1.0) for rank in range(first, first + self.size)]
        if not self.experts:
            return max(slow)
        times = []
        for layer in self._layers(stage):
            loads = group_loads(self.popularity[layer].tolist(), self.experts[first].placements[layer])
            mean = sum(loads) / self.size
            times.append(
                max(
                    factor * (1 - SHARE + SHARE * load / mean)
                    for factor, load in zip(slow, loads, strict=True)
                )
            )
        return float(sum(times) / len(times))
