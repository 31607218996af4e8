"""Launches of Triton's kernels: checked as the real launcher would, and computed by the references.

Triton's own binder determines what would be compiled (types of pointers, alignment, constants, options) and
refuses what it does not know. The rest is checked here: that pointers are on the device, that none is beyond
its block, that CUDA accepts the grid, that a kernel with an early start directly follows one that allows it,
that a launch past Triton (`kernels/triton/launch.py`) has the kernel that Triton would have found.
The numbers are the references', as a job of the operator; for SGMV, whose kernels may be on two streams, and
for weights in few bits, each kernel's own (`lowrank.py`, `quantized.py`).
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paper_gpu import lowrank, quantized
from paper_gpu.driver import Mapped
from paper_gpu.machine import Machine, Mistake
from paper_gpu.tensors import Address, PaperTensor, leaves, mapped
from personae.kernels import reference, reference_latent, registry
from personae.kernels.attention import AttentionBatch, AttentionShape
from personae.kernels.attention_backend import AttentionBackend, AttentionPlan
from personae.kernels.latent_attention import LatentPlan
from personae.kernels.masks import Scratch
from personae.kernels.sampling import SamplingRows
from personae.kernels.triton import launch

NUMBERS = {**lowrank.KERNELS, **quantized.KERNELS}
"""Kernels whose numbers are computed from their launch's arguments."""
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
POINTERS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    reference.FP8,
)


def install(machine: Machine, capability: tuple[int, int], patch: pytest.MonkeyPatch) -> None:
    """Simulate launches, and make the registry return the Triton operators for `cuda`."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    device = {"get_current_device": lambda: 0, "get_current_stream": lambda _device: 0}
    patch.setattr(driver, "_active", SimpleNamespace(utils=None, **device))
    patch.setattr(launch, "_bound", {})
    target = capability[0] * 10 + capability[1]

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> PaperKernel:
        options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
        key = launched(machine, target, kernel, args, grid, kwargs)
        return PaperKernel(machine, target, kernel, options, key)

    patch.setattr(JITFunction, "run", run)
    plain, found = registry.operators, None

    def operators(backend: str) -> dict[str, registry.Implementation]:
        nonlocal found
        if backend == "tinygemm":  # torch's own kernel
            return {}
        if backend != "triton":
            return plain(backend)
        if found is None:
            from personae.kernels import triton

            found = {
                name: replace(own, run=_own(machine, name, own.run))
                for name, own in triton.operators().items()
            }
        return found

    patch.setattr(registry, "operators", operators)


@dataclass(frozen=True)
class PaperKernel:
    """What Triton returns of a launch: a kernel that was compiled under `key`."""

    machine: Machine
    target: int
    kernel: Any
    options: dict[str, Any]
    key: str
    function = packed_metadata = None

    def run(self, x: int, y: int, z: int, _stream: int, _f: Any, _m: Any, *rest: Any) -> None:
        """Launch it, without asking Triton."""
        args = [value.tensor if isinstance(value, Address) else value for value in rest[3:]]
        if launched(self.machine, self.target, self.kernel, args, (x, y, z), dict(self.options)) != self.key:
            raise Mistake(f"{self.kernel.__name__} was compiled for other arguments")
        self.machine.bound[self.kernel.__name__] += 1


@cache
def _binder(kernel: Any, target: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", target, 32))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def launched(machine: Machine, target: int, kernel: Any, args: Any, grid: Any, kwargs: dict[str, Any]) -> str:
    """One launch; returns Triton's key of its kernel. Raises Mistake for what the launcher or CUDA would
    refuse or misread."""
    name = kernel.__name__
    backend, bind = _binder(kernel, target)
    named = {**kwargs, "debug": False, "instrumentation_mode": ""}
    bound, specialization, options = bind(*args, **named)
    key = _key(kernel, backend, named, bound, specialization, options)
    for parameter, value in bound.items():
        if isinstance(value, PaperTensor):
            _check_pointer(f"{name}: {parameter}", value)
        elif isinstance(value, Tensor):
            raise Mistake(f"{name}: {parameter} is a tensor of {value.device}")
        elif not isinstance(value, int | float | bool):
            raise Mistake(f"{name}: {parameter} is {value!r}")
        elif isinstance(value, int) and not -(2**31) <= value < 2**31:
            raise Mistake(
                f"{name}: {parameter} = {value} does not fit the 32 bits that its kernel was tested with"
            )
    blocks = (*grid, 1, 1)[:3]
    if not all(isinstance(n, int) and 1 <= n <= most for n, most in zip(blocks, MOST_BLOCKS, strict=True)):
        raise Mistake(f"{name}: a grid of {blocks}")
    stream = machine.current
    if kwargs.get("launch_pdl") and stream.kernel != "shrink_kernel":
        raise Mistake(f"{name} begins early behind {stream.kernel or 'what is no kernel'}")
    if name in NUMBERS:
        given = {
            key: value.sheet if isinstance(value, PaperTensor) else value for key, value in bound.items()
        }
        machine.push(partial(NUMBERS[name], SimpleNamespace(**given)))
    stream.kernel = name
    machine.launches[name] += 1
    if name == "greatest_kernel":
        machine.greatest = bound
    machine.compiled.add((name, key))
    return key


def _key(
    kernel: Any, backend: Any, named: dict[str, Any], bound: Any, specialization: Any, options: Any
) -> str:
    """Triton's key of a kernel, made once for launches that differ in nothing that Triton looks at. Raises
    KeyError for an option that it does not know."""
    from triton.runtime.jit import compute_cache_key

    launch = kernel, tuple(specialization), str(options), tuple(named)
    if launch not in _KEYS:
        kernel._pack_args(backend, named, bound, specialization, options)
        _KEYS[launch] = compute_cache_key({}, specialization, options)
    return _KEYS[launch]


_KEYS: dict[Any, str] = {}


def _check_pointer(what: str, tensor: PaperTensor) -> None:
    if tensor.dtype not in POINTERS:
        raise Mistake(f"{what} points to {tensor.dtype}")
    if tensor.numel() and tensor.dim() and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise Mistake(f"{what} has strides {tensor.stride()}: kernels take the last dimension as contiguous")
    if isinstance(tensor.memory, Mapped) and not tensor.memory.accessible(tensor.data_ptr()):
        raise Mistake(f"{what} begins where nothing is mapped, which Triton's launcher refuses")
    if tensor.data_ptr() % 16:
        raise Mistake(f"{what} is not on a multiple of 16 bytes: another kernel would be compiled for it")


def _own(machine: Machine, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    if name == "paged_attention":
        return _Attention(machine, run)
    return run if name in ("sgmv", "begin_sgmv", "pack_linear") else _whole(machine, name, run)


class _Attention(AttentionBackend):
    """The plan is the real one; each layer's numbers are the reference's."""

    def __init__(self, machine: Machine, own: AttentionBackend) -> None:
        self._machine, self._own = machine, own

    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> AttentionPlan:
        planned = self._own.plan(batch, shape)

        def run(q: Any, k: Any, v: Any, _batch: AttentionBatch, scale: float, window: int | None) -> Any:
            return planned(q, k, v, scale, window)

        whole = _whole(self._machine, "paged_attention", run)
        return lambda q, k, v, scale, window: whole(q, k, v, batch, scale, window)


def _whole(machine: Machine, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """An operator with simulated kernels: its host code is real, its numbers are the reference's."""

    def operator(*args: Any) -> Any:
        before = machine.launches.total()
        result = run(*args)
        if machine.launches.total() == before:  # nothing to do, or left to the reference
            return result
        given = [_given(value) for value in args]
        sampling = machine.greatest if name == "choose" else None
        targets = [value.sheet for value in leaves(result) if isinstance(value, PaperTensor)]
        truth = getattr(reference_latent if name == "latent_attention" else reference, name)

        def job() -> None:
            if sampling is not None:
                given[1:3] = _asked(
                    sampling["rows_ptr"].sheet, sampling["masks_ptr"].sheet, given[0].shape[1]
                )
            found = leaves(truth(*given))
            for target, value in zip(targets, found if targets else [], strict=False):
                target.copy_(value)

        machine.push(job)
        return result

    return operator


def _asked(table: Tensor, masks: Tensor, width: int) -> tuple[SamplingRows, Tensor]:
    """The sampling parameters as the kernels read them, from the device's copy; see `device/sampling.py`."""
    columns = [column.numpy() for column in table]
    streams, positions, top_k, top_p, temperature, min_p, mask = columns
    allowed = np.full((len(mask), -(-width // 32)), -1, np.int32)
    allowed[mask >= 0] = masks.numpy()[mask[mask >= 0]]
    rows = SamplingRows(
        temperature.view(np.float64).astype(np.float32),
        top_k,
        top_p.view(np.float64),
        min_p.view(np.float64).astype(np.float32),
        streams.view(np.uint64),
        positions,
    )
    return rows, torch.from_numpy(allowed)


def _given(value: Any) -> Any:
    """An argument as the kernel will find it: device memory at that time, host memory as it is now."""
    if isinstance(value, Scratch):
        return Scratch(torch.device("cpu"))
    if isinstance(value, LatentPlan):
        given = copy(value)
        for later in ("numbers", "by_token"):  # made from the batch again
            vars(given).pop(later, None)
        given.batch = _given(value.batch)
        return given
    if hasattr(value, "plans"):
        value = replace(value, plans={})

    def change(leaf: Any) -> Any:
        if isinstance(leaf, PaperTensor):
            return leaf.sheet
        return leaf.clone() if isinstance(leaf, Tensor) else getattr(leaf, "copy", lambda: leaf)()

    return mapped(value, change)
