"""The Triton kernels' machine code on random cases, without a GPU: `python -m personae.evals.kernels`.

Each case is compiled for Ampere or Hopper and run by the PTX interpreter of the tests (tests/support/ptx),
which checks bounds, races, waits and fences, and compared with the reference. A case takes a CPU seconds.
"""

import importlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"


def support(name: str) -> Any:
    """A module of the tests' support, which is not in the wheel."""
    if str(SUPPORT) not in sys.path:
        sys.path.insert(0, str(SUPPORT))
    return importlib.import_module(name)


app = typer.Typer(add_completion=False)


@app.command()
def fuzz(
    seconds: Annotated[float, typer.Option(help="How long.")] = 600,
    seed: Annotated[int, typer.Option(help="Of the first case.")] = 0,
    kind: Annotated[str, typer.Option(help="Of the kernels; empty: all.")] = "",
) -> None:
    """Runs random cases until the time is up. Prints what is wrong, and ends with 1 if anything is."""
    cases, interpreter = support("ptx.fuzz"), support("ptx")
    kinds = [kind] if kind else list(cases.KINDS)
    until, count, bad = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        number, capability = seed + count // (2 * len(kinds)), (80, 90)[count % 2]
        case = cases.case(kinds[count // 2 % len(kinds)], number, capability)
        count += 1
        try:
            with interpreter.Interpreted(capability):
                wrong = [check.error() for check in case.run() if check.failed()]
        except interpreter.Fault as fault:
            wrong = [str(fault)]
        if wrong:
            bad += 1
            print(f"sm_{capability}: {case.text}: {wrong}", flush=True)
    print(f"{count} cases, {bad} wrong")
    raise typer.Exit(bool(bad))


if __name__ == "__main__":
    app()
