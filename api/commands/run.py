"""`personae run`: serve a model for one conversation in the terminal."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from personae.api.commands.conversation import Conversation
from personae.api.commands.terminal import talk

_READY = "personae ready "
_STOP_SECONDS = 30.0


def run(model: str | None, options: Sequence[str] = (), system: str | None = None) -> int:
    """Serve the model on a free port of this machine, talk to it until the conversation ends, and stop it.
    The exit code: that of the server if it does not start, 1 if it does not answer."""
    named = [] if model is None else [model]
    command = [sys.executable, "-m", "personae", "serve", *named, "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  our own program
    try:
        assert server.stdout is not None
        line = next((line for line in server.stdout if line.startswith(_READY)), None)
        if line is None:
            return server.wait() or 1
        url = line.removeprefix(_READY).split()[0]
        return 0 if talk(Conversation(url, None, system)) else 1
    except KeyboardInterrupt:
        return 130
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(_STOP_SECONDS)
        if server.poll() is None:
            server.kill()
            server.wait()
