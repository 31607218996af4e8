"""What the eval of kills makes of streams, and which processes it takes for an engine."""

import os
import subprocess
import sys

import pytest
from patience import eventually

from personae.evals.kills import REQUESTS, Findings, _joined, engine_processes


def test_an_answer_is_its_text_its_end_and_its_tokens_however_it_was_cut_into_pieces() -> None:
    first = [("a", None, ["a"]), ("bc", None, ["b", "c"]), ("", "length", None)]
    second = [("abc", "length", ["a", "b", "c"])]
    assert _joined(first) == _joined(second) == ("abc", "length", ["a", "b", "c"])
    assert _joined([("abc", None, ["a", "b", "c"])]) != _joined(first)


def test_the_requests_differ_and_cover_all_that_binds_an_answer() -> None:
    assert len({repr(request) for request in REQUESTS}) == len(REQUESTS) == 32
    fields = {field for request in REQUESTS for field in request}
    assert {"response_format", "structured_outputs", "logprobs", "n", "seed"} <= fields


def test_findings_with_a_lost_answer_are_not_good_and_say_why() -> None:
    found = Findings(kills=2, answers=9, pauses=[0.1, 0.3, 0.5])
    assert found.good
    assert "p50 0.30 s, max 0.50 s" in found.line("engine")
    found.lost["500 it broke"] += 1
    assert not found.good
    assert found.line("engine").endswith("1 x 500 it broke")
    assert not Findings(different=1).good


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_only_the_engines_of_one_server_are_killed() -> None:
    code = "import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, "personae.actors.enginecore"]) as engine:
        try:
            eventually(lambda: engine.pid in engine_processes(os.getpid()), "it runs")
            assert engine.pid not in engine_processes(os.getpid() + 10**7)
        finally:
            engine.kill()
