import os
import subprocess
import sys

import pytest
import torch
from patience import PATIENCE

from personae.kernels import reference, registry
from personae.kernels.activation import silu_and_mul

CPU = torch.device("cpu")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend for the CPU that has one operator, and it is recognisably not the reference."""
    own = {"silu_and_mul": lambda x: torch.full((len(x), x.shape[1] // 2), 7.0)}
    monkeypatch.setattr(registry, "operators", lambda device_type: own if device_type == "cpu" else {})


@pytest.mark.usefixtures("backend")
def test_a_backends_operator_is_used_on_its_device() -> None:
    assert silu_and_mul(torch.ones(2, 6)).tolist() == [[7.0] * 3] * 2
    assert registry.select(reference.silu_and_mul, torch.device("meta")) is reference.silu_and_mul


@pytest.mark.usefixtures("backend")
def test_an_operator_that_the_backend_lacks_is_the_reference() -> None:
    assert registry.select(reference.rms_norm, CPU) is reference.rms_norm


@pytest.mark.usefixtures("backend")
def test_the_reference_can_be_forced_for_a_block() -> None:
    with registry.reference_only():
        assert registry.select(reference.silu_and_mul, CPU) is reference.silu_and_mul
    assert registry.select(reference.silu_and_mul, CPU) is not reference.silu_and_mul


def test_the_reference_can_be_forced_by_the_environment() -> None:
    program = (
        "import torch; from personae.kernels import reference, registry;"
        "registry.operators = lambda _: {'rms_norm': None};"
        "print(registry.select(reference.rms_norm, torch.device('cpu')) is reference.rms_norm)"
    )
    environment = {**os.environ, "PERSONAE_KERNELS": "reference", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, timeout=PATIENCE
    )
    assert run.stdout.split() == [b"True"]


def test_the_operators_of_the_cpu_stay_callable_once_they_are_loaded() -> None:
    first = registry.operators("cpu")
    registry.operators.cache_clear()
    assert registry.operators("cpu").keys() == first.keys()


def test_a_device_without_a_backend_has_no_operators_of_its_own() -> None:
    assert registry.operators("meta") == {}
