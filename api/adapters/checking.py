"""The process that checks uploaded adapters for a server.

    python -m personae.api.adapters.checking FD SECONDS

is started by `checker.py` with one end of a line as an open file. It ends when the other end is closed, or
when it has had nothing to do for so many seconds: torch takes some 200 MB.
"""

import select
import signal
import socket
import sys
from pathlib import Path

from personae.actors.framing import frame, receive_first
from personae.api.adapters.checker import Accepted, Answer, CheckRequest, NotAccepted
from personae.errors import AdapterError
from personae.lora.upload import check_upload


def main() -> None:
    """Answer requests until nobody has any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the server, which ends us
    file, idle_seconds = int(sys.argv[1]), float(sys.argv[2])
    with socket.socket(fileno=file) as line:
        line.set_inheritable(False)
        while select.select([line], [], [], idle_seconds)[0]:
            try:
                request: CheckRequest = receive_first(line, CheckRequest)
                line.sendall(frame(_answer(request)))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return  # the server has gone


def _answer(request: CheckRequest) -> Answer:
    try:
        return Accepted(check_upload(Path(request.folder), request.bounds, request.most))
    except AdapterError as error:
        return NotAccepted(error.message, error.param, error.code)


if __name__ == "__main__":
    main()
