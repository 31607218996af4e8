"""Adapters that arrive while the real engine runs: uploaded over HTTP, used at once, replaced, evicted."""

import random
import threading
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import torch
from hf import hf_greedy
from patience import PATIENCE, soon
from safetensors.torch import load, save
from tiny_adapters import make_adapter, make_adapter_folder
from tiny_models import VOCAB, model_folder
from uploads import CONFIG, TENSORS, UploadFixture, open_fixture, upload
from virtual_clock import real_clock

from personae.actors.assembly import assemble
from personae.actors.in_process import open_in_process
from personae.actors.options import EngineOptions
from personae.engine.step import StepEngine
from personae.lora.weight_pools import pool_bytes

pytestmark = real_clock
BASE = model_folder("qwen3")
RANK = 8
STACKS = "stacks.F32.safetensors"
SPECS = [{"rank": RANK, "seed": seed, "scale": 0.5} for seed in range(6)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """Six adapters as PEFT saves them."""
    root = tmp_path_factory.mktemp("adapters")
    folders = [make_adapter_folder(root / f"{i}", BASE, **spec) for i, spec in enumerate(SPECS)]
    return [{name: (folder / name).read_bytes() for name in (CONFIG, TENSORS)} for folder in folders]


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    """What PEFT answers to `PROMPT` with each of them."""
    return [hf_greedy(make_adapter(BASE, **spec), PROMPT, 10) for spec in SPECS]


PROMPT = random.Random(1).choices(range(4, VOCAB), k=50)


@asynccontextmanager
async def live(path: Path, **options: Any) -> AsyncIterator[UploadFixture]:
    """A fixture over a real engine that finds the fixture's adapters."""
    engine = {"device": "cpu", "dtype": "float32", "kv_memory": 2**22, "max_seqs": 8, "max_batch_tokens": 64}
    store = {"adapter_store": path / "adapters", "secret": b"s" * 32}
    assembly = assemble(EngineOptions(BASE, **{**engine, **store, **options}))
    async with open_in_process(assembly.engine_spec) as client:
        with open_fixture(path, client, assembly.bounds) as fixture:
            yield fixture


def room_for(adapters: int) -> int:
    """Bytes of adapter memory that hold so many of these adapters."""
    assembly = assemble(EngineOptions(BASE, device="cpu", dtype="float32", kv_memory=2**20))
    return pool_bytes(assembly.bounds.shapes, adapters * RANK, torch.float32)


async def ask(
    client: httpx.AsyncClient, model: str, prompt: list[int] = PROMPT, **fields: Any
) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body | {"return_token_ids": True} | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


async def test_an_adapter_answers_exactly_as_peft_as_soon_as_it_is_uploaded(
    tmp_path: Path, files: list[dict[str, bytes]], truth: list[list[int]]
) -> None:
    async with live(tmp_path) as fixture, fixture.client() as client:
        base = tokens(await ask(client, BASE.name))
        for number, name in enumerate(["poet", "clerk"]):
            assert (await upload(client, name, files[number])).status_code == 201
            assert tokens(await ask(client, name)) == truth[number] != base


async def test_more_adapters_than_fit_take_turns_and_answer_as_each_would_alone(
    tmp_path: Path, files: list[dict[str, bytes]], truth: list[list[int]]
) -> None:
    answers: dict[tuple[int, int], list[int]] = {}
    async with live(tmp_path, adapter_memory=room_for(2)) as fixture, fixture.client() as client:
        for number, each in enumerate(files):
            assert (await upload(client, f"a{number}", each)).status_code == 201

        async def one(number: int, turn: int) -> None:
            answers[number, turn] = tokens(await ask(client, f"a{number}"))

        async with anyio.create_task_group() as tasks:
            for turn in range(3):
                for number in range(len(files)):
                    tasks.start_soon(one, number, turn)
        big = make_adapter_folder(tmp_path / "big", BASE, rank=17)
        refused = await upload(client, "big", {name: (big / name).read_bytes() for name in (CONFIG, TENSORS)})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "r")
    assert answers == {(n, turn): truth[n] for n in range(len(files)) for turn in range(3)}


async def test_an_adapter_that_is_always_asked_for_does_not_starve_another(
    tmp_path: Path, files: list[dict[str, bytes]], truth: list[list[int]]
) -> None:
    async with live(tmp_path, adapter_memory=room_for(1)) as fixture, fixture.client() as client:
        for number in range(2):
            await upload(client, f"a{number}", files[number])
        done = False

        async def busy(length: int) -> None:
            while not done:
                assert tokens(await ask(client, "a0", max_tokens=length))[:10] == truth[0]

        async with anyio.create_task_group() as tasks:
            for length in range(10, 45, 5):  # different, so that there is always one that runs
                tasks.start_soon(busy, length)
            await ask(client, "a0")
            with anyio.fail_after(PATIENCE):
                assert tokens(await ask(client, "a1")) == truth[1]
            done = True


async def test_a_request_finishes_on_the_version_that_it_began_with(
    tmp_path: Path,
    files: list[dict[str, bytes]],
    truth: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, prepare = threading.Semaphore(5), StepEngine.prepare  # too few for 60 tokens, also with guesses

    def prepare_if_it_may(engine: StepEngine, *args: Any) -> Any:
        assert steps.acquire(timeout=PATIENCE)
        return prepare(engine, *args)

    async with live(tmp_path, adapter_memory=room_for(1)) as fixture, fixture.client() as client:
        await upload(client, "poet", files[0])
        first = await ask(client, "poet", max_tokens=60)
        running: list[dict[str, Any]] = []
        monkeypatch.setattr(StepEngine, "prepare", prepare_if_it_may)

        async def long() -> None:
            running.append(await ask(client, "poet", max_tokens=60))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long)
            await soon(lambda: bool(fixture.engine.stats().running), "the first request runs")
            second = await upload(client, "poet", files[1], replace="true")
            assert second.json()["version"] == 2
            assert not running
            steps.release(1000)
            new = await ask(client, "poet")
        assert tokens(running[0]) == tokens(first)
        assert (tokens(new), cached(new)) == (truth[1], 0), "nothing of the old version is in its cache"
        assert fixture.leftovers() == []
        await client.delete("/v1/adapters/poet")
        gone = await client.post("/v1/completions", json={"model": "poet", "prompt": "hi"})
        assert gone.status_code == 404


async def test_the_cache_is_shared_within_a_tenant_and_never_between_two(
    tmp_path: Path, files: list[dict[str, bytes]], truth: list[list[int]]
) -> None:
    async with live(tmp_path) as fixture:
        admin, bob = fixture.key("root", "admin"), fixture.key("bob")
        async with fixture.client(admin) as one, fixture.client(bob) as two:
            await upload(one, "poet", files[0], shared="true")
            for model in (BASE.name, "poet"):
                for first, second in ((one, two), (two, one)):
                    prompt = random.Random(f"{model}{first is one}").choices(range(4, VOCAB), k=50)
                    cold = await ask(first, model, prompt)
                    hit = await ask(first, model, prompt)
                    other = await ask(second, model, prompt)
                    again = await ask(second, model, prompt)
                    assert [cached(cold), cached(other)] == [0, 0]
                    assert cached(hit) > 32
                    assert cached(again) > 32
                    assert tokens(cold) == tokens(hit) == tokens(other) == tokens(again)


async def test_what_was_uploaded_is_served_after_a_restart(
    tmp_path: Path, files: list[dict[str, bytes]], truth: list[list[int]]
) -> None:
    async with live(tmp_path) as fixture, fixture.client() as client:
        await upload(client, "poet", files[0])
    async with live(tmp_path) as fixture, fixture.client() as client:
        assert tokens(await ask(client, "poet")) == truth[0]


async def test_files_that_were_damaged_fail_their_own_requests_only(
    tmp_path: Path, files: list[dict[str, bytes]], truth: list[list[int]]
) -> None:
    async with live(tmp_path) as fixture, fixture.client() as client:
        digests = [(await upload(client, f"a{i}", files[i])).json()["sha256"] for i in range(2)]
        (fixture.data.adapters / digests[0] / TENSORS).write_bytes(b"")
        (fixture.data.adapters / digests[0] / STACKS).unlink()
        body = {"model": "a0", "prompt": PROMPT, "max_tokens": 2}
        failed = await client.post("/v1/completions", json=body)
        assert failed.status_code == 500
        assert str(tmp_path) not in failed.text
        assert tokens(await ask(client, "a1")) == truth[1]


def _flipped(whole: bytes, place: int) -> bytes:
    return whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a value": lambda whole: _flipped(whole, len(whole) - 1),
    "the header's length": lambda whole: _flipped(whole, 0),
    "a figure of the header": lambda whole: whole.replace(b'\\"peak\\": ', b'\\"peak\\": 9e300, \\"x\\": '),
    "a name in the header": lambda whole: whole.replace(b"checksums", b"checksumz"),
    "the end": lambda whole: whole[:-100],
    "all of it": lambda whole: b"",
}


@pytest.mark.parametrize("what", DAMAGE)
async def test_what_it_is_placed_from_is_made_of_the_upload_again_if_it_was_damaged(
    tmp_path: Path, files: list[dict[str, bytes]], truth: list[list[int]], what: str
) -> None:
    async with live(tmp_path) as fixture, fixture.client() as client:
        digest = (await upload(client, "poet", files[0])).json()["sha256"]
        stacks = fixture.data.adapters / digest / STACKS
        whole = stacks.read_bytes()
        stacks.write_bytes(DAMAGE[what](whole))
        assert stacks.read_bytes() != whole
        assert tokens(await ask(client, "poet")) == truth[0], "no request fails"
        assert stacks.read_bytes() == whole


async def test_an_adapter_that_overflows_with_a_prompt_is_that_requests_400(
    tmp_path: Path, files: list[dict[str, bytes]], truth: list[list[int]]
) -> None:
    large = load(files[0][TENSORS])
    for name in large:
        large[name] = torch.ones_like(large[name]) * (1e9 if "lora_A" in name else 1e8)
    async with live(tmp_path) as fixture, fixture.client() as client:
        await upload(client, "poet", files[0])
        assert (await upload(client, "large", {**files[0], TENSORS: save(large)})).status_code == 201
        body = {"model": "large", "prompt": PROMPT, "max_tokens": 2}
        failed = await client.post("/v1/completions", json=body)
        assert tokens(await ask(client, "poet")) == truth[0]
    error = failed.json()["error"]
    assert (failed.status_code, error["code"], error["param"]) == (400, "adapter_overflow", "model")
    assert error["type"] == "invalid_request_error"


async def test_a_mix_whose_weights_overflow_is_that_requests_400(
    tmp_path: Path, files: list[dict[str, bytes]], truth: list[list[int]]
) -> None:
    large = load(files[0][TENSORS])
    for name in large:
        large[name] = torch.ones_like(large[name]) * (1e9 if "lora_A" in name else 3e8)
    async with live(tmp_path) as fixture, fixture.client() as client:
        assert (await upload(client, "large", {**files[0], TENSORS: save(large)})).status_code == 201
        assert (await upload(client, "poet", files[1])).status_code == 201
        mix = [{"name": "large", "weight": 16}, {"name": "poet", "weight": 1}]
        body = {"model": BASE.name, "adapters": mix, "prompt": PROMPT, "max_tokens": 2}
        failed = await client.post("/v1/completions", json=body)
        assert tokens(await ask(client, "poet")) == truth[1]
    error = failed.json()["error"]
    assert (failed.status_code, error["code"], error["param"]) == (400, "adapter_unusable", "model")
    assert error["type"] == "invalid_request_error"


async def test_weighted_adapters_answer_together_as_in_peft_beside_each_alone(
    tmp_path: Path, files: list[dict[str, bytes]], truth: list[list[int]]
) -> None:
    model = make_adapter(BASE, **SPECS[0])
    folder = make_adapter_folder(tmp_path / "second", BASE, **SPECS[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an adapter that PEFT cannot name
        model.load_adapter(folder, "second")
        model.add_weighted_adapter(["default", "second"], [1.5, -0.5], "mix", combination_type="cat")
    model.set_adapter("mix")
    both = hf_greedy(model, PROMPT, 10)
    answers: dict[str, list[int]] = {}

    async def one(client: httpx.AsyncClient, name: str, model: str, **fields: Any) -> None:
        answers[name] = tokens(await ask(client, model, **fields))

    weighted = [{"name": "a1", "weight": -0.5}, {"name": "a0", "weight": 1.5}]
    async with live(tmp_path / "data") as fixture, fixture.client() as client:
        for i in range(2):
            assert (await upload(client, f"a{i}", files[i])).status_code == 201
        async with anyio.create_task_group() as tasks:
            for i in range(2):
                tasks.start_soon(one, client, f"a{i}", f"a{i}")
            tasks.start_soon(partial(one, client, "both", BASE.name, adapters=weighted))
    assert answers == {"a0": truth[0], "a1": truth[1], "both": both}
