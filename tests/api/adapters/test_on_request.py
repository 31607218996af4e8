"""An adapter that a request names by its source is fetched, if its tenant may do that."""

import shutil
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio import to_thread
from uploads import UploadFixture, open_fixture, whole

from personae.api.adapters import registration
from personae.api.adapters.sources.fetch import Fetched, FetchJob
from personae.api.adapters.sources.fetching import fetched
from personae.api.settings import ApiSettings
from personae.errors import SourceFailed

pytestmark = pytest.mark.anyio

SAYS = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are fetched in this process, which is faster."""

    async def fetch(job: FetchJob) -> str:
        answer = await to_thread.run_sync(fetched, job)
        assert isinstance(answer, Fetched)
        return answer.source

    monkeypatch.setattr(registration, "fetch", fetch)


def source_of(folder: Path, name: str = "poet", seed: int = 0) -> str:
    made = folder / name
    made.mkdir(parents=True)
    for file, content in whole(seed).items():
        (made / file).write_bytes(content)
    return f"file://{made}"


async def chat(one: UploadFixture, key: str, model: str) -> httpx.Response:
    async with one.client(key) as client:
        return await client.post("/v1/chat/completions", json={**SAYS, "model": model})


def error(response: httpx.Response) -> tuple[int, Any, Any]:
    found = response.json()["error"]
    return response.status_code, found["code"], found["param"]


async def test_a_source_in_a_request_is_fetched_once_and_answers(tmp_path: Path) -> None:
    source = source_of(tmp_path / "lib")
    settings = ApiSettings(adapter_source=(f"file://{tmp_path}/lib",))
    with open_fixture(tmp_path / "data", settings=settings) as one:
        key = one.key("acme", fetches_per_minute=5)
        first = await chat(one, key, source)
        assert first.status_code == 200, first.text
        assert first.json()["model"] == source
        (record,) = one.registry.list("acme")
        assert record.source == source
        assert one.engine.submitted[-1].adapter == record.sha256
        shutil.rmtree(tmp_path / "lib")
        assert (await chat(one, key, source)).status_code == 200  # it is here
        assert (await chat(one, key, record.name)).status_code == 200
        assert one.leftovers() == []


@pytest.mark.usefixtures("in_process")
async def test_it_is_off_unless_the_server_or_the_tenant_turns_it_on(tmp_path: Path) -> None:
    source = source_of(tmp_path / "lib")
    prefix = (f"file://{tmp_path}/lib",)
    for default, limit, status in ((0, None, 404), (0, 0, 404), (3, 0, 404), (3, None, 200), (0, 3, 200)):
        settings = ApiSettings(adapter_source=prefix, fetches_per_minute=default)
        with open_fixture(tmp_path / f"data-{default}-{limit}", settings=settings) as one:
            key = one.key("acme", **({} if limit is None else {"fetches_per_minute": limit}))
            assert (await chat(one, key, source)).status_code == status, (default, limit)


async def test_a_source_outside_the_list_is_refused_by_name(tmp_path: Path) -> None:
    source_of(tmp_path / "lib")
    outside = source_of(tmp_path / "other")
    settings = ApiSettings(adapter_source=(f"file://{tmp_path}/lib",), fetches_per_minute=5)
    with open_fixture(tmp_path / "data", settings=settings) as one:
        key = one.key("acme")
        assert error(await chat(one, key, outside)) == (403, "source_not_allowed", "model")
        assert error(await chat(one, key, "ftp://x/y")) == (400, "invalid_source", "model")
        gone = await chat(one, key, f"file://{tmp_path}/lib/nobody")
        assert error(gone) == (404, "source_not_found", "model")
        assert one.registry.list("acme") == []
        assert one.leftovers() == []


@pytest.mark.usefixtures("in_process")
async def test_an_adapter_that_does_not_fit_the_base_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    source = source_of(tmp_path / "lib")
    (tmp_path / "lib" / "poet" / "adapter_model.safetensors").write_bytes(b"nothing")
    settings = ApiSettings(adapter_source=(f"file://{tmp_path}/lib",), fetches_per_minute=5)
    with open_fixture(tmp_path / "data", settings=settings) as one:
        refused = await chat(one, one.key("acme"), source)
        assert refused.status_code == 400, refused.text
        assert one.registry.list("acme") == []
        assert one.leftovers() == []


@pytest.mark.usefixtures("in_process")
async def test_one_tenants_adapter_is_not_anothers(tmp_path: Path) -> None:
    source = source_of(tmp_path / "lib")
    settings = ApiSettings(adapter_source=(f"file://{tmp_path}/lib",))
    with open_fixture(tmp_path / "data", settings=settings) as one:
        assert (await chat(one, one.key("acme", fetches_per_minute=5), source)).status_code == 200
        assert (await chat(one, one.key("globex"), source)).status_code == 404


@pytest.mark.usefixtures("in_process")
async def test_requests_fetch_so_many_adapters_a_minute(tmp_path: Path) -> None:
    sources = [source_of(tmp_path / "lib", f"a{number}", number) for number in range(3)]
    settings = ApiSettings(adapter_source=(f"file://{tmp_path}/lib",))
    with open_fixture(tmp_path / "data", settings=settings) as one:
        key = one.key("acme", fetches_per_minute=2)
        statuses = [(await chat(one, key, source)).status_code for source in sources]
        assert statuses == [200, 200, 429]
        assert (await chat(one, key, sources[0])).status_code == 200


@pytest.mark.usefixtures("in_process")
async def test_the_number_of_adapters_of_a_tenant_holds(tmp_path: Path) -> None:
    sources = [source_of(tmp_path / "lib", f"a{number}", number) for number in range(2)]
    settings = ApiSettings(adapter_source=(f"file://{tmp_path}/lib",))
    with open_fixture(tmp_path / "data", settings=settings) as one:
        key = one.key("acme", fetches_per_minute=9, adapters=1)
        statuses = [(await chat(one, key, source)).status_code for source in sources]
        assert statuses == [200, 429]


@pytest.mark.usefixtures("in_process")
async def test_requests_for_one_source_share_one_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, fetches = source_of(tmp_path / "lib"), list[str]()
    begun, release = anyio.Event(), anyio.Event()
    fetch = registration.fetch

    async def slowly(job: Any) -> str:
        fetches.append(str(job.source))
        begun.set()
        await release.wait()
        return await fetch(job)

    monkeypatch.setattr(registration, "fetch", slowly)
    settings = ApiSettings(adapter_source=(f"file://{tmp_path}/lib",), fetches_per_minute=5)
    with open_fixture(tmp_path / "data", settings=settings) as one:
        key, statuses = one.key("acme"), list[int]()

        async def ask() -> None:
            statuses.append((await chat(one, key, source)).status_code)

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask)
            await begun.wait()
            release.set()
        assert (statuses, fetches) == (4 * [200], [source])


@pytest.mark.usefixtures("in_process")
async def test_a_source_that_does_not_answer_is_a_503_and_the_next_request_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, fetch = source_of(tmp_path / "lib"), registration.fetch

    async def never(job: Any) -> str:
        raise SourceFailed("It does not answer.", param="source")

    settings = ApiSettings(adapter_source=(f"file://{tmp_path}/lib",), fetches_per_minute=5)
    with open_fixture(tmp_path / "data", settings=settings) as one:
        key = one.key("acme")
        monkeypatch.setattr(registration, "fetch", never)
        assert error(await chat(one, key, source)) == (503, "source_failed", "model")
        monkeypatch.setattr(registration, "fetch", fetch)
        assert (await chat(one, key, source)).status_code == 200


async def test_a_fetch_that_outlasts_the_request_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(job: Any) -> str:
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(registration, "fetch", endless)
    source = source_of(tmp_path / "lib")
    settings = ApiSettings(
        adapter_source=(f"file://{tmp_path}/lib",), fetches_per_minute=5, request_timeout=0.2
    )
    with open_fixture(tmp_path / "data", settings=settings) as one:
        assert error(await chat(one, one.key("acme"), source))[0] == 504
        assert one.leftovers() == []
