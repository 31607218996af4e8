"""`personae run`: serve a model for one conversation in the terminal."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress

from personae.api.commands.conversation import Conversation
from personae.api.commands.terminal import talk

_READY = "personae ready "
_STOP_SECONDS = 30.0
_INTERRUPTED = 130  # the exit code of shells for Ctrl-C


def run(model: str | None, options: Sequence[str] = (), system: str | None = None) -> int:
    """Serve the model on a free port of this machine, talk to it until the conversation ends, and stop it.
    The exit code: that of the server if it does not start, 1 if it does not answer."""
    named = [] if model is None else [model]
    quiet = ["--log-level", "warning"]  # the log is on the terminal of the conversation
    command = [sys.executable, "-m", "personae", "serve", *named, "--port", "0", *quiet, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603  our own program
        try:
            assert server.stdout is not None
            line = next((line for line in server.stdout if line.startswith(_READY)), None)
            if line is None:
                return server.wait() or 1
            url = line.removeprefix(_READY).split()[0]
            with closing(Conversation(url, None, system)) as conversation:
                return 0 if talk(conversation) else 1
        except KeyboardInterrupt:
            return _INTERRUPTED
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(_STOP_SECONDS)
            server.kill()
