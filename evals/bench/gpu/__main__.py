"""Checks the kernels on this machine's GPU and measures them: `python -m personae.evals.bench.gpu`.

    python -m personae.evals.bench.gpu [--out FOLDER] [--seconds 500] [--seed N]

First correctness, then the tables, in order of importance, until the time is up; what did not fit says so.
Writes gpu.json and gpu.md. Ends with 1 if a check failed, with 2 where there is no GPU.
"""

import argparse
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from personae.actors.assembly import FP8_CAPABILITY
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
from personae.evals.bench.gpu.lending import lending
from personae.evals.bench.gpu.report import check_entries, markdown
from personae.evals.bench.gpu.tables import (
    attention_table,
    pointwise_table,
    sampling_table,
    sgmv_table,
    step_table,
)
from personae.evals.bench.gpu.timing import Deadline, copy_bandwidth
from personae.kernels import registry
from personae.kernels.reference import FP8, OPERATORS
from personae.lora.copies import SideStream, pinned


def all_checks(operators: dict[str, Callable[..., Any]], generator: torch.Generator) -> Iterator[Check]:
    """Every operator in every dtype."""
    for dtype in LIMITS:
        for checks in (sgmv_checks, attention_checks, pointwise_checks):
            yield from checks(operators, dtype, generator)
    if generator.device.type == "cuda" and torch.cuda.get_device_capability() >= FP8_CAPABILITY:
        yield from attention_checks(operators, torch.bfloat16, generator, kept=FP8)
    yield from sampling_checks(operators, generator)


def measure(seconds: float, seed: int) -> dict[str, Any]:
    """The report; see `markdown` for its fields."""
    import triton

    begun, deadline = time.monotonic(), Deadline.after(seconds)
    generator = torch.Generator("cuda").manual_seed(seed)
    operators = registry.operators("cuda")
    missing = set(OPERATORS) - operators.keys()
    if missing:
        raise SystemExit(f"no Triton kernels for {', '.join(sorted(missing))} on this GPU")
    checks = [*all_checks(operators, generator), *graph_checks(operators, generator)]
    checks += step_graph_checks(generator)
    rig = Rig(SHAPE, CudaCapture(), generator)
    checks += engine_checks(rig)
    checks += arriving_checks(Rig(SHAPE, CudaCapture(), generator, copies=DelayedStream()), pinned)
    found, lent = lending(SHAPE, CudaCapture(), generator)
    checks += found
    for check in checks:
        if not check.passed:
            print(f"FAILED {check.name}: error {check.error:.3g}, at most {check.limit:.3g}", flush=True)
    bandwidth = copy_bandwidth()
    tables: dict[str, list[dict[str, Any]]] = {"The engine's decode step": list(engine_table(rig))}
    tables["Memory that goes from the KV cache to adapters and back"] = lent
    del rig
    torch.cuda.empty_cache()
    rig = Rig(SHAPE, CudaCapture(), generator, copies=SideStream())
    tables["A decode step while an adapter of rank 64 comes"] = list(arriving_table(rig, pinned))
    del rig
    torch.cuda.empty_cache()
    for title, rows in {
        "A decode step, context 1024, with adapters": partial(step_table, bandwidth, generator, deadline),
        "SGMV alone, cold weights": partial(sgmv_table, bandwidth, generator, deadline),
        "Attention": partial(attention_table, bandwidth, generator, deadline),
        "Between the products": partial(pointwise_table, bandwidth, generator),
        "Choosing tokens": partial(sampling_table, bandwidth, generator),
    }.items():
        tables[title] = list(rows())
        torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "seed": seed,
        "seconds": time.monotonic() - begun,
        "bandwidth": bandwidth,
        "checks": check_entries(checks),
        "tables": tables,
    }


def main() -> int:
    """Run it all; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m personae.evals.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--seconds", type=float, default=480.0, help="begin nothing after so long")
    parser.add_argument("--seed", type=int, default=None, help="fresh by default")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA GPU on this machine: nothing to check, nothing to measure", file=sys.stderr)
        return 2
    report = measure(options.seconds, secrets.randbits(32) if options.seed is None else options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    text = markdown(report)
    (options.out / "gpu.md").write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(check["passed"] for check in report["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
