"""Prefixes that do not stay in memory: `--kv-disk` compared with llama.cpp's saved slots and host cache.

    python -m personae.evals.bench.prefix_caches --peer PYTHON FILE.gguf

PYTHON is an interpreter with the package `xllamacpp`, as for `evals.bench.llama_cpp`. Both serve the same
file over HTTP with AVX2, one after the other. Prompts are random token ids.

First a prefix after a restart. Requests have llama.cpp save its slot when the prompt was computed, and
restore it; we do both by ourselves. Prints medians of the seconds until the first token, with the time of
restoring, and until that of another prompt of the same length, which is computed.

Then sessions that do not fit in memory: all have their first turn, then all have their second, and so on. A
turn is the session's prompt so far and new tokens. Both have `--memory` for keys and values. llama.cpp puts
the slots that it needs for others in the host's memory, we put pages on a disk. Prints turns per second with
and without that.

Without such a cache every turn computes its whole prompt: with T turns of N new tokens a session computes
N x T x (T + 1) / 2. On two cores llama.cpp computed a prefix of 4,096 tokens at 142 a second. So the sessions
have 10,240 to compute by default, which takes it a good minute. Its threads spin while they wait for one
another: on cores that do other work it takes many times as long. `--rounds 0` leaves out the restarts.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx
import torch

from personae.engine.checkpoints import open_checkpoint
from personae.engine.kv import KVCache
from personae.evals.bench.instructions import AVX2
from personae.evals.bench.llama_cpp import free_port, serving

PEER = """
import sys, threading, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.slot_save_path = sys.argv[1:3]
params.port, threads, slots, context, params.cache_ram_mib = map(int, sys.argv[3:])
params.n_parallel, params.n_ctx, params.n_gpu_layers, params.warmup = slots, slots * context, 0, True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.endpoint_slots = True
server = xllamacpp.Server(params)
threading.Event().wait()
"""
ANSWER = 8  # tokens
SLOT = {"filename": "prefix.bin"}
STORED_SECONDS = 5.0  # after which an idle engine has stored its pages
HOST_MIB = 8192  # of llama.cpp's cache on the host


class Comparison(NamedTuple):
    """What is measured, with which programs."""

    file: Path
    peer: str
    folder: Path
    tokens: int
    rounds: int
    sessions: int
    turns: int
    new: int
    clients: int
    memory: int


@contextmanager
def ours(run: Comparison, *options: str) -> Iterator[str]:
    """Personae's address."""
    port = free_port()
    command = [sys.executable, "-m", "personae", "serve", str(run.file), "--port", str(port)]
    with serving([*command, "--speculate", "off", *options], port, AVX2) as address:
        yield address


@contextmanager
def theirs(run: Comparison, slots: int, context: int, host_mib: int) -> Iterator[str]:
    """llama.cpp's address."""
    port = free_port()
    numbers = map(str, (port, os.cpu_count(), slots, context, host_mib))
    command = [run.peer, "-c", PEER, str(run.file), f"{run.folder}/", *numbers]
    with serving(command, port, {}) as address:
        yield address


async def answer(
    client: httpx.AsyncClient, prompt: list[int], count: int, session: str = ""
) -> tuple[float, int]:
    """The seconds of an answer, and how many prompt tokens were not computed for it."""
    model = (await client.get("/v1/models")).json()["data"][0]["id"]
    begun = time.perf_counter()
    body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    response = await client.post(
        "/v1/completions", json=body, headers={"x-session-id": session} if session else {}
    )
    seconds = time.perf_counter() - begun
    found = response.raise_for_status().json()
    details = found["usage"].get("prompt_tokens_details") or {}
    return seconds, found.get("timings", {}).get("cache_n", details.get("cached_tokens", 0))


def drawn(seed: str, count: int) -> list[int]:
    """A prompt."""
    chance = random.Random(seed)
    return [chance.randrange(1000, 40000) for _ in range(count)]


def prefix_after_restarts(run: Comparison, name: str) -> None:
    """Measure and print one server's seconds until the first token."""
    prompt = drawn("prefix", run.tokens + ANSWER)
    disk = ("--kv-disk", str(run.folder / "disk"))

    def opened() -> AbstractContextManager[str]:
        return ours(run, *disk) if name == "Personae" else theirs(run, 1, len(prompt) + 64, 0)

    async def first(address: str) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=600) as client:
            await answer(client, prompt, 1)
            if name == "Personae":
                await anyio.sleep(STORED_SECONDS)
            else:
                (await client.post("/slots/0?action=save", json=SLOT)).raise_for_status()

    async def again(address: str, number: int) -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=address, timeout=600) as client:
            await answer(client, drawn("warm", 16), 4)
            begun = time.perf_counter()
            if name != "Personae":
                (await client.post("/slots/0?action=restore", json=SLOT)).raise_for_status()
            _, cached = await answer(client, prompt, 1)
            found = time.perf_counter() - begun
            if cached < run.tokens:
                raise SystemExit(f"{name}: {cached} of {run.tokens} tokens were found")
            computed, cached = await answer(client, drawn(f"new {number}", len(prompt)), 1)
            if cached > ANSWER:
                raise SystemExit(f"{name}: {cached} tokens of a new prompt were found")
            return found, computed

    with opened() as address:
        anyio.run(first, address)
    seconds = []
    for number in range(run.rounds):
        with opened() as address:
            seconds.append(anyio.run(again, address, number))
    found, computed = (statistics.median(each) for each in zip(*seconds, strict=True))
    print(f"| {name} | {computed:.2f} s | {found:.2f} s | {computed / found:.1f} times |", flush=True)


async def play(address: str, run: Comparison) -> tuple[float, int]:
    """Turns per second of all sessions, and the prompt tokens that were not computed."""
    cached = 0

    async def ask(client: httpx.AsyncClient, turn: int, left: list[int]) -> None:
        nonlocal cached
        while left:
            session = left.pop()
            prompt = [token for past in range(turn + 1) for token in drawn(f"{session} {past}", run.new)]
            _, found = await answer(client, prompt, ANSWER, f"{session}")
            cached += found

    limits = httpx.Limits(max_keepalive_connections=0)  # llama.cpp closes what is idle for 5 s
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:
        await answer(client, drawn("warm", 16), 4)
        begun = time.perf_counter()
        for turn in range(run.turns):
            left = list(range(run.sessions))[::-1]
            async with anyio.create_task_group() as tasks:
                for _ in range(run.clients):
                    tasks.start_soon(ask, client, turn, left)
        seconds = time.perf_counter() - begun
    return run.sessions * run.turns / seconds, cached


def sessions(run: Comparison) -> None:
    """Measure and print both servers' turns per second."""
    config = open_checkpoint(run.file).config()
    per_token = KVCache.bytes_per_page(config.kv_specs, 16, torch.bfloat16) // 16
    longest = run.turns * run.new + ANSWER
    options = ["--kv-memory", f"{run.memory}", "--max-seqs", f"{run.clients}"]
    options += ["--max-model-len", f"{longest + ANSWER}"]
    context = run.memory // per_token // run.clients
    if context < longest or run.sessions * longest * per_token <= run.memory:
        raise SystemExit(
            f"--memory: a session has {longest * per_token} bytes, of which {run.clients} must fit at once, "
            f"and {run.sessions} must not"
        )
    print(f"{per_token} bytes a token, {context} tokens for each of llama.cpp's {run.clients} slots")
    servers: dict[str, Callable[[], AbstractContextManager[str]]] = {
        "Personae": lambda: ours(run, *options),
        "Personae, with a disk": lambda: ours(run, *options, "--kv-disk", str(run.folder / "sessions")),
        "llama.cpp": lambda: theirs(run, run.clients, context, 0),
        "llama.cpp, with its cache on the host": lambda: theirs(run, run.clients, context, HOST_MIB),
    }
    for name, server in servers.items():
        with server() as address:
            rate, cached = anyio.run(play, address, run)
        print(f"| {name} | {rate:.2f} turns/s | {cached} prompt tokens not computed |", flush=True)


def main() -> None:
    """Measure, and print rows of tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--peer", required=True, help="a Python that has xllamacpp")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prefix")
    parser.add_argument("--rounds", type=int, default=3, help="restarts")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--new", type=int, default=64, help="new tokens in each turn")
    parser.add_argument("--clients", type=int, default=4, help="turns at once")
    parser.add_argument("--memory", type=int, default=2**25, help="bytes of keys and values")
    given = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        run = Comparison(folder=Path(folder), **given)
        if run.rounds:
            print("| | computed | after a restart | sooner |\n|---|---|---|---|")
            for name in ("Personae", "llama.cpp"):
                prefix_after_restarts(run, name)
        sessions(run)


if __name__ == "__main__":
    main()
