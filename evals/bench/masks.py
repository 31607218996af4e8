"""What binding costs: decode steps with every row bound by a grammar, against the same rows free.

    python -m personae.evals.bench.masks --model models/smol135 --rows 32 --rounds 6

The engine alone, in rounds that are bound and free in turn, so that a machine that is busy now and then is
busy with both. Half of the bound rows write one text after the other, half fill in a form, all of them far
from the end of their budgets. Of every round the median step; then the medians of the rounds, and where the
difference goes: filling masks, advancing grammars by the tokens (finish), and the rest of sampling, which is
applying the masks. `--busy` takes processor time on one thread instead of wall time: what the work costs,
whoever else is there.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from msgspec.structs import replace
from rich.console import Console
from rich.progress import track
from rich.table import Table

from personae.actors.assembly import EngineOptions, assemble
from personae.actors.script import Script
from personae.api.local import DEMO
from personae.engine.step import StepEngine
from personae.evals.bench.steps import WARM_UP, Parts, logs
from personae.grammar.backend import BoundGrammar
from personae.grammar.spec import GrammarSpec

TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 60}
FIELDS = [{"type": "string"}, {"type": "integer"}, {"enum": ["open", "paid"]}, {"type": "boolean"}]
FORM = {
    "type": "object",
    "properties": {f"field_{number}": FIELDS[number % 4] for number in range(40)},
    "required": [f"field_{number}" for number in range(40)],
    "additionalProperties": False,
}


def play(
    script: Script,
    grammars: dict[GrammarSpec, BoundGrammar],
    rows: int,
    steps: int,
    clock: Callable[[], float],
) -> Parts:
    """Decode steps of `rows` rows, bound by the grammars in turn if there are any."""
    engine: Any = script.build_step_engine()
    scheduler, parts = script.build_scheduler(), Parts(clock)
    specs = list(grammars)
    for number, log in enumerate(logs(script, rows, False, 16, 1900)):
        scheduler.add(replace(log, grammar=specs[number % len(specs)] if specs else None))
    with _timed(engine, parts):
        while len(parts.samples["step"]) < WARM_UP + steps:
            plan = scheduler.plan()
            assert plan is not None, "a row has ended too early"
            decoding = len(plan.rows) == rows and all(row.count == 1 for row in plan.rows)
            with parts.part("step" if decoding else "prompt"):
                with parts.part("prepare"):
                    packed = engine.prepare(plan, grammars)
                with parts.part("forward"):
                    forward = engine.forward(packed)
                with parts.part("sample"):
                    launched = engine.sample(plan, forward)
                with parts.part("finish"):
                    result = engine.finish(launched)
            assert not result.failures, result.failures
            scheduler.commit(result)
    return parts


@contextmanager
def _timed(engine: StepEngine, parts: Parts) -> Iterator[None]:
    """The masks' part of sampling by itself."""
    masks: Any = engine._masks
    fill = masks.fill

    def timed(*arguments: Any) -> None:
        with parts.part("fill"):
            fill(*arguments)

    masks.fill = timed
    yield
    masks.fill = fill


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")] = DEMO / "model",
    rows: int = 32,
    steps: Annotated[int, typer.Option(help="Of every round.")] = 60,
    rounds: Annotated[int, typer.Option(help="Of each kind.")] = 6,
    busy: Annotated[bool, typer.Option("--busy", help="Processor time on one thread.")] = False,
) -> None:
    """Measure and print."""
    if busy:
        torch.set_num_threads(1)
    script = assemble(EngineOptions(model, max_seqs=rows, max_model_len=2048, kv_memory=2**30)).script
    compiler = script.build_compiler()
    specs = [GrammarSpec("json_schema", json.dumps(schema)) for schema in (TEXTS, FORM)]
    bound = {spec: compiler.compile(spec) for spec in specs}
    clock = time.process_time if busy else time.perf_counter
    found: dict[str, list[dict[str, float]]] = {"free": [], "bound": []}
    console = Console()
    for number in track(range(2 * rounds), transient=True, console=console, disable=not console.is_terminal):
        name = ("free", "bound")[number % 2]
        parts = play(script, bound if name == "bound" else {}, rows, steps, clock)
        found[name].append(
            {part: 1e6 * statistics.median(seen[-steps:]) for part, seen in parts.samples.items()}
        )
    table = Table("us, median of rounds", "free", "bound", "difference of a step")
    medians = {
        name: {part: statistics.median(one.get(part, 0.0) for one in of) for part in found["bound"][0]}
        for name, of in found.items()
    }
    for part in ("step", "prepare", "forward", "sample", "fill", "finish"):
        free, tied = medians["free"][part], medians["bound"][part]
        table.add_row(
            part, f"{free:.0f}", f"{tied:.0f}", f"{100 * (tied - free) / medians['free']['step']:+.1f} %"
        )
    console.print(table)
    ratios = [100 * (b["step"] / f["step"] - 1) for f, b in zip(found["free"], found["bound"], strict=True)]
    each = ", ".join(f"{ratio:+.1f} %" for ratio in ratios)
    console.print(f"rounds: {each}; median {statistics.median(ratios):+.1f} %")


if __name__ == "__main__":
    typer.run(main)
