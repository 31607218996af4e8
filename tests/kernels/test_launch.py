"""Launches past Triton: what reaches the driver is what Triton would have given it."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(),
    reason="needs Triton's compiler, and no GPU",
)
from torch import Tensor  # noqa: E402  # below the mark, which says what they need
from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from personae.evals.bench.host_cost import Step, null_driver  # noqa: E402
from personae.kernels.triton import launch  # noqa: E402
from personae.kernels.triton.device.pointwise import act_and_mul_kernel, rms_norm_kernel  # noqa: E402

if not hasattr(nvidia, "PyKernelArg"):
    pytest.skip("Triton 3.6 builds its launcher against a driver's library", allow_module_level=True)
Given = list[tuple[Any, ...]]


@pytest.fixture
def given() -> Iterator[Given]:
    """What the driver was given, by launch: grid, stream, function and the kernel's arguments."""
    found: Given = []
    with null_driver() as utils:

        def record(*args: Any) -> None:
            *head, _annotations, _signature, rest = args
            found.append((*head[:8], *(a.data_ptr() if isinstance(a, Tensor) else a for a in rest)))

        functions = iter(range(1, 1000))
        utils.launch = record
        utils.load_binary = lambda *_: (0, next(functions), 32, 0, 1024)
        yield found


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of launches that Triton was asked for."""
    names: list[str] = []
    run = JITFunction.run

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(kernel.__name__)
        return run(kernel, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", counted)
    return names


def test_a_launch_past_triton_has_the_kernel_and_the_arguments_that_triton_would_choose(
    given: Given, through_triton: list[str]
) -> None:
    memory = torch.zeros(1 << 12)
    own = launch.Launch(act_and_mul_kernel, GELU=False, BLOCK=64)
    past = 0
    for dtype, begin, stride, size in product(
        (torch.float32, torch.bfloat16), (0, 1), (1, 16, 48, 100), (1, 7, 32)
    ):
        x, y = memory.view(dtype)[begin:], memory.view(dtype)[begin + 1024 :]
        act_and_mul_kernel[(2, 3, 1)](x, y, stride, size, GELU=False, BLOCK=64)
        for _ in range(2):
            through_triton.clear()
            own((2, 3, 1), (x, y), (stride, size))
            assert given[-1] == given[-2]
        past += not through_triton
        assert bool(through_triton) == bool(begin), "what is not aligned is Triton's to look at"
    assert past == 2 * 4 * 3
    assert len({launched[4] for launched in given}) > 8, "they were all one kernel"


def test_a_second_step_of_the_same_sizes_asks_triton_for_nothing(
    given: Given, through_triton: list[str]
) -> None:
    step = Step(24, adapters=True)
    step.run(1)
    first = [launched[:8] for launched in given]
    assert len(given) > len(through_triton) > 15
    through_triton.clear()
    given.clear()
    step.run(1)
    assert [launched[:8] for launched in given] == first
    assert through_triton == []


def test_another_number_another_constant_or_another_driver_is_another_launch(
    given: Given, through_triton: list[str]
) -> None:
    x = torch.zeros(4, 64)

    def norm(eps: float, stride: int, add: bool) -> int:
        through_triton.clear()
        own = launch.launch(rms_norm_kernel, SIZE=64, WIDE=64, ADD=add, num_warps=1)
        own((4, 1, 1), (x,) * 5, (stride, 0, 0, 1, eps))
        return len(through_triton)

    assert norm(1e-5, 64, False) == 1
    assert norm(1e-5, 64, False) == 0
    assert [norm(1e-6, 64, False), norm(1e-5, 1, False), norm(1e-5, 64, True)] == [1, 1, 1]
    launch.forget()
    assert norm(1e-5, 64, False) == 1


def test_what_is_remembered_of_launches_is_bounded(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_BOUND", 8)
    x = torch.zeros(2, 64)
    own = launch.Launch(act_and_mul_kernel, GELU=False, BLOCK=64)
    for stride in range(16, 16 * 40, 16):
        own((1, 1, 1), (x, x), (stride, 32))
        assert len(launch._bound) <= 8
