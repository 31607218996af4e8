"""Adapters that arrive during steps: does a step that needs one wait for it, and how much do other steps
lose?"""

import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.cuda import Event

from personae.evals.bench.gpu.checks import Check
from personae.evals.bench.gpu.engine import LIMIT, Rig, RigStep
from personae.lora.adapter import Adapter
from personae.lora.copies import StreamCopies
from personae.lora.segments import lora_batch
from personae.lora.writing import Host, made_ready

ROWS = 16
STEPS = 300
SHARE = 0.2  # the share of a step for placing, as in the executor
CYCLES = 10**9  # about half a second: longer than the host takes to load an adapter of rank 64


class DelayedStream(StreamCopies):
    """Copies arrive long after the step that needs them was launched."""

    def begin(self) -> None:
        """See Copies."""
        super().begin()
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]  # torch has no types here


def arriving_checks(rig: Rig, host: Host) -> Iterator[Check]:
    """A step launched right after its adapters' copies, compared with the same step with adapters that were
    already there. Memory that has not arrived is NaN.

    rig: with late copies. host: memory for adapters in the device's form.
    """
    mixes: dict[str, list[int | None]] = {
        "one adapter": [2] * ROWS,
        "among others": [0, 0, 2, 2, 2, 5, *[None] * 10],
    }
    for name, mix in mixes.items():
        step = rig.step(mix, [rig.config.max_position // 2] * ROWS)
        truth = _run(rig, step, mix).double()
        for form in ("as read", "made ready"):
            adapter = rig.adapters[2]
            _spoil(rig, adapter)
            if form == "made ready":
                adapter = made_ready(adapter, rig.pool.dtype, host)
            assert rig.pool.load(adapter) == 2
            late = len(rig.pool.arriving({2}))
            found = _run(rig, step, mix).double()
            error = float(((found - truth).norm(dim=1) / truth.norm(dim=1)).max())
            what = f"engine, a cold adapter {form}, {name}"
            yield Check(what, error, LIMIT)
            yield Check(f"{what}: its load returned before it was there", 1 - late, 0)


def _spoil(rig: Rig, adapter: Adapter) -> None:
    """The adapter is evicted, and NaN takes its place."""
    slot = rig.pool.slot(adapter.digest)
    assert slot is not None
    rows = {module: stack.table.rows(slot) for module, stack in rig.pool.stacks.items()}
    rig.pool.unload(adapter.digest)
    for module, own in rows.items():
        rig.pool.stacks[module].a[:, own] = torch.nan
        rig.pool.stacks[module].b[:, own] = torch.nan


def _run(rig: Rig, step: RigStep, mix: list[int | None]) -> Tensor:
    lora = lora_batch(rig.pool, mix, [1] * len(mix))
    return rig.model.forward(step.tokens, step.positions, rig.kv, step.batch, lora)


def arriving_table(rig: Rig, host: Host) -> Iterator[dict[str, object]]:
    """Decode steps of all adapters but the one of rank 64, which is loaded and evicted all the time:
    microseconds from a step's launch to its end, including the host's parallel work. rig: with a
    `StreamCopies`."""
    mix: list[int | None] = [row % 2 for row in range(ROWS)]
    step = rig.step(mix, [rig.config.max_position // 2] * ROWS)
    step.replayed()
    adapter = rig.adapters[2]
    forms: dict[str, Adapter | None] = {
        "nothing": None,
        "loads, as read": adapter,
        "loads, made ready": made_ready(adapter, rig.pool.dtype, host),
    }
    for name, coming in forms.items():
        times: list[float] = []
        loads, share = 0, 0.0
        pieces: Iterator[None] = iter(())
        for _ in range(STEPS):
            begun, ended = (Event(enable_timing=True) for _ in "be")  # type: ignore[no-untyped-call]  # torch's own
            begun.record()
            if step.replayed() is None:
                step.eager()
            ended.record()
            until = time.perf_counter() + share
            while coming is not None and time.perf_counter() < until:
                if next(pieces, rig) is rig:
                    loads += 1
                    rig.pool.unload(coming.digest)
                    pieces = iter(rig.pool.loading(coming))
            ended.synchronize()
            times.append(begun.elapsed_time(ended) * 1000)
            share = SHARE * statistics.median(times) / 1e6
        for _ in pieces:
            pass
        times.sort()
        yield {
            "beside": name,
            "step us, p50": statistics.median(times),
            "p99": times[int(len(times) * 0.99)],
            "loads": loads,
        }
