"""A `Capture` for machines without a GPU: it records a pass operator by operator, and repeats the operators
on the very tensors that they had, as a CUDA graph does, without running the Python that called them.

Inside a capture it refuses what a CUDA graph cannot hold: reading a value from the device, sizes that depend
on data, tensors made from Python values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from personae.engine.graphs import Outputs
from personae.kernels import reference

REFUSED = {"aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh", "aten::masked_select"}
OPERATORS = (
    "append_kv",
    "paged_attention",
    "sgmv",
    "rms_norm",
    "add_rms_norm",
    "rotary",
    "silu_and_mul",
)


@dataclass
class Call:
    """An operator with the arguments and results that it had."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]

    def again(self) -> None:
        found = tensors(self.run(*self.args, **self.kwargs))
        for old, new in zip(self.results, found, strict=True):
            if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                old.copy_(new)


def tensors(values: Any) -> list[Tensor]:
    """All tensors in arguments or results, those of work lists and batches included."""
    found = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dataclass_fields__"):
            found += tensors([getattr(leaf, name) for name in leaf.__dataclass_fields__])
    return found


class Recording(TorchDispatchMode):
    """One capture."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.within = False  # of an operator of ours: on a GPU its kernels read the device, not the host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not self.within:
            name = func.name().split(".")[0]
            assert name not in REFUSED, f"{name} has no place in a captured graph"
            self.calls.append(Call(name, func, args, kwargs or {}, tensors(result)))
        return result

    def inputs(self) -> list[tuple[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]]:
        """What each operator was given that was there before: addresses, shapes and strides."""
        made: set[int] = set()
        found = []
        for call in self.calls:
            given = [
                (t.data_ptr(), tuple(t.shape), t.stride())
                for t in tensors((call.args, call.kwargs))
                if t.untyped_storage().data_ptr() not in made
            ]
            taken = {t.untyped_storage().data_ptr() for t in tensors((call.args, call.kwargs))}
            made |= {t.untyped_storage().data_ptr() for t in call.results} - taken
            found.append((call.name, given))
        return found


class RecordedGraphs:
    """The capture; `recordings` has one for each time that it was called, `replays` counts repetitions."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.replays = 0
        self._recording: Recording | None = None

    def __call__(self, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        recording = self._recording = Recording()
        with recording:
            outputs = work()
        self._recording = None
        self.recordings.append(recording)
        for result in outputs:  # only a repetition may write them
            result.fill_(torch.nan)

        def replay() -> None:
            self.replays += 1
            for call in recording.calls:
                call.again()

        return replay, outputs

    def operators(self, _device: str) -> dict[str, Callable[..., Any]]:
        """What stands in for `registry.operators`: the references, each one thing to the recorder."""
        return {name: self._whole(getattr(reference, name)) for name in OPERATORS}

    def _whole(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def operator(*args: Any, **kwargs: Any) -> Any:
            if self._recording is None:
                return run(*args, **kwargs)
            with self._inside(self._recording):
                result = run(*args, **kwargs)
            self._recording.calls.append(Call(run.__name__, run, args, kwargs, tensors(result)))
            return result

        return operator

    @contextmanager
    def _inside(self, recording: Recording) -> Iterator[None]:
        recording.within = True
        try:
            yield
        finally:
            recording.within = False
