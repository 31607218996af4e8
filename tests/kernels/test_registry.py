"""Which implementation of an operator is chosen."""

import os
import subprocess
import sys

import pytest
import torch
from patience import PATIENCE

from personae.errors import KernelError
from personae.kernels import reference, registry
from personae.kernels.attention_backend import ReferenceAttention, attention_backend
from personae.kernels.operators import rms_norm, silu_and_mul
from personae.kernels.registry import Implementation, override, parse_overrides, reference_only

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WIDE, HALF = torch.float32, torch.float16
OWN = {
    "fast": {
        "silu_and_mul": Implementation(
            lambda x: torch.full((len(x), x.shape[1] // 2), 7.0), frozenset({HALF})
        ),
        "rms_norm": Implementation(lambda x, weight, eps: x, capability=(9, 0)),
    },
    "plain": {
        "silu_and_mul": Implementation(lambda x: torch.full((len(x), x.shape[1] // 2), 3.0)),
        "rms_norm": Implementation(lambda x, weight, eps: -x, capability=(8, 0)),
    },
}


@pytest.fixture(autouse=True)
def _backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two backends for either device; the better one takes less."""
    monkeypatch.setattr(registry, "operators", lambda backend: OWN[backend])
    monkeypatch.setattr(registry, "BACKENDS", {"cpu": ("fast", "plain"), "cuda": ("fast", "plain")})


def test_the_first_backend_that_takes_the_dtype_is_chosen() -> None:
    assert silu_and_mul.on(CPU, HALF) is OWN["fast"]["silu_and_mul"].run
    assert silu_and_mul.on(CPU, WIDE) is OWN["plain"]["silu_and_mul"].run
    assert silu_and_mul.on(torch.device("meta"), WIDE) is reference.silu_and_mul


@pytest.mark.parametrize(
    ("found", "chosen"), [((9, 0), "fast"), ((8, 9), "plain"), ((7, 5), None)], ids=["9.0", "8.9", "7.5"]
)
def test_the_first_backend_that_the_gpu_is_new_enough_for_is_chosen(
    found: tuple[int, int], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: found)
    expected = OWN[chosen]["rms_norm"].run if chosen else reference.rms_norm
    assert rms_norm.on(CUDA, HALF) is expected


def test_an_operator_that_no_backend_has_is_the_reference() -> None:
    assert isinstance(attention_backend(CPU, WIDE), ReferenceAttention)
    assert registry.optional("fuse", CPU, WIDE) is None


def test_a_call_without_a_choice_goes_by_its_first_tensor() -> None:
    assert silu_and_mul(torch.ones(2, 6)).tolist() == [[3.0] * 3] * 2
    assert silu_and_mul(torch.ones(2, 6, dtype=HALF)).tolist() == [[7.0] * 3] * 2


def test_what_is_chosen_stays_when_an_override_ends() -> None:
    before = silu_and_mul.on(CPU, HALF)
    with reference_only():
        within = silu_and_mul.on(CPU, HALF)
    assert within is reference.silu_and_mul
    assert silu_and_mul.on(CPU, HALF) is before is OWN["fast"]["silu_and_mul"].run


def test_an_override_is_of_one_operator_and_names_its_backend() -> None:
    with override(silu_and_mul="plain"):
        assert silu_and_mul.on(CPU, HALF) is OWN["plain"]["silu_and_mul"].run
        with override(silu_and_mul="reference"):
            assert silu_and_mul.on(CPU, HALF) is reference.silu_and_mul


def test_an_override_that_cannot_run_is_refused_with_what_can(monkeypatch: pytest.MonkeyPatch) -> None:
    with override(silu_and_mul="fast"), pytest.raises(KernelError) as refused:
        silu_and_mul.on(CPU, WIDE)
    assert "'fast' cannot run on cpu in torch.float32" in refused.value.message
    assert "fast does not take torch.float32; plain fits; reference fits" in refused.value.message
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    with (
        override(rms_norm="fast"),
        pytest.raises(KernelError, match=r"needs compute capability 9\.0, .* 8\.0"),
    ):
        rms_norm.on(CUDA, HALF)
    with override(paged_attention="fast"), pytest.raises(KernelError, match="fast has none on this machine"):
        attention_backend(CPU, WIDE)


@pytest.mark.parametrize(
    ("kernels", "attention", "expected"),
    [
        ("", "", {}),
        ("reference", "", {"*": "reference"}),
        ("sgmv=plain, rms_norm=reference", "", {"sgmv": "plain", "rms_norm": "reference"}),
        ("plain", "reference", {"*": "plain", "paged_attention": "reference"}),
    ],
)
def test_overrides_are_read_from_the_environment(
    kernels: str, attention: str, expected: dict[str, str]
) -> None:
    assert parse_overrides(kernels, attention) == expected


@pytest.mark.parametrize(
    ("kernels", "attention", "why"),
    [
        ("flash", "", "no kernel backend 'flash'"),
        ("", "flash", "'flash'"),
        ("gemm=plain", "", "operator 'gemm'"),
    ],
)
def test_unknown_names_in_the_environment_are_refused(kernels: str, attention: str, why: str) -> None:
    with pytest.raises(KernelError, match=why):
        parse_overrides(kernels, attention)


def test_the_environments_override_is_in_force_in_a_process() -> None:
    program = (
        "import torch; from personae.kernels import attention_backend, operators, reference;"
        "cpu, half = torch.device('cpu'), torch.bfloat16;"
        "print(operators.rms_norm.on(cpu, half) is reference.rms_norm,"
        " type(attention_backend.attention_backend(cpu, half)).__name__)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"PERSONAE_KERNELS": "rms_norm=reference", "PERSONAE_ATTENTION_BACKEND": "reference"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, timeout=PATIENCE
    )
    assert run.stdout.split() == [b"True", b"ReferenceAttention"]
