"""One batch, several servers: one of them runs it, and another goes on when that one dies."""

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from batch_fixture import BatchFixture, Counting, open_batches, request
from fake_engine import FakeEngine
from patience import soon

from personae.api.database.leases import Leases
from personae.api.object_store import ObjectStore
from personae.errors import StorageFailed

pytestmark = pytest.mark.anyio
Serve = Callable[..., AbstractAsyncContextManager[BatchFixture]]


@pytest.fixture
def serve(url: str, tmp_path: Path) -> Serve:
    """Opens another server with the same database and object store."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install obstore")
    return partial(open_batches, database_url=url, objects=ObjectStore(f"file://{tmp_path}/bucket"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that end soon."""
    monkeypatch.setattr("personae.api.database.leases.LEASE_SECONDS", 2)
    monkeypatch.setattr("personae.api.database.leases.RENEW_SECONDS", 0.3)
    monkeypatch.setattr("personae.api.batches.manager.LOOK_SECONDS", 0.2)
    monkeypatch.setattr("personae.api.batches.run._DISK_RETRY", 0.2)
    monkeypatch.setattr("personae.api.batches.manager._AFTER_AN_ERROR", 0.5)


@contextmanager
def killed(leases: Leases | None) -> Iterator[None]:
    """A server that renews nothing, as one that lost its network."""
    assert leases is not None
    renew = leases.renew

    def fails() -> None:
        raise StorageFailed("planted")

    leases.renew = fails  # type: ignore[method-assign]
    try:
        yield
    finally:
        leases.renew = renew  # type: ignore[method-assign]


def texts(lines: list[dict[str, Any]]) -> dict[str, str]:
    assert len({line["custom_id"] for line in lines}) == len(lines), "nothing twice"
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}


async def test_a_batch_is_run_by_one_server_and_seen_by_all(tmp_path: Path, serve: Serve) -> None:
    engines = [Counting(), Counting()]
    async with AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(serve(tmp_path / str(n), engine))
            for n, engine in enumerate(engines)
        ]
        id = await one.start([request(f"r{n}", f"text {n}") for n in range(40)])
        batch = await one.until(id, "completed")
        assert len(texts(await one.lines(batch["output_file_id"]))) == 40
        await soon(lambda: two.batches.get("default", id).status == "completed", "the other knows its end")
        assert (await two.get(id))["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert sum(engines[0].asked.values()) == 40
    assert not engines[1].asked


async def test_another_server_goes_on_with_the_batch_of_one_that_died_and_runs_no_line_twice(
    tmp_path: Path, serve: Serve
) -> None:
    lines = [request(f"r{n}", f"text {n}") for n in range(30)]
    stuck, well = Counting(), Counting()
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(serve(tmp_path / "one", stuck))
        two = await stack.enter_async_context(serve(tmp_path / "two", well))
        stuck.holds = frozenset({"text 20"})
        id = await one.start(lines)

        def answered() -> int:
            counts = one.batches.get("default", id).request_counts
            return counts.completed

        await soon(lambda: answered() > 0, "some lines are done")
        await soon(lambda: bool(stuck.live), "others hang")
        done_before = answered()
        with killed(one.data.leases):
            batch = await two.until(id, "completed")
            found = texts(await two.lines(batch["output_file_id"]))
            stuck.hold_after = None
            await soon(lambda: id not in one.batches._work, "the first one has noticed")
        assert one.batches.get("default", id).status == "completed"
    assert found == {f"r{n}": f"got text {n}" for n in range(30)}
    assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert done_before
    assert sum(well.asked.values()) <= 30 - done_before
    assert max(well.asked.values()) == 1


async def test_a_server_that_stops_leaves_its_batches_to_others_at_once(tmp_path: Path, serve: Serve) -> None:
    stuck = FakeEngine("never", hold_after=1)
    async with serve(tmp_path / "two", FakeEngine("Hello")) as two:
        async with serve(tmp_path / "one", stuck) as one:
            id = await one.start([request("r0")])
            await soon(lambda: bool(stuck.live), "it runs")
        batch = await two.until(id, "completed")
        assert texts(await two.lines(batch["output_file_id"])) == {"r0": "Hello"}


async def test_a_batch_can_be_cancelled_through_any_server(tmp_path: Path, serve: Serve) -> None:
    stuck = FakeEngine("never", hold_after=1)
    async with (
        serve(tmp_path / "one", stuck) as one,
        serve(tmp_path / "two", FakeEngine()) as two,
    ):
        id = await one.start([request(f"r{n}") for n in range(3)])
        await soon(lambda: bool(stuck.live), "it runs")
        await soon(lambda: two.batches.page("default", None, 10)[0] != [], "the other knows it")
        answer = await two.client.post(f"/v1/batches/{id}/cancel")
        assert answer.json()["status"] == "cancelling"
        batch = await one.until(id, "cancelled")
        assert {line["error"]["code"] for line in await one.lines(batch["error_file_id"])} == {
            "batch_cancelled"
        }
        with anyio.fail_after(5):
            await soon(lambda: not stuck.live, "nothing runs any more")
