"""What `personae serve` shows of its start, on a terminal and in a log."""

import logging
import os
import pty
import re
import threading

import pytest

from personae.api.commands.startup import StartUp

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, shown) -> str:
    """What `shown(StartUp)` writes to a terminal of 100 columns, without what is drawn over."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    delivered = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 65536):
                delivered.extend(data)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        shown(StartUp(drawn=True))
    reader.join()
    os.close(ours)
    return CONTROL.sub("", delivered.decode())


def test_a_terminal_shows_the_running_phase_and_a_line_for_each_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shown(start_up: StartUp) -> None:
        with start_up:
            start_up.begin("libraries")
            start_up.write("a line of the log that is " + "long " * 20 + "[bold]\n")
            start_up.begin("weights", 50 * 2**20, 100 * 2**20)
            start_up._progress.refresh()
            start_up.end()
            start_up.write("later\n")

    text = on_a_terminal(monkeypatch, shown)
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    assert "50 of 100 MiB" in text
    assert [line for line in lines if re.fullmatch(r"(libraries|weights) +0\.\d s", line)] == [
        line for line in lines if line.endswith("s") and "━" not in line
    ]
    assert "a line of the log that is " + "long " * 20 + "[bold]" in lines
    assert lines[-2:] == ["later", ""]


def test_a_start_that_fails_shows_no_time_and_leaves_the_terminal_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(start_up: StartUp) -> None:
        with start_up:
            start_up.begin("weights")
            raise OSError("no such file")

    def shown(start_up: StartUp) -> None:
        with pytest.raises(OSError, match="no such"):
            fail(start_up)
        assert not start_up._progress.live.is_started

    assert not re.search(r"weights +0\.\d s", on_a_terminal(monkeypatch, shown))


def test_a_log_has_a_line_for_each_phase_that_took_time(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 2.0, 2.0, 2.01, 2.01, 5.5])
    monkeypatch.setattr("personae.api.commands.startup.monotonic", lambda: next(now))
    caplog.set_level(logging.INFO)
    with StartUp(drawn=False) as start_up:
        start_up.begin("libraries")
        start_up.begin("kernels")
        start_up.begin("weights")
        start_up.begin("weights", 1, 2)
        start_up.end()
    assert caplog.messages == ["start: libraries took 2.0 s", "start: weights took 3.5 s"]
    assert capsys.readouterr().out == ""  # which is for the line that says where it is ready
