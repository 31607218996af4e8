"""The `openai` package's `files` and `batches`, unchanged, against the real server."""

import base64
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_fixture import CHAT, jsonl, request
from fake_engine import FakeEngine
from live_server import serving
from openai import OpenAI
from openai_client import openai_client
from patience import eventually

from personae.api.app import create_app
from personae.api.batches.manager import BatchManager
from personae.api.settings import ApiSettings
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import TenantLimits, TenantStore


class Served:
    def __init__(self, url: str, tenants: TenantStore) -> None:
        self.url = url
        self.tenants = tenants
        self._keys: dict[str, str] = {}

    def client(self, tenant: str, **limits: int) -> OpenAI:
        if tenant not in self._keys:
            self.tenants.create_tenant(tenant, TenantLimits(**limits))
            self._keys[tenant] = self.tenants.create_key(tenant, "tenant")
        return openai_client(self.url, self._keys[tenant])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = DataDir(tmp_path_factory.mktemp("data"))
    tenants = TenantStore(data)
    batches = BatchManager(data, tenants)
    settings = ApiSettings(max_file_bytes=100_000, max_open_batches=2)
    app = create_app(FakeEngine(), settings, tenants=tenants, batches=batches)
    try:
        with serving(app, settings, batches.running(app.state.services)) as url:
            yield Served(url, tenants)
    finally:
        batches.close()
        data.close()


def wait(client: OpenAI, id: str, status: str) -> openai.types.Batch:
    eventually(lambda: client.batches.retrieve(id).status == status, f"the batch is {status}")
    return client.batches.retrieve(id)


def test_a_batch_from_upload_to_results(served: Served) -> None:
    with served.client("ann") as client:
        lines = [request(f"r{i}", model=("base", "team/pirate")[i % 2]) for i in range(30)]
        file = client.files.create(file=("requests.jsonl", jsonl(lines)), purpose="batch")
        assert (file.filename, file.purpose, file.bytes) == ("requests.jsonl", "batch", len(jsonl(lines)))
        assert client.files.wait_for_processing(file.id).status == "processed"
        made = client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"suite": "smoke"}
        )
        assert (made.status, made.object, made.metadata) == ("validating", "batch", {"suite": "smoke"})
        batch = wait(client, made.id, "completed")
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed) == (30, 30)
        assert batch.usage is not None
        assert batch.usage.output_tokens == 30 * 14
        assert batch.output_file_id is not None
        content = client.files.content(batch.output_file_id)
        found = {json.loads(line)["custom_id"]: json.loads(line) for line in content.text.splitlines()}
        assert found.keys() == {f"r{i}" for i in range(30)}
        answer = openai.types.chat.ChatCompletion.model_validate(found["r3"]["response"]["body"])
        assert (answer.model, answer.choices[0].message.content) == ("team/pirate", "Hello, world!")
        output = client.files.retrieve(batch.output_file_id)
        assert (output.purpose, output.expires_at) == ("batch_output", None)
        assert client.files.content(file.id).read() == jsonl(lines)


def test_completions_can_be_a_batch(served: Served) -> None:
    with served.client("ann") as client:
        body = {"model": "base", "prompt": "a", "max_tokens": 3}
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
        file = client.files.create(file=jsonl([line]), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )
        batch = wait(client, made.id, "completed")
        assert batch.output_file_id is not None
        (found,) = client.files.content(batch.output_file_id).text.splitlines()
        assert json.loads(found)["response"]["body"]["choices"][0]["text"] == "Hel"
        kept = client.files.retrieve(batch.output_file_id)
        assert kept.expires_at == kept.created_at + 3600


def test_embeddings_can_be_a_batch(served: Served) -> None:
    with served.client("ann") as client:
        bodies: list[dict[str, Any]] = [
            {"model": "base", "input": ["a", "bc"]},
            {"model": "team/pirate", "input": "a", "dimensions": 4, "encoding_format": "base64"},
            {"model": "base", "input": "a", "dimensions": 9},
        ]
        path = "/v1/embeddings"
        lines = [
            {"custom_id": f"e{i}", "method": "POST", "url": path, "body": body}
            for i, body in enumerate(bodies)
        ]
        file = client.files.create(file=jsonl(lines), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint=path, completion_window="24h")
        batch = wait(client, made.id, "completed")
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
        assert batch.usage is not None
        assert (batch.usage.input_tokens, batch.usage.output_tokens) == (4, 0)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        output = client.files.content(batch.output_file_id).text.splitlines()
        found = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, output)}
        both = openai.types.CreateEmbeddingResponse.model_validate(found["e0"])
        direct = client.embeddings.create(model="base", input=["a", "bc"], encoding_format="float")
        assert [each.embedding for each in both.data] == [each.embedding for each in direct.data]
        assert len(base64.b64decode(found["e1"]["data"][0]["embedding"])) == 16
        (wrong,) = client.files.content(batch.error_file_id).text.splitlines()
        assert json.loads(wrong)["response"]["body"]["error"]["param"] == "dimensions"


def test_pages(served: Served) -> None:
    with served.client("pages") as client:
        files = [
            client.files.create(
                file=(f"{i}.jsonl", jsonl([request("a")])),
                purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 3600},
            )
            for i in range(5)
        ]
        assert files[0].expires_at == files[0].created_at + 3600
        newest = [file.id for file in reversed(files)]
        page = client.files.list(limit=2)
        assert ([file.id for file in page.data], page.has_more) == (newest[:2], True)
        assert [file.id for file in client.files.list(limit=2)] == newest, "the client walks over all pages"
        assert [file.id for file in client.files.list(order="asc", limit=3)] == newest[::-1]
        assert not client.files.list(purpose="batch_output").data
        made = []
        for file in files:
            batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            made.append(wait(client, batch.id, "completed").id)
        first = client.batches.list(limit=2)
        assert ([batch.id for batch in first.data], first.has_more) == (made[:-3:-1], True)
        assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
        for call in (client.files.list, client.batches.list):
            with pytest.raises(openai.BadRequestError) as wrong:
                call(limit=0)
            assert wrong.value.param == "limit"
            with pytest.raises(openai.NotFoundError):
                call(after="nothing")


def test_what_is_deleted_is_gone(served: Served) -> None:
    with served.client("ann") as client:
        file = client.files.create(file=jsonl([request("a")]), purpose="batch")
        gone = client.files.delete(file.id)
        assert (gone.id, gone.deleted, gone.object) == (file.id, True, "file")
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file.id)
        with pytest.raises(openai.NotFoundError) as missing:
            client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert missing.value.param == "input_file_id"


def test_tenants_know_nothing_of_each_other(served: Served) -> None:
    with served.client("ann") as ann, served.client("eve") as eve:
        file = ann.files.create(file=jsonl([request("a")]), purpose="batch")
        batch = ann.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wait(ann, batch.id, "completed")
        assert not eve.files.list().data
        assert not eve.batches.list().data
        for call in (eve.files.retrieve, eve.files.content, eve.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file.id)
        for work in (eve.batches.retrieve, eve.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                work(batch.id)
        with pytest.raises(openai.NotFoundError):
            eve.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def test_a_batch_that_is_done_cannot_be_cancelled(served: Served) -> None:
    with served.client("ann") as client:
        file = client.files.create(file=jsonl([request("a")]), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wait(client, made.id, "completed")
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(made.id)


WRONG = {
    "window": ({"completion_window": "soon"}, "completion_window"),
    "long window": ({"completion_window": "31d"}, "completion_window"),
    "endpoint": ({"endpoint": "/v1/rerank"}, "endpoint"),
    "metadata": ({"metadata": {"k" * 65: "v"}}, "metadata"),
    "keep": (
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
        "output_expires_after.seconds",
    ),
    "unknown": ({"extra_body": {"bogus": 1}}, "bogus"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_field_is_named(served: Served, what: str) -> None:
    changes, param = WRONG[what]
    fields = {"input_file_id": "file-none", "endpoint": CHAT, "completion_window": "24h", **changes}
    with served.client("ann") as client, pytest.raises(openai.BadRequestError) as wrong:
        client.batches.create(**fields)  # type: ignore[arg-type]  # wrong on purpose
    assert wrong.value.param == param


def test_uploads_are_checked(served: Served) -> None:
    with served.client("ann") as client:
        with pytest.raises(openai.BadRequestError) as wrong:
            client.files.create(file=b"x", purpose="fine-tune")
        assert wrong.value.param == "purpose"
        with pytest.raises(openai.APIStatusError) as large:
            client.files.create(file=b"x" * 100_001, purpose="batch")
        assert large.value.status_code == 413
        with pytest.raises(openai.BadRequestError) as soon:
            client.files.create(
                file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 5}
            )
        assert soon.value.param == "expires_after[seconds]"
    with served.client("small", file_bytes=3000) as client:
        client.files.create(file=b"x" * 1500, purpose="batch")
        with pytest.raises(openai.RateLimitError) as full:
            client.files.create(file=b"x" * 1600, purpose="batch")
        assert full.value.code == "quota_exceeded"


def test_a_file_that_a_batch_reads_stays_and_too_many_batches_are_refused(tmp_path: Path) -> None:
    settings = ApiSettings(max_open_batches=1)
    with closing(DataDir(tmp_path)) as data, closing(BatchManager(data)) as batches:
        app = create_app(FakeEngine(hold_after=1), settings, batches=batches)
        with (
            serving(app, settings, batches.running(app.state.services)) as url,
            openai_client(url) as client,
        ):
            file = client.files.create(file=jsonl([request("a")]), purpose="batch")
            made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            wait(client, made.id, "in_progress")
            with pytest.raises(openai.ConflictError):
                client.files.delete(file.id)
            with pytest.raises(openai.RateLimitError):
                client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            assert client.batches.cancel(made.id).status == "cancelling"
            done = wait(client, made.id, "cancelled")
            assert done.error_file_id is not None
            client.files.delete(file.id)


def test_without_a_place_for_them_the_routes_say_so() -> None:
    app = create_app(FakeEngine())
    with serving(app) as url, openai_client(url) as client:
        for call in (client.files.list, client.batches.list):
            with pytest.raises(openai.NotFoundError, match="keeps no files"):
                call()
