"""Which implementation of an operator runs: its device's backend where there is one, else the reference.

A backend is a package with a function `operators() -> dict[str, Callable]`: the operators that it has on this
machine, by name, with the reference's signature. It is imported when its device first asks. A backend that
cannot work here (no compiler, no device) returns an empty dict. `PERSONAE_KERNELS=reference` turns all
backends off, and so does `reference_only()` for a block of code.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch

BACKENDS = {"cpu": "personae.kernels.cpu", "cuda": "personae.kernels.triton"}

Operator = TypeVar("Operator", bound=Callable[..., Any])

_reference_only = os.environ.get("PERSONAE_KERNELS") == "reference"


@cache
def operators(device_type: str) -> dict[str, Callable[..., Any]]:
    """The operators of the device's backend, by name; empty where it has none."""
    name = BACKENDS.get(device_type)
    if name is None or find_spec(name) is None:
        return {}
    found: dict[str, Callable[..., Any]] = import_module(name).operators()
    return found


def select(reference: Operator, device: torch.device) -> Operator:
    """The implementation to call in place of `reference` for tensors on `device`."""
    if _reference_only:
        return reference
    return cast(Operator, operators(device.type).get(reference.__name__, reference))


def optional(name: str, device: torch.device) -> Callable[..., Any] | None:
    """What only a backend can have and the reference does without; None where this one has it not."""
    return None if _reference_only else operators(device.type).get(name)


def references_only() -> bool:
    """Whether backends are turned off at the moment."""
    return _reference_only


@contextmanager
def reference_only() -> Iterator[None]:
    """Within the block every operator is the reference, on every device and thread (for tests)."""
    global _reference_only
    before, _reference_only = _reference_only, True
    try:
        yield
    finally:
        _reference_only = before
