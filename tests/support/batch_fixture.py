"""An app that runs batches, over a data directory that survives it."""

import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
from fake_engine import FakeEngine, byte_tokenizer
from starlette.applications import Starlette

from personae.api.app import create_app
from personae.api.batches.manager import BatchManager
from personae.api.object_store import ObjectStore
from personae.api.settings import ApiSettings
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import TenantStore

START = 1_800_000_000
CHAT = "/v1/chat/completions"
TOKENIZER = byte_tokenizer()


def request(id: str, text: str = "hi", model: str = "base", **fields: Any) -> dict[str, Any]:
    """A line for a chat completion."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
    return {"custom_id": id, "method": "POST", "url": CHAT, "body": body}


def jsonl(lines: Iterable[Any]) -> bytes:
    """Write lines as a file. A line of bytes is written as it is."""
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


class Counting(FakeEngine):
    """Records which texts it was asked; does not answer those that `holds` names."""

    def __init__(self, holds: frozenset[str] = frozenset()) -> None:
        super().__init__(answer=self._said)
        self.asked: Counter[str] = Counter()
        self.holds = holds
        self.open = threading.Event()

    def _said(self, log: Any) -> str:
        text = TOKENIZER.decode(log.tokens[: log.prompt_length], True).split("\n")[1]
        self.asked[text] += 1
        if text in self.holds:
            self.hold_after = 0
        return f"got {text}"


@dataclass
class BatchFixture:
    """A running server, and a client of it."""

    app: Starlette
    client: httpx.AsyncClient
    batches: BatchManager
    data: DataDir

    async def upload(self, lines: Iterable[Any], **fields: str) -> str:
        """Upload a file and return its id."""
        response = await self.client.post(
            "/v1/files", data={"purpose": "batch", **fields}, files={"file": ("in.jsonl", jsonl(lines))}
        )
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    async def start(self, lines: Iterable[Any], **fields: Any) -> str:
        """Start a batch and return its id."""
        file = await self.upload(lines)
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", **fields}
        response = await self.client.post("/v1/batches", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["status"] == "validating"
        return str(response.json()["id"])

    async def get(self, id: str) -> dict[str, Any]:
        response = await self.client.get(f"/v1/batches/{id}")
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def until(self, id: str, *statuses: str) -> dict[str, Any]:
        """Return the batch once it is in one of these states."""
        for _ in range(20_000):
            if (batch := await self.get(id))["status"] in statuses:
                return batch
            await anyio.sleep(1)
        raise AssertionError(f"still {batch}")

    async def lines(self, file: str | None) -> list[dict[str, Any]]:
        """The lines of a file."""
        if file is None:
            return []
        response = await self.client.get(f"/v1/files/{file}/content")
        assert response.status_code == 200, response.text
        return [json.loads(line) for line in response.text.splitlines()]


@asynccontextmanager
async def open_batches(
    path: Path,
    engine: Any = None,
    settings: ApiSettings | None = None,
    *,
    keys: bool = False,
    at: float = 0.0,
    database_url: str | None = None,
    objects: ObjectStore | None = None,
) -> AsyncIterator[BatchFixture]:
    """Serve while the block runs. The wall clock follows the loop's clock, `at` seconds after START."""
    data = DataDir(path, database_url, objects=objects)
    tenants = TenantStore(data) if keys else None
    batches = BatchManager(data, tenants, lambda: START + at + anyio.current_time())
    app = create_app(engine or FakeEngine(), settings, tenants=tenants, batches=batches)
    try:
        async with (
            batches.running(app.state.services),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
        ):
            yield BatchFixture(app, client, batches, data)
    finally:
        batches.close()
        data.close()
