"""Plays loads against one or several servers, in alternation, and collects the results."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from personae.api.commands.remote import server_root
from personae.errors import RequestError
from personae.evals.bench.cells import Cell
from personae.evals.bench.client import Answer, ask, get_json
from personae.evals.bench.figures import MEASURES, Figures, Goals, Ratio, figures, ratio
from personae.evals.bench.workload import Maker, Workload

_CALIBRATION = 200  # words
_SHOWN_SAMPLES = 400  # points in a plot

OnAnswer = Callable[[Answer], None]


class ServerUnderTest(msgspec.Struct, frozen=True, kw_only=True):
    """A server under load: its name in reports, its URL, its models and the keys to use."""

    name: str
    url: str
    models: tuple[str, ...]
    keys: tuple[str, ...] = ()
    words_per_token: float = 1.0


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one cell on one server. `firsts`, `gaps` and `ends` are quantiles for plots. `done` are the
    tokens of answers that had ended by each second."""

    cell: str
    server: str
    round: int
    figures: Figures
    firsts: list[float]
    gaps: list[float]
    ends: list[float]
    done: list[int]


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report. The other servers are compared with the first one."""

    started: str
    servers: list[ServerUnderTest]
    cells: list[Cell]
    goals: Goals
    played: list[Played]

    def rounds(self, cell: str, server: str) -> list[Figures]:
        """The rounds of one cell on one server, in order."""
        return [one.figures for one in self.played if (one.cell, one.server) == (cell, server)]

    def ratios(self, cell: str, server: str) -> dict[str, Ratio]:
        """The first server's measures over another's."""
        first = self.rounds(cell, self.servers[0].name)
        return {name: ratio(first, self.rounds(cell, server), name) for name in MEASURES}


async def subject(
    url: str, models: Sequence[str] = (), keys: Sequence[str] = (), name: str = ""
) -> ServerUnderTest:
    """The server with the models to use: `models`, or those in the URL's fragment, or all that it lists.

    Raises RequestError if it does not answer.
    """
    url, _, named = url.partition("#")
    url = server_root(url)
    found = tuple(models) or tuple(filter(None, named.split(",")))
    if not found:
        listed = await get_json(url, "/v1/models", keys[0] if keys else None)
        found = tuple(entry["id"] for entry in listed["data"])
    if not found:
        raise RequestError(f"{url} serves no model.", param="url")
    return ServerUnderTest(name=name or url, url=url, models=found, keys=tuple(keys))


async def calibrate(one: ServerUnderTest, workload: Workload) -> float:
    """How many of our words make a token of this server, found by asking it. Raises RequestError."""
    sizes = []
    for count in (0, _CALIBRATION):
        maker = Maker(Workload(api=workload.api, prompt=str(count + 1), output="1"), one.models, one.keys)
        answer = await ask(one.url, maker.make(0))
        if answer.error:
            model = answer.request.body["model"]
            raise RequestError(f"{one.url} does not answer as `{model}`: {answer.error}.", param="url")
        sizes.append(answer.prompt_tokens)
    return _CALIBRATION / max(1, sizes[1] - sizes[0])


async def warm_up(one: ServerUnderTest, workload: Workload) -> None:
    """Ask every model once, so that its adapter is on the device and every thread has started."""
    for model in one.models:
        maker = Maker(Workload(api=workload.api, prompt="4", output="4"), [model], one.keys)
        await ask(one.url, maker.make(0))


async def play(cell: Cell, one: ServerUnderTest, round: int, goals: Goals, on_answer: OnAnswer) -> Played:
    """Run one cell once on one server. Raises RequestError if no request was answered."""
    maker = Maker(cell.workload, one.models, one.keys, one.words_per_token, f"{cell.name} {round}")
    answers: list[Answer] = []

    def keep(answer: Answer) -> None:
        answers.append(answer)
        on_answer(answer)

    await cell.arrivals.run(one.url, maker.make, cell.requests, keep)
    found = figures(answers, goals)
    if not found.completed:
        raise RequestError(f"{one.name} answered no request of `{cell.name}`: {found.errors}", param="url")
    return Played(
        cell=cell.name,
        server=one.name,
        round=round,
        figures=found,
        firsts=_thinned([answer.first for answer in answers if answer.first is not None]),
        gaps=_thinned([gap for answer in answers for gap in answer.gaps]),
        ends=_thinned([answer.seconds for answer in answers if answer.complete]),
        done=_done(answers),
    )


async def compare(
    servers: Sequence[ServerUnderTest],
    cells: Sequence[Cell],
    rounds: int,
    goals: Goals,
    on_answer: OnAnswer = lambda answer: None,
) -> BenchReport:
    """Run every cell `rounds` times on every server. In each round the servers take turns, because a
    machine's speed drifts."""
    words_per_token = await calibrate(servers[0], cells[0].workload)
    servers = [msgspec.structs.replace(one, words_per_token=words_per_token) for one in servers]
    for one in servers:
        await warm_up(one, cells[0].workload)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    played = [
        await play(cell, one, round, goals, on_answer)
        for round in range(rounds)
        for cell in cells
        for one in (servers if round % 2 == 0 else servers[::-1])
    ]
    # Keys are secrets, and the report may be shared.
    shown = [msgspec.structs.replace(one, keys=()) for one in servers]
    return BenchReport(started=started, servers=shown, cells=list(cells), goals=goals, played=played)


def write_json(report: BenchReport, path: Path) -> None:
    """All figures for programs. A value that is not a number is null."""
    tree: Any = msgspec.to_builtins(report)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(tree), indent=1))


def _thinned(samples: list[float]) -> list[float]:
    """At most `count` of the values, evenly spread over their order."""
    ordered = sorted(samples)
    if len(ordered) <= _SHOWN_SAMPLES:
        return ordered
    last = len(ordered) - 1
    return [ordered[round(place * last / (_SHOWN_SAMPLES - 1))] for place in range(_SHOWN_SAMPLES)]


def _done(answers: Sequence[Answer]) -> list[int]:
    begun = min(answer.sent for answer in answers)
    ended = [(int(answer.sent + answer.seconds - begun), answer.tokens) for answer in answers]
    total = [0] * (max(second for second, _ in ended) + 1)
    for second, tokens in ended:
        total[second] += tokens
    return total
