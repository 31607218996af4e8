"""Full load for a long time, with clients that disconnect and clients that read slowly: does anything grow?

Every third answer is bound by one of many schemas, so grammars are compiled and dropped as well.

    python -m personae.evals.soak --model evals/demo/model --adapters evals/demo/adapters --minutes 60

Samples, every `--every` seconds: resident memory and open files of the frontend and the engine core, and the
frontend's tasks. The first fifth of the samples is the warm-up. Exit code 1 if anything grows by more than
`--growth` (a share) from the second fifth to the last.
"""

import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Annotated

import anyio
import typer

from personae.actors.multi_process import MultiProcessEngine, open_multi_process
from personae.actors.options import EngineOptions
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.grammar.spec import GrammarSpec

NAMES = ("front MiB", "back MiB", "front files", "back files", "tasks")
SCHEMAS = 512
ENOUGH = 64  # tokens in which an answer to any of the schemas is complete
SLACK = {"front MiB": 8, "back MiB": 8, "front files": 2, "back files": 2, "tasks": 4}


class Soak:
    """One run. `samples` has a row per sample, in the order of NAMES."""

    def __init__(self, engine_processes: MultiProcessEngine, seconds: float, tokens: int) -> None:
        self.engine_processes = engine_processes
        self.tokens = tokens
        self.ends = time.monotonic() + seconds
        self.answers = self.left = 0
        self.samples: list[tuple[float, ...]] = []

    async def client(self, number: int) -> None:
        """Send requests repeatedly. Every fourth client disconnects early, every eighth reads slowly."""
        dice = random.Random(number)
        client = self.engine_processes.client
        cards = list(client.models("default").values())
        turn = 0
        while time.monotonic() < self.ends:
            turn += 1
            length = dice.randrange(8, 120)
            bound = turn % 3 == 0
            budget = dice.randrange(1, self.tokens) + bound * ENOUGH
            log = SequenceLog(
                f"{number}-{turn}",
                tuple(dice.choices(range(4, client.vocab_size), k=length)),
                length,
                SamplingParams(max_tokens=budget, seed=turn),
                adapter=dice.choice(cards).adapter,
                eos=tuple(client.tokenizer.eos_ids),
                grammar=grammar(dice.randrange(SCHEMAS)) if bound else None,
            )
            leaves = dice.randrange(self.tokens) if number % 4 == 0 else None
            seen = 0
            async with client.stream([log]) as stream:
                async for delta in stream:
                    seen += len(delta.tokens)
                    if leaves is not None and seen > leaves:
                        self.left += 1
                        break
                    if number % 8 == 1:
                        await anyio.sleep(0.2)
            self.answers += 1

    async def watch(self, back: int, every: float) -> None:
        """Take samples until the end."""
        print(f"{'minute':>7}" + "".join(f"{name:>13}" for name in NAMES) + f"{'answers':>10}{'left':>7}")
        begun = time.monotonic()
        while time.monotonic() < self.ends:
            await anyio.sleep(every)
            tasks = len(anyio.get_running_tasks())
            sample = (memory(os.getpid()), memory(back), files(os.getpid()), files(back), tasks)
            self.samples.append(sample)
            row = "".join(f"{value:>13.0f}" for value in sample)
            minute = (time.monotonic() - begun) / 60
            print(f"{minute:>7.1f}{row}{self.answers:>10}{self.left:>7}", flush=True)

    def grown(self, share: float) -> list[str]:
        """What has grown from the beginning to the end by more than a share and a small constant."""
        fifth = max(len(self.samples) // 5, 1)
        found = []
        for index, name in enumerate(NAMES):
            values = [sample[index] for sample in self.samples]
            early, late = statistics.median(values[fifth : 2 * fifth + 1]), statistics.median(values[-fifth:])
            if late > early * (1 + share) + SLACK[name]:
                found.append(f"{name}: {early:.0f} -> {late:.0f}")
        return found


def grammar(number: int) -> GrammarSpec:
    """One of the schemas, each with different names."""
    names = {f"field_{number}_{part}": {"type": kind} for part, kind in enumerate(("integer", "boolean"))}
    schema = {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
    return GrammarSpec("json_schema", json.dumps(schema))


def memory(pid: int) -> float:
    """Resident MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def files(pid: int) -> int:
    """Open file descriptors."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def child(pid: int) -> int:
    """The one child process."""
    (only,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(only)


async def run(
    options: EngineOptions, minutes: float, streams: int, tokens: int, every: float, growth: float
) -> bool:
    """True if nothing has grown."""
    async with open_multi_process(options) as engine_processes:
        soak = Soak(engine_processes, 60 * minutes, tokens)
        async with anyio.create_task_group() as clients:
            clients.start_soon(soak.watch, child(os.getpid()), every)
            for number in range(streams):
                clients.start_soon(soak.client, number)
        await anyio.sleep(1)
        stats = engine_processes.client.stats()
        grown = soak.grown(growth)
        print(f"{soak.answers} answers, {soak.left} of them left early; {stats.restarts} restarts")
        print(f"left over: {stats.running} running, {stats.waiting} waiting, {stats.pages_used} pages")
        print("grown: " + ("; ".join(grown) or "nothing"))
        return not grown and not (stats.running or stats.waiting or stats.pages_used or stats.restarts)


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")],
    adapters: Annotated[Path | None, typer.Option(help="A folder of adapter folders.")] = None,
    minutes: float = 60,
    streams: int = 64,
    tokens: int = 48,
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 15,
    growth: float = 0.03,
) -> None:
    """Run, print, judge."""
    options = EngineOptions(model, (adapters,) if adapters else (), kv_memory=2**28, max_seqs=32)
    fine = anyio.run(
        run, options, minutes, streams, tokens, every, growth, backend_options={"use_uvloop": True}
    )
    raise typer.Exit(0 if fine else 1)


if __name__ == "__main__":
    typer.run(main)
