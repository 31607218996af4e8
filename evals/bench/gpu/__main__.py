"""Checks the kernels on this machine's GPU and measures them: `python -m personae.evals.bench.gpu`.

    python -m personae.evals.bench.gpu [--out FOLDER] [--seconds 480] [--seed N] [--only NAME] [--resume]

The correctness checks run first, then the tables in order of importance, until the time is up; the report
lists what was left out. A part that fails is a failed check, and the other parts go on. They go on in a new
process if the part hangs, or has broken the device for this process, as an illegal access does. gpu.json and
gpu.md are written after each part, so they have all findings however the run ends. `--resume` continues with
the parts that they lack. The exit status is 1 if a check failed, 2 if there is no GPU.

Of Personae's dependencies this only needs torch, triton, numpy and msgspec. If Personae is not installed, a
checkout's `.pkg` on PYTHONPATH is enough. Only the part with the bundled model needs all dependencies;
without them it is left out, and says so. `--only NAME` runs the checks and tables whose names contain NAME.
"""

import argparse
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from math import nan
from pathlib import Path
from threading import Timer
from typing import Any, Never

import torch

from personae.engine.worker.capture import CudaCapture
from personae.evals.bench.gpu.arriving import DelayedStream, arriving_checks, arriving_table
from personae.evals.bench.gpu.checks import (
    LIMITS,
    Check,
    attention_checks,
    expert_checks,
    graph_checks,
    pointwise_checks,
    sampling_checks,
    sgmv_checks,
    step_graph_checks,
)
from personae.evals.bench.gpu.engine import SHAPE, Rig, engine_checks, engine_table
from personae.evals.bench.gpu.few_bits import few_bits_checks
from personae.evals.bench.gpu.goals import DECODE_STEPS
from personae.evals.bench.gpu.lending import lending_checks, lending_table
from personae.evals.bench.gpu.repeats import repeat_checks
from personae.evals.bench.gpu.report import check_entry, markdown
from personae.evals.bench.gpu.served import served_checks
from personae.evals.bench.gpu.tables import (
    ReportRow,
    attention_table,
    pointwise_table,
    product_table,
    sampling_table,
    sgmv_table,
    step_table,
)
from personae.evals.bench.gpu.timing import Deadline, Roofline, copy_bandwidth, product_rate
from personae.evals.bench.gpu.torch_blocks import block_checks
from personae.kernels import registry
from personae.kernels.reference import FP8
from personae.kernels.registry import OPERATORS
from personae.kernels.side_stream import SideStream
from personae.kernels.triton import FP8_CAPABILITY
from personae.lora.copies import Copies, StreamCopies, pinned

Operators = dict[str, Callable[..., Any]]
LONGEST = 75.0  # seconds; a part that takes longer hangs
OPEN_FILES = 4096  # the most open files


def check_parts(
    operators: Operators, generator: torch.Generator
) -> Iterator[tuple[str, Callable[[], Iterable[Check]]]]:
    """Every operator in every dtype, graphs, and the engine's steps, by name."""
    for dtype in LIMITS:
        yield f"sgmv, {dtype}", partial(sgmv_checks, operators, dtype, generator)
        yield f"attention, {dtype}", partial(attention_checks, operators, dtype, generator)
        yield f"experts, {dtype}", partial(expert_checks, operators, dtype, generator)
        yield f"between the products, {dtype}", partial(pointwise_checks, operators, dtype, generator)
        yield f"weights in few bits, {dtype}", partial(few_bits_checks, dtype, generator)
    if fp8 := torch.cuda.get_device_capability() >= FP8_CAPABILITY:
        kept = partial(attention_checks, operators, torch.bfloat16, generator, kept=FP8)
        yield "attention, keys and values in fp8", kept
    yield "choosing tokens", partial(sampling_checks, operators, generator)
    yield "the same bits again", partial(repeat_checks, operators, generator, fp8=fp8)
    yield "blocks in torch", partial(block_checks, generator)
    yield "sgmv as a graph", partial(graph_checks, operators, generator)
    yield "a layer as a graph", partial(step_graph_checks, generator)
    yield "the engine's steps as graphs", lambda: engine_checks(rig(generator))
    yield "adapters that arrive", lambda: arriving_checks(rig(generator, DelayedStream()), pinned)
    yield "memory that is lent", lambda: lending_checks(rig(generator, StreamCopies(), lends=True))
    yield "the bundled model", served_checks


def table_parts(
    roofline: Roofline, generator: torch.Generator, deadline: Deadline
) -> dict[str, Callable[[], Iterable[ReportRow]]]:
    """The tables by their titles, the most important first."""
    return {
        "The engine's decode step": lambda: engine_table(rig(generator)),
        "Memory that goes from the KV cache to adapters and back": lambda: lending_table(
            rig(generator, StreamCopies(), lends=True)
        ),
        "A decode step while an adapter of rank 64 comes": lambda: arriving_table(
            rig(generator, StreamCopies()), pinned
        ),
        DECODE_STEPS: partial(step_table, roofline, generator, deadline),
        "SGMV alone, cold weights": partial(sgmv_table, roofline, generator, deadline),
        "Attention": partial(attention_table, roofline, generator, deadline),
        "Products of a layer": partial(product_table, roofline, generator, deadline),
        "Between the products": partial(pointwise_table, roofline, generator),
        "Choosing tokens": partial(sampling_table, roofline, generator),
    }


def rig(generator: torch.Generator, copies: Copies | None = None, *, lends: bool = False) -> Rig:
    """A new rig of the measured shape."""
    return Rig(SHAPE, CudaCapture(), generator, copies=copies, side_stream=SideStream(), lends=lends)


class Findings:
    """The report (see `markdown` for its fields) in a folder. It is written before and after each part, and
    read again by a process that resumes it.

    again: continues in a new process, given when this one's call began; any thread may call it.
    """

    def __init__(self, folder: Path, report: dict[str, Any], again: Callable[[float], Never]) -> None:
        self._folder, self._report, self._again = folder, report, again
        self.checks: list[dict[str, Any]] = report["checks"]
        self.tables: dict[str, list[ReportRow]] = report["tables"]

    @classmethod
    def of(
        cls, folder: Path, seed: int, again: Callable[[float], Never], *, resume: bool, begun: float | None
    ) -> "Findings":
        """The folder's findings if they are to be resumed, otherwise empty ones.

        begun: when this call's first process began; None: this one is the first. Then a part that an earlier
        call was cut off in is begun anew.
        """
        if resume:
            report = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
            cut = report["cut"]
            if begun is None and cut is not None:
                report["parts"].remove(cut["part"])
                del report["checks"][cut["checks"] :]
            if begun is None:  # tables that an earlier call had no time for, or was cut off in
                left = {
                    title: rows
                    for title, rows in report["tables"].items()
                    if (cut is None or title != cut["part"]) and not any("left out" in row for row in rows)
                }
                report["parts"] = [
                    part for part in report["parts"] if part in left or part not in report["tables"]
                ]
                report["tables"] = left
            return cls(folder, report | {"begun": begun or time.time(), "cut": None}, again)
        import triton

        known = {
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "seed": seed,
            "bandwidth": copy_bandwidth(),
            "rate": product_rate(),
            "begun": begun or time.time(),
        }
        return cls(folder, {**known, "cut": None, "parts": [], "checks": [], "tables": {}}, again)

    @property
    def seconds(self) -> float:
        """The seconds since this call's first process began."""
        return time.time() - float(self._report["begun"])

    @property
    def roofline(self) -> Roofline:
        """What the device does at most."""
        return Roofline(float(self._report["bandwidth"]), float(self._report["rate"]))

    def part(self, name: str, items: Callable[[], Iterable[Any]], take: Callable[[Any], object]) -> None:
        """Add a part's findings one by one; a failure is a finding too. Does nothing if the part was begun
        before."""
        if name in self._report["parts"]:
            return
        self._report["parts"].append(name)
        self._report["cut"] = {"part": name, "checks": len(self.checks)}  # where it is, if it is killed
        self.write()
        print(f"{self.seconds:5.0f} s  {name}", flush=True)
        watch = Timer(LONGEST, self._hangs, (name,))
        watch.daemon = True
        watch.start()
        try:
            torch.cuda.empty_cache()
            for item in items():
                take(item)
            torch.cuda.synchronize()
        except Exception as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())
            self.check(Check(f"{name}: {what[:300]}", nan, 0))
        finally:
            watch.cancel()
        self._report["cut"] = None
        self.write()
        if not device_answers():
            self._again(float(self._report["begun"]))

    def _hangs(self, name: str) -> None:
        self.check(Check(f"{name}: it has not ended after {LONGEST:.0f} s", nan, 0))
        self._report["cut"] = None
        self.write()
        self._again(float(self._report["begun"]))

    def check(self, check: Check) -> None:
        """Add a check."""
        self.checks.append(check_entry(check))
        if not check.passed:
            print(f"FAILED {check.name}: error {check.error:.3g}, at most {check.limit:.3g}", flush=True)

    def write(self) -> str:
        """Writes gpu.json and gpu.md. Returns the text of the latter."""
        self._report["seconds"] = self.seconds
        self._folder.mkdir(parents=True, exist_ok=True)
        text = markdown(self._report)
        for name, content in {"gpu.json": json.dumps(self._report, indent=1), "gpu.md": text}.items():
            part = self._folder / f"{name}.part"
            part.write_text(content, encoding="utf-8")
            part.replace(self._folder / name)  # at once: the process may be killed at any time
        return text


def device_answers() -> bool:
    """Whether this process can still use the device: some faults make that impossible."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def measure(findings: Findings, seconds: float, seed: int, only: str = "") -> None:
    """Run all parts, or those whose names contain `only`. After this many seconds only checks begin."""
    deadline = Deadline.after(seconds - findings.seconds)
    generator = torch.Generator("cuda").manual_seed(seed)
    operators = {name: own.run for name, own in registry.operators("triton").items()}
    missing = set(OPERATORS) - operators.keys()
    if missing:
        raise SystemExit(f"no Triton kernels for {', '.join(sorted(missing))} on this GPU")
    for name, checks in check_parts(operators, generator):
        if only in name:
            findings.part(name, checks, findings.check)
    for title, table in table_parts(findings.roofline, generator, deadline).items():
        if only not in title:
            continue
        rows = findings.tables.setdefault(title, [])
        if deadline.passed:
            rows.append({"left out": "no time left"})
        else:
            findings.part(title, table, rows.append)


def main() -> int:
    """Run everything. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m personae.evals.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no table after so long")
    parser.add_argument("--seed", type=int, default=None, help="fresh by default")
    parser.add_argument("--only", default="", help="parts whose names contain this")
    parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
    parser.add_argument("--begun", type=float, default=None, help=argparse.SUPPRESS)  # of its own processes
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA GPU on this machine: nothing to check, nothing to measure", file=sys.stderr)
        return 2
    seed = secrets.randbits(32) if options.seed is None else options.seed

    def again(begun: float) -> Never:
        """Replaces this process, which releases the device whatever its threads do."""
        sys.stdout.flush()
        for number in range(3, OPEN_FILES):  # the driver's open files would keep the old context alive
            with suppress(OSError):
                os.set_inheritable(number, False)
        own = [*("--out", str(options.out), "--seconds", str(options.seconds)), *("--seed", str(seed))]
        own += ["--only", options.only, "--begun", str(begun)]
        os.execv(sys.executable, [sys.executable, "-m", "personae.evals.bench.gpu", *own, "--resume"])  # noqa: S606

    findings = Findings.of(options.out, seed, again, resume=options.resume, begun=options.begun)
    measure(findings, options.seconds, seed, options.only)
    print(findings.write())
    return 0 if all(check["passed"] for check in findings.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
