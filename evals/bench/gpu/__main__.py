"""Checks the kernels on this machine's GPU and measures them: `python -m personae.evals.bench.gpu`.

    python -m personae.evals.bench.gpu [--out FOLDER] [--seconds 480] [--seed N]

First correctness, then the tables, in order of importance, until the time is up; what did not fit says so. A
part that fails is a failed check, and the others go on. gpu.json and gpu.md are written after each part, so
that they hold what was found whatever ends the run. Ends with 1 if a check failed, with 2 where there is no
GPU.

Of Personae's dependencies this needs torch, triton, numpy and msgspec alone; where it is not installed, a
checkout's `.pkg` on PYTHONPATH will do.
"""

import argparse
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import torch

from personae.engine.graphs import CudaCapture
from personae.evals.bench.gpu.arriving import DelayedStream, arriving_checks, arriving_table
from personae.evals.bench.gpu.checks import (
    LIMITS,
    Check,
    attention_checks,
    graph_checks,
    pointwise_checks,
    sampling_checks,
    sgmv_checks,
    step_graph_checks,
)
from personae.evals.bench.gpu.engine import SHAPE, Rig, engine_checks, engine_table
from personae.evals.bench.gpu.lending import lending_checks, lending_table
from personae.evals.bench.gpu.report import check_entry, markdown
from personae.evals.bench.gpu.tables import (
    Row,
    attention_table,
    pointwise_table,
    sampling_table,
    sgmv_table,
    step_table,
)
from personae.evals.bench.gpu.timing import Deadline, copy_bandwidth
from personae.kernels import registry
from personae.kernels.branch import Branch
from personae.kernels.reference import FP8, OPERATORS
from personae.kernels.triton import FP8_CAPABILITY
from personae.lora.copies import Copies, SideStream, pinned

Operators = dict[str, Callable[..., Any]]


def check_parts(
    operators: Operators, generator: torch.Generator
) -> Iterator[tuple[str, Callable[[], Iterable[Check]]]]:
    """Every operator in every dtype, graphs, the engine's steps; by name."""
    for dtype in LIMITS:
        yield f"sgmv, {dtype}", partial(sgmv_checks, operators, dtype, generator)
        yield f"attention, {dtype}", partial(attention_checks, operators, dtype, generator)
        yield f"between the products, {dtype}", partial(pointwise_checks, operators, dtype, generator)
    if torch.cuda.get_device_capability() >= FP8_CAPABILITY:
        kept = partial(attention_checks, operators, torch.bfloat16, generator, kept=FP8)
        yield "attention, keys and values in fp8", kept
    yield "choosing tokens", partial(sampling_checks, operators, generator)
    yield "sgmv as a graph", partial(graph_checks, operators, generator)
    yield "a layer as a graph", partial(step_graph_checks, generator)
    yield "the engine's steps as graphs", lambda: engine_checks(rig(generator))
    yield "adapters that arrive", lambda: arriving_checks(rig(generator, DelayedStream()), pinned)
    yield "memory that is lent", lambda: lending_checks(rig(generator, SideStream(), lends=True))


def table_parts(
    bandwidth: float, generator: torch.Generator, deadline: Deadline
) -> dict[str, Callable[[], Iterable[Row]]]:
    """The tables by their titles, the most important first."""
    return {
        "The engine's decode step": lambda: engine_table(rig(generator)),
        "Memory that goes from the KV cache to adapters and back": lambda: lending_table(
            rig(generator, SideStream(), lends=True)
        ),
        "A decode step while an adapter of rank 64 comes": lambda: arriving_table(
            rig(generator, SideStream()), pinned
        ),
        "A decode step, context 1024, with adapters": partial(step_table, bandwidth, generator, deadline),
        "SGMV alone, cold weights": partial(sgmv_table, bandwidth, generator, deadline),
        "Attention": partial(attention_table, bandwidth, generator, deadline),
        "Between the products": partial(pointwise_table, bandwidth, generator),
        "Choosing tokens": partial(sampling_table, bandwidth, generator),
    }


def rig(generator: torch.Generator, copies: Copies | None = None, *, lends: bool = False) -> Rig:
    """A fresh one of the shape that is measured."""
    return Rig(SHAPE, CudaCapture(), generator, copies=copies, branch=Branch(), lends=lends)


class Findings:
    """The report (see `markdown` for its fields), written to a folder after each part."""

    def __init__(self, folder: Path, **known: object) -> None:
        self._folder, self._begun = folder, time.monotonic()
        self.checks: list[dict[str, Any]] = []
        self.tables: dict[str, list[Row]] = {}
        self._report: dict[str, Any] = {**known, "checks": self.checks, "tables": self.tables}

    def part(self, name: str, items: Callable[[], Iterable[Any]], take: Callable[[Any], object]) -> None:
        """Take what a part finds, one after the other; that it failed is a finding, too."""
        print(f"{time.monotonic() - self._begun:5.0f} s  {name}", flush=True)
        try:
            torch.cuda.empty_cache()
            for item in items():
                take(item)
        except Exception as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())
            self.check(Check(f"{name}: {what[:300]}", nan, 0))
        self.write()

    def check(self, check: Check) -> None:
        """Take one in."""
        self.checks.append(check_entry(check))
        if not check.passed:
            print(f"FAILED {check.name}: error {check.error:.3g}, at most {check.limit:.3g}", flush=True)

    def write(self) -> str:
        """gpu.json and gpu.md as they are now; the latter's text."""
        self._report["seconds"] = time.monotonic() - self._begun
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "gpu.json").write_text(json.dumps(self._report, indent=1), encoding="utf-8")
        text = markdown(self._report)
        (self._folder / "gpu.md").write_text(text, encoding="utf-8")
        return text


def measure(folder: Path, seconds: float, seed: int) -> Findings:
    """All parts, none begun after so many seconds but the checks."""
    import triton

    deadline = Deadline.after(seconds)
    generator = torch.Generator("cuda").manual_seed(seed)
    operators = registry.operators("cuda")
    missing = set(OPERATORS) - operators.keys()
    if missing:
        raise SystemExit(f"no Triton kernels for {', '.join(sorted(missing))} on this GPU")
    bandwidth = copy_bandwidth()
    findings = Findings(
        folder,
        device=torch.cuda.get_device_name(),
        versions={"torch": torch.__version__, "triton": triton.__version__},
        seed=seed,
        bandwidth=bandwidth,
    )
    for name, checks in check_parts(operators, generator):
        findings.part(name, checks, findings.check)
    for title, table in table_parts(bandwidth, generator, deadline).items():
        rows = findings.tables[title] = []
        if deadline.passed:
            rows.append({"left out": "no time left"})
        else:
            findings.part(title, table, rows.append)
    return findings


def main() -> int:
    """Run it all; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m personae.evals.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no table after so long")
    parser.add_argument("--seed", type=int, default=None, help="fresh by default")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA GPU on this machine: nothing to check, nothing to measure", file=sys.stderr)
        return 2
    seed = secrets.randbits(32) if options.seed is None else options.seed
    findings = measure(options.out, options.seconds, seed)
    print(findings.write())
    return 0 if all(check["passed"] for check in findings.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
