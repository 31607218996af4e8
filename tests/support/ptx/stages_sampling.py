"""What each kernel of sampling leaves for the next one, compared with NumPy's.

A wrong count of a level shows in a token only if some row's threshold lies there. So all of them are
compared: maxima, weights, counts and sums of levels, and the lists.
"""

import numpy as np

from personae.kernels.sampling import SamplingRows
from ptx.cases import Check
from ptx.stages import Array, Given, Stages, close, same

LEVELS = 32
# The bits from which on a weight is above a level: 26 times three quarters of an octave, then 8 octaves.
EDGES = np.array(
    [0x3F80_0001 - min(level, 26) * (6 << 20) - max(level - 26, 0) * (8 << 23) for level in range(1, 33)]
    + [0]
)
ROUNDS = [12] * 26 + [13] * 6 + [15]  # pairs of bits of a level's interval
EXPONENTIAL, SUM, WIDE_SUM = 1e-5, 1e-6, 1e-12


def _chunks(row: Array, chunk: int, fill: float) -> Array:
    """[chunks, chunk]; past the end: `fill`."""
    return np.pad(row, (0, -len(row) % chunk), constant_values=fill).reshape(-1, chunk)


class SamplingStages(Stages):
    """Of one `choose`. logits: of its rows, those that a grammar forbids minus infinity."""

    def __init__(self, logits: Array, rows: SamplingRows) -> None:
        super().__init__(
            {"greatest_kernel": self._greatest, "weigh_kernel": self._weigh, "gather_kernel": self._gather}
        )
        self._logits, self._rows = logits, rows
        self._drawn = np.flatnonzero(rows.temperature > 0)
        filtered = (rows.top_k > 0) | (rows.top_p < 1)
        self._filtered = [row for row in self._drawn if filtered[row]]

    def _greatest(self, given: Given) -> list[Check]:
        chunk = given["CHUNK"]
        parts = np.stack([_chunks(row, chunk, -np.inf) for row in self._logits])
        return [
            same(given["tops_ptr"], parts.max(2)),
            same(given["ids_ptr"], (parts.argmax(2) + np.arange(parts.shape[1]) * chunk).astype(np.int32)),
        ]

    def _weigh(self, given: Given) -> list[Check]:
        checks = [
            same(given["best_ptr"], self._logits.max(1)),
            same(given["tokens_ptr"], self._logits.argmax(1)),
        ]
        for row in self._drawn:
            logits, weights = self._logits[row].astype(np.float64), given["logits_ptr"][row]
            truth = np.exp((logits - logits.max()) / self._rows.temperature[row])
            parts = _chunks(weights, given["CHUNK"], 0)
            checks += [
                close(weights, truth, EXPONENTIAL),
                same(given["weights_ptr"][row], parts.max(1)),
                close(given["sums_ptr"][row], parts.sum(1, dtype=np.float64), SUM),
            ]
        for row in self._filtered:
            parts = _chunks(given["logits_ptr"][row], given["CHUNK"], np.nan)
            above = parts.view(np.int32) >= EDGES[:LEVELS, None, None]
            above &= ~np.isnan(parts)
            sums = np.where(above, parts, 0).sum(2, dtype=np.float64)
            checks += [
                same(given["counts_ptr"][row], above.sum(2).astype(np.int32)),
                close(given["level_sums_ptr"][row], sums, SUM),
            ]
        return checks

    def _gather(self, given: Given) -> list[Check]:
        checks: list[Check] = []
        for row in self._filtered:
            weights, count = given["weights_ptr"][row], int(self._rows.top_k[row])
            sums = given["level_sums_ptr"][row].sum(1, dtype=np.float64)
            if count:
                reached = given["counts_ptr"][row].sum(1) >= count
            else:
                reached = sums >= self._rows.top_p[row] * given["sums_ptr"][row].sum()
            level = int(reached.argmax()) if reached.any() else LEVELS
            low, high = int(EDGES[level]), 0x3F80_0001 if count or not level else int(EDGES[level - 1])
            bits = weights.view(np.int32)
            listed = weights[(bits >= low) & (bits < high)]
            base = 0.0 if count or not level else sums[level - 1]
            truth = np.array([len(listed), low, ROUNDS[level], base])
            checks += [
                close(given["narrowed_ptr"][row], truth, WIDE_SUM),
                same(given["lists_ptr"][row][: len(listed)], listed),
            ]
        return checks
