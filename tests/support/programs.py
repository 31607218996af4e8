"""Programs in processes of their own, which end at the latest with their block."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


def child(parent: int) -> int:
    """The process id of the only child of a process."""
    (found,) = subprocess.check_output(["pgrep", "-P", str(parent)], text=True, timeout=PATIENCE).split()
    return int(found)


class Program:
    """Runs Python with these arguments, with one thread for torch's operators. With another `python` than
    ours it has only its own packages.

    Its stderr goes to a file: an unread pipe fills up and blocks its writer.
    """

    def __init__(
        self,
        *arguments: str,
        paths: tuple[Path, ...] = (),
        pass_fds: tuple[int, ...] = (),
        python: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the block
        path = "" if python else os.pathsep.join(map(str, (ROOT / ".pkg", *paths)))
        self.process = subprocess.Popen(
            [python or sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            pass_fds=pass_fds,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait(PATIENCE)
        self.process.stdout.close()
        self._errors.close()

    def line(self) -> str:
        """The next line of its output; empty if it ends instead. It is ended if it prints nothing for too
        long."""
        assert self.process.stdout is not None
        killer = threading.Timer(PATIENCE, self.process.kill)
        killer.start()
        try:
            return self.process.stdout.readline()
        finally:
            killer.cancel()

    @property
    def errors(self) -> str:
        """Its stderr, once it has ended."""
        self._errors.seek(0)
        return self._errors.read()

    def end(self, code: int) -> str:
        """Wait for its end with this exit code. Returns the rest of its output."""
        output, _ = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == code, self.errors
        return output
