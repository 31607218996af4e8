"""Every family of models against transformers and PEFT: `python -m personae.evals.families`.

A tiny random model of transformers' own class, norms and biases included, in float32: logits of 100 tokens,
64 greedy tokens, chunks of a prompt and a mixed batch; then the base and two adapters of PEFT on all its
modules in one batch, with a cached prefix and with preemption. A case takes a second. The tests
(`tests/engine/test_families.py`) take one family of each kind.

    --case glm4_moe    one case; otherwise all
"""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from personae.evals.kernels import support


def main(case: Annotated[str, typer.Option(help="The case; empty: all.")] = "") -> None:
    """Checks the families and exits with 1 if one differs."""
    checks, models = support("family_checks"), support("family_models")
    failed = []
    for name in [case] if case else models.CASES:
        with tempfile.TemporaryDirectory() as folder:
            report = checks.check_family(name, Path(folder))
        print(f"{name}: {'passed' if report.passed else 'FAILED'}: {report}", flush=True)
        failed += [] if report.passed else [name]
    print(f"{len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
