"""Several base models behind one address: which one answers, whose adapters are whose, what clients see."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from uploads import BOUNDS, CONFIG, config, upload, whole

from personae.actors.client import ModelCard
from personae.actors.on_demand import EngineMemory, OnDemandEngine
from personae.api.adapters.registry import Registry
from personae.api.app import create_app
from personae.api.base_models.base_models import BaseModel, BaseModels
from personae.api.batches.manager import BatchManager
from personae.api.opened import Opened, serve_settings
from personae.api.options import ServeOptions
from personae.api.responses.store import ResponseStore
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import TenantStore
from personae.api.tenants.usage import UsageLedger
from personae.engine.generation_config import GenerationDefaults
from personae.errors import LoadError
from personae.lora.bounds import AdapterBounds
from personae.lora.shapes import LoraShapes
from personae.lora.sites import sites

pytestmark = pytest.mark.anyio

WIDE = AdapterBounds(LoraShapes(2, sites({"q": (16, 16), "v": (16, 4)})), max_rank=16, max_value=65504.0)
SIZES = {"small": 3, "wide": 3, "third": 4}
SAYS = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class OneBase(FakeEngine):
    """A base with that name only."""

    def models(self, tenant: str) -> dict[str, ModelCard]:
        name = self.base_names[0]
        return {name: ModelCard(name, None, 1_700_000_000)}


@dataclass
class Server:
    """An app over several fake engines. `failures` are raised by the starts of their models."""

    app: Starlette
    bases: BaseModels
    engines: dict[str, OneBase]
    registry: Registry
    data: DataDir
    failures: dict[str, Exception] = field(default_factory=dict)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost")

    async def chat(self, **fields: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.post("/v1/chat/completions", json={**SAYS, **fields})

    async def get(self, path: str) -> Any:
        async with self.client() as client:
            return (await client.get(path)).json()

    async def upload(self, name: str, files: dict[str, bytes], **fields: str) -> httpx.Response:
        async with self.client() as client:
            return await upload(client, name, files, **fields)

    def running(self) -> list[str]:
        return [base.name for base in self.bases if base.engine.state == "running"]


@asynccontextmanager
async def server(path: Path, limit: int = 6, keep_alive: float | None = None) -> AsyncIterator[Server]:
    memory, failures = EngineMemory(limit), dict[str, Exception]()
    engines = {name: OneBase(answer=f"I am {name}.", base_names=(name,)) for name in SIZES}

    @asynccontextmanager
    async def opened(name: str) -> AsyncIterator[Opened]:
        if name in failures:
            raise failures[name]
        bounds = WIDE if name == "wide" else BOUNDS
        yield Opened(engines[name], GenerationDefaults(), 4, bounds)

    bases = BaseModels(
        [
            BaseModel(
                name,
                f"org/{name}-model",
                ServeOptions(Path(name)),
                OnDemandEngine(name, size, partial(opened, name), memory, keep_alive),
                400,
            )
            for name, size in SIZES.items()
        ],
        memory,
    )
    async with AsyncExitStack() as stack:
        data = stack.enter_context(closing(DataDir(path)))
        first = await stack.enter_async_context(bases.opened("three models"))
        assert first.bounds is not None
        registry = stack.enter_context(closing(Registry(data, "small", {"small"}, first.bounds)))
        batches = stack.enter_context(closing(BatchManager(data)))
        app = create_app(
            first.client,
            serve_settings(ServeOptions(Path("small")), first),
            tenants=TenantStore(data),
            registry=registry,
            usage=UsageLedger(data),
            batches=batches,
            stored=stack.enter_context(ResponseStore(data).running()),
            base_models=first.base_models,
        )
        await stack.enter_async_context(batches.running(app.state.services))
        yield Server(app, bases, engines, registry, data, failures)


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def test_a_request_is_answered_by_the_base_that_it_names(tmp_path: Path) -> None:
    async with server(tmp_path) as one:
        assert one.running() == ["small"]
        assert text(await one.chat()) == "I am small."
        assert text(await one.chat(model="wide")) == "I am wide."
        assert text(await one.chat(model="small")) == "I am small."
        assert one.running() == ["small", "wide"]
        assert [len(engine.submitted) for engine in one.engines.values()] == [2, 1, 0]


async def test_every_route_that_generates_finds_the_base(tmp_path: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": SAYS,
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {**SAYS, "max_tokens": 20},
        "/v1/embeddings": {"input": "hi"},
        "/v1/score": {"text_1": "a", "text_2": "b"},
    }
    async with server(tmp_path) as one, one.client() as client:
        for path, body in bodies.items():
            before = len(one.engines["wide"].submitted)
            await client.post(path, json={**body, "model": "wide"})
            assert len(one.engines["wide"].submitted) == before + 1, path
        assert one.engines["small"].submitted == []


async def test_requests_that_only_encode_take_the_tokenizer_of_their_base(tmp_path: Path) -> None:
    async with server(tmp_path) as one, one.client() as client:
        one.engines["wide"].max_model_len = 77
        shown = await client.post("/tokenize", json={"prompt": "hi", "model": "wide"})
        assert shown.json()["max_model_len"] == 77
        assert (await client.post("/tokenize", json={"prompt": "hi"})).json()["max_model_len"] == 512


async def test_the_list_of_models_has_the_state_of_each(tmp_path: Path) -> None:
    async with server(tmp_path) as one:
        found = {each["id"]: each for each in (await one.get("/v1/models"))["data"]}
        assert {name: each["state"] for name, each in found.items()} == {
            "small": "running",
            "wide": "asleep",
            "third": "asleep",
        }
        assert found["small"]["max_model_len"] == 512
        assert found["wide"]["max_model_len"] == 400  # as its files say
        await one.chat(model="third")  # it takes the place of small
        found = {each["id"]: each for each in (await one.get("/v1/models"))["data"]}
        assert {name: each["state"] for name, each in found.items()} == {
            "small": "asleep",
            "wide": "asleep",
            "third": "running",
        }
        assert found["small"]["max_model_len"] == found["third"]["max_model_len"] == 512
        assert (await one.get("/v1/models/wide"))["state"] == "asleep"
        assert one.running() == ["third"]  # to look at a model does not start it


async def test_a_base_that_sleeps_is_started_for_its_next_request(tmp_path: Path) -> None:
    async with server(tmp_path) as one:
        for name in ("third", "small", "third"):
            assert text(await one.chat(model=name)) == f"I am {name}."
        assert [base.engine.starts for base in one.bases] == [2, 0, 2]


async def test_an_adapter_belongs_to_the_base_that_its_config_names(tmp_path: Path) -> None:
    files = whole() | {CONFIG: config(base_model_name_or_path="someone/third-model")}
    async with server(tmp_path) as one:
        response = await one.upload("poet", files)
        assert response.status_code == 201, response.text
        assert response.json()["base_model"] == "third"
        assert text(await one.chat(model="poet")) == "I am third."
        (asked,) = one.engines["third"].submitted
        assert asked.adapter == response.json()["sha256"]
        found = {each["id"]: each for each in (await one.get("/v1/models"))["data"]}
        assert (found["poet"]["parent"], found["poet"]["state"]) == ("third", "running")
        assert text(await one.chat(model="poet@1")) == "I am third."


async def test_an_upload_names_its_base_and_is_checked_against_that_one(tmp_path: Path) -> None:
    async with server(tmp_path) as one:
        assert (await one.upload("poet", whole())).json()["base_model"] == "small"
        assert (await one.upload("bard", whole(), base_model="third")).json()["base_model"] == "third"
        wrong = await one.upload("wide-poet", whole(), base_model="wide")
        assert wrong.status_code == 400
        assert "shape" in wrong.json()["error"]["message"]
        unknown = await one.upload("other", whole(), base_model="nobody")
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "base_model")
        assert "`small`, `wide`, `third`" in unknown.json()["error"]["message"]
        assert [each["name"] for each in (await one.get("/v1/adapters"))["data"]] == ["bard", "poet"]


async def test_all_versions_of_a_name_are_for_one_base(tmp_path: Path) -> None:
    async with server(tmp_path) as one:
        await one.upload("poet", whole())
        other = await one.upload("poet", whole(1), base_model="third", replace="true")
        assert (other.status_code, other.json()["error"]["param"]) == (409, "base_model")
        assert "adapter of the base `small`" in other.json()["error"]["message"]
        assert (await one.upload("poet", whole(1), replace="true")).json()["version"] == 2


async def test_no_adapter_gets_the_name_of_a_base(tmp_path: Path) -> None:
    async with server(tmp_path) as one:
        for name in SIZES:
            assert (await one.upload(name, whole())).status_code == 409


async def test_adapters_of_two_bases_are_not_mixed(tmp_path: Path) -> None:
    async with server(tmp_path) as one:
        await one.upload("poet", whole())
        await one.upload("bard", whole(1), base_model="third")
        mixed = await one.chat(model="small", adapters=[{"name": "poet"}, {"name": "bard"}])
        assert (mixed.status_code, mixed.json()["error"]["param"]) == (404, "adapters[1].name")


async def test_an_alias_has_targets_of_one_base(tmp_path: Path) -> None:
    async with server(tmp_path) as one, one.client() as client:
        await one.upload("poet", whole(), base_model="third")
        await one.upload("bard", whole(1), base_model="third")
        both = await client.put("/v1/adapter_aliases/any", json={"targets": {"poet": 1, "bard": 1}})
        assert both.status_code == 200, both.text
        assert text(await one.chat(model="any")) == "I am third."
        crossed = await client.put("/v1/adapter_aliases/cross", json={"targets": {"poet": 1, "wide": 1}})
        assert (crossed.status_code, crossed.json()["error"]["param"]) == (400, "targets")
        assert "`poet` has `third`, `wide` has `wide`" in crossed.json()["error"]["message"]


async def test_adapters_stay_with_their_base_over_a_restart(tmp_path: Path) -> None:
    async with server(tmp_path) as one:
        await one.upload("bard", whole(), base_model="third")
    async with server(tmp_path) as one:
        found = {each["id"]: each for each in (await one.get("/v1/models"))["data"]}
        assert (found["bard"]["parent"], found["bard"]["state"]) == ("third", "asleep")
        assert (await one.get("/v1/adapters/bard"))["targets"]
        assert text(await one.chat(model="bard")) == "I am third."


async def test_a_server_with_one_base_serves_its_adapters_of_a_directory_of_several(tmp_path: Path) -> None:
    async with server(tmp_path) as one:
        await one.upload("poet", whole())
        await one.upload("bard", whole(1), base_model="third")
    with closing(DataDir(tmp_path)) as data, closing(Registry(data, "small", {"small"}, BOUNDS)) as registry:
        app = create_app(OneBase(base_names=("small",)), tenants=TenantStore(data), registry=registry)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            assert [each["id"] for each in listed] == ["small", "poet"]
            refused = await client.post("/v1/chat/completions", json={**SAYS, "model": "bard"})
            assert refused.status_code == 404


async def test_a_name_that_nobody_knows_is_a_404_and_starts_nothing(tmp_path: Path) -> None:
    async with server(tmp_path) as one:
        refused = await one.chat(model="nobody")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert one.running() == ["small"]


async def test_a_base_that_cannot_start_is_a_503_and_others_answer(tmp_path: Path) -> None:
    async with server(tmp_path) as one:
        one.failures["wide"] = LoadError("The weights are damaged.")
        refused = await one.chat(model="wide")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_started")
        assert "The weights are damaged" in refused.json()["error"]["message"]
        assert (await one.get("/v1/models/wide"))["state"] == "failed"
        assert text(await one.chat(model="small")) == "I am small."


async def test_the_metrics_have_every_engine_in_each_family_once(tmp_path: Path) -> None:
    async with server(tmp_path) as one:
        await one.chat(model="wide")
        await one.chat(model="third")
        async with one.client() as client:
            shown = (await client.get("/metrics")).text
        families = list(text_string_to_metric_families(shown))
        names = [family.name for family in families]
        assert len(names) == len(set(names))
        running = next(each for each in families if each.name == "vllm:num_requests_running")
        assert {sample.labels["model_name"] for sample in running.samples} == set(SIZES)
        tokens = next(each for each in families if each.name == "vllm:generation_tokens")
        answered = {each.labels["model_name"] for each in tokens.samples if each.name.endswith("_total")}
        assert answered == {"wide", "third"}


async def test_the_usage_of_each_base_is_its_own(tmp_path: Path) -> None:
    async with server(tmp_path) as one:
        for name in ("small", "wide", "wide"):
            await one.chat(model=name)
        rows = (await one.get("/v1/usage?group_by=adapter"))["data"]
        found = {row.get("adapter", ""): (row["requests"], row["adapter_seconds"]) for row in rows}
        assert found == {"": (1, 0.0), "wide": (2, 0.0)}


async def test_the_lines_of_a_batch_are_answered_by_their_bases(tmp_path: Path) -> None:
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**SAYS, "model": name}}
        for name in SIZES
    ]
    content = b"\n".join(map(msgspec.json.encode, lines))
    async with server(tmp_path) as one, one.client() as client:
        form = {"file": ("in.jsonl", content, "application/jsonl")}
        file = (await client.post("/v1/files", data={"purpose": "batch"}, files=form)).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=asked)).json()
        while batch["status"] not in ("completed", "failed"):
            await anyio.sleep(0.01)  # the server has the same loop
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
        assert batch["status"] == "completed", batch
        written = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).text.splitlines()
        found = {(line := msgspec.json.decode(each))["custom_id"]: line for each in written}
        for name in SIZES:
            choice = found[name]["response"]["body"]["choices"][0]
            assert choice["message"]["content"] == f"I am {name}."
