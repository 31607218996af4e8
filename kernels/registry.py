"""Chooses an operator's implementation by operator, device, dtype and compute capability, best first.

A backend is a package `personae.kernels.NAME` with a function `operators() -> dict[str, Implementation]`. It
returns the operators that the backend has on this machine, by name, with the reference's signature. The
package is imported when its device is first used. A backend that cannot work here (no compiler, no device)
returns an empty dict. After all backends comes the reference, which takes every device and dtype.

The caller chooses an implementation once: layers when they are built, adapters and sampling when the engine
is. An override applies to what is chosen while it is in force:

    PERSONAE_KERNELS=reference                     all operators
    PERSONAE_KERNELS=rms_norm=reference,sgmv=cpu   some
    PERSONAE_KERNELS=choose=flashinfer             sampling
    PERSONAE_KERNELS=pack_linear=triton            weights in few bits
    PERSONAE_ATTENTION_BACKEND=reference           attention
    PERSONAE_ATTENTION_BACKEND=flash               attention of steps with prompts
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from personae.errors import KernelError

OPERATORS = (
    "append_kv",
    "paged_attention",
    "sgmv",
    "rms_norm",
    "add_rms_norm",
    "rotary",
    "silu_and_mul",
    "gelu_and_mul",
    "choose",
)
"""The operators that backends implement, with these names and signatures."""
BACKENDS = {"cpu": ("cpu",), "cuda": ("tinygemm", "triton", "flash", "flashinfer")}
"""By type of device, best first."""
REFERENCE = "reference"
ALL = "*"  # in overrides: every operator without its own override
NAMES = frozenset(
    {
        *OPERATORS,
        "begin_sgmv",
        "fuse",
        "packed_layout",
        "pack_linear",
        "grouped_linear",
        "lookup",
        "route",
        "expert_linear",
        "latent_attention",
        "combine",
        ALL,
    }
)

P = ParamSpec("P")
R = TypeVar("R")
Run = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an operator.

    dtypes: of the activations, None for all. capability: the lowest compute capability of a CUDA device.
    on_request: it is chosen only where an override names its backend.
    """

    run: Run
    dtypes: frozenset[torch.dtype] | None = None
    capability: tuple[int, int] = (0, 0)
    on_request: bool = False

    def unfit(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot be used there; None if it can."""
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"does not take {dtype}"
        if self.capability > (0, 0) and (found := torch.cuda.get_device_capability(device)) < self.capability:
            return f"needs compute capability {_version(self.capability)}, the GPU has {_version(found)}"
        return None


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@cache
def operators(backend: str) -> dict[str, Implementation]:
    """The operators of a backend, by name; empty if it cannot work here."""
    name = f"personae.kernels.{backend}"
    if find_spec(name) is None:
        return {}
    found: dict[str, Implementation] = import_module(name).operators()
    return found


def _missing(backend: str) -> str:
    """Why a backend does not have an operator: what its function `unavailable` says, if it has one."""
    name = f"personae.kernels.{backend}"
    say = getattr(import_module(name), "unavailable", None) if find_spec(name) else None
    return (say and say()) or "has none on this machine"


def choose(operator: str, device: torch.device, dtype: torch.dtype, reference: Run | None) -> Run | None:
    """The implementation for tensors of that device and dtype; `reference` if no backend has one that fits.

    Raises KernelError if an override names one that does not exist or does not fit.
    """
    asked = _overrides()
    wanted = asked.get(operator)
    preferred = wanted or asked.get(ALL)
    found: list[str] = []
    for backend in BACKENDS.get(device.type, ()):
        own = operators(backend).get(operator)
        why = _missing(backend) if own is None else own.unfit(device, dtype)
        asked_for = preferred == backend or (preferred is None and own is not None and not own.on_request)
        if own is not None and why is None and asked_for:
            return own.run
        found.append(f"{backend} {why or 'fits'}")
    if wanted in (None, REFERENCE):
        return reference
    known = "; ".join((*found, f"{REFERENCE} fits"))
    raise KernelError(f"{operator}: {wanted!r} cannot run on {device.type} in {dtype} ({known}).")


def optional(operator: str, device: torch.device, dtype: torch.dtype) -> Run | None:
    """An operator that only backends have and the reference does without; None if no backend has one that
    fits."""
    return choose(operator, device, dtype, None)


class Operator(Generic[P, R]):
    """An operator, made from its reference: a function whose first argument is the activations."""

    def __init__(self, reference: Callable[P, R]) -> None:
        self.name, self.reference = reference.__name__, reference

    def on(self, device: torch.device, dtype: torch.dtype) -> Callable[P, R]:
        """The implementation for activations of that device and dtype. Raises KernelError."""
        return cast(Callable[P, R], choose(self.name, device, dtype, self.reference))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Chooses and calls the implementation at once: for tests and benchmarks."""
        x = cast(Tensor, args[0])
        return self.on(x.device, x.dtype)(*args, **kwargs)


def parse_overrides(kernels: str, attention: str) -> dict[str, str]:
    """Parses PERSONAE_KERNELS and PERSONAE_ATTENTION_BACKEND to backends by operator. Raises KernelError."""
    parts = [part.strip().rpartition("=") for part in kernels.split(",") if part.strip()]
    found = {operator.strip() or ALL: backend.strip() for operator, _, backend in parts}
    if attention:
        found["paged_attention"] = attention
    known = {REFERENCE, *(name for names in BACKENDS.values() for name in names)}
    for operator, backend in found.items():
        if operator not in NAMES:
            raise KernelError(f"PERSONAE_KERNELS: there is no operator {operator!r}.")
        if backend not in known:
            raise KernelError(
                f"There is no kernel backend {backend!r}; choose one of {', '.join(sorted(known))}."
            )
    return found


@cache
def _of_environment() -> dict[str, str]:
    environment = os.environ
    return parse_overrides(
        environment.get("PERSONAE_KERNELS", ""), environment.get("PERSONAE_ATTENTION_BACKEND", "")
    )


def _overrides() -> dict[str, str]:
    return _of_environment() if _in_force is None else _in_force


_in_force: dict[str, str] | None = None  # by `override`


@contextmanager
def override(**backends: str) -> Iterator[None]:
    """Within the block, on any thread, these backends are chosen, by operator."""
    global _in_force
    before, _in_force = _in_force, {**_overrides(), **backends}
    try:
        yield
    finally:
        _in_force = before


def reference_only() -> AbstractContextManager[None]:
    """Within the block, on any thread, the reference is chosen."""
    return override(**dict.fromkeys(NAMES - {ALL}, REFERENCE))
