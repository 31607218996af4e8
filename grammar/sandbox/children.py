"""The server's side of `server.py`: keeps children ready, gives each request to one, and sees how they end.

A child gets one request at a time, with the socket on which it is answered. The server holds a copy of that
socket until the child has answered, and writes to it how the child's work has ended (`server.end_frame`). So
it is known whether the request has exceeded a limit or its child was ended from outside. A stopped child is
ended.

A child is used again, unless it has grown, or its request took so long that it runs on idle cores only.
Children that wait for long end, so that memory is what it was before.

Other programs may leave no core idle for hours. If the children on idle cores together get less than a share
of one core, the cores are *busy*: a few of these children run at a low priority instead, and get a little
of every core. An unprivileged process cannot leave the class of idle cores, so such a child is ended from
outside, and its request is made again in another one.
"""

import ctypes
import gc
import math
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Never

from personae.grammar.sandbox.server import (
    ANSWERED,
    BEAT_SECONDS,
    SandboxLimits,
    bound,
    end_frame,
    resident,
    unbound,
)

STANDING = 2  # new children that wait for a request, at least
MOST = 96  # children; further requests wait
_WEIGHT_OF_NICENESS = 1.25  # Linux divides the weight of a process by this for each step
_NICEST = 18
_LOWERED = 5  # added to the niceness of a child that runs at a low priority while the cores are busy
_MOST_LOWERED = 4  # children; the others run on idle cores
_BUSY_SECONDS = 30.0  # since it was last seen
_STARVED_SECONDS = 1.0
_HALF = 0.5  # of a core: less than that, and others want it
_FREE = b"+"  # what a child writes on its line when it has answered
_BEAT = b"."
_TIMER = signal.SIGVTALRM
_LONG = bytes([_TIMER])  # what its signal handler writes there, in whatever library the child may be
_PR_SET_PDEATHSIG = 1


class Starvation:
    """Whether some processes together get less than a share of a core, although one of them always wants to
    run."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._since: float | None = None
        self._begun: dict[int, float] = {}

    def restart(self) -> None:
        """One of them has done its work: they have enough."""
        self._since = None

    def observe(self, now: float, seconds: Mapping[int, float], *, waiting: bool) -> bool:
        """Whether they have starved for a second. `seconds`: the processor time of each process; `waiting`:
        one of them wants to run."""
        if self._since is None or not waiting:
            self._since, self._begun = now if waiting else None, dict(seconds)
            return False
        gained = sum(spent - self._begun.setdefault(process, spent) for process, spent in seconds.items())
        starved = gained < self._share * _STARVED_SECONDS
        if starved and now - self._since < _STARVED_SECONDS:
            return False
        self._since = None
        return starved


class _Child:
    """A child, as the server knows it. `line` is the server's end of the socket between them."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self.line = line
        self.kind = b""  # of its request
        self.connection: socket.socket | None = None  # of its request
        self.used = self.slowed = self.exceeded = False
        self.on_idle_cores = self.lowered = False
        self.since = time.monotonic()  # when it became free
        self.status: int | None = None  # how it has ended, if that is known

    def slow(self, others: int) -> None:
        """Let it have less processor time in proportion, if so many others are busy: together they have
        little more than one alone."""
        if others:
            self.slowed = True
            niceness = os.getpriority(os.PRIO_PROCESS, 0) + math.log(others + 1, _WEIGHT_OF_NICENESS)
            with suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, self.pid, min(round(niceness), _NICEST))

    def give_way(self) -> None:
        """Let it run only when no other process wants to."""
        self.slowed = True
        if sys.platform == "linux":
            with suppress(OSError):  # it has ended, or a container forbids this
                os.sched_setscheduler(self.pid, os.SCHED_IDLE, os.sched_param(0))
                self.on_idle_cores, self.lowered = True, False

    def lower(self, others: int) -> None:
        """Let it run at a low priority, if it does not run on idle cores only. So many others do, too:
        together they have little more than one alone."""
        if not self.lowered:
            self.slowed = self.lowered = True
            niceness = (
                os.getpriority(os.PRIO_PROCESS, 0) + _LOWERED + math.log(others + 1, _WEIGHT_OF_NICENESS)
            )
            with suppress(OSError):  # it has ended
                already = os.getpriority(os.PRIO_PROCESS, self.pid)
                os.setpriority(os.PRIO_PROCESS, self.pid, max(min(round(niceness), _NICEST), already))

    def ended(self, number: int) -> None:
        """Its work on the request has ended, as `end_frame` says."""
        if self.connection is not None:
            with self.connection, suppress(OSError):  # nobody waits, or not for this
                self.connection.send(end_frame(number), socket.MSG_DONTWAIT)
        self.connection = None

    def examine(self) -> None:
        """End it if it is stopped."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                os.kill(pid, signal.SIGKILL)
            elif pid:
                self.status = status

    def signal(self) -> int:
        """The signal that has ended it; 0 if it ended by itself or for its memory. Its line is closed."""
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) and not self.exceeded else 0


class Children:
    """Serves requests for ever. `control` brings them, and gets the signs of life.

    `answer(kind, connection)` is a child's work on a request; `warm_up` writes, in a new child, to the memory
    that a request will write to. `ordinary` gives the seconds of processor time after which a request of a
    kind runs on idle cores only.
    """

    def __init__(
        self,
        control: socket.socket,
        limits: SandboxLimits,
        answer: Callable[[bytes, socket.socket], None],
        warm_up: Callable[[], None] = lambda: None,
        ordinary: Callable[[bytes], float] | None = None,
    ) -> None:
        self._control = control
        self._limits = limits
        self._answer = answer
        self._warm_up = warm_up
        self._ordinary = ordinary or (lambda kind: limits.ordinary)
        self._children: dict[int, _Child] = {}  # by the descriptor of their line
        self._free: list[_Child] = []  # the last one is the next to be used
        self._waiting: deque[tuple[bytes, socket.socket]] = deque()
        self._starvation = Starvation(limits.share)
        self._contention = Starvation(_HALF)
        self._busy_until = 0.0
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> Never:
        """Serve until the other end of `control` is closed."""
        gc.disable()  # a child collects between two requests
        gc.freeze()  # what is here is in use for ever, and a child would copy each page that it examines
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        beat = 0.0
        while True:
            self._hand_out()
            # one at a time: a request may have come meanwhile
            if missing := len(self._free) < STANDING and len(self._children) < MOST:
                self._fork()
            if (now := time.monotonic()) >= beat:
                beat = now + BEAT_SECONDS
                self._beat()
            for descriptor, _ in self._poll.poll(0 if missing else 1000 * (beat - now)):
                if descriptor == self._control.fileno():
                    self._receive()
                elif descriptor in self._children:
                    self._hear(self._children[descriptor])

    def _beat(self) -> None:
        with suppress(BlockingIOError):  # the other end is busy
            self._control.send(_BEAT, socket.MSG_DONTWAIT)
        for child in self._children.values():
            child.examine()
        self._relieve(time.monotonic())
        self._bound_memory()
        late = time.monotonic() - self._limits.idle
        for child in [child for child in self._free if child.used and child.since < late]:
            self._free.remove(child)
            self._leave(child)

    def _relieve(self, now: float) -> None:
        """See whether the cores are busy, and end some of the children that get nothing of them."""
        idle = {child: _activity(child.pid) for child in self._children.values() if child.on_idle_cores}
        lowered = {child: _activity(child.pid) for child in self._children.values() if child.lowered}
        if _observe(self._contention, now, lowered) and now < self._busy_until:
            self._busy_until = now + _BUSY_SECONDS
        if _observe(self._starvation, now, idle):
            self._busy_until = now + _BUSY_SECONDS
            waiting = [child for child, (runnable, _) in idle.items() if runnable]
            for child in waiting[: max(_MOST_LOWERED - len(lowered), 0)]:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)

    def _slow_down(self, child: _Child) -> None:
        """Its request takes long."""
        others = sum(other.lowered for other in self._children.values() if other is not child)
        busy = time.monotonic() < self._busy_until
        if busy and others < _MOST_LOWERED and not child.on_idle_cores:
            child.lower(others)
        else:
            child.give_way()

    def _bound_memory(self) -> None:
        """End the largest child while all together have too much."""
        own = resident()
        grown = {child: max(resident(child.pid) - own, 0) for child in self._children.values() if child.used}
        while sum(grown.values()) > self._limits.memory_of_all:
            largest = max(grown, key=grown.__getitem__)
            del grown[largest]
            largest.exceeded = True
            with suppress(ProcessLookupError):
                os.kill(largest.pid, signal.SIGKILL)

    def _receive(self) -> None:
        kind, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not kind:
            os._exit(0)  # there is nothing to clean up
        self._waiting.append((kind, socket.socket(fileno=descriptors[0])))

    def _hand_out(self) -> None:
        """Give the requests that wait to children."""
        while self._waiting and (self._free or len(self._children) < MOST):
            if not self._free:
                self._fork()
            child = self._free.pop()
            kind, connection = self._waiting.popleft()
            try:
                socket.send_fds(child.line, [kind], [connection.fileno()])
            except ConnectionError:  # it has died, which is noticed soon
                self._waiting.appendleft((kind, connection))
                continue
            busy = sum(other.connection is not None for other in self._children.values())
            child.slow(max(busy - 1, 0))  # one of them may have answered and only collect its garbage
            child.used = True
            child.kind, child.connection = kind, connection

    def _hear(self, child: _Child) -> None:
        said, early = b"", child in self._free
        try:
            said = child.line.recv(1)
        except ConnectionResetError:  # it has died, and had not read what is on its line
            early = True
        if said != _LONG and child.on_idle_cores:
            self._starvation.restart()
        if said == _LONG:
            self._slow_down(child)
        elif said == _FREE:
            child.ended(ANSWERED)
            child.since = time.monotonic()
            if child.slowed:  # which only an administrator can undo
                self._leave(child)
            else:
                self._free.append(child)
        else:
            self._poll.unregister(child.line)
            del self._children[child.line.fileno()]
            child.line.close()
            number = child.signal()
            if early and child.connection is not None:
                self._waiting.appendleft((child.kind, child.connection))
                child.connection = None
            child.ended(number)
            if early:
                with suppress(ValueError):
                    self._free.remove(child)
                time.sleep(0.1)  # it died by itself, and so may the next one

    @staticmethod
    def _leave(child: _Child) -> None:
        """Have it end."""
        with suppress(OSError):
            child.line.shutdown(socket.SHUT_WR)

    def _fork(self) -> None:
        line, theirs = socket.socketpair()
        server = os.getpid()
        if pid := os.fork():
            theirs.close()
            child = self._children[line.fileno()] = _Child(pid, line)
            self._free.insert(0, child)
            self._poll.register(line, select.POLLIN)
            return
        try:
            _end_with(server)
            self._control.close()
            line.close()
            for other in self._children.values():
                other.line.close()
                if other.connection is not None:
                    other.connection.close()
            for _, connection in self._waiting:
                connection.close()
            self._work(theirs)
        finally:
            os._exit(0)

    def _work(self, line: socket.socket) -> None:
        """A child's life."""
        line.setblocking(False)
        signal.signal(_TIMER, lambda *_: None)
        signal.set_wakeup_fd(line.fileno())  # the signal is written here, whatever it interrupts
        if not select.select([line], [], [], 0)[0]:
            self._warm_up()
        most = resident() + self._limits.size_estimate
        while True:
            select.select([line], [], [])
            kind, descriptors, _, _ = socket.recv_fds(line, 1, 1)
            if not kind:
                return
            bound(self._limits)
            signal.setitimer(signal.ITIMER_VIRTUAL, self._ordinary(kind))
            with socket.socket(fileno=descriptors[0]) as connection, suppress(ConnectionError):
                self._answer(kind, connection)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            unbound()
            gc.collect()
            line.send(_FREE)
            if resident() > most:
                return


def _activity(process: int) -> tuple[bool, float]:
    """Whether a process runs or waits for a core, and its seconds of processor time so far."""
    with suppress(OSError), open(f"/proc/{process}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
        return fields[0] == "R", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return False, 0.0


def _observe(starvation: Starvation, now: float, children: Mapping[_Child, tuple[bool, float]]) -> bool:
    seconds = {child.pid: spent for child, (_, spent) in children.items()}
    return starvation.observe(now, seconds, waiting=any(runnable for runnable, _ in children.values()))


def _end_with(server: int) -> None:
    """Have this process end when the server does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(0)  # it ended before the call
