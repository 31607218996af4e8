"""What binding costs: decode steps with every row bound by a grammar, against the same rows free.

    python -m personae.evals.bench.masks --model models/smol135 --rows 32 --rounds 6

The engine alone, in rounds that are bound and free in turn, so that a machine that is busy now and then is
busy with both. Half of the bound rows write one text after the other, half fill in a form, all of them far
from the end of their budgets. Of every round the median step; then the medians of the rounds, and where the
difference goes: advancing grammars and filling masks ("masks"), and sampling, with what is asked about
tokens near an answer's end ("asking"). `--busy` takes processor time on one thread instead of wall time:
what the work costs, whoever else is there.

    python -m personae.evals.bench.masks --model models/smol135 --schema schema.json --budget 256

With a budget all rows run to its end, and the mean step counts instead of the median, since the last tokens
of a budget cost the most. Free rows and bound ones write as many tokens.
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
from personae.engine.scheduler import Scheduler
from personae.engine.step import Launched, StepEngine
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
    budget: int | None = None,
) -> Parts:
    """Decode steps of `rows` rows, bound by the grammars in turn if there are any: so many, or a budget's."""
    engine: Any = script.build_step_engine()
    scheduler, parts = script.build_scheduler(), Parts(clock)
    unread: Launched | None = None
    specs = list(grammars)
    for number, log in enumerate(logs(script, rows, False, 16, budget or 1900)):
        scheduler.add(replace(log, grammar=specs[number % len(specs)] if specs else None))
    with _timed(engine, parts):
        while budget or len(parts.samples["step"]) < WARM_UP + steps:
            plan = scheduler.plan()
            if plan is None and unread is None:
                break
            decoding = plan is None or (len(plan.rows) == rows and all(row.count == 1 for row in plan.rows))
            with parts.part("step" if decoding else "prompt"):
                if plan is not None:
                    with parts.part("prepare"):
                        packed = engine.prepare(plan, grammars)
                    with parts.part("forward"):
                        forward = engine.forward(packed)
                if unread is not None:
                    _read(engine, scheduler, parts, unread)
                    unread = None
                if plan is not None:
                    with parts.part("sample"):
                        unread = engine.sample(plan, forward)
                    if not engine.runs_ahead:
                        _read(engine, scheduler, parts, unread)
                        unread = None
    return parts


def _read(engine: StepEngine, scheduler: Scheduler, parts: Parts, unread: Launched) -> None:
    with parts.part("finish"):
        result = engine.finish(unread)
    assert not result.failures, result.failures
    scheduler.commit(result)


@contextmanager
def _timed(engine: StepEngine, parts: Parts) -> Iterator[None]:
    """What is done about masks by itself."""
    own = Parts(time.thread_time)  # beside the forward pass the process's time would be both's
    own.samples = parts.samples
    whose: list[tuple[Any, str, Callable[..., Any]]] = [
        (engine, "_fill", _watched(engine._fill, "masks", own)),
        (engine.sampler, "_ask", _watched(engine.sampler._ask, "asking", parts)),
    ]
    for owner, name, watched in whose:
        setattr(owner, name, watched)
    yield
    for owner, name, _ in whose:
        delattr(owner, name)


def _watched(function: Callable[..., Any], part: str, parts: Parts) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        with parts.part(part):
            return function(*arguments)

    return timed


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")] = DEMO / "model",
    rows: int = 32,
    steps: Annotated[int, typer.Option(help="Of every round.")] = 60,
    rounds: Annotated[int, typer.Option(help="Of each kind.")] = 6,
    schema: Annotated[Path | None, typer.Option(help="A file; all answers are of this.")] = None,
    budget: Annotated[int | None, typer.Option(help="Tokens of an answer; all are written.")] = None,
    busy: Annotated[bool, typer.Option("--busy", help="Processor time on one thread.")] = False,
) -> None:
    """Measure and print."""
    if busy:
        torch.set_num_threads(1)
    script = assemble(EngineOptions(model, max_seqs=rows, max_model_len=2048, kv_memory=2**30)).script
    compiler = script.build_compiler()
    sources = [json.dumps(one) for one in (TEXTS, FORM)] if schema is None else [schema.read_text()]
    specs = [GrammarSpec("json_schema", source) for source in sources]
    bound = {spec: compiler.compile(spec) for spec in specs}
    if budget is not None and (shortest := max(grammar.shortest for grammar in bound.values())) > budget:
        raise typer.BadParameter(f"the shortest answer has {shortest} tokens", param_hint="--budget")
    clock = time.process_time if busy else time.perf_counter
    found: dict[str, list[dict[str, float]]] = {"free": [], "bound": []}
    console = Console()
    for number in track(range(2 * rounds), transient=True, console=console, disable=not console.is_terminal):
        name = ("free", "bound")[number % 2]
        parts = play(script, bound if name == "bound" else {}, rows, steps, clock, budget)
        if budget:
            count = len(parts.samples["step"])
            found[name].append({part: 1e6 * sum(seen) / count for part, seen in parts.samples.items()})
        else:
            found[name].append(
                {part: 1e6 * statistics.median(seen[-steps:]) for part, seen in parts.samples.items()}
            )
    table = Table("us, median of rounds", "free", "bound", "difference of a step")
    medians = {
        name: {part: statistics.median(one.get(part, 0.0) for one in of) for part in found["bound"][0]}
        for name, of in found.items()
    }
    for part in ("step", "prepare", "forward", "masks", "sample", "asking", "finish"):
        free, tied = (medians[name].get(part, 0.0) for name in ("free", "bound"))
        table.add_row(
            part, f"{free:.0f}", f"{tied:.0f}", f"{100 * (tied - free) / medians['free']['step']:+.1f} %"
        )
    console.print(table)
    ratios = [100 * (b["step"] / f["step"] - 1) for f, b in zip(found["free"], found["bound"], strict=True)]
    each = ", ".join(f"{ratio:+.1f} %" for ratio in ratios)
    console.print(f"rounds: {each}; median {statistics.median(ratios):+.1f} %")


if __name__ == "__main__":
    typer.run(main)
