"""Personae and llama.cpp on the same GGUF files, in turn, on this machine held to AVX2.

    python -m personae.evals.bench.llama_cpp --peer PYTHON FILE.gguf …

PYTHON is an interpreter with the package `xllamacpp`: llama.cpp's own server, which its makers compile for
AVX2. Both servers stream over HTTP, with the threads that the machine has processors. Prompts are random
token ids and all differ, so no prefix is cached; but they favour guesses from the prompt, which
`--speculate off` leaves out. Each server first gets the whole load once, unmeasured. Prints medians of
tokens/s with each number of `--clients`, and of the seconds until the first token after a prompt of 512
tokens. On a busy machine only the ratios mean something.
"""

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import httpx

from personae.evals.bench.instructions import AVX2

START_SECONDS = 600.0
PEER = """
import sys, threading, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, threads, slots = sys.argv[1], *map(int, sys.argv[2:5])
params.n_parallel, params.n_ctx, params.n_gpu_layers, params.warmup = slots, slots * 1024, 0, True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(params)
threading.Event().wait()
"""


@contextmanager
def serving(command: list[str], port: int, environment: dict[str, str]) -> Iterator[str]:
    """Runs a server; its address, once it is ready."""
    with subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL) as process:  # noqa: S603  # named on the command line
        address = f"http://127.0.0.1:{port}"
        try:
            for _ in range(int(10 * START_SECONDS)):
                if process.poll() is not None:
                    raise SystemExit(f"{command} ended")
                with suppress(httpx.TransportError):
                    if httpx.get(f"{address}/health").is_success:
                        break
                time.sleep(0.1)
            yield address
        finally:
            process.kill()


async def measure(address: str, tokens: int, seed: int, groups: list[int]) -> list[float]:
    """Tokens/s of a warm server with each number of clients in `groups`, and its seconds until the first
    token."""
    drawn = random.Random(seed)
    each_anew = httpx.Limits(max_keepalive_connections=0)  # llama.cpp closes what is idle for 5 s
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=each_anew) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def answer(prompt: int, count: int) -> float:
            """The seconds until the first token."""
            body = {
                "model": model,
                "prompt": [drawn.randrange(1000, 40000) for _ in range(prompt)],
                "max_tokens": count,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            began, first = time.perf_counter(), 0.0
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        first = first or time.perf_counter() - began
            assert first, f"{address} answered nothing"
            return first

        async def play() -> list[float]:
            found = []
            for clients in groups:
                began = time.perf_counter()
                async with anyio.create_task_group() as tasks:
                    for _ in range(clients):
                        tasks.start_soon(answer, 16, tokens)
                found.append(clients * tokens / (time.perf_counter() - began))
            return [*found, await answer(512, 1)]

        await play()  # what a server does once, such as getting its memory, is not measured
        return await play()


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    """Measures and prints a table in Markdown for each file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--peer", required=True, help="a Python that has xllamacpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8], help="at the same time")
    parser.add_argument("--speculate", default="auto", help="as `personae serve` takes it")
    asked = parser.parse_args()
    figures = [*(f"{clients} clients, tokens/s" for clients in asked.clients), "first token of 512, s"]
    for file in asked.files:
        found: dict[str, list[list[float]]] = {"Personae": [], "llama.cpp": []}
        for number in range(asked.rounds):
            for name in sorted(found, reverse=bool(number % 2)):
                port = free_port()
                slots = max(8, *asked.clients)
                peer = [asked.peer, "-c", PEER, str(file), str(port), str(os.cpu_count()), str(slots)]
                own = [sys.executable, "-m", "personae", "serve", str(file), "--port", str(port)]
                own += ["--speculate", asked.speculate]
                command, environment = (own, AVX2) if name == "Personae" else (peer, {})
                with serving(command, port, environment) as address:
                    found[name].append(anyio.run(measure, address, asked.tokens, number, asked.clients))
        print(f"| {file.name} | Personae | llama.cpp | ratio |\n|---|---|---|---|")
        for place, figure in enumerate(figures):
            mine, other = (statistics.median(each[place] for each in found[name]) for name in found)
            print(f"| {figure} | {mine:.3g} | {other:.3g} | {mine / other:.2f} |", flush=True)


if __name__ == "__main__":
    main()
