"""What the host spends on a layer's launches, on a machine without a GPU: the driver does nothing.

    python -m personae.evals.bench.host_cost

The kernels of one layer of an 8B model are launched for a step with a prompt, with Triton's own code down to
the call of the driver. Kernels are compiled for sm_90. The products of the base are not in it: they are one
call of torch each, with any kernels. Prints microseconds a layer: as Triton launches, as
`kernels/triton/launch.py` does, and in a step whose graphs are cut at attention
(`engine/worker/prefill_graphs.py`), whose replays are not in it: they are one call of the driver each.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from personae.kernels.attention import AttentionBatch, AttentionShape
from personae.kernels.attention_backend import AttentionPlan
from personae.kernels.sgmv import RankTable, WeightPool, WorkList
from personae.kernels.triton import launch
from personae.kernels.triton.calls import TritonOperators
from personae.kernels.triton.sizes import Gpu

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 4096, 14336, 32, 8, 128, 32
QKV = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
GROUPS = {
    "qkv": (HIDDEN, QKV),
    "o": (HIDDEN, [HIDDEN]),
    "gate_up": (HIDDEN, [INNER] * 2),
    "down": (INNER, [HIDDEN]),
}
PAGES, PAGE, ADAPTERS, MOST_RANKS = 64, 16, 4, 64
DTYPE = torch.bfloat16


@contextmanager
def null_driver() -> Iterator[SimpleNamespace]:
    """Within the block Triton compiles for sm_90 and calls a driver that does nothing: its calls."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    utils = SimpleNamespace(
        launch=lambda *_: None,
        build_signature_metadata=lambda signature: bytes(len(signature)),
        load_binary=lambda *_: (0, 0, 32, 0, 1024),
        get_device_properties=lambda _device: {"max_shared_mem": 227 << 10},
    )
    active = SimpleNamespace(
        utils=utils,
        launcher_cls=nvidia.CudaLauncher,
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    before = driver._active, nvidia.PyKernelArg
    driver._active, nvidia.PyKernelArg = active, lambda nested_tuple, type: (nested_tuple, type)
    launch.forget()
    try:
        yield utils
    finally:
        driver._active, nvidia.PyKernelArg = before
        launch.forget()


def zeros(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """On the host, which nobody minds: nothing is computed."""
    return torch.zeros(shape, dtype=dtype)


def ints(*shape: int) -> Tensor:
    """As `zeros`."""
    return zeros(*shape, dtype=torch.int32)


@dataclass
class Group:
    """Modules that read the same x."""

    x: Tensor
    y: Tensor
    sizes: list[int]
    pools: tuple[WeightPool, ...]
    tables: tuple[RankTable, ...]

    @classmethod
    def of(cls, tokens: int, inputs: int, outputs: list[int]) -> "Group":
        """With room for some adapters."""
        pages = MOST_RANKS // 8
        return cls(
            zeros(tokens, inputs),
            zeros(tokens, sum(outputs)),
            outputs,
            tuple(WeightPool(zeros(MOST_RANKS, inputs), zeros(MOST_RANKS, out)) for out in outputs),
            tuple(RankTable(ints(ADAPTERS), ints(ADAPTERS, pages)) for _ in outputs),
        )


class Step:
    """The launches of a step's layers, but the base's products."""

    def __init__(self, tokens: int, *, adapters: bool) -> None:
        self.operators = TritonOperators(Gpu(132, hopper=True))
        self.x, self.residual = zeros(tokens, HIDDEN), zeros(tokens, HIDDEN)
        self.norm = zeros(HIDDEN, dtype=torch.float32)
        self.wide = zeros(tokens, 2 * INNER)
        self.positions, self.table = (
            zeros(tokens, dtype=torch.int64),
            zeros(128, DIM // 2, dtype=torch.float32),
        )
        self.keys, self.values = zeros(2, PAGES, KV_HEADS, PAGE, DIM)
        self.batch = AttentionBatch(ints(2), ints(1), ints(1, PAGES), self.positions, tokens, tokens)
        self.groups = {name: Group.of(tokens, *sizes) for name, sizes in GROUPS.items()} if adapters else {}
        self.qkv = zeros(tokens, sum(QKV))
        self.q = torch.split(self.qkv, QKV, 1)[0].view(tokens, HEADS, DIM)
        self.mixed = zeros(tokens, HEADS, DIM)
        self.begin()

    def begin(self) -> None:
        """What a step does once, for all layers."""
        self.work = WorkList(ints(ADAPTERS), ints(ADAPTERS), ints(ADAPTERS))
        shape = AttentionShape(HEADS, KV_HEADS, DIM, PAGE, DTYPE, DTYPE)
        self.attend: AttentionPlan = self.operators.paged_attention.plan(self.batch, shape)

    def layer(self) -> None:
        """One layer, kernel by kernel."""
        run = self.operators
        run.add_rms_norm(self.x, self.residual, self.norm, 1e-5)
        self.update("qkv")
        q, k, v = (part.view(len(self.x), -1, DIM) for part in torch.split(self.qkv, QKV, 1))
        run.rotary(q, k, self.positions, self.table, self.table)
        run.append_kv(k, v, self.keys, self.values, self.positions)
        self.attend(q, self.keys, self.values, DIM**-0.5, None)
        self.update("o")
        run.add_rms_norm(self.x, self.residual, self.norm, 1e-5)
        self.update("gate_up")
        run.silu_and_mul(self.wide)
        self.update("down")

    def cut(self) -> None:
        """One layer between two graphs: see `PrefillGraphs`. The copy of its result is of one row, as a
        processor's copies take longer than their launch."""
        rows = self.q[: len(self.x)]
        mixed = self.attend(rows, self.keys, self.values, DIM**-0.5, None)
        self.mixed[:1].copy_(mixed[:1])

    def update(self, group: str) -> None:
        """The adapters' part of one group."""
        if self.groups:
            own = self.groups[group]
            self.operators.sgmv(own.x, torch.split(own.y, own.sizes, 1), own.pools, own.tables, self.work)

    def run(self, layers: int = LAYERS) -> None:
        """One step."""
        self.begin()
        for _ in range(layers):
            self.layer()

    def run_cut(self) -> None:
        """One step whose graphs are cut at attention."""
        self.begin()
        for _ in range(LAYERS):
            self.cut()


def microseconds(run: Callable[[], None], rounds: int) -> float:
    """The least processor time of a layer over some steps."""
    best = float("inf")
    for _ in range(rounds):
        begun = time.process_time()
        run()
        best = min(best, (time.process_time() - begun) / LAYERS)
    return best * 1e6


class Never(dict[Any, Any]):
    """Bound launches that are never found."""

    def get(self, _key: Any, _default: Any = None) -> None:
        """None."""


def measure(tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds a layer, by what is in the step and how it is launched."""
    found: dict[str, dict[str, float]] = {}
    torch.set_num_threads(1)
    with null_driver():
        for what, adapters in {"base": False, "with adapters": True}.items():
            step = Step(tokens, adapters=adapters)
            bound, times = launch._bound, found.setdefault(what, {})
            step.run()
            for _ in range(3):  # in alternation: the machine is not quiet
                for how, known in {"Triton": Never(), "bound": bound}.items():
                    launch._bound = known
                    times[how] = min(times.get(how, float("inf")), microseconds(step.run, rounds))
                launch._bound = bound
                cut = microseconds(step.run_cut, rounds)
                times["cut at attention"] = min(times.get("cut at attention", float("inf")), cut)
    return found


def main(argv: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="personae.evals.bench.host_cost", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--tokens", type=int, default=512, help="of the step's prompt (%(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="steps to take the least of (%(default)s)")
    asked = parser.parse_args(argv)
    for what, times in measure(asked.tokens, asked.rounds).items():
        line = ", ".join(f"{how} {time:.1f}" for how, time in times.items())
        print(f"{what}: {line} us a layer")


if __name__ == "__main__":
    main(sys.argv[1:])
