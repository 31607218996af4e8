"""What a step brings, on its way from the device to the host."""

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> Tensor:
    """Memory of the host with the tensor's values, once an `DeviceToHostEvent` made later is there; on a
    CPU the tensor."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class DeviceToHostEvent:
    """The place behind all that a device was told so far. On a CPU that is done."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
            self._event.record()

    @property
    def reached(self) -> bool:
        """Whether `wait` would not."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]  # torch, too

    def wait(self) -> None:
        """Wait for the device to get there."""
        if self._event is not None:
            self._event.synchronize()
