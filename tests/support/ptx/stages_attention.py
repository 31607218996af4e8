"""The parts of split sequences, which attention leaves for the kernel that merges them."""

import math

import numpy as np
import torch
from torch import Tensor

from personae.kernels.attention import AttentionBatch
from personae.kernels.triton.sizes import ceil_div
from ptx.cases import PAGE, Check
from ptx.stages import Array, Given, Stages, close, same

TOP, WEIGHT = 1e-5, 1e-3


class AttentionStages(Stages):
    """Of one layer. rows: (queries, keys). tolerance: of a part's sum."""

    def __init__(
        self,
        q: Tensor,
        caches: Tensor,
        batch: AttentionBatch,
        rows: list[tuple[int, int]],
        window: int | None,
        tolerance: float,
    ) -> None:
        super().__init__({"attention_kernel": self._attend})
        self._q, self._caches = q.double().numpy(), caches.float().numpy()
        self._batch, self._rows, self._tolerance = batch, rows, tolerance
        self._window = window or 1 << 30

    def _attend(self, given: Given) -> list[Check]:
        most, queries = given["most_splits"], given["split_queries"]
        if most == 1:
            return []
        heads, dim = self._q.shape[1:]
        sums = given["sums_ptr"].reshape(len(self._rows), queries, most, heads, dim)
        stats = given["stats_ptr"].reshape(len(self._rows), queries, most, heads, 2)
        found: list[Array] = []
        truth: list[Array] = []
        for row, (count, length) in enumerate(self._rows):
            for split, (begin, end) in enumerate(self._parts(count, length, given)):
                own = stats[row, :count, split]
                found.append(np.concatenate((own, sums[row, :count, split]), 2).reshape(-1, 2 + dim))
                truth.append(self._part(row, begin, end).reshape(-1, 2 + dim))
        if not found:
            return []
        (tops, weights, parts), (true_tops, true_weights, true_parts) = (
            (whole[:, 0], whole[:, 1], whole[:, 2:])
            for whole in (np.concatenate(side).astype(np.float64) for side in (found, truth))
        )
        seen = np.isfinite(true_tops)
        scale = np.where(seen, true_weights, 1)[:, None]
        return [
            same(np.isfinite(tops), seen),
            close(tops[seen], true_tops[seen], TOP),
            close(weights, true_weights, WEIGHT),
            Check(*(torch.from_numpy(side / scale) for side in (parts, true_parts)), self._tolerance),
        ]

    def _parts(self, count: int, length: int, given: Given) -> list[tuple[int, int]]:
        """The first key of each part, and the one behind its last; none if the sequence is not split."""
        block = given["KEYS"]
        first = max(length - count - self._window + 1, 0) // block * block
        keys = length - first
        parts = min(ceil_div(keys, given["SHORTEST"]), given["most_splits"])
        if parts < 2 or count > given["split_queries"]:
            return []
        each = ceil_div(ceil_div(keys, parts), block) * block
        return [(begin, min(begin + each, length)) for begin in range(first, length, each)]

    def _part(self, row: int, begin: int, end: int) -> Array:
        """Of each query and head: the greatest score, the sum of powers of two, and that of values."""
        count, length = self._rows[row]
        start = int(self._batch.query_start[row])
        q = self._q[start : start + count]
        at = np.arange(begin, end)
        page = self._batch.page_table[row].numpy().astype(np.int64)[at // PAGE]
        k, v = (
            np.repeat(cache[page, :, at % PAGE], q.shape[1] // cache.shape[1], 1) for cache in self._caches
        )
        scores = np.einsum("qhd,khd->qhk", q, k.astype(np.float64)) * q.shape[2] ** -0.5 * math.log2(math.e)
        position = np.arange(length - count, length)[:, None]
        seen = (at <= position) & (at > position - self._window)
        scores = np.where(seen[:, None], scores, -np.inf)
        top = scores.max(2, keepdims=True)
        powers = np.exp2(scores - np.where(np.isfinite(top), top, 0))
        sums = np.einsum("qhk,khd->qhd", powers, v.astype(np.float64))
        return np.concatenate((top, powers.sum(2, keepdims=True), sums), 2)
