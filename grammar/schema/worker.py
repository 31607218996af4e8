"""Canonical forms, computed in a process that can be killed.

The rewriting is exponential for some schemas, and a schema comes from anywhere: it gets a time and a memory
limit of its own, and takes nobody's interpreter lock meanwhile.
"""

import contextlib
import os
import resource
import subprocess
import sys
import weakref
from threading import Lock, Timer
from typing import Any

import msgspec

from personae.errors import GrammarError
from personae.grammar.schema.canonical import canonicalise
from personae.grammar.schema.document import SCHEMA_PARAM, Schema

_COMMAND = "from personae.grammar.schema.worker import main; main()"


class CanonicalWorker:
    """A process that canonicalises one schema at a time; started when needed, and again after a kill."""

    def __init__(self, *, seconds: float = 2.0, memory: int = 2**30) -> None:
        self._seconds = seconds
        self._memory = memory
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def canonicalise(self, document: Schema) -> Schema:
        """`canonical.canonicalise`, within the limits. Raises GrammarError when it fails or exceeds them."""
        with self._lock:
            process = self._process or self._start()
            timer = Timer(self._seconds, process.kill)
            timer.start()
            try:
                answer = _exchange(process, msgspec.json.encode(document))
            finally:
                timer.cancel()
            if answer is None:
                self._process = None
                process.kill()
                process.communicate()
                raise GrammarError(
                    "The schema is too complex to be analysed within the server's limits.", param=SCHEMA_PARAM
                )
        schema, error = answer
        if error is not None:
            raise GrammarError(f"The schema cannot be analysed: {error}", param=SCHEMA_PARAM)
        return schema

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own text
            [sys.executable, "-c", _COMMAND, str(self._memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what a process says that runs out of memory helps nobody
            env=environment,
        )
        weakref.finalize(self, _end, process)
        return process

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process is not None:
                _end(self._process)
                self._process = None


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> tuple[Schema, str | None] | None:
    """Send a document and wait for its canonical form; None when the process has died."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        return None
    return msgspec.json.decode(answer, type=tuple[dict[str, Any] | bool, str | None]) if answer else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def main() -> None:
    """The worker process: a document a line in, (canonical form, error) a line out."""
    memory = int(sys.argv[1])
    with contextlib.suppress(ValueError, OSError):  # not every system can limit the address space
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin.buffer:
        schema: Schema = True
        error = None
        try:
            schema = canonicalise(msgspec.json.decode(line))
        except Exception as failure:  # whatever it is, it belongs to this schema alone
            error = str(failure) or type(failure).__name__
        sys.stdout.buffer.write(msgspec.json.encode((schema, error)) + b"\n")
        sys.stdout.buffer.flush()
