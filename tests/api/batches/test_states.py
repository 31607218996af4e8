"""What becomes of a batch, by the virtual clock: finished, failed, expired, cancelled, taken up again."""

import logging
import sqlite3
from pathlib import Path
from typing import Any

import anyio
import pytest
from batch_fixture import CHAT, START, open_batches, request
from fake_engine import FakeEngine, byte_tokenizer
from virtual_clock import virtual_clock

from personae.api.batches import run
from personae.api.batches.journal import OUTPUT, Journal
from personae.api.files.store import FileStore
from personae.api.settings import ApiSettings
from personae.api.tenants.store import Identity, TenantLimits
from personae.errors import Overloaded, QuotaExceeded

pytestmark = [*virtual_clock, pytest.mark.usefixtures("no_threads")]
TOKENIZER = byte_tokenizer()


def echo(log: Any) -> str:
    """An answer that tells the prompt."""
    return "got " + TOKENIZER.decode(log.tokens[: log.prompt_length], True).split("\n")[1]


def texts(lines: list[dict[str, Any]]) -> dict[str, str]:
    """Answers by custom id."""
    assert len({line["custom_id"] for line in lines}) == len(lines), "nothing twice"
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}


async def test_every_request_is_answered_as_it_would_be_over_http(tmp_path: Path) -> None:
    async with open_batches(tmp_path, FakeEngine("Hello, world!")) as fixture:
        models = ("base", "team/pirate")
        id = await fixture.start(
            [request(f"r{i}", model=models[i % 2], seed=i) for i in range(200)], metadata={"run": "1"}
        )
        batch = await fixture.until(id, "completed")
        lines = await fixture.lines(batch["output_file_id"])
        single = (await fixture.client.post(CHAT, json=request("x")["body"])).json()
    assert texts(lines) == {f"r{i}": "Hello, world!" for i in range(200)}
    first = next(line for line in lines if line["custom_id"] == "r0")
    assert first["response"]["status_code"] == 200
    assert first["error"] is None
    same = {"choices", "model", "object", "usage"}
    assert {k: first["response"]["body"][k] for k in same} == {k: single[k] for k in same}
    assert batch["request_counts"] == {"total": 200, "completed": 200, "failed": 0}
    assert batch["usage"]["output_tokens"] == 200 * single["usage"]["completion_tokens"]
    assert batch["usage"]["total_tokens"] == 200 * single["usage"]["total_tokens"]
    assert batch["error_file_id"] is None
    assert batch["metadata"] == {"run": "1"}
    assert START <= batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"]
    assert not list((tmp_path / "batches").iterdir()), "nothing is left of it"


async def test_its_sequences_give_way_and_are_bounded(tmp_path: Path) -> None:
    most = 0

    class Watched(FakeEngine):
        def stream(self, logs: Any) -> Any:
            nonlocal most
            most = max(most, len(self.live) + len(logs))
            assert all(log.background for log in logs)
            return super().stream(logs)

    async with open_batches(tmp_path, Watched(), ApiSettings(batch_concurrency=5)) as fixture:
        ids = [await fixture.start([request(f"{i}", n=2) for i in range(20)]) for _ in range(2)]
        for id in ids:
            batch = await fixture.until(id, "completed")
            assert batch["request_counts"]["completed"] == 20
    assert most == 4, "two requests of two"


async def test_a_request_that_fails_has_its_error_in_the_error_file(tmp_path: Path) -> None:
    async with open_batches(tmp_path) as fixture:
        long = request("long", "x" * 2000)
        batch = await fixture.until(await fixture.start([request("good"), long]), "completed")
        good, bad = await fixture.lines(batch["output_file_id"]), await fixture.lines(batch["error_file_id"])
    assert [line["custom_id"] for line in good] == ["good"]
    assert [line["custom_id"] for line in bad] == ["long"]
    assert bad[0]["response"]["status_code"] == 400
    assert bad[0]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}


async def test_a_full_engine_is_asked_again(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.refuse = Overloaded("full", retry_after=5.0)
    async with open_batches(tmp_path, engine) as fixture:
        id = await fixture.start([request("a"), request("b")])
        await anyio.sleep(60)
        assert (await fixture.get(id))["request_counts"] == {"total": 2, "completed": 0, "failed": 0}
        engine.refuse = None
        assert (await fixture.until(id, "completed"))["request_counts"]["completed"] == 2


BROKEN: dict[str, tuple[Any, str, str | None]] = {
    "no JSON": (b"{", "invalid_json_line", None),
    "no UTF-8": (b'{"custom_id": "\xff"}', "invalid_json_line", None),
    "no object": (b"[]", "invalid_line", None),
    "no custom_id": ({"method": "POST", "url": CHAT, "body": {}}, "missing_required_parameter", "custom_id"),
    "custom_id": (request("x") | {"custom_id": 5}, "invalid_type", "custom_id"),
    "another field": (request("x") | {"model": "base"}, "unknown_parameter", "model"),
    "twice": (request("r1"), "duplicate_custom_id", "custom_id"),
    "method": (request("x") | {"method": "GET"}, "invalid_method", "method"),
    "url": (request("x") | {"url": "/v1/completions"}, "invalid_url", "url"),
    "unknown": (request("x", bogus=1), "unknown_parameter", "body.bogus"),
    "type": (request("x", max_tokens="many"), "invalid_type", "body.max_tokens"),
    "missing": (request("x") | {"body": {"model": "base"}}, "missing_required_parameter", "body.messages"),
    "stream": (request("x", stream=True), "unsupported_parameter", "body.stream"),
    "timeout": (request("x", timeout=5), "unsupported_parameter", "body.timeout"),
    "model": (request("x", model="nobody"), "model_not_found", "body.model"),
    "too long": (request("x", "y" * 5000), "line_too_long", None),
}


@pytest.mark.parametrize("what", BROKEN)
async def test_a_broken_line_fails_the_batch_and_is_named(tmp_path: Path, what: str) -> None:
    line, code, param = BROKEN[what]
    engine = FakeEngine()
    async with open_batches(tmp_path, engine, ApiSettings(max_body_bytes=4000)) as fixture:
        batch = await fixture.until(await fixture.start([request("r1"), b"", line, request("r2")]), "failed")
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"]) == (code, 3), error
    assert error["param"] == param
    assert not engine.submitted, "nothing is run of a batch that fails"
    assert batch["failed_at"] is not None
    assert batch["output_file_id"] is None


async def test_a_file_without_requests_or_with_too_many_fails(tmp_path: Path) -> None:
    async with open_batches(tmp_path, settings=ApiSettings(max_batch_lines=3)) as fixture:
        empty = await fixture.until(await fixture.start([b" "]), "failed")
        many = await fixture.until(await fixture.start([request(str(i)) for i in range(4)]), "failed")
        wrong = await fixture.until(await fixture.start([b"x"] * 3), "failed")
    assert empty["errors"]["data"][0]["code"] == "empty_file"
    assert many["errors"]["data"] == [
        {"code": "too_many_requests", "message": "A batch has at most 3 requests.", "param": None, "line": 4}
    ]
    assert [error["line"] for error in wrong["errors"]["data"]] == [1, 2, 3]


async def test_what_is_done_when_its_time_is_up_is_kept(tmp_path: Path) -> None:
    engine = FakeEngine(lambda log: "done" if log.params.seed == 1 else "never")
    engine.hold_after = 5
    async with open_batches(tmp_path, engine) as fixture:
        id = await fixture.start([request("quick", seed=1), request("slow", seed=2)], completion_window="5m")
        await anyio.sleep(200)
        assert (await fixture.get(id))["request_counts"]["completed"] == 1
        batch = await fixture.until(id, "expired")
        good, bad = await fixture.lines(batch["output_file_id"]), await fixture.lines(batch["error_file_id"])
    assert texts(good) == {"quick": "done"}
    assert [(line["custom_id"], line["error"]["code"]) for line in bad] == [("slow", "batch_expired")]
    assert batch["expires_at"] == batch["created_at"] + 300
    assert batch["expired_at"] - batch["expires_at"] < 5
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 0}


async def test_cancelling_keeps_what_is_done(tmp_path: Path) -> None:
    engine = FakeEngine(lambda log: "done" if log.params.seed == 1 else "never")
    engine.hold_after = 5
    async with open_batches(tmp_path, engine) as fixture:
        id = await fixture.start([request("quick", seed=1), *(request(f"slow{i}") for i in range(100))])
        await anyio.sleep(10)
        answer = await fixture.client.post(f"/v1/batches/{id}/cancel")
        assert answer.json()["status"] == "cancelling"
        again = await fixture.client.post(f"/v1/batches/{id}/cancel")
        assert again.json()["status"] in ("cancelling", "cancelled") or again.status_code == 409
        batch = await fixture.until(id, "cancelled")
        assert not engine.live, "the engine has let go of them"
        good, bad = await fixture.lines(batch["output_file_id"]), await fixture.lines(batch["error_file_id"])
        late = await fixture.client.post(f"/v1/batches/{id}/cancel")
    assert texts(good) == {"quick": "done"}
    assert {line["custom_id"] for line in bad} == {f"slow{i}" for i in range(100)}
    assert {line["error"]["code"] for line in bad} == {"batch_cancelled"}
    assert late.status_code == 409


@pytest.mark.parametrize("held", [0, 1, 3])
async def test_a_restart_loses_nothing_and_does_nothing_twice(
    tmp_path: Path, held: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wanted = [request(f"r{i}", f"text {i}") for i in range(60)]
    engine = FakeEngine(lambda log: echo(log) if int(echo(log).split()[-1]) % 4 < held else "-" * 50)
    engine.hold_after = 30
    async with open_batches(tmp_path, engine) as fixture:
        id = await fixture.start(wanted)
        await anyio.sleep(30)
        before = await fixture.get(id)
    assert before["request_counts"] == {"total": 60, "completed": 15 * held, "failed": 0}
    with (tmp_path / "batches" / id / OUTPUT).open("ab") as file:
        file.write(b'{"id": "torn", "custom_id": "r3", "respo')  # the power went
    engine = FakeEngine(echo)
    async with open_batches(tmp_path, engine, at=100) as fixture:
        batch = await fixture.until(id, "completed")
        lines = await fixture.lines(batch["output_file_id"])
    assert "resuming unfinished batches: 1" in caplog.messages
    assert texts(lines) == {f"r{i}": f"got text {i}" for i in range(60)}
    assert len(engine.submitted) == 60 - 15 * held, "only what was missing"
    assert batch["request_counts"]["completed"] == 60


async def test_a_batch_whose_time_was_up_while_the_server_was_down_expires(tmp_path: Path) -> None:
    engine = FakeEngine(hold_after=1)
    async with open_batches(tmp_path, engine) as fixture:
        id = await fixture.start([request("a")], completion_window="10m")
        await fixture.until(id, "in_progress")
    async with open_batches(tmp_path, engine, at=10_000) as fixture:
        batch = await fixture.until(id, "expired")
        (line,) = await fixture.lines(batch["error_file_id"])
    assert line["error"]["code"] == "batch_expired"


async def test_one_that_was_being_finished_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crash(*_: Any, **__: Any) -> None:
        raise RuntimeError("the lights went out")

    async with open_batches(tmp_path) as fixture:
        monkeypatch.setattr(fixture.batches._store, "finish", crash)
        id = await fixture.start([request("a")])
        batch = await fixture.until(id, "finalizing")
        await anyio.sleep(5)
        assert batch["output_file_id"] is None
    async with open_batches(tmp_path) as fixture:
        batch = await fixture.until(id, "completed")
        assert list(texts(await fixture.lines(batch["output_file_id"]))) == ["a"]


async def test_one_that_stumbles_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_batches(tmp_path) as fixture:
        finish, failures = fixture.batches._store.finish, 2

        async def locked(*arguments: Any, **changes: Any) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise sqlite3.OperationalError("database is locked")
            return await finish(*arguments, **changes)

        monkeypatch.setattr(fixture.batches._store, "finish", locked)
        batch = await fixture.until(await fixture.start([request("a")]), "completed")
        assert list(texts(await fixture.lines(batch["output_file_id"]))) == ["a"]


async def test_a_database_that_is_busy_when_files_are_swept_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, failures = FileStore.sweep, 2

    async def locked(self: FileStore, needed: Any) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise sqlite3.OperationalError("database is locked")
        await sweep(self, needed)

    monkeypatch.setattr(FileStore, "sweep", locked)
    async with open_batches(tmp_path) as fixture:
        fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = fixture.batches.files.path(await fixture.upload([request("a")], **fields))
        assert file.exists()
        await anyio.sleep(2 * 3600)
        assert not file.exists()


async def test_uploads_at_the_same_time_have_one_quota(tmp_path: Path) -> None:
    async with open_batches(tmp_path) as fixture, anyio.create_task_group() as tasks:
        files, taken, refused = fixture.batches.files, [], []
        who = Identity("default", "tenant", TenantLimits(file_bytes=100))

        async def add(number: int) -> None:
            (path := tmp_path / str(number)).write_bytes(b"x" * 60)
            try:
                taken.append(await files.add(who, path, filename="f", purpose="batch", seconds=None))
            except QuotaExceeded as error:
                refused.append(error)

        for number in range(3):
            tasks.start_soon(add, number)
    assert (len(taken), len(refused)) == (1, 2)


async def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, full = Journal._append, True

    def append(self: Journal, name: str, data: bytes) -> None:
        if full:
            with self.paths[name].open("ab") as file:
                file.write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write(self, name, data)

    monkeypatch.setattr(Journal, "_append", append)
    async with open_batches(tmp_path) as fixture:
        id = await fixture.start([request(str(i)) for i in range(10)])
        await anyio.sleep(3 * run._DISK_RETRY)
        assert (await fixture.get(id))["request_counts"]["completed"] == 0, (
            "what is not on disk does not count"
        )
        full = False
        batch = await fixture.until(id, "completed")
        assert len(texts(await fixture.lines(batch["output_file_id"]))) == 10


async def test_a_tenant_that_is_held_to_tokens_keeps_half_of_them_for_itself(tmp_path: Path) -> None:
    engine = FakeEngine("x" * 20)
    async with open_batches(tmp_path, engine, keys=True) as fixture:
        tenants = fixture.batches._tenants
        assert tenants is not None
        tenants.create_tenant("ann", TenantLimits(tokens_per_minute=500))
        fixture.client.headers["authorization"] = f"Bearer {tenants.create_key('ann', 'tenant')}"
        meter = fixture.app.state.services.meter
        meter._clock = anyio.current_time
        id = await fixture.start([request(str(i)) for i in range(30)])
        least = 500.0
        while (await fixture.get(id))["status"] != "completed":
            await anyio.sleep(1)
            bucket = meter._accounts["ann"].tokens
            if bucket is not None:
                least = min(least, bucket._level)
        assert anyio.current_time() > 60, "it took its time"
    assert least > -30 * 21 / 2


async def test_requests_of_a_tenant_that_is_revoked_while_they_run_end(tmp_path: Path) -> None:
    engine = FakeEngine(hold_after=2)
    async with open_batches(tmp_path, engine, keys=True) as fixture:
        tenants, services = fixture.batches._tenants, fixture.app.state.services
        assert tenants is not None
        tenants.create_tenant("ann", TenantLimits())
        fixture.client.headers["authorization"] = f"Bearer {tenants.create_key('ann', 'tenant')}"
        async with services.revocations.running():
            id = await fixture.start([request("a"), request("b")])
            while len(engine.live) < 2:  # noqa: ASYNC110  the engine notifies nobody
                await anyio.sleep(0.1)
            tenants.revoke_tenant("ann")
            await anyio.sleep(60)
        batch = fixture.batches.get("ann", id)
        assert (batch.status, batch.request_counts.failed) == ("completed", 2)
        assert batch.error_file_id is not None
        text = fixture.batches.files.path(batch.error_file_id).read_text()
        assert text.count("The tenant was revoked while the request ran.") == 2
    assert not engine.live


async def test_requests_of_a_revoked_tenant_are_not_run(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.refuse = Overloaded("full", retry_after=5.0)
    async with open_batches(tmp_path, engine, keys=True) as fixture:
        tenants = fixture.batches._tenants
        assert tenants is not None
        tenants.create_tenant("ann", TenantLimits())
        fixture.client.headers["authorization"] = f"Bearer {tenants.create_key('ann', 'tenant')}"
        id = await fixture.start([request("a")])
        await anyio.sleep(12)
        tenants.revoke_tenant("ann")
        engine.refuse = None
        await anyio.sleep(60)
        assert fixture.batches.get("ann", id).status == "completed"
        assert fixture.batches.get("ann", id).request_counts.failed == 1
    assert not engine.submitted


async def test_the_adapter_of_a_request_that_waits_can_be_removed_and_is_missed(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.refuse = Overloaded("full", retry_after=5.0)
    async with open_batches(tmp_path, engine) as fixture:
        id = await fixture.start([request("a", model="team/pirate")])
        await anyio.sleep(12)
        monkey = engine.models("default")
        engine.models = lambda tenant: {"base": monkey["base"]}  # type: ignore[method-assign]  # it is gone
        engine.refuse = None
        batch = await fixture.until(id, "completed")
        (line,) = await fixture.lines(batch["error_file_id"])
    assert line["response"]["body"]["error"]["code"] == "model_not_found"


async def test_a_batch_of_responses_counts_its_tokens(tmp_path: Path) -> None:
    path = "/v1/responses"
    lines = [
        {"custom_id": str(i), "method": "POST", "url": path, "body": {"model": "base", "input": "hi"}}
        for i in range(3)
    ]
    async with open_batches(tmp_path, FakeEngine("Hello, world!")) as fixture:
        batch = await fixture.until(await fixture.start(lines, endpoint=path), "completed")
        bodies = [line["response"]["body"] for line in await fixture.lines(batch["output_file_id"])]
    assert {body["output"][0]["content"][0]["text"] for body in bodies} == {"Hello, world!"}
    assert batch["usage"]["output_tokens"] == sum(body["usage"]["output_tokens"] for body in bodies) == 3 * 14
    assert batch["usage"]["input_tokens"] == sum(body["usage"]["input_tokens"] for body in bodies)


async def test_results_count_against_the_tenants_files_and_stop_where_these_are_full(tmp_path: Path) -> None:
    engine = FakeEngine("x" * 150)
    async with open_batches(tmp_path, engine, ApiSettings(batch_concurrency=1), keys=True) as fixture:
        tenants = fixture.batches._tenants
        assert tenants is not None
        tenants.create_tenant("ann", TenantLimits(file_bytes=90_000))
        fixture.client.headers["authorization"] = f"Bearer {tenants.create_key('ann', 'tenant')}"
        id = await fixture.start([request(f"r{i}", max_tokens=150) for i in range(200)])
        batch = await fixture.until(id, "completed")
        good, bad = await fixture.lines(batch["output_file_id"]), await fixture.lines(batch["error_file_id"])
        listed = (await fixture.client.get("/v1/files")).json()["data"]
        used = sum(file["bytes"] for file in listed if file["filename"] != f"{id}_errors.jsonl")
        another = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        refused = await fixture.client.post("/v1/batches", json=another)
        for file in (batch["output_file_id"], batch["error_file_id"]):
            await fixture.client.delete(f"/v1/files/{file}")
        taken = await fixture.client.post("/v1/batches", json=another)
    assert 10 < len(good) < 160
    assert len(good) + len(bad) == 200
    assert batch["request_counts"] == {"total": 200, "completed": len(good), "failed": len(bad)}
    assert {line["response"]["status_code"] for line in bad} == {429}
    assert {line["response"]["body"]["error"]["code"] for line in bad} == {"quota_exceeded"}
    assert used < 90_000 + 70 * 1500, "but for what was being answered then"
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert taken.status_code == 200


async def test_a_tenant_has_as_many_files_and_batches_as_its_limits_say(tmp_path: Path) -> None:
    engine = FakeEngine(hold_after=1)
    async with open_batches(tmp_path, engine, keys=True) as fixture:
        tenants = fixture.batches._tenants
        assert tenants is not None
        tenants.create_tenant("ann", TenantLimits(files=5, batches=1))
        fixture.client.headers["authorization"] = f"Bearer {tenants.create_key('ann', 'tenant')}"
        await fixture.start([request("a")])
        body = {"input_file_id": await fixture.upload([request("b")]), "endpoint": CHAT}
        second = await fixture.client.post("/v1/batches", json={**body, "completion_window": "24h"})
        assert (second.status_code, second.json()["error"]["code"]) == (429, "quota_exceeded")
        tenants.change_limits("ann", TenantLimits(batches=2))
        for _ in range(3):
            await fixture.upload([request("c")])
        third = await fixture.client.post("/v1/batches", json={**body, "completion_window": "24h"})
        assert "5 files of at most 5" in third.json()["error"]["message"], "there is no room for its results"
        sixth = await fixture.client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"x")}
        )
        assert (sixth.status_code, sixth.json()["error"]["code"]) == (429, "quota_exceeded")


async def test_of_batches_that_have_ended_the_oldest_are_forgotten(tmp_path: Path) -> None:
    async with open_batches(tmp_path, settings=ApiSettings(max_ended_batches=3)) as fixture:
        ids = []
        for number in range(6):
            ids.append(await fixture.start([request(str(number))]))
            last = await fixture.until(ids[-1], "completed")
        listed = [batch["id"] for batch in (await fixture.client.get("/v1/batches")).json()["data"]]
        assert listed == ids[:1:-1], "three that had ended when the last came"
        assert await fixture.lines(last["output_file_id"])
