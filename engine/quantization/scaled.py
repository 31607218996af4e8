"""What int8 and int4 share: a scale per output."""

from dataclasses import dataclass

from torch import Tensor

from personae.kernels.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True)
class ScaledWeight(QuantizedWeight):
    """scales: [outputs, 1] float32. A row's scale is finite if the row is."""

    scales: Tensor

    def finite(self) -> bool:
        """See `QuantizedWeight`."""
        return bool(self.scales.isfinite().all())
