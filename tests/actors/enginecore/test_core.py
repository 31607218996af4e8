"""The engine core's process, and what ends it."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from patience import eventually
from programs import Program, child
from tiny_models import model_folder

FRONT = """
import sys, anyio
from pathlib import Path
from personae.actors.options import EngineOptions
from personae.actors.multi_process import open_multi_process
async def main():
    async with open_multi_process(EngineOptions(Path(sys.argv[1]), device="cpu", kv_memory=2**22)):
        print("ready", flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a stopped child with its parent")
@pytest.mark.parametrize("state", ["running", "stopped"])
def test_the_engine_core_ends_when_the_frontend_is_killed(state: str) -> None:
    with Program("-c", FRONT, str(model_folder("qwen3"))) as frontend:
        assert frontend.line() == "ready\n"
        core = child(frontend.process.pid)
        if state == "stopped":
            os.kill(core, signal.SIGSTOP)
        frontend.process.kill()
    eventually(lambda: not alive(core), "the engine core ends, too")


def test_the_engine_core_ignores_signals_for_the_frontend() -> None:
    ours, theirs = socket.socketpair()
    line = str(theirs.fileno())
    with ours, Program("-m", "personae.actors.enginecore", line, pass_fds=(theirs.fileno(),)) as core:
        theirs.close()
        status = Path(f"/proc/{core.process.pid}/status")
        eventually(
            lambda: ignores(status.read_text(), signal.SIGTERM, signal.SIGINT),
            "Back leaves alone the signals that are meant for the frontend",
        )
        core.process.terminate()
        ours.close()
        core.end(0)  # because the connection closed, which is a good end, and not by the signal


def ignores(status: str, *signals: int) -> bool:
    (mask,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn")]
    return all(mask & 1 << number - 1 for number in signals)
