"""From logits to tokens: grammar mask, temperature, filters and noise, a row each."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from personae.kernels import reference
from personae.kernels.counter_rng import again
from personae.kernels.registry import Operator, optional


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row of a step chooses its token; all [S], on the host, contiguous."""

    temperature: NDArray[np.float32]
    """0: the largest logit, whatever the filters say."""
    top_k: NDArray[np.int64]
    """0 is off; else less than the vocabulary."""
    top_p: NDArray[np.float64]
    """Infinity is off."""
    min_p: NDArray[np.float32]
    """0 is off."""
    streams: NDArray[np.uint64]
    """The streams of the rows' seeds; see `kernels/counter_rng.py`."""
    positions: NDArray[np.int64]
    """The absolute positions that are chosen."""

    def again(self, rows: NDArray[np.int64], attempt: int) -> "SamplingRows":
        """These rows of it, for the `attempt`-th choice that replaces another."""
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            again(self.streams[rows], attempt),
            self.positions[rows],
        )


choose = Operator(reference.choose)


def overwrites(device: torch.device) -> bool:
    """Whether `choose` may write into the logits that it is given: all do but the CPU's own."""
    return device.type != "cpu" or optional("choose", device, torch.float32) is None
