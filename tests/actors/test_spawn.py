"""A process that is started before the server is imported becomes the engine's, or ends with the command."""

import signal
import sys

import pytest

from personae.actors import spawn as spawning
from personae.actors.process import ChildProcess
from personae.actors.spawn import ahead, end_ahead, have_spare, spawn

pytestmark = pytest.mark.anyio
SLEEPER = (sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)")


async def test_a_process_that_was_started_ahead_is_the_next_of_its_command() -> None:
    with ahead(SLEEPER) as early:
        process = await ChildProcess.launch(SLEEPER)
        other = await ChildProcess.launch(SLEEPER)
    assert process.pid == early.process.pid != other.pid
    for each in (process, other):
        async with each.line, each.output:
            assert await each.output.receive(1) == b"h"
            assert each.returncode is None, "what was taken does not end with what started it"
            each.kill()
            assert await each.wait() == each.returncode == -signal.SIGKILL


def test_a_spare_process_gets_its_first_message_once_and_is_replaced_when_it_has_ended() -> None:
    reader = (
        sys.executable,
        "-c",
        "import socket, sys; print(socket.socket(fileno=int(sys.argv[1])).recv(9), end='')",
    )
    try:
        for _ in range(2):
            have_spare(b"hello", reader)
        spare = spawn(reader)
        with spare.output, spare.line:
            assert spare.output.recv(99) == b"b'hello'"
            assert spare.process.wait() == 0
        have_spare(b"hello", reader)
        ended = spawning._ahead[reader]
        assert ended.process.wait() == 0
        have_spare(b"hello", reader)
        assert spawning._ahead[reader] is not ended
    finally:
        end_ahead()


def test_a_process_in_an_environment_of_its_own_is_another() -> None:
    with ahead(SLEEPER) as early:
        other = spawn(SLEEPER, {"OMP_NUM_THREADS": "1"})
        assert other is not early
        other.end()
        assert early.process.poll() is None
    assert early.process.poll() == -signal.SIGKILL


def test_a_process_that_turns_out_not_to_be_needed_ends() -> None:
    with ahead(SLEEPER) as early:
        end_ahead()
        assert early.process.poll() == -signal.SIGKILL
        another = spawn(SLEEPER)
        assert another is not early
        another.end()
