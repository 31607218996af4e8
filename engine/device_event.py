"""Copies from the device to the host, and the events that say when they are done."""

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in host memory, complete once a `DeviceToHostEvent` made later is reached. On a CPU: the
    tensor."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class DeviceToHostEvent:
    """A point in the device's work: after all that was launched before this was made. On a CPU it is
    reached."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
            self._event.record()

    @property
    def reached(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]  # torch, too

    def wait(self) -> None:
        """Wait until the device reaches the event."""
        if self._event is not None:
            self._event.synchronize()
