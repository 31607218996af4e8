"""A `Capture` for machines without a GPU. It records a pass operator by operator, and repeats the operators
on the same tensors, as a CUDA graph does, without running the Python code that called them.

Inside a capture it refuses what a CUDA graph cannot hold: reading a value from the device, sizes that depend
on data, tensors made from Python values. Before each repetition it poisons all memory that the pass
allocated, so nothing can be left over from the capture or the step before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from personae.kernels import reference
from personae.kernels.attention import AttentionBatch, AttentionShape
from personae.kernels.attention_backend import AttentionBackend, AttentionPlan
from personae.kernels.registry import OPERATORS, Implementation

REFUSED = {"aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh", "aten::masked_select"}
ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
IN_GRAPHS = [name for name in OPERATORS if name != "choose"]  # that is after a graph


def storage(tensor: Tensor) -> int:
    """The address where a tensor's memory begins, whatever part of it the tensor is."""
    return tensor.untyped_storage().data_ptr()


@dataclass
class Call:
    """A call of an operator, with its arguments and results."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]

    def again(self) -> None:
        if self.name in ALLOCATIONS:
            return
        found = tensors(self.run(*self.args, **self.kwargs))
        for old, new in zip(self.results, found, strict=True):
            if storage(old) != storage(new):
                old.copy_(new)


def tensors(values: Any) -> list[Tensor]:
    """All tensors in arguments or results, including those of work lists and batches."""
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
        self.within = False  # one of our operators: on a GPU its kernels read the device, not the host
        self.made: dict[int, Tensor] = {}  # by storage, what the pass allocated

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not self.within:
            self.add(func.name().split(".")[0], func, args, kwargs or {}, result)
        return result

    def add(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        assert name not in REFUSED, f"{name} has no place in a captured graph"
        call = Call(name, run, args, kwargs, tensors(result))
        given = {storage(tensor) for tensor in tensors((args, kwargs))}
        self.calls.append(call)
        self.made |= {storage(t): t for t in call.results if storage(t) not in given}

    def inputs(self) -> list[tuple[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]]:
        """For each operator, its inputs that existed before: addresses, shapes and strides."""
        return [
            (
                call.name,
                [
                    (t.data_ptr(), tuple(t.shape), t.stride())
                    for t in tensors((call.args, call.kwargs))
                    if storage(t) not in self.made
                ],
            )
            for call in self.calls
        ]

    def outside(self) -> set[int]:
        """The storages that existed before, of all inputs of any operator."""
        given = {storage(t) for call in self.calls for t in tensors((call.args, call.kwargs)) if t.numel()}
        return given - self.made.keys()

    def replay(self) -> None:
        for tensor in self.made.values():
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            memory.fill_(0xFF)  # NaN, or -1
        for call in self.calls:
            call.again()


class Unplanned(AttentionBackend):
    """An attention operator without a plan."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self._run = run

    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> AttentionPlan:
        return lambda q, k, v, scale, window: self._run(q, k, v, batch, scale, window)


class RecordedGraphs:
    """The capture. `recordings` has one recording per capture, `replays` counts repetitions, `cuts` what was
    cut out of the recordings."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.replays = self.cuts = 0
        self._recording: Recording | None = None

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        return self.pieces(lambda _cut: work())

    def pieces(self, work: Callable[[Any], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What is cut out runs with the Python around it, each time."""
        recording = self._recording = Recording()

        def cut(run: Callable[[], None]) -> None:
            self._recording = None
            with self._inside(recording):
                run()
            self._recording = recording
            recording.calls.append(Call("cut", run, (), {}, []))
            self.cuts += 1

        try:
            with recording:
                result = work(cut)
        finally:
            self._recording = None
        self.recordings.append(recording)

        def replay() -> None:
            self.replays += 1
            recording.replay()

        return replay, result

    def operators(self, _backend: str) -> dict[str, Implementation]:
        """Replaces `registry.operators`: the references, each recorded as one call."""
        found = {name: self._whole(getattr(reference, name)) for name in IN_GRAPHS}
        found["paged_attention"] = Unplanned(found["paged_attention"])
        return {name: Implementation(run) for name, run in found.items()}

    def _whole(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def operator(*args: Any, **kwargs: Any) -> Any:
            if self._recording is None:
                return run(*args, **kwargs)
            with self._inside(self._recording):
                result = run(*args, **kwargs)
            self._recording.add(run.__name__, run, args, kwargs, result)
            return result

        return operator

    @contextmanager
    def _inside(self, recording: Recording) -> Iterator[None]:
        recording.within = True
        try:
            yield
        finally:
            recording.within = False
