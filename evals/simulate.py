"""`personae simulate`: a day of traffic with faults, in seconds; and how many replicas some traffic needs."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import track

from personae.actors.options import PrefillReplicas, parse_prefill_replicas
from personae.api.commands.command_line import option_parser

app = typer.Typer(help="Simulate the whole engine under a virtual clock, with faults.", no_args_is_help=True)

FirstGoal = Annotated[float, typer.Option(help="Goal: seconds to the first token.")]


@app.command()
def seeds(
    count: Annotated[int, typer.Option(min=1, help="How many scenarios to draw.")] = 100,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    requests: Annotated[int, typer.Option(min=1, help="Requests in each.")] = 120,
) -> None:
    """Draw random scenarios with faults, and search for violated invariants."""
    from personae.actors.simulation.swarm import draw
    from personae.actors.simulation.world import InvariantViolated, simulate

    wrong = 0
    for seed in range(first, first + count):
        try:
            simulate(draw(seed, requests))
        except InvariantViolated as violation:
            wrong += 1
            typer.echo(f"seed {seed}: {violation}")
    typer.echo(f"{count} seeds, {wrong} with violations")
    raise typer.Exit(1 if wrong else 0)


@app.command()
def traffic(
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 100_000,
    adapters: Annotated[int, typer.Option(min=0)] = 1000,
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 600.0,
    faults_every: Annotated[float, typer.Option(help="Virtual seconds between two faults; 0: none.")] = 20.0,
    tier_pages: Annotated[
        int, typer.Option(min=0, help="KV pages that a disk has room for; 0: no disk.")
    ] = 0,
    tier_fails: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the disk's operations that fail or stall.")
    ] = 0.0,
    replicas: Annotated[int, typer.Option(min=1, help="Engines, which share --rate.")] = 1,
    prefill_replicas: Annotated[
        Any,
        typer.Option(
            help="So many of --replicas only compute prompts; with auto the load decides how many.",
            parser=option_parser(parse_prefill_replicas),
            metavar="N|auto",
        ),
    ] = 0,
    transfer_fails: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the fetches between engines that fail or stall.")
    ] = 0.0,
    seed: int = 0,
    parts: Annotated[int, typer.Option(min=1, help="Independent parts, each with a seed of its own.")] = 1,
    processes: Annotated[int, typer.Option(min=1, help="Parts that are simulated at once.")] = 1,
) -> None:
    """Simulate much traffic with faults, over many adapters. The invariants are checked every 64 steps."""
    begun = perf_counter()
    jobs = [
        _Job(
            seed + part,
            requests // parts + (part < requests % parts),
            adapters,
            rate,
            faults_every or None,
            tier_pages,
            tier_fails,
            replicas,
            prefill_replicas,
            transfer_fails,
        )
        for part in range(parts)
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = pool.map(_part, jobs)
        found = list(track(running, "simulating", total=parts, console=Console(stderr=True)))
    outcomes: dict[str, int] = {}
    faults: dict[str, int] = {}
    for part in found:
        for name, number in part.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + number
        for name, number in part.faults.items():
            faults[name] = faults.get(name, 0) + number
    sent = sum(part.requests for part in found)
    virtual = sum(part.seconds for part in found)
    restarts = sum(part.restarts for part in found)
    typer.echo(f"{sent} requests in {virtual:.0f} virtual and {perf_counter() - begun:.0f} real seconds")
    typer.echo(f"ended: {dict(sorted(outcomes.items()))}")
    typer.echo(f"faults: {dict(sorted(faults.items()))}, {restarts} restarts")
    if tier_pages:
        queries, hits, tier = (
            sum(getattr(part, name) for part in found) for name in ("queries", "hits", "tier_hits")
        )
        typer.echo(f"prompt tokens: {queries}, {hits} of them cached, {tier} of these from the disk")
    if replicas > 1:
        moved, prefilled, pages = (
            sum(getattr(part, name) for part in found) for name in ("moved", "prefilled", "transferred")
        )
        typer.echo(f"{moved} moved, {prefilled} prefilled, {pages} pages came from other engines")
    typer.echo("0 violations")


class _Job(NamedTuple):
    """The arguments of `swarm.busy`."""

    seed: int
    requests: int
    adapters: int
    rate: float
    faults_every: float | None
    tier_pages: int
    tier_fails: float
    replicas: int
    prefill: PrefillReplicas
    transfer_fails: float


class _Figures(NamedTuple):
    """What is added up over the parts; see SimulationReport."""

    requests: int
    seconds: float
    restarts: int
    outcomes: dict[str, int]
    faults: dict[str, int]
    queries: int
    hits: int
    tier_hits: int
    prefilled: int
    transferred: int
    moved: int


def _part(job: _Job) -> _Figures:
    from personae.actors.simulation.swarm import busy
    from personae.actors.simulation.world import simulate

    report = simulate(busy(*job))
    return _Figures(*(getattr(report, name) for name in _Figures._fields))


@app.command()
def capacity(
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 20.0,
    requests: Annotated[int, typer.Option(min=1)] = 4000,
    adapters: Annotated[int, typer.Option(min=0)] = 100,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 512,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of the longest answer.")] = 256,
    slots: Annotated[int, typer.Option(min=1, help="Sequences in one step.")] = 64,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the KV cache holds.")] = 65536,
    places: Annotated[int, typer.Option(min=1, help="Adapters on the device at once.")] = 32,
    costs: Annotated[
        str, typer.Option(help="Seconds, as step=0.01,token=0.0001,row=0.0002,adapter=0.0001,context=0.")
    ] = "",
    first_goal: FirstGoal = 1.0,
    token_goal: Annotated[float, typer.Option(help="Goal: seconds a token after that.")] = 0.1,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the requests that must meet the goals.")
    ] = 0.99,
    most: Annotated[int, typer.Option(min=1, help="Replicas at most.")] = 16,
    seed: int = 0,
    chart_file: Annotated[Path | None, typer.Option("--chart", help="Write an SVG here.")] = None,
) -> None:
    """Find how many replicas some traffic needs to meet its goals."""
    from personae.actors.simulation.capacity import LatencyGoal, answers, chart
    from personae.actors.simulation.scenario import Scenario
    from personae.actors.simulation.trouble import Costs
    from personae.actors.simulation.workload import SimulatedWorkload

    given: dict[str, Any] = _numbers(costs, {field.name for field in fields(Costs)} - {"runs_ahead"})
    scenario = Scenario(
        seed,
        SimulatedWorkload(
            requests, rate, adapters=adapters, prompt=(1, prompt), answer=(1, answer), leaves=0, slow=0
        ),
        replace(Costs(), **given),
        pages=-(-kv_tokens // 16),
        page_size=16,
        slots=slots,
        batch=max(slots, 2048),
        places=places,
        window=64,
        max_live=4096,
        longest_wait=float("inf"),
    )
    goal = LatencyGoal(first_goal, token_goal, share)
    typer.echo(f"{'replicas':>8}{'first token, s':>16}{'each token, ms':>16}{'refused':>9}{'busy':>6}")
    found = []
    for each in answers(scenario, goal, most):
        found.append(each)
        typer.echo(
            f"{each.replicas:>8}{each.first:>16.3f}{each.token * 1000:>16.1f}{each.refused:>9}"
            f"{each.busy:>6.0%}{'  meets both' if each.met else ''}"
        )
    if chart_file is not None:
        chart_file.write_text(chart(found, scenario, goal), encoding="utf-8")
    enough = next((each.replicas for each in found if each.met), None)
    typer.echo(f"{enough} replicas are enough" if enough else f"{most} replicas are not enough")
    raise typer.Exit(0 if enough else 1)


def _numbers(text: str, names: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if name not in names:
            raise typer.BadParameter(
                f"{name!r} is not one of {', '.join(sorted(names))}", param_hint="--costs"
            )
        try:
            found[name] = float(number)
        except ValueError:
            raise typer.BadParameter(f"{number!r} is not a number", param_hint="--costs") from None
    return found
