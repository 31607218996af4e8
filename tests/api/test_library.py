"""`personae.open`: the engine inside a Python program."""

from collections.abc import AsyncIterator

import anyio
import pytest
from tiny_adapters import make_adapter_folder
from tiny_models import model_folder

import personae
from personae.api.options import ServeOptions
from personae.errors import LoadError, NotFound, RequestError, UnsupportedParameter

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.fixture
async def engine(tmp_path) -> AsyncIterator["personae.Engine"]:
    make_adapter_folder(tmp_path / "poet", model_folder("qwen3"), rank=4, seed=1)
    async with personae.open(
        model_folder("qwen3"), adapters=[tmp_path], device="cpu", dtype="float32", served_model_name="tiny"
    ) as engine:
        yield engine


async def test_the_base_and_its_adapters_answer_by_name(engine) -> None:
    assert engine.models == ("tiny", "poet")
    texts = {}

    async def ask(model: str) -> None:
        answer = await engine.chat(HELLO, model=model, max_tokens=12, temperature=0)
        texts[model] = answer.choices[0].message.content
        assert answer.usage.completion_tokens == 12

    async with anyio.create_task_group() as tasks:
        for model in engine.models:
            tasks.start_soon(ask, model)
    assert texts["tiny"] != texts["poet"]
    assert engine.stats().ready
    assert engine.stats().counters.steps > 0


async def test_a_stream_brings_the_text_of_the_whole_answer(engine) -> None:
    fields = {"max_tokens": 20, "seed": 3}
    whole = await engine.chat(HELLO, **fields)
    text, ends = "", []
    async with engine.stream_chat(HELLO, **fields) as chunks:
        async for chunk in chunks:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
    assert (text, ends) == (whole.choices[0].message.content, [whole.choices[0].finish_reason])


async def test_a_stream_may_be_left_at_any_time(engine) -> None:
    async with engine.stream_chat(HELLO, max_tokens=500) as chunks:
        async for _ in chunks:
            break
    assert (await engine.complete("after", max_tokens=2)).usage.completion_tokens <= 2


async def test_errors_are_those_of_the_api(engine) -> None:
    with pytest.raises(RequestError) as caught:
        await engine.complete("x", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(NotFound):
        await engine.complete("x", model="nobody")
    with pytest.raises(RequestError) as caught:
        async with engine.stream_chat([{"role": "user"}]):
            pass
    assert caught.value.param is not None


async def test_an_answer_in_chunks_is_not_given_whole_in_its_place(engine) -> None:
    for ask in (engine.chat(HELLO, stream=True), engine.complete("x", stream=True)):
        with pytest.raises(UnsupportedParameter, match="stream_chat"):
            await ask


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "gpu"}, "'gpu'"),
        ({"max_seqs": "4"}, "max_seqs"),
        ({"max_seqs": 0}, "`max_seqs`: 0 is less than 1"),
        ({"session_ttl": 9_999_999}, "`session_ttl`: 9999999 is more than 2592000."),
        ({"quantize": "int3"}, "`quantize`: 'int3' is not one of"),
        ({"root_path": "llm"}, "`root_path`: .* write it as /llm"),
        ({"kv_memory": "2 apples"}, "is not a size"),
        ({"spare_process": True}, "--spare-process is for one engine"),
        ({"nnodes": 2}, "--nnodes 2 needs --pipeline-parallel-size 2"),
        ({"nnodes": 2, "pipeline_parallel_size": 2, "ray": "auto"}, "--nnodes is for one engine"),
        ({"dist_init_addr": "here"}, "'here' is not HOST:PORT"),
        ({"model": "acme/poet"}, "acme/poet is not complete in the cache"),
        ({"model": "acme/poet", "kv_disk_bytes": 2**30}, "--kv-disk-bytes needs --kv-disk"),
        ({"model": "acme/poet", "kv_transfer_backend": "nixl"}, "nixl needs --kv-transfer"),
        (
            {"model": "acme/poet", "one_process": True, "kv_events": "tcp://127.0.0.1:5557"},
            "--kv-events needs an engine process",
        ),
    ],
)
async def test_a_wrong_option_is_told_before_anything_is_loaded(options: dict[str, str], said: str) -> None:
    with pytest.raises(LoadError, match=said):
        async with personae.open(**options):
            pass


async def test_an_option_may_be_written_as_on_the_command_line(tmp_path) -> None:
    make_adapter_folder(tmp_path / "poet", model_folder("qwen3"), rank=4, seed=1)
    options = {"adapters": str(tmp_path), "device": "cpu", "kv_memory": "64MiB"}
    async with personae.open(str(model_folder("qwen3")), **options) as engine:
        assert engine.models[1:] == ("poet",)


async def test_one_value_with_all_options_opens_an_engine_as_keywords_do() -> None:
    options = ServeOptions(
        model_folder("qwen3"), device="cpu", one_process=True, served_model_name=("a", "b")
    )
    async with personae.open(options) as engine:
        assert engine.models == ("a", "b")
    with pytest.raises(TypeError):
        async with personae.open(options, max_seqs=3):
            pass


async def test_what_is_left_out_is_not_said_and_a_salt_of_ones_own_parts_the_cache(engine) -> None:
    long, fields = "x" * 200, {"max_tokens": 12, "temperature": 0, "return_token_ids": True}

    async def said(**more: object) -> tuple[int, ...]:
        answer = await engine.complete(long, n=2, **fields, **more)
        first, second = (choice.token_ids for choice in answer.choices)
        assert first == second
        return tuple(first)

    free = await said(ignore_eos=True)
    assert set(await said(allowed_token_ids=[*free[:2], 40])) <= {*free[:2], 40}

    async def cached(salt: str | None) -> int:
        answer = await engine.complete(long, cache_salt=salt, **fields)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert await cached(None) > 0
    assert await cached("mine") == 0
    assert await cached("mine") > 0
    assert await cached("yours") == 0
    cut = await engine.complete(long, truncate_prompt_tokens=9, **fields)
    assert cut.usage.prompt_tokens == 9
