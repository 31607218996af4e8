"""Who checks uploaded adapters: a thread, or a process of its own.

Checking an adapter takes torch. The server's process has none: it starts one that has when the first adapter
comes, and that ends when it has had nothing to do for a while.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import msgspec
from anyio import CapacityLimiter, to_thread

from personae.actors.framing import frame, receive_first
from personae.errors import AdapterError, RequestFailed
from personae.lora.bounds import AdapterBounds
from personae.lora.summary import AdapterSummary

_COMMAND = (sys.executable, "-m", "personae.api.adapters.checking")
IDLE_SECONDS = 60.0


class CheckRequest(msgspec.Struct, frozen=True, tag=True):
    """Check the adapter in this folder; see `lora.upload.check_upload`."""

    folder: str
    bounds: AdapterBounds
    most: int | None


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The server can serve it."""

    summary: AdapterSummary


class NotAccepted(msgspec.Struct, frozen=True, tag=True):
    """The AdapterError that was raised."""

    message: str
    param: str | None
    code: str | None


Answer = Accepted | NotAccepted


class AdapterChecker(Protocol):
    """Checks one uploaded adapter at a time."""

    async def check(self, folder: Path, bounds: AdapterBounds, most: int | None) -> AdapterSummary:
        """See `lora.upload.check_upload`. A check that has begun finishes, even if nobody waits for it."""

    def close(self) -> None:
        """Nothing more is checked."""


class ThreadChecker:
    """Checks in a thread of this process, which loads torch for it."""

    def __init__(self) -> None:
        self._one = CapacityLimiter(1)  # adapters in memory for being checked

    async def check(self, folder: Path, bounds: AdapterBounds, most: int | None) -> AdapterSummary:
        """See AdapterChecker."""
        from personae.lora.upload import check_upload

        return await to_thread.run_sync(check_upload, folder, bounds, most, limiter=self._one)

    def close(self) -> None:
        """See AdapterChecker."""


class ProcessChecker:
    """Checks in a process of its own, which is started when it is needed, and ends when it has had nothing
    to do for `idle_seconds`."""

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._one = CapacityLimiter(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket

    async def check(self, folder: Path, bounds: AdapterBounds, most: int | None) -> AdapterSummary:
        """See AdapterChecker. Raises RequestFailed if the process dies of it."""
        request = frame(CheckRequest(str(folder), bounds, most))
        answer: Answer = await to_thread.run_sync(self._ask, request, limiter=self._one)
        if isinstance(answer, NotAccepted):
            raise AdapterError(answer.message, param=answer.param, code=answer.code)
        return answer.summary

    def close(self) -> None:
        """See AdapterChecker."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._line.close()

    def _ask(self, request: bytes) -> Answer:
        """On a thread: ask the process that is there, else a new one."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is not None:
            if (answer := self._exchange(request)) is not None:
                return answer
            if (code := self._end()) != 0:
                raise _failed(code)
        self._process = self._start()
        if (answer := self._exchange(request)) is not None:
            return answer
        raise _failed(self._end())

    def _start(self) -> subprocess.Popen[bytes]:
        self._line, theirs = socket.socketpair()
        with theirs:
            return subprocess.Popen(  # noqa: S603 - our own interpreter and our own module
                [*_COMMAND, str(theirs.fileno()), str(self._idle_seconds)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1", **os.environ},  # torch's threads would take the steps' cores
            )

    def _exchange(self, request: bytes) -> Answer | None:
        """The answer; None if the process has ended."""
        try:
            self._line.sendall(request)
            answer: Answer = receive_first(self._line, Answer)
        except (EOFError, OSError):
            return None
        return answer

    def _end(self) -> int:
        """The exit code of the process; 0: it ended since it had nothing to do."""
        assert self._process is not None
        self._line.close()
        code = self._process.wait()
        self._process = None
        return code


def _failed(code: int) -> RequestFailed:
    return RequestFailed(
        f"The process that checks adapters ended with exit code {code}. Try again; if that does not help, "
        "the server has too little memory for this adapter."
    )
