"""What binding costs: decode steps with every row bound by a grammar, compared with the same rows free.

    python -m personae.evals.bench.masks --model models/smol135 --rows 32 --rounds 3

The engine alone, bound and free in one process. They take turns step by step, so that the machine affects
both equally. Half of the bound rows write one text after another, half fill in a form of short values, all
far from the end of their budgets. For each step it takes the median of the rounds, then the mean of these. It
also shows where the difference goes: advancing grammars ("finish") and filling masks ("masks"), both
overlapped with the forward pass, and the verification of tokens near an answer's end ("asking"); all three
are part of "forward". The first two are processor time of that thread. With `--busy` everything is, on one
thread: this is the cost of the work, whatever else runs. Over HTTP: `evals/bench/bound.py`.

    python -m personae.evals.bench.masks --model models/smol135 --budget 128

With a budget all rows run to its end, where tokens cost the most: a form with a text that may go on, or the
schema in `--schema`. Free and bound rows write the same number of tokens.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from msgspec.structs import replace
from rich.console import Console
from rich.progress import track
from rich.table import Table

from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.actors.spec import EngineSpec
from personae.api.bundled import DEMO
from personae.engine.launched import LaunchedStep
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.step import StepEngine, by_tenant
from personae.engine.worker.worker import PackedStep
from personae.evals.bench.steps import WARM_UP, Parts, logs
from personae.grammar.matcher import Grammar
from personae.grammar.spec import GrammarSpec

FAR = 1900  # tokens; a budget whose end is not reached
PARTS = ("step", "prepare", "forward", "finish", "masks", "asking", "sample")
TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 60}
SHORT: list[dict[str, Any]] = [
    {"type": "integer"},
    {"enum": ["open", "paid"]},
    {"type": "string", "maxLength": 12},
    {"type": "boolean"},
]


def form(fields: int, kinds: list[dict[str, Any]]) -> dict[str, Any]:
    """A schema of this many required fields, whose kinds alternate."""
    names = [f"field_{number}" for number in range(fields)]
    return {
        "type": "object",
        "properties": {name: kinds[number % len(kinds)] for number, name in enumerate(names)},
        "required": names,
        "additionalProperties": False,
    }


FORM = form(100, SHORT)
CLOSING = form(16, [*SHORT, {"type": "string"}])


def decode(
    engine_spec: EngineSpec,
    grammars: dict[GrammarSpec, Grammar],
    rows: int,
    parts: Parts,
    budget: int | None,
) -> Iterator[None]:
    """Decode `rows` rows, bound by the grammars in turn if there are any, to the budget's end. Yields after
    each step that decodes all of them."""
    engine: Any = engine_spec.build_step_engine()
    scheduler = engine_spec.build_scheduler()
    unread: LaunchedStep | None = None
    specs = list(grammars)
    for number, log in enumerate(logs(engine_spec, rows, False, 16, budget or FAR)):
        scheduler.add(replace(log, grammar=specs[number % len(specs)] if specs else None))
    _watch(engine, parts)
    while True:
        plan = scheduler.plan()
        if plan is None and unread is None:
            return
        decoding = plan is None or (len(plan.rows) == rows and all(row.count == 1 for row in plan.rows))
        with parts.part("step" if decoding else "prompt"):
            if plan is not None:
                with parts.part("prepare"):
                    packed = engine.prepare(plan, by_tenant(plan, grammars))
                with parts.part("forward"):
                    overlap = partial(_overlap, engine, scheduler, unread, packed)
                    forward = engine.forward(packed, overlap)
                with parts.part("sample"):
                    unread = engine.sample(plan, forward)
            elif unread is not None:
                _read(engine, scheduler, unread)
                unread = None
        if decoding:
            yield


def _overlap(
    engine: StepEngine, scheduler: Scheduler, unread: LaunchedStep | None, packed: PackedStep | None
) -> None:
    """What the executor does during a forward pass."""
    if unread is not None:
        _read(engine, scheduler, unread)
    engine.fill(packed)


def _read(engine: StepEngine, scheduler: Scheduler, unread: LaunchedStep) -> None:
    result = engine.finish(unread)
    assert not result.failures, result.failures
    scheduler.commit(result)


def _watch(engine: Any, parts: Parts) -> None:
    """Time the work on grammars separately."""
    own = Parts(time.thread_time)  # the process's time would include the forward pass
    own.samples = parts.samples
    engine.finish = _watched(engine.finish, "finish", own)
    engine.fill = _watched(engine.fill, "masks", own)
    engine.sampler._verify = _watched(engine.sampler._verify, "asking", parts)


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
    engine_spec = assemble(
        EngineOptions(model, max_seqs=rows, max_model_len=2048, kv_memory=2**30)
    ).engine_spec
    compiler = engine_spec.build_compiler()
    schemas = [TEXTS, FORM] if budget is None else [CLOSING]
    sources = [json.dumps(one) for one in schemas] if schema is None else [schema.read_text()]
    specs = [GrammarSpec("json_schema", source) for source in sources]
    bound = {spec: compiler.compile(spec, "") for spec in specs}
    if budget is not None and (shortest := max(grammar.shortest for grammar in bound.values())) > budget:
        raise typer.BadParameter(f"the shortest answer has {shortest} tokens", param_hint="--budget")
    clock = time.process_time if busy else time.perf_counter
    played: dict[str, list[Parts]] = {"free": [], "bound": []}
    console = Console()
    for number in track(range(rounds), transient=True, console=console, disable=not console.is_terminal):
        pair = {name: Parts(clock) for name in (("free", "bound") if number % 2 else ("bound", "free"))}
        sides = [
            decode(engine_spec, bound if name == "bound" else {}, rows, parts, budget)
            for name, parts in pair.items()
        ]
        together = zip(*sides, strict=True)
        for _ in together if budget else islice(together, WARM_UP + steps):
            pass
        for name, parts in pair.items():
            played[name].append(parts)
    figures = {name: {part: _typical(of, part, budget) for part in PARTS} for name, of in played.items()}
    table = Table("us, mean step", "free", "bound", "difference of a step")
    for part in PARTS:
        free, tied = figures["free"][part], figures["bound"][part]
        share = 100 * (tied - free) / figures["free"]["step"]
        table.add_row(part, f"{free:.0f}", f"{tied:.0f}", f"{share:+.1f} %")
    console.print(table)
    ratios = [
        100 * (_typical([tied], "step", budget) / _typical([free], "step", budget) - 1)
        for free, tied in zip(played["free"], played["bound"], strict=True)
    ]
    console.print(f"rounds by themselves: {', '.join(f'{ratio:+.1f} %' for ratio in ratios)}")


def _typical(rounds: list[Parts], part: str, budget: int | None) -> float:
    """The mean over the steps of the median over the rounds, in microseconds per step."""
    steps = len(rounds[0].samples["step"])
    if budget is None:
        steps -= WARM_UP
    seen = [parts.samples[part][-steps:] for parts in rounds]
    medians = [float(statistics.median(times)) for times in zip(*seen, strict=True)]
    return 1e6 * sum(medians) / steps


if __name__ == "__main__":
    typer.run(main)
