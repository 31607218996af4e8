"""Random traffic on an engine that is too small for it, each stream compared with the same request alone.

    python -m personae.evals.isolation --seeds 100
    python -m personae.evals.isolation --seeds 100 --speculate draft --draft-model DIR
    python -m personae.evals.isolation --seeds 100 --tier-fails 0.2

A seed defines some requests (base and adapters, prompts that share beginnings or continue answers, free and
bound, all sampling parameters), the sizes of an engine with memory for a few of them, and the order of
events: requests arrive, are planned, computed, read and withdrawn, and the engine is lost. So sequences are
preempted, chunked, jumped, guessed and cached, and adapters are loaded and evicted. Alone means a new engine
for every request. Tokens, ends and log-probabilities must be the same: with AVX-512 in bfloat16 to the last
bit; in float32 log-probabilities up to rounding, which may also choose another token once in 10,000. Prints
the differences. Exit code 1 if there are more, or if there are tiers and nothing came from them.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import typer

from personae.api.bundled import DEMO
from personae.engine.sequence import TokenLogprobs
from personae.evals.isolation.fixture import EngineFixture, ObservedStream
from personae.evals.isolation.load import Load
from personae.evals.isolation.tier import UnreliableTier
from personae.evals.isolation.traffic import Past, RandomTraffic, draw_scene

ROUNDING = 2e-4  # of a log-probability in float32
BETWEEN = 10_000  # tokens per token that rounding may choose
WAYS: dict[str, tuple[str, str | None]] = {
    "bfloat16": ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
    "float32": ("float32", None),
}


class StreamDifference(NamedTuple):
    """Where a stream differs from the same request alone. `chosen`: another token was chosen, perhaps by
    rounding."""

    id: str
    what: str
    chosen: bool = False


def difference(
    id: str, found: ObservedStream, alone: ObservedStream, rounding: float, *, left: bool = False
) -> StreamDifference | None:
    """The first difference; None if there is none. A stream that was withdrawn may be shorter."""
    for what, mine, theirs in (
        ("token", found.tokens, alone.tokens),
        ("logprob of token", found.logprobs, alone.logprobs),
        ("logprob of prompt token", found.prompt_logprobs, alone.prompt_logprobs),
    ):
        for at, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if a != b and not _near(a, b, rounding):
                return StreamDifference(id, f"{what} {at} is {a}, alone {b}", chosen=what == "token")
        if len(mine) > len(theirs) or (len(mine) < len(theirs) and not left):
            end = f"it ended {found.end}, alone {alone.end}"
            return StreamDifference(id, f"{what}s: {len(mine)}, alone {len(theirs)}; {end}")
    if found.end != alone.end and not left:
        return StreamDifference(id, f"it ended {found.end}, alone {alone.end}")
    return None


def _near(a: object, b: object, rounding: float) -> bool:
    """Whether two log-probabilities of the same token differ only by rounding. Ranks and the order of the
    others may then differ too."""
    if not (isinstance(a, TokenLogprobs) and isinstance(b, TokenLogprobs)):
        return False
    return a.token == b.token and abs(a.logprob - b.logprob) <= rounding


def play(
    fixture: EngineFixture,
    seed: int,
    requests: int,
    rounding: float,
    speculate: str = "ngram",
    tier_fails: float | None = None,
) -> tuple[list[StreamDifference], Counter[str]]:
    """The differences of one seed, and what happened in it. With `tier_fails`, pages go to a disk and an
    object store, and this share of the operations goes wrong."""
    dice = Random(seed)
    scene, traffic = draw_scene(dice, fixture), RandomTraffic(dice, fixture)
    past: Past = []
    for number in range(requests):
        log = traffic.draw(f"{seed}-{number}", past)
        past.append((log, fixture.alone(log)))
    with ExitStack() as stack:
        tier = None
        if tier_fails is not None:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            page_bytes = fixture.page_bytes(scene.layout, speculate)
            tier = UnreliableTier(folder, page_bytes, Random(seed), tier_fails)
            stack.callback(tier.close)
            scene = replace(scene, losses=max(scene.losses, 0.03))  # after which it has something to give
        clients = Load(fixture, scene, (log for log, _ in past), dice, speculate, tier)
        clients.play()
    differences = []
    for log, alone in past:
        left = log.id in clients.left
        how = difference(log.id, clients.streams[log.id], alone, rounding, left=left)
        if how is not None:
            differences.append(how)
    clients.happened["requests"] += requests
    clients.happened["tokens"] += sum(len(stream.tokens) for stream in clients.streams.values())
    return differences, clients.happened


def judged(differ: list[StreamDifference], tokens: int, rounding: float) -> int:
    """How many of the differences are errors, for this many tokens."""
    chosen = sum(one.chosen for one in differ)
    forgiven = min(chosen, 1 + tokens // BETWEEN) if rounding else 0
    return len(differ) - forgiven


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    first: Annotated[int, typer.Option(help="The first of them.")] = 0,
    requests: Annotated[int, typer.Option(min=1, help="Of a seed.")] = 16,
    way: Annotated[
        list[str] | None, typer.Option(help=f"Only this of {', '.join(WAYS)}. Repeatable.")
    ] = None,
    speculate: Annotated[str, typer.Option(help="As of `personae serve`.")] = "ngram",
    tier_fails: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Keep pages in tiers, and have this share of operations fail."),
    ] = None,
    draft_model: Annotated[Path | None, typer.Option(help="For draft or auto: a model or a head.")] = None,
    model: Annotated[Path, typer.Option(help="A model folder.")] = DEMO / "model",
    adapters: Annotated[Path, typer.Option(help="A folder of adapter folders.")] = DEMO / "adapters",
) -> None:
    """Play every seed in every way, print, judge."""
    wrong = 0
    for name in way or WAYS:
        dtype, quantize = WAYS[name]
        fixture, rounding = (
            EngineFixture(model, [adapters], dtype, quantize, draft_model),
            ROUNDING if dtype == "float32" else 0.0,
        )
        happened: Counter[str] = Counter()
        differ: list[StreamDifference] = []
        for seed in range(first, first + seeds):
            found, what = play(fixture, seed, requests, rounding, speculate, tier_fails)
            happened += what
            differ += found
            for one in found:
                print(f"{name}, {one.id} differs: {one.what}", flush=True)
        print(
            f"{name}: " + ", ".join(f"{count} {what}" for what, count in sorted(happened.items())), flush=True
        )
        wrong += judged(differ, happened["tokens"], rounding)
        if tier_fails is not None and not happened["tokens from the tier"]:
            print(f"{name}: no token came from the tiers; it takes more requests", flush=True)
            wrong += 1
    raise typer.Exit(wrong > 0)


if __name__ == "__main__":
    typer.run(main)
