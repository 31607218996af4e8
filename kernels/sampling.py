"""From logits to tokens: grammar mask, temperature, filters and noise, each row with its own parameters."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from personae.kernels.counter_rng import again
from personae.kernels.registry import optional


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row of a step chooses its token. All [S], on the host, contiguous."""

    temperature: NDArray[np.float32]
    """0: the largest logit, whatever the filters are."""
    top_k: NDArray[np.int64]
    """0 is off; otherwise less than the vocabulary's size."""
    top_p: NDArray[np.float64]
    """Infinity is off."""
    min_p: NDArray[np.float32]
    """0 is off."""
    streams: NDArray[np.uint64]
    """The random streams of the rows' seeds; see `kernels/counter_rng.py`."""
    positions: NDArray[np.int64]
    """The absolute positions of the tokens to choose."""

    def again(self, rows: NDArray[np.int64], attempt: int) -> "SamplingRows":
        """The parameters of some rows, for the `attempt`-th choice that replaces another."""
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            again(self.streams[rows], attempt),
            self.positions[rows],
        )


def overwrites(device: torch.device) -> bool:
    """Whether `choose` may write into the logits that it gets. All implementations may, except the CPU's."""
    return device.type != "cpu" or optional("choose", device, torch.float32) is None
