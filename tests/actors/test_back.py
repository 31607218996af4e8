"""Back's process and what ends it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import model_folder

PACKAGES = str(Path(__file__).resolve().parents[2] / ".pkg")
FRONT = """
import sys, anyio
from pathlib import Path
from personae.actors.assembly import EngineOptions
from personae.actors.company import open_company
async def main():
    async with open_company(EngineOptions(Path(sys.argv[1]), device="cpu", kv_memory=2**22)):
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
def test_back_does_not_outlive_a_front_that_is_killed(state: str) -> None:
    command = [sys.executable, "-c", FRONT, str(model_folder("qwen3"))]
    environment = {**os.environ, "PYTHONPATH": PACKAGES, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as front:
        assert front.stdout is not None
        assert front.stdout.readline() == "ready\n"
        (back,) = map(int, subprocess.check_output(["pgrep", "-P", str(front.pid)], text=True).split())
        if state == "stopped":
            os.kill(back, signal.SIGSTOP)
        front.kill()
    deadline = time.monotonic() + 10
    while alive(back):
        assert time.monotonic() < deadline, "Back lives on"
        time.sleep(0.02)


def test_signals_for_front_are_not_taken_by_back() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "personae.actors.back", str(theirs.fileno())]
    environment = {**os.environ, "PYTHONPATH": PACKAGES, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment) as back:
        theirs.close()
        status = Path(f"/proc/{back.pid}/status")
        deadline = time.monotonic() + 60
        while not ignores(status.read_text(), signal.SIGTERM, signal.SIGINT):
            assert time.monotonic() < deadline, "Back takes signals that are meant for Front"
            time.sleep(0.05)
        back.terminate()
        time.sleep(0.2)
        assert back.poll() is None
        ours.close()
        assert back.wait(10) == 0, "the end of the line is a good end"


def ignores(status: str, *signals: int) -> bool:
    (mask,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn")]
    return all(mask & 1 << number - 1 for number in signals)
