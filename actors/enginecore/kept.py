"""An engine core that waits for a new frontend, with its weights loaded: see `actors/keeping.py`."""

import hmac
import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from personae.actors.enginecore.step_recorder import StepRecorder
from personae.actors.keeping import END, SUFFIX, TAKE, TICKET_BYTES, short_path
from personae.actors.line import Line
from personae.actors.wire import Keep

PEER_SECONDS = 60.0  # how long a peer may take to show its ticket, and to say what it wants

log = logging.getLogger("personae.engine")


class NewFrontend(msgspec.Struct, frozen=True):
    """The connection to a frontend that takes this engine core over, and the recorder that it reads."""

    line: Line
    recorder: StepRecorder


class KeptCore:
    """Listens for the next frontend. Created by `open`."""

    def __init__(self, keep: Keep, listener: socket.socket, path: Path) -> None:
        self.keep = keep
        self._listener = listener
        self._path = path

    @classmethod
    def open(cls, keep: Keep) -> "KeptCore | None":
        """Listen in the folder. None if that is not possible; the log says why."""
        path = keep.folder / f"{secrets.token_hex(8)}{SUFFIX}"
        listener = socket.socket(socket.AF_UNIX)
        try:
            with short_path(keep.folder) as folder:
                listener.bind(f"{folder}/{path.name}")
            listener.listen()
        except OSError as error:
            listener.close()
            log.warning(
                "the engine ends with its server, because it can't listen in %s: %s", keep.folder, error
            )
            return None
        return cls(keep, listener, path)

    def wait(self) -> NewFrontend | None:
        """Wait for a new frontend. None when none has come in time, or when one ended this engine core."""
        until = time.monotonic() + self.keep.seconds
        while (left := until - time.monotonic()) > 0:
            self._listener.settimeout(left)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                break
            order, files = _order(connection, self.keep)
            if order == TAKE and len(files) == 2:
                output, recorder = files
                redirect_output(output)
                connection.settimeout(None)
                return NewFrontend(Line(connection), StepRecorder.attach(recorder))
            connection.close()
            for file in files:
                os.close(file)
            if order == END:
                break
        return None

    def close(self) -> None:
        """Stop listening, and remove the socket's name."""
        self._listener.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def redirect_output(file: int) -> None:
    """Send stdout and stderr to this file from now on, and close its descriptor."""
    for output in (1, 2):
        os.dup2(file, output)
    os.close(file)


def _order(connection: socket.socket, keep: Keep) -> tuple[bytes, list[int]]:
    """What a peer with the right ticket wants, with the files that it sent; empty from any other peer."""
    connection.settimeout(PEER_SECONDS)
    try:
        ticket = connection.recv(TICKET_BYTES, socket.MSG_WAITALL)
        if not hmac.compare_digest(ticket, keep.ticket):
            return b"", []
        connection.sendall(keep.fingerprint)
        order, files, _, _ = socket.recv_fds(connection, 1, 2)
    except OSError:
        return b"", []  # it has gone, or says nothing
    for file in files:
        os.set_inheritable(file, False)
    return order, files
