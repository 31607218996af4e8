"""A real PostgreSQL server on a port of its own, and a new database for each test."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

_ROOT_RUNS_AS = ("postgres", "nobody")  # PostgreSQL refuses to run as root


def programs() -> Path | None:
    """The folder of PostgreSQL's programs, if it is installed."""
    if (found := shutil.which("postgres")) is not None:
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


def required() -> None:
    """Skips the test where there is no PostgreSQL or no driver."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'psycopg[binary]'")
    if programs() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")


class PostgresServer:
    """A server that can be stopped and started again, on the same port."""

    def __init__(self, folder: Path, user: str | None) -> None:
        self._data = folder / "data"
        self._log = folder / "log"
        self._folder = folder
        self._user = user
        self._numbers = count()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._run("initdb", "-U", "personae", "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C.UTF-8")

    def start(self) -> None:
        options = (
            f"-p {self.port} -h 127.0.0.1 -c fsync=off -c full_page_writes=off -c shared_buffers=16MB "
            f"-c unix_socket_directories={self._folder}"
        )
        self._run("pg_ctl", "-w", "-l", str(self._log), "-o", options, "start")

    def stop(self) -> None:
        """Stop as at a crash: connections break."""
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def pause(self, *, on: bool) -> None:
        """Stop all its processes (SIGSTOP), so that it is silent, or let them go on."""
        pid = (self._data / "postmaster.pid").read_text().split()[0]
        found = subprocess.run(["pgrep", "-P", pid], capture_output=True, text=True, check=False)
        for each in (pid, *found.stdout.split()):
            os.kill(int(each), 19 if on else 18)

    def database(self) -> str:
        """The URL of a new, empty database."""
        import psycopg

        name = f"test_{next(self._numbers)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as db:
            db.execute(f"create database {name}".encode())
        return self.url(name)

    def url(self, name: str) -> str:
        return f"postgresql://personae@127.0.0.1:{self.port}/{name}"

    def _run(self, program: str, *arguments: str) -> None:
        folder = programs()
        assert folder is not None
        command = [str(folder / program), "-D", str(self._data), *arguments]
        done = subprocess.run(
            command,
            capture_output=program == "initdb",
            text=True,
            check=False,
            user=self._user,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=None if program == "initdb" else subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A running server in a temporary folder. Skips the test where there is none."""
    required()
    user = None
    if os.getuid() == 0:
        import pwd

        known = {each.pw_name for each in pwd.getpwall()}
        user = next(name for name in _ROOT_RUNS_AS if name in known)
    with tempfile.TemporaryDirectory(prefix="personae-postgres-") as name:
        folder = Path(name)
        if user is not None:
            shutil.chown(folder, user)
        server = PostgresServer(folder, user)
        server.start()
        try:
            yield server
        finally:
            server.stop()
