"""Kills one kind of a server's processes repeatedly under load, and compares every answer with a calm one.

    python -m personae.evals.kills
    python -m personae.evals.kills --kind engine --kills 50 --streams 32 -- --replicas 2
    python -m personae.evals.kills --kind prefill --kind decode --streams 8
    python -m personae.evals.kills --kind tensor --kind stage --kind expert --kind attention --kills 10
    python -m personae.evals.kills --kind apart --kills 10

Clients stream answers of `REQUESTS`, one after the other: greedy and seeded, with adapters, logprobs and two
choices, bound by schemas, by checked schemas, by regular expressions and by GBNF. At random moments a process
is killed by SIGKILL: an `engine`, a `child` of the sandbox's fork server, the `forkserver`, or the
`frontend`, which is started again and finds its engine kept. Its clients lose their connections and ask
again; that is the only kind that clients may notice. `prefill` and `decode` are the two engines of
`--prefill-replicas 1`, whose requests have long prompts; at least half of the prompts must have been computed
by the one and answered by the other. `tensor`, `stage`, `expert`, `attention` and `apart` are the two ranks
of a model, see `RANKS`; the engine is in the first. Prints for each kind the kills, answers, lost and
different ones, requests that were asked again, and a stream's longest pause after each kill; on stderr this
so far, every few kills. Exit code 1 if an answer is lost or differs.
"""

import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
import httpx
import msgspec
import typer

from personae.api import sse
from personae.api.bundled import NAMED
from personae.evals.floods import strict
from personae.evals.kernels import support
from personae.evals.neighbours import descends, sandbox_processes
from personae.evals.served import Served

RANKS = {
    "tensor": ("--tensor-parallel-size", "2"),
    "stage": ("--pipeline-parallel-size", "2"),
    "expert": ("--tensor-parallel-size", "2", "--expert-parallel-size", "2", "--enable-eplb"),
    "attention": ("--tensor-parallel-size", "2", "--expert-parallel-size", "2", "--enable-dp-attention"),
    "apart": ("--tensor-parallel-size", "2", "--enable-dp-attention", "--attention-ranks", "1"),
}
"""How two ranks share a model: for the last three a tiny random mixture of experts, if none is given."""
KINDS = ("engine", "child", "forkserver", "frontend", "prefill", "decode", *RANKS)
ROLES = {"prefill": 0, "decode": 1}  # and the number of the engine
LONG = " ".join(f"{number} sheep and {number * 7} goats," for number in range(30))  # before a prompt
_READY_SECONDS = 120.0
_AGAIN_SECONDS = 0.5
_TELL_EVERY = 5  # kills
_PATH = "/v1/completions"
_PREFILLED = re.compile(r"^personae:streams_prefilled_total\S* (\S+)$", re.MULTILINE)


_WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "logprobs": 2},
    {"temperature": 1, "n": 2},
    strict({"id": {"type": "integer"}, "status": {"enum": ["open", "paid", "sent"]}}),
    strict({"set": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 3}}),
    {"structured_outputs": {"regex": "(ab|c)*[0-9]{2}(x|y)*"}},
    {"structured_outputs": {"grammar": 'root ::= word ("," word)*\nword ::= [a-z]+ | "(" word ")"'}},
    {"structured_outputs": {"grammar": 'root ::= "[" [0-9]+ ("," [0-9]+)* "]"'}, "temperature": 1},
)
REQUESTS: tuple[dict[str, Any], ...] = tuple(
    {"prompt": f"Story {number} begins", "max_tokens": 48, "seed": number, "stream": True} | _WAYS[number % 8]
    for number in range(32)
)


@dataclass(slots=True)
class Findings:
    """What the clients have seen."""

    kills: int = 0
    answers: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    different: int = 0
    again: int = 0
    pauses: list[float] = field(default_factory=list)  # of each kill the longest, in seconds
    prefilled: int | None = None  # sequences whose prompt a prefill engine computed; None: there is none

    @property
    def good(self) -> bool:
        """Whether no answer is lost or differs, and prefill engines had their part."""
        return (
            not self.lost
            and not self.different
            and (self.prefilled is None or 2 * self.prefilled >= self.answers)
        )

    def line(self, kind: str) -> str:
        """These findings as a line of text."""
        pauses = self.pauses or [0.0]
        return (
            f"{kind}: {self.kills} kills, {self.answers} answers, {self.lost.total()} lost, "
            f"{self.different} different, {self.again} asked again; longest pause of a kill "
            f"p50 {statistics.median(pauses):.2f} s, max {max(pauses):.2f} s"
            + ("" if self.prefilled is None else f"; {self.prefilled} prompts by the prefill engine")
            + "".join(f"\n  {number} x {why}" for why, number in self.lost.most_common(5))
        )


class _Broken(Exception):
    """The connection to a frontend has ended."""


class Play:
    """Clients of a server, which `restart` starts again if its frontend was killed. `spare`: it has a process
    that waits to take the engine core's place. Only when that is ready the engine core is killed."""

    def __init__(
        self,
        kind: str,
        served: Served,
        restart: Callable[[], Awaitable[Served]],
        streams: int,
        *,
        spare: bool,
    ) -> None:
        self.kind = kind
        self.spare = spare
        self.streams = streams
        self.served = served
        self.restart = restart
        self.found = Findings()
        self.calm: dict[int, Any] = {}
        self.models: list[str] = []
        self.done = False
        self._struck = 0.0
        self._longest = 0.0
        self._asked = 0

    async def answer(self, client: httpx.AsyncClient, number: int) -> Any:
        """Everything that the answer to a request contains."""
        body = REQUESTS[number] | {"model": self.models[number // 8 % len(self.models)]}
        if self.kind in ROLES:  # with a salt of its own: no engine has pages of it
            self._asked += 1
            body |= {"prompt": LONG + body["prompt"], "cache_salt": f"{self._asked}"}
        texts: dict[int, list[Any]] = {}
        heard = 0.0
        url = self.served.url
        try:
            async with client.stream("POST", url + _PATH, json=body) as response:
                if response.is_error:
                    await response.aread()
                    if response.status_code == 503 and self.kind == "frontend":
                        raise _Broken
                    raise ValueError(f"{response.status_code} {response.text[:200]}")
                async for line in sse.async_lines(response):
                    if not line.startswith("data: {"):
                        continue
                    event, now = msgspec.json.decode(line[6:]), time.monotonic()
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    if 0.0 < heard < self._struck:
                        self._longest = max(self._longest, now - self._struck)
                    heard = now
                    for choice in event.get("choices", ()):
                        logprobs = choice.get("logprobs") or {}
                        texts.setdefault(choice["index"], []).append(
                            (choice.get("text"), choice.get("finish_reason"), logprobs.get("tokens"))
                        )
        except httpx.TransportError as error:
            raise _Broken from error
        return {index: _joined(pieces) for index, pieces in sorted(texts.items())}

    async def client(self, client: httpx.AsyncClient, name: int) -> None:
        """Ask, compare and repeat, until all kills are done."""
        chance = random.Random(name)
        while not self.done:
            number = chance.randrange(len(REQUESTS))
            try:
                answer = await self._patiently(client, number)
            except (_Broken, ValueError) as error:
                self.found.lost[str(error) or "the connection ended"] += 1
                continue
            self.found.answers += 1
            self.found.different += answer != self.calm[number]

    async def _patiently(self, client: httpx.AsyncClient, number: int) -> Any:
        """Ask, and again if the frontend was killed."""
        begun = time.monotonic()
        while True:
            try:
                return await self.answer(client, number)
            except _Broken:
                if self.kind != "frontend" or time.monotonic() > max(begun, self._struck) + _READY_SECONDS:
                    raise
            self.found.again += 1
            await anyio.sleep(_AGAIN_SECONDS)

    async def ready(self, client: httpx.AsyncClient) -> None:
        """Until the server serves."""
        ends = time.monotonic() + _READY_SECONDS
        while time.monotonic() < ends:
            with suppress(httpx.TransportError):
                if (await client.get(self.served.url + "/ready")).status_code == 200:
                    return
            await anyio.sleep(0.05)
        raise TimeoutError("the server is not ready")

    def victims(self) -> list[int]:
        """The processes of this kind."""
        sandbox = sandbox_processes(self.served.pid)
        match self.kind:
            case "engine":
                engines = sorted(engine_processes(self.served.pid))
                if not self.spare:
                    return engines
                *serving, waits = engines or [0]  # the youngest; what compiles grammars it starts last
                return serving if any(descends(pid, waits) for pid in sandbox) else []
            case kind if kind in RANKS:
                ranks = processes_of(self.served.pid, b"engine.parallel.process")
                return [*engine_processes(self.served.pid), *ranks] if ranks else []
            case "prefill" | "decode":
                engines = engine_processes(self.served.pid)
                return [pid for pid in engines if engine_number(pid) == ROLES[self.kind]]
            case "child":
                return [pid for pid in sandbox if _parent_in(pid, sandbox)]
            case "forkserver":
                return [pid for pid in sandbox if not _parent_in(pid, sandbox)]
            case _:
                return [self.served.pid]

    async def strike(
        self, client: httpx.AsyncClient, kills: int, pause: float, chance: random.Random
    ) -> None:
        """Kill, each time when every client has had an answer since the last time, on average."""
        while self.found.kills < kills:
            enough = self.found.answers + self.streams
            while self.found.answers < enough and not self.found.lost:  # noqa: ASYNC110 - nobody tells
                await anyio.sleep(0.01)
            await anyio.sleep(chance.uniform(0.0, pause))
            await self.ready(client)
            victims = self.victims()
            if not victims:
                await anyio.sleep(0.05)
                continue
            self._longest, self._struck = 0.0, time.monotonic()
            if self.kind == "frontend":
                self.served.kill()
                self.served = await self.restart()
                await self.ready(client)
                self._longest = time.monotonic() - self._struck
            else:
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(victims), signal.SIGKILL)
            self.found.kills += 1
            seen = self.found.answers + self.streams
            while self.found.answers < seen and not self.found.lost:  # noqa: ASYNC110 - as above
                await anyio.sleep(0.01)
            self.found.pauses.append(self._longest)
            if self.found.kills % _TELL_EVERY == 0:
                print(self.found.line(self.kind), file=sys.stderr, flush=True)
        self.done = True


def _joined(pieces: list[Any]) -> tuple[str, str | None, list[str]]:
    text = "".join(piece or "" for piece, _, _ in pieces)
    tokens = [token for _, _, some in pieces for token in some or ()]
    return text, next((end for _, end, _ in reversed(pieces) if end), None), tokens


def _parent_in(pid: int, others: list[int]) -> bool:
    return any(other != pid and descends(pid, other) for other in others)


def engine_processes(server: int) -> list[int]:
    """The engine cores of a server, also one that a server before has left."""
    return processes_of(server, b"actors.enginecore")


def processes_of(server: int, command: bytes) -> list[int]:
    """The processes of a server whose command line contains `command`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if command in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return [pid for pid in found if descends(pid, server)]


def engine_number(pid: int) -> int | None:
    """The number of an engine that gives pages to others: the name of the socket at which it listens. None if
    it does not listen yet, or has ended."""
    sockets = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8:  # it has a path
            sockets[f"socket:[{fields[6]}]"] = Path(fields[7]).name
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if (name := sockets.get(os.readlink(file), "")).isdecimal():
                    return int(name)
    return None


async def play(
    kind: str, arguments: list[str], kills: int, streams: int, pause: float, seed: int
) -> Findings:
    """One kind's kills, on a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        options = [*arguments, "--max-restarts", f"{kills + 9}", "--data-dir", f"{folder}/data"]
        if kind in ROLES:
            options += ["--replicas", "2", "--prefill-replicas", "1"]
        if kind in RANKS:
            options += [*RANKS[kind], "--device", "cpu", "--dtype", "float32"]
        servers: list[Served] = []

        def start() -> Served:
            served = Served(options, Path(os.devnull))
            served.__enter__()
            servers.append(served)
            return served

        async def restart() -> Served:
            return await anyio.to_thread.run_sync(start)

        try:
            limits = httpx.Limits(max_connections=streams + 4)
            async with httpx.AsyncClient(timeout=300, limits=limits) as client:
                it = Play(kind, await restart(), restart, streams, spare="--spare-process" in arguments)
                await it.ready(client)
                it.models = [
                    each["id"] for each in (await client.get(it.served.url + "/v1/models")).json()["data"]
                ]
                for number in range(len(REQUESTS)):
                    it.calm[number] = await it.answer(client, number)
                async with anyio.create_task_group() as tasks:
                    for name in range(streams):
                        tasks.start_soon(it.client, client, name)
                    await it.strike(client, kills, pause, random.Random(seed))
                if kind in ROLES:
                    metrics = (await client.get(it.served.url + "/metrics")).text
                    it.found.prefilled = int(sum(float(count) for count in _PREFILLED.findall(metrics)))
                return it.found
        finally:
            if servers:
                servers[-1].__exit__()


def main(
    more: Annotated[list[str] | None, typer.Argument(help="Options of `personae serve`, after --.")] = None,
    model: Annotated[Path | None, typer.Option(help="A model folder or file; else the demo.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(KINDS)}; else all.")] = None,
    kills: Annotated[int, typer.Option(min=1, help="Of each kind.")] = 50,
    streams: Annotated[int, typer.Option(min=1, help="Clients at once.")] = 32,
    pause: Annotated[float, typer.Option(help="Longest additional time between two kills, seconds.")] = 1.0,
    seed: int = 0,
) -> None:
    """Kill, and compare."""
    good = True
    for each in kind or KINDS:
        if each not in KINDS:
            raise typer.BadParameter(f"{each}: not one of {', '.join(KINDS)}")
        base = model or NAMED
        if model is None and each in ("expert", "attention", "apart"):
            base = support("tiny_models").model_folder("qwen3_moe", num_experts=8, num_key_value_heads=2)
        arguments = [str(base), *(more or ())]
        found = anyio.run(play, each, arguments, kills, streams, pause, seed)
        print(found.line(each), flush=True)
        good = good and found.good
    sys.exit(not good)


if __name__ == "__main__":
    typer.run(main)
