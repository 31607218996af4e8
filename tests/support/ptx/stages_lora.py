"""What the plan's kernel and shrink leave for expand."""

import numpy as np
import torch

from personae.kernels.sgmv import RANK_PAGE, RankTable, WeightPool, WorkList
from ptx.cases import Check
from ptx.stages import Array, Given, Stages, same

SUM = 1e-5


class LoraStages(Stages):
    """Of one `sgmv`."""

    def __init__(
        self,
        x: torch.Tensor,
        pools: tuple[WeightPool, ...],
        tables: tuple[RankTable, ...],
        work: WorkList,
    ) -> None:
        super().__init__({"plan_kernel": self._plan, "shrink_kernel": self._shrink})
        self._x = x.double().numpy()
        self._a = [pool.a.double().numpy() for pool in pools]
        self._segments = list(
            zip(*(part.tolist() for part in (work.first_row, work.rows, work.adapter)), strict=True)
        )
        self._ranks = np.stack([table.rank.numpy() for table in tables], 1)  # [slots, modules]
        self._tables = [table.pages.numpy() for table in tables]

    def _pages(self, slot: int) -> list[Array]:
        """By module."""
        return [
            table[slot, : -(-rank // RANK_PAGE)]
            for table, rank in zip(self._tables, self._ranks[slot], strict=True)
        ]

    def _plan(self, given: Given) -> list[Check]:
        items, checks = np.zeros((2, len(self._segments)), np.int32), []
        for number, (_, rows, slot) in enumerate(self._segments):
            ranks, pages = self._ranks[slot], np.concatenate(self._pages(slot))
            groups = -(-len(pages) * RANK_PAGE // given["RANKS"])
            blocks = sum(given[f"blocks{module}"] for module, rank in enumerate(ranks) if rank)
            tiles = -(-rows // given["ROWS"])
            items[:, number] = tiles * groups * given["SPLITS"], tiles * blocks
            checks += [
                same(given["ranks_ptr"][number, : len(ranks)], ranks),
                same(given["pages_ptr"][number, : len(pages)], pages),
            ]
        return [*checks, same(given["ends_ptr"], items.cumsum(1, dtype=np.int32))]

    def _shrink(self, given: Given) -> list[Check]:
        found, truth = [], []
        for first, rows, slot in self._segments:
            a = np.concatenate([self._weights(module, slot) for module in range(len(self._a))])
            own = slice(first, first + rows)
            for split in range(given["SPLITS"]):
                part = slice(split * given["split_k"], (split + 1) * given["split_k"])
                found.append(given["planes_ptr"][split, own, : len(a)].astype(np.float64).ravel())
                truth.append((self._x[own, part] @ a[:, part].T).ravel())
        return [Check(*(torch.from_numpy(np.concatenate(side)) for side in (found, truth)), SUM)]

    def _weights(self, module: int, slot: int) -> Array:
        """A slot's A, in whole pages; past its rank zeros."""
        rank, pages = self._ranks[slot, module], self._pages(slot)[module]
        at = pages[:, None].astype(np.int64) * RANK_PAGE + np.arange(RANK_PAGE)
        a = self._a[module][at.ravel()]
        a[rank:] = 0
        return a
