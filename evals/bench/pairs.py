"""Compares the decode steps of two trees of this repository, by pairs in changing order.

    git worktree add ../before COMMIT
    python -m personae.evals.bench.pairs ../before --pairs 40 --rows 1 --rows 8

Each tree has a process that loads the bundled model once, on one thread, and then runs decode steps when it
is asked to (`steps.engine_parts`). Its figure is the median processor time of a step, so other programs on
the machine matter less. Prints the median of the ratios, here by there, with the sign test's interval of
95 %.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import track
from rich.table import Table

import personae

HERE = Path(personae.__file__).parent.parent
_STEPS = 96  # of a run, of which the first `WARM_UP` do not count
_CHILD = f"""
import json, statistics, sys, time
import torch
from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.api.bundled import DEMO
from personae.evals.bench.steps import WARM_UP, engine_parts
torch.set_num_threads(1)
options = EngineOptions(DEMO / "model", (DEMO / "adapters",), max_seqs=64, max_model_len=2048)
spec = assemble(options).engine_spec
for line in sys.stdin:
    asked = json.loads(line)
    parts = engine_parts(spec, asked["rows"], asked["mixed"], 16, {_STEPS}, time.process_time)
    steps = map(sum, zip(*(samples[WARM_UP:] for samples in parts.samples.values())))  # without the last plan
    print(json.dumps(statistics.median(steps)), flush=True)
"""


class Tree:
    """A process of one tree; a context manager. `packages` is the folder that has `personae`."""

    def __init__(self, packages: Path) -> None:
        self._process = subprocess.Popen(  # noqa: S603  # our own interpreter
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def __enter__(self) -> "Tree":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def step(self, rows: int, *, mixed: bool) -> float:
        """The median seconds of a step with so many rows: of the base, or `mixed` over all adapters."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"rows": rows, "mixed": mixed}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("a tree's process has ended; its error is above")
        return float(json.loads(answer))


def interval(ratios: list[float]) -> tuple[float, float]:
    """Between which two of them their true median is, with 95 % (the sign test)."""
    ordered, count = sorted(ratios), len(ratios)
    tail, least = 1.0, 0  # tail: how probable it is that at most `least` are on one side, in 2^count
    while (tail := tail + math.comb(count, least + 1)) <= 0.025 * 2**count:
        least += 1
    return ordered[least], ordered[-1 - least]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path, help="the other tree's folder")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--rows", type=int, action="append", help="1 and 8 if not given")
    given = parser.parse_args()
    table = Table("rows", "models", "here us", "there us", "here / there", "95 %")
    with Tree(HERE) as here, Tree((given.tree / ".pkg").resolve()) as there:
        for rows in given.rows or (1, 8):
            for mixed in (False, True):
                here.step(rows, mixed=mixed), there.step(rows, mixed=mixed)  # warm
                ours: list[float] = []
                theirs: list[float] = []
                for number in track(range(given.pairs), transient=True):
                    for tree, found in ((here, ours), (there, theirs))[:: -1 if number % 2 else 1]:
                        found.append(tree.step(rows, mixed=mixed))
                ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
                low, high = interval(ratios)
                table.add_row(
                    str(rows),
                    "all adapters" if mixed else "base",
                    *(f"{1e6 * statistics.median(found):.0f}" for found in (ours, theirs)),
                    f"{statistics.median(ratios):.3f}",
                    f"{low:.3f}–{high:.3f}",
                )
    Console().print(table)


if __name__ == "__main__":
    main()
