"""A prefix from a tier after a restart compared with computing it: the time to the first token.

    python -m personae.evals.kv_disk --tokens 4096

The model is loaded once. Each round makes a new engine with an empty cache, twice: one finds the prefix in
--kv-disk (with --remote in --kv-remote), one computes it. The rounds alternate. Prints both medians and their
ratio.
"""

import random
import tempfile
import time
from dataclasses import replace as replace_options
from pathlib import Path
from statistics import median
from typing import Annotated

import anyio
import typer
from msgspec.structs import replace

from personae.actors.assembly import Assembly, assemble
from personae.actors.in_process import open_in_process
from personae.actors.options import EngineOptions
from personae.api.bundled import DEMO, smollm2
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog


async def first_token(
    assembly: Assembly, log: SequenceLog, settle: float
) -> tuple[float, int, tuple[int, ...]]:
    """Seconds to the first token on a new engine, how many prompt tokens were cached, and the answer. Waits
    `settle` seconds after it, in which idle pages are stored."""
    seconds, cached = 0.0, 0
    tokens: tuple[int, ...] = ()
    async with open_in_process(assembly.engine_spec) as client:
        begun = time.perf_counter()
        async with client.stream([log]) as stream:
            async for delta in stream:
                if not tokens:
                    seconds, cached = time.perf_counter() - begun, delta.cached or 0
                tokens += delta.tokens
        await anyio.sleep(settle)
    return seconds, cached, tokens


async def measure(options: EngineOptions, tokens: int, rounds: int) -> None:
    """Play the rounds, and print."""
    assembly = assemble(options)
    vocab_size = assembly.engine_spec.vocab_size
    prompt = tuple(random.Random(1).choices(range(10, vocab_size), k=tokens + 8))
    log = SequenceLog("a", prompt, len(prompt), SamplingParams(max_tokens=8, temperature=0.0, seed=0))
    known, new = replace(log, salt=b"known"), replace(log, salt=b"new")
    await first_token(assembly, known, 5.0)
    found, computed = [], []
    for number in range(rounds):
        fetched, cached, answer = await first_token(assembly, known, 0.0)
        taken, none, truth = await first_token(assembly, replace(new, salt=b"new %d" % number), 0.0)
        if answer != truth or cached < tokens or none:
            raise SystemExit(f"round {number}: {cached} and {none} tokens cached, {answer} and {truth}")
        found.append(fetched)
        computed.append(taken)
        print(f"round {number}: {fetched:.3f} s from the tier, {taken:.3f} s computed", flush=True)
    ratio = median(computed) / median(found)
    print(f"{tokens} tokens: {median(found):.3f} s, {median(computed):.3f} s, {ratio:.1f}x sooner")


def main(
    tokens: Annotated[int, typer.Option(min=16, help="Of the prefix.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    remote: Annotated[str | None, typer.Option(help="The URL of an object store instead of a disk.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model; without it SmolLM2-135M if it is installed, or the demo's.")
    ] = None,
) -> None:
    """Measure and print."""
    folder = model or smollm2() or DEMO / "model"
    with tempfile.TemporaryDirectory() as disk:
        options = EngineOptions(folder, kv_memory=2**29)
        if remote is None:
            options = replace_options(options, kv_disk=Path(disk), kv_disk_bytes=2**32)
        else:
            options = replace_options(options, kv_remote=remote, kv_remote_bytes=2**32)
        anyio.run(measure, options, tokens, rounds)


if __name__ == "__main__":
    typer.run(main)
