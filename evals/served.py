"""A `personae serve` process for the duration of a `with` block."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from personae.errors import ModelLoadError

_READY = re.compile(r"personae ready (\S+)")


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """On SIGTERM the block ends with SystemExit; otherwise a server started in it would keep running. On the
    main thread only."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Served:
    """`url` is set once the block is entered. The server's other output goes to the file `log`."""

    def __init__(self, arguments: Sequence[str], log: Path | None = None) -> None:
        self._arguments = arguments
        self._log = log
        self.url = ""

    def __enter__(self) -> "Served":
        """Raises ModelLoadError if the server ends before it is ready."""
        command = [sys.executable, "-c", "from personae.api.cli import main; main()", "serve"]
        self._stderr: IO[bytes] | None = None if self._log is None else self._log.open("wb")
        self._process = subprocess.Popen(  # noqa: S603  # ourselves
            [*command, *self._arguments, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := _READY.match(line):
                self.url = found[1]
                return self
        code = self._process.wait()
        self._close()
        told = "" if self._log is None else f" See {self._log}."
        raise ModelLoadError(f"The server ended with {code} before it was ready.{told}")

    @property
    def pid(self) -> int:
        """The server's process id. The model's process is its child."""
        return self._process.pid

    def kill(self) -> None:
        """End it at once, as a crash does (SIGKILL). The block may go on without it."""
        self._process.kill()
        self._process.wait(60)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._close()

    def _close(self) -> None:
        for end in (self._process.stdout, self._stderr):
            if end is not None:
                end.close()
