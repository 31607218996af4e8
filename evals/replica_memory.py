"""The memory of two engines on one machine compared with that of one, on Linux.

    python -m personae.evals.replica_memory

Starts a server with `--replicas 1` and with 2, asks each engine some requests, and adds up what all processes
of the server hold: each one's own memory and its part of shared memory (PSS). Weights are the mapped file of
packed weights, which engines share, or the copy of it that a single engine makes where files have no huge
pages. Prints both, and the ratio of two engines to one. Exit code 1 if two engines' weights take more than
1.15 times those of one.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import typer

from personae.api.bundled import NAMED, smollm2
from personae.evals.kills import engine_processes
from personae.evals.served import Served
from personae.evals.slow_grammars import memory_of

MOST = 1.15  # times the weights' memory of one engine
ASKED = 16  # requests
SETTLE_SECONDS = 10.0  # for packed weights to be written, mapped and copied
_SUFFIX = ".weights"


class Held(NamedTuple):
    """Bytes of a server: of all its processes, and of the weights that its engines have mapped, in how many
    engines, from files of so many bytes."""

    everything: int
    mapped: int
    engines: int
    file: int


def mapped_weights(pid: int) -> Iterator[tuple[int, str]]:
    """A process's part of the bytes of each mapped file of packed weights, and the file's path."""
    path = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if not line.split(maxsplit=1)[0].endswith(":"):
            path = line.split(maxsplit=5)[-1]
        elif line.startswith("Pss:") and path.endswith(_SUFFIX):
            yield 1024 * int(line.split()[1]), path


def held(model: Path, replicas: int, more: list[str]) -> Held:
    """What a server with so many engines holds after some requests."""
    with Served([str(model), "--replicas", f"{replicas}", *more], Path(os.devnull)) as served:
        name = httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"]
        for number in range(ASKED):
            body = {"model": name, "prompt": f"Story {number} begins", "max_tokens": 16}
            httpx.post(f"{served.url}/v1/completions", json=body, timeout=300).raise_for_status()
        time.sleep(SETTLE_SECONDS)
        engines = engine_processes(served.pid)
        found = [part for pid in engines for part in mapped_weights(pid)]
        return Held(
            memory_of(served.pid),
            sum(size for size, _ in found),
            len(engines),
            sum(Path(path).stat().st_size for path in {path for _, path in found}),
        )


def main(
    more: Annotated[list[str] | None, typer.Argument(help="Options of `personae serve`, after --.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model; else SmolLM2-135M if it is installed, or the demo's.")
    ] = None,
) -> None:
    """Measure and print."""
    served = model or smollm2() or NAMED
    held(served, 1, more or [])  # packs the weights, if this is the first start
    two = held(served, 2, more or [])
    if not two.mapped:
        raise SystemExit("this model's weights are not kept packed, so each engine has its own")
    one = held(served, 1, more or [])
    alone = one.mapped or two.file  # a copy of its own
    for name, first, second in (
        ("weights", alone, two.mapped),
        ("everything", one.everything, two.everything),
    ):
        print(
            f"{name}: one engine {first / 2**20:.0f} MiB, {two.engines} engines {second / 2**20:.0f} MiB: "
            f"{second / first:.2f} times"
        )
    sys.exit(two.mapped > MOST * alone)


if __name__ == "__main__":
    typer.run(main)
