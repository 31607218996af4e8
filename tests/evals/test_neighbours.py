"""What the eval of new grammars sends, and what it makes of what it has seen."""

import os
import sys

import pytest
from patience import eventually

from personae.evals.floods import FLOODS
from personae.evals.neighbours import FloodFindings, sandbox_processes
from personae.evals.slow_grammars import Seen
from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.sandbox.forkserver import Sandbox

_OTHERWISE = [name for name, flood in FLOODS.items() if flood.body(1) != flood.body(2)]


def test_the_floods_of_new_requests_are_these() -> None:
    assert len(_OTHERWISE) == 15
    assert all("new" not in name for name in FLOODS.keys() - _OTHERWISE)


@pytest.mark.parametrize("name", _OTHERWISE)
def test_a_request_of_a_flood_depends_on_its_number_only(name: str) -> None:
    assert FLOODS[name].body(1) == FLOODS[name].body(1)


def test_a_row_has_both_times_their_ratio_and_the_memory() -> None:
    calm, attacked = Seen([0.02] * 3, [0.01] * 3), Seen([0.03] * 3, [0.04] * 3)
    attacked.bytes.append(3 * 2**20)
    attacked.outcomes["200"] += 2
    row = FloodFindings(calm, attacked, before=2**20, after=2 * 2**20, back=7.2).row()
    assert row == [*["20 / 30 (1.5x)"] * 3, "10 / 40 (4.0x)", "1 / 3 / 2", "7", "2 x 200"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_only_the_processes_of_one_server_are_disturbed() -> None:
    sandbox = Sandbox(byte_vocabulary())
    sandbox.start()
    assert sandbox._process is not None
    server = sandbox._process.pid
    eventually(lambda: server in sandbox_processes(os.getpid()), "it runs")
    assert server not in sandbox_processes(os.getppid() + 10**7)
    sandbox.close()
    assert server not in sandbox_processes(os.getpid())
