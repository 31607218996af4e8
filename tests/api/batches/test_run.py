"""How many of a batch's requests are in memory at once."""

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from virtual_clock import virtual_clock

from personae.api.batches import input as reading
from personae.api.batches.input import Requests
from personae.api.batches.model import InputLine, OutputLine
from personae.api.batches.run import BatchRun
from personae.api.batches.semaphore import SequenceSemaphore
from personae.api.settings import ApiSettings
from personae.api.tenants.bodies import BodyBudget
from personae.api.tenants.store import Identity, TenantLimits

pytestmark = virtual_clock


class Journal:
    def __init__(self) -> None:
        self.done: set[str] = set()
        self.written: list[OutputLine] = []

    def write(self, results: list[OutputLine]) -> None:
        self.written += results


class Call:
    """A request that takes a second."""

    running = most = 0
    sequences = 1

    def __init__(self, line: InputLine) -> None:
        self.line = line
        self.result: OutputLine | None = None

    async def prepare(self) -> None:
        type(self).running += 1
        type(self).most = max(self.most, self.running)

    async def run(self) -> None:
        await anyio.sleep(1)
        self.result = OutputLine("x", self.line.custom_id, None, None)

    def close(self) -> None:
        type(self).running -= 1


def lines(path: Path, count: int, size: int) -> Path:
    with path.open("wb") as file:
        for number in range(count):
            line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions"}
            file.write(msgspec.json.encode({**line, "body": {"model": "m", "prompt": "x" * size}}) + b"\n")
    return path


async def test_a_batchs_requests_leave_half_of_the_tenants_bytes_to_others(tmp_path: Path) -> None:
    Call.running = Call.most = 0
    budget, journal = BodyBudget(), Journal()
    who = Identity("ann", "tenant", TenantLimits(body_bytes=10_000))
    requests: Any = Requests(lines(tmp_path / "file", 20, 1000), ApiSettings())
    make: Any = Call
    await BatchRun(journal, requests, make, SequenceSemaphore(64), lambda: budget.hold(who))()  # type: ignore[arg-type]
    requests.close()
    assert len(journal.written) == 20
    assert Call.most == 4, "of 5,000 bytes, with some around each prompt"
    assert budget.held() == 0


async def test_few_long_lines_are_read_at_a_time_and_all_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_READ_BYTES", 2500)
    requests = Requests(lines(tmp_path / "file", 7, 1000), ApiSettings())
    taken = []
    while found := requests.take(16):
        taken.append([line.custom_id for line in found])
    requests.close()
    assert taken == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
