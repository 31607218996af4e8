"""Faults: when they strike, and what they do.

crash     the executor raises at the beginning of a step, or before or after it sampled
kill      the engine core's process dies between any two steps of any two tasks
hang      the executor never returns
stop      the whole process stops, as by SIGSTOP, until the frontend gives it up
stall     the same, but only for a while
silent    the connection is dead for some seconds; what was sent meanwhile arrives after that
drag      everything that one engine computes takes eight times as long, for some seconds
slow      one step takes fifty times as long
lost      a step's result never reaches the scheduler
full      a mailbox of the engine core refuses one message
load      the next start of the engine core fails
partition several engines are silent at the same time
scale     an engine is added, or drains and is removed
fail      one row cannot be sampled
rank      the process of one of the model's ranks dies, which its next step notices
straggle  one of the ranks takes eight times as long, for some seconds
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from personae.actors.kit.actor import BaseCell
from personae.actors.messages import StepFinished
from personae.actors.simulation.loop import SimulationLoop
from personae.actors.simulation.process import SimulatedProcess
from personae.actors.simulation.trouble import Trouble
from personae.actors.simulation.workload import BAD, BROKEN, PANICS, POISON, SLOW, THINKS
from personae.engine.parallel.ranks import RankEnded
from personae.engine.sequence import SequenceLog
from personae.errors import AdapterError, GrammarError, Overloaded
from personae.grammar.spec import GrammarSpec

KINDS = ("crash", "kill", "hang", "stop", "stall", "slow", "lost", "full", "load", "fail")
KINDS_OF_RANKS = (*KINDS, "rank", "straggle")  # with several ranks
KINDS_OF_SEVERAL = (*KINDS, "silent", "drag", "partition", "scale")  # with several engines
PLACES = ("prepare", "forward", "sample", "finish")


class Planted(Exception):
    """An intended fault of the device."""


class Panic(BaseException):
    """What a library in another language may raise."""


class Faults(Trouble):
    """One fault after the other, on average every `every` virtual seconds. `kinds` are drawn evenly.

    `processes` returns the process of each engine, if it has one; `scale` adds or removes an engine.
    """

    def __init__(
        self,
        loop: SimulationLoop,
        seed: int,
        every: float | None,
        kinds: tuple[str, ...],
        processes: Callable[[], Sequence[SimulatedProcess | None]],
        scale: Callable[[random.Random], None] = lambda dice: None,
    ) -> None:
        self.struck: dict[str, int] = {}
        self.load_fails = False
        self.resting = False  # no fault strikes
        self._loop = loop
        self._dice = random.Random(seed)
        self._every = every
        self._kinds = kinds
        self._processes = processes
        self._scale = scale
        self._armed: dict[str, str] = {}  # place in the device's code -> kind
        self._slowed = 1.0
        self._failing = 0
        self._failed: set[tuple[str, int]] = set()
        self._countdown = 0

    async def run(self) -> None:
        """Cause faults until cancelled."""
        while self._every is not None:
            await anyio.sleep(self._dice.expovariate(1 / self._every))
            if self.resting:
                continue
            serving = [
                process
                for process in self._processes()
                if process is not None and process.core is not None and process.returncode is None
            ]
            if serving:
                kind = self._dice.choice(self._kinds)
                self._strike(kind, serving[0] if len(serving) == 1 else self._dice.choice(serving))

    def explains(self, error: BaseException) -> bool:
        """Whether an error that ended the engine core is a planted one, or follows from one."""
        if isinstance(error, BaseExceptionGroup):
            return all(map(self.explains, error.exceptions))
        if isinstance(error, Overloaded):
            return "full" in self.struck
        if isinstance(error, ValueError):  # the step after the lost one reveals it at once
            return "lost" in self.struck and "out of order" in str(error)
        return isinstance(error, Planted) or (isinstance(error, RankEnded) and "rank" in self.struck)

    def _strike(self, kind: str, process: SimulatedProcess) -> None:
        self.struck[kind] = self.struck.get(kind, 0) + 1
        match kind:
            case "crash":
                self._armed[self._dice.choice(PLACES)] = kind
            case "hang":
                self._armed[self._dice.choice(PLACES)] = kind
            case "kill":
                self._countdown = self._dice.randrange(1, 400)
                self._loop.after_step = lambda: self._count_down(process)
            case "stop":
                process.hold(True)
            case "stall":
                process.hold(True)
                self._loop.call_later(self._dice.uniform(0.01, 1.0), process.hold, False)
            case "silent":
                process.hold(True)
                self._loop.call_later(self._dice.uniform(1.0, 6.0), process.hold, False)
            case "partition":
                self._partition(process)
            case "scale":
                self._scale(self._dice)
            case "drag":
                process.drag = 8.0
                self._loop.call_later(self._dice.uniform(1.0, 10.0), setattr, process, "drag", 1.0)
            case "slow":
                self._slowed = 50.0
            case "lost":
                self._lose(process)
            case "full":
                self._fill(process)
            case "load":
                self.load_fails = True
                process.kill()
            case "fail":
                self._failing += 1
            case "rank":
                process.ranks.end(self._dice.randrange(process.ranks.count))
            case "straggle":
                rank = self._dice.randrange(process.ranks.count)
                process.ranks.slow[rank] = 8.0
                self._loop.call_later(self._dice.uniform(1.0, 10.0), process.ranks.slow.pop, rank, None)

    def _partition(self, process: SimulatedProcess) -> None:
        """Silence this process and about a third of the others for the same time."""
        seconds = self._dice.uniform(1.0, 6.0)
        for other in self._processes():
            if other is not None and (other is process or self._dice.random() < 1 / 3):
                other.hold(True)
                self._loop.call_later(seconds, other.hold, False)

    def _count_down(self, process: SimulatedProcess) -> None:
        self._countdown -= 1
        if self._countdown <= 0:
            self._loop.after_step = None
            process.kill()

    def _cells(self, process: SimulatedProcess) -> dict[str, BaseCell[Any]]:
        assert process.core is not None
        return {
            child.node.path: child.node for child in process.core.children if isinstance(child.node, BaseCell)
        }

    def _lose(self, process: SimulatedProcess) -> None:
        mailbox = self._cells(process)["core/scheduler"].mailbox
        put = mailbox.put

        def lose(message: object, reply: Any = None) -> None:
            if isinstance(message, StepFinished):
                del mailbox.put  # restores the class's method
            else:
                put(message, reply)

        mailbox.put = lose  # type: ignore[method-assign]  # for one message

    def _fill(self, process: SimulatedProcess) -> None:
        cells = self._cells(process)
        mailbox = cells[self._dice.choice(sorted(cells))].mailbox
        mailbox.capacity = 0

    # Called by the device, the disk and the grammar library.

    def strikes(self, where: str) -> None:
        """Crash or hang, if that is due here."""
        kind = self._armed.pop(where, None)
        if kind == "crash":
            self._armed.clear()
            raise Planted(f"the device is gone, in {where}")
        if kind == "hang":
            self._armed.clear()
            self._loop.threads.sleep_for_ever()

    def slowed(self, seconds: float) -> float:
        """Return the time, longer for the one step that is made slow."""
        factor, self._slowed = self._slowed, 1.0
        return factor * seconds

    def fails(self, log: SequenceLog, position: int) -> str | None:
        """Fail one row, and the same one again if it is computed again."""
        if self._failing and not log.grammar:
            self._failing -= 1
            self._failed.add((log.id, position))
        return "planted: not finite" if (log.id, position) in self._failed else None

    def may_fail(self, id: str) -> bool:
        """Whether this sequence was made to fail."""
        return any(failed == id for failed, _ in self._failed)

    def thinks(self, log: SequenceLog, position: int) -> float:
        """Masks that take long. The same mask takes as long again if it is made again."""
        if log.grammar is None or not log.grammar.source.startswith(THINKS):
            return 0.0
        draw = hash((log.params.seed, position)) % 64
        return (0.0, 0.0, 0.0, 0.003, 0.02, 0.02, 0.2, 0.2)[draw % 8] if draw else 1.0

    def reads(self, digest: str) -> None:
        """Fail for broken adapters."""
        if digest.startswith(BROKEN):
            raise AdapterError(f"adapter {digest}: planted")

    def compiles(self, spec: GrammarSpec) -> None:
        """Fail or take long for bad grammars, as a grammar library does."""
        if spec.source.startswith(BAD):
            raise GrammarError("planted: cannot be enforced", param="schema")
        if spec.source.startswith(PANICS):
            raise Panic("planted: index out of bounds")
        if spec.source.startswith(SLOW):
            self._loop.threads.sleep(5.0)

    def admits(self, log: SequenceLog) -> None:
        """Crash for requests that kill the engine whenever it computes them."""
        if log.tokens[0] == POISON:
            self.struck["poison"] = self.struck.get("poison", 0) + 1
            raise Planted(f"poison: {log.id}")
