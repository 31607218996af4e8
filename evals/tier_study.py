"""A study of tiers, and of engines that only compute prompts, in the simulator: runs it and draws its plots.

    python -m personae.evals.tier_study tiers results.jsonl --requests 3000
    python -m personae.evals.tier_study prefill results.jsonl --requests 3000
    python -m personae.evals.tier_study roles results.jsonl
    python -m personae.evals.tier_study trace conversation_trace.jsonl results.jsonl --requests 3000
    python -m personae.evals.tier_study trace-prefill conversation_trace.jsonl results.jsonl --requests 3000
    python -m personae.evals.tier_study draw results.jsonl docs/internals/tiers

`trace` and `trace-prefill` play requests that Mooncake has published (`FAST25-release/traces` of
kvcache-ai/Mooncake), with one token for each 32. `roles` plays a load that changes. All append a line
per run to the file, so a study can run in parts. `draw` makes a table, and an SVG for each figure, from all
lines of the file.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import msgspec
import typer

from personae.actors.options import PrefillReplicas
from personae.actors.simulation.capacity import quantile
from personae.actors.simulation.scenario import Scenario
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import BLOCK, SimulatedWorkload, TracedPrompt
from personae.actors.simulation.world import simulate
from personae.evals.plots import lines

app = typer.Typer(add_completion=False, no_args_is_help=True)

Study = Literal["tiers", "prefill"]
PAGES = 512  # of the device
SCALE = 512 // BLOCK  # a block of a trace has 512 tokens
SIZES = (0, 1, 2, 4, 8, 16)  # of the tier, in times the device's pages
PREFILL: tuple[PrefillReplicas, ...] = (0, 1, 2, 3, "auto")  # engines of four
_COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed")


class TracedRequest(msgspec.Struct, frozen=True):
    """A line of a trace: when it came, in milliseconds, its tokens, and the blocks of its prompt."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class Result(msgspec.Struct, frozen=True):
    """A run: the line and the place in the plots. `hits` is a share of the prompt tokens, `from_tier` of
    these; times are milliseconds."""

    study: Study
    line: str
    given: float | Literal["auto"]
    hits: float
    from_tier: float
    first_p50: float
    first_p99: float
    pause_p99: float


FIGURES: dict[str, tuple[str, str, str, Callable[[Result], float]]] = {
    "hits": ("tiers", "prompt tokens not computed, %", "tier / device memory", lambda r: 100 * r.hits),
    "first_token": ("tiers", "first token, p99, ms", "tier / device memory", lambda r: r.first_p99),
    "prefill_first": ("prefill", "first token, p99, ms", "prefill engines of 4", lambda r: r.first_p99),
    "prefill_pauses": (
        "prefill",
        "longest pause of 100, ms",
        "prefill engines of 4",
        lambda r: r.pause_p99,
    ),
}


def with_a_tier(times: int, kind: str, requests: int, seed: int) -> Scenario:
    """One engine whose memory has room for a part of what is asked for again, and a tier of `times` as many
    pages. The prompts are those of conversations. If `kind` ends with `slow`, a page takes ten times as long
    to fetch."""
    load = SimulatedWorkload(
        requests=requests,
        rate=25.0,
        adapters=0,
        tenants=4,
        prompt=(20, 120),
        prefixed=0.0,
        answer=(1, 30),
        schemas=0.0,
        leaves=0.0,
        slow=0.0,
        conversations=120,
    )
    costs = Costs(step=0.005, token=0.0001, fetch=0.002 if kind.endswith("slow") else 0.0002)
    return Scenario(
        seed,
        load,
        costs,
        pages=PAGES,
        page_size=16,
        slots=32,
        batch=256,
        max_live=100_000,
        lull=1_000_000,
        every=1_000,
        longest_wait=600.0,
        tier_pages=times * PAGES,
    )


def of_a_trace(times: int, file: Path, requests: int, seed: int) -> Scenario:
    """The beginning of a trace, on the engine of `with_a_tier` with five times the time for a token."""
    scenario = with_a_tier(times, file.stem, requests, seed)
    return replace(scenario, workload=_traced(file, requests), costs=replace(scenario.costs, token=0.0005))


def trace_apart(prefill: PrefillReplicas, file: Path, requests: int, seed: int) -> Scenario:
    """The beginning of a trace on the engines of `apart`. A step computes 32 tokens of each answer at 10 ms,
    and a token of a prompt stands for 32 at 47 us."""
    costs = Costs(step=0.32, token=0.0015, row=0.003)
    load = _traced(file, requests)
    return replace(apart(prefill, "", requests, seed), workload=load, costs=costs, pages=8192)


def _traced(file: Path, requests: int) -> SimulatedWorkload:
    with file.open("rb") as text:
        traced = [msgspec.json.decode(line, type=TracedRequest) for line in islice(text, requests)]
    return SimulatedWorkload(
        requests=len(traced),
        trace=tuple(one.timestamp / 1000 for one in traced),
        prompts=tuple(
            TracedPrompt(one.hash_ids, max(one.input_length // SCALE, 1), max(one.output_length // SCALE, 1))
            for one in traced
        ),
        adapters=0,
        tenants=1,
        schemas=0.0,
        siblings=0.0,
        leaves=0.0,
        slow=0.0,
    )


def apart(prefill: PrefillReplicas, kind: str, requests: int, seed: int) -> Scenario:
    """Four engines, `prefill` of which only compute prompts; short prompts, or long ones among them."""
    load = SimulatedWorkload(
        requests=requests,
        rate=20.0 if kind == "short prompts" else 6.0,
        adapters=0,
        prompt=(4, 200) if kind == "short prompts" else (200, 1500),
        prefixed=0.0,
        answer=(20, 120),
        schemas=0.0,
        leaves=0.0,
        slow=0.0,
        speculates=False,
    )
    return Scenario(
        seed,
        load,
        Costs(step=0.005, token=0.0003, row=0.0002),
        pages=4096,
        page_size=16,
        slots=32,
        batch=512,
        max_live=100_000,
        lull=1_000_000,
        every=1_000,
        longest_wait=600.0,
        replicas=4,
        transfer=True,
        prefill=prefill,
    )


def changing(prefill: PrefillReplicas, seed: int) -> Scenario:
    """The engines of `apart`, with short prompts all the time, 8 a second, and in the second of three minutes
    5 long prompts a second among them."""
    dice = Random(seed)
    arrivals: list[tuple[float, TracedPrompt]] = []
    for begin, end, rate, (least, most) in ((0, 180, 8.0, (4, 100)), (60, 120, 5.0, (400, 1200))):
        at = begin + dice.expovariate(rate)
        while at < end:
            tokens = dice.randint(least, most)
            blocks = tuple(dice.randrange(2**30) for _ in range(-(-tokens // BLOCK)))
            arrivals.append((at, TracedPrompt(blocks, tokens, dice.randint(20, 120))))
            at += dice.expovariate(rate)
    arrivals.sort()
    scenario = apart(prefill, "long prompts", len(arrivals), seed)
    load = replace(
        scenario.workload, trace=tuple(at for at, _ in arrivals), prompts=tuple(one for _, one in arrivals)
    )
    return replace(scenario, workload=load)


Requests = Annotated[int, typer.Option(min=1)]


@app.command()
def tiers(results: Path, requests: Requests = 3000, seed: int = 1) -> None:
    """Serve the same requests with tiers of different sizes."""
    for kind in ("conversations", "conversations, slow"):
        for times in SIZES:
            _run(results, "tiers", kind, times, with_a_tier(times, kind, requests, seed))


@app.command()
def prefill(results: Path, requests: Requests = 3000, seed: int = 1) -> None:
    """Serve the same requests with more and fewer engines that only compute prompts."""
    for kind in ("short prompts", "long prompts"):
        for count in PREFILL:
            _run(results, "prefill", kind, count, apart(count, kind, requests, seed))


@app.command()
def trace(file: Path, results: Path, requests: Requests = 3000, seed: int = 1) -> None:
    """Serve the first requests of a published trace with tiers of different sizes."""
    for times in SIZES:
        _run(results, "tiers", file.stem, times, of_a_trace(times, file, requests, seed))


@app.command("trace-prefill")
def trace_prefill(file: Path, results: Path, requests: Requests = 3000, seed: int = 1) -> None:
    """Serve the first requests of a published trace with more and fewer engines that only compute prompts."""
    for count in PREFILL:
        _run(results, "prefill", file.stem, count, trace_apart(count, file, requests, seed))


@app.command()
def roles(results: Path, seed: int = 1) -> None:
    """Serve a load that changes, with fixed numbers of prefill engines, and with as many as it asks for."""
    for count in PREFILL:
        _run(results, "prefill", "long prompts for a minute of three", count, changing(count, seed))


def _run(results: Path, study: Study, line: str, given: PrefillReplicas, scenario: Scenario) -> None:
    report = simulate(scenario)
    result = Result(
        study,
        line,
        given,
        report.hits / max(report.queries, 1),
        report.tier_hits / max(report.hits, 1),
        1000 * quantile(report.waits, 0.5),
        1000 * quantile(report.waits, 0.99),
        1000 * quantile(report.pauses, 0.99) if report.pauses else 0.0,
    )
    with results.open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


@app.command()
def draw(results: Path, folder: Path) -> None:
    """Write the plots into a folder, and print the table."""
    found = [msgspec.json.decode(line, type=Result) for line in results.read_bytes().splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    for name, (study, title, given, value) in FIGURES.items():
        own = [one for one in found if one.study == study]
        names = dict.fromkeys(one.line for one in own)
        points = {
            name: [(one.given, value(one)) for one in own if one.line == name and one.given != "auto"]
            for name in names
        }
        colours = dict(zip(names, _COLOURS, strict=False))
        (folder / f"{name}.svg").write_text(lines(title, given, points, colours), encoding="utf-8")
    typer.echo("\n".join(table(found)))


def table(found: list[Result]) -> Iterator[str]:
    """All results, as Markdown."""
    yield "| | | not computed | of these from the tier | first token p50, ms | p99, ms | pauses p99, ms |"
    yield "|---|---|---|---|---|---|---|"
    for one in found:
        given = one.given if one.given == "auto" else f"{one.given:g}"
        yield (
            f"| {one.line} | {given} | {one.hits:.0%} | {one.from_tier:.0%} | {one.first_p50:.0f} | "
            f"{one.first_p99:.0f} | {one.pause_p99:.0f} |"
        )


if __name__ == "__main__":
    app()
