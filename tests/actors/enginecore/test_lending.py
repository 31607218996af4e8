"""Adapters use memory that the KV cache does not need, and return it when sequences need it."""

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
import torch
from engine_harness import Played
from patience import PATIENCE
from recording_engine import noting, steps_between
from tiny_adapters import make_adapter_folder
from tiny_models import VOCAB, model_folder
from virtual_clock import real_clock

from personae.actors.assembly import Assembly, assemble
from personae.actors.client import EngineClient
from personae.actors.in_process import open_in_process
from personae.actors.options import EngineOptions
from personae.actors.sizing import PAGE_SIZE
from personae.actors.spec import EngineSpec
from personae.engine.config_file import read_config
from personae.engine.kv import KVCache
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.lora.shapes import LoraShapes
from personae.lora.weight_pools import pool_bytes

pytestmark = real_clock
NAMES = ("one", "two", "three", "four")
LENGTH = 256  # tokens: 16 pages of the KV cache


def assembled(root: Path, kv_pages: int) -> Assembly:
    """An engine with this many KV pages, and with memory for one of its four adapters."""
    base = model_folder("qwen3")
    for seed, name in enumerate(NAMES):
        make_adapter_folder(root / name, base, rank=16, seed=seed)
    config = read_config(base)
    shapes = LoraShapes(config.layers, config.lora_sites)
    return assemble(
        EngineOptions(
            base,
            (root,),
            device="cpu",
            dtype="float32",
            max_seqs=8,
            max_batch_tokens=64,
            max_model_len=LENGTH,
            kv_memory=kv_pages * KVCache.bytes_per_page(config.kv_specs, PAGE_SIZE, torch.float32),
            adapter_memory=pool_bytes(shapes, 16, torch.float32),
        )
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    return assembled(tmp_path_factory.mktemp("small"), 200)


def log(
    engine_spec: EngineSpec, id: str, name: str | None, length: int = 20, **changes: object
) -> SequenceLog:
    tokens = tuple(random.Random(id).choices(range(4, VOCAB), k=length))
    params = {"max_tokens": 8, "temperature": 0.0, "seed": 1, **changes}
    adapter = None if name is None else engine_spec.models[name].adapter
    return SequenceLog(id, tokens, length, SamplingParams(**params), adapter=adapter, eos=(0, 2))


async def play(client: EngineClient, logs: Sequence[SequenceLog]) -> dict[str, Played]:
    played: dict[str, Played] = defaultdict(Played)
    async with client.stream(logs) as stream:
        async for delta in stream:
            played[delta.id].tokens += delta.tokens
            played[delta.id].finish = delta.finish
    return dict(played)


async def test_adapters_use_lent_memory_until_sequences_need_it(
    small: Assembly,
) -> None:
    engine_spec = small.engine_spec
    async with open_in_process(engine_spec) as client:
        first = {}
        for name in NAMES:
            first |= await play(client, [log(engine_spec, name, name)])
        stats = client.stats()
        assert stats.adapters.device == len(NAMES), "no adapter was evicted"
        assert 0 < stats.pages_lent <= engine_spec.layout.lendable
        assert stats.adapters.evictions == 0

        free = stats.pages_total - stats.pages_lent
        load = [log(engine_spec, f"base {number}", None, LENGTH - 10, ignore_eos=True) for number in range(8)]
        assert len(load) * LENGTH // PAGE_SIZE < free, "the test's own sums"
        await play(client, load)
        assert client.stats().pages_lent == stats.pages_lent, "there was room in addition"

        again = {}
        for name in NAMES:
            again |= await play(client, [log(engine_spec, name, name)])
        assert {id: one.tokens for id, one in again.items()} == {id: one.tokens for id, one in first.items()}


async def test_lent_memory_returns_to_sequences_and_no_answer_changes(
    tmp_path_factory: pytest.TempPathFactory, small: Assembly
) -> None:
    tight = assembled(tmp_path_factory.mktemp("tight"), 90).engine_spec
    # Long answers, so that all run at the same time with any thread scheduling.
    logs = [
        log(tight, f"base {number}", None, 100, max_tokens=LENGTH - 110, ignore_eos=True)
        for number in range(8)
    ]
    async with open_in_process(small.engine_spec) as client:
        roomy = await play(client, logs)
        assert client.stats().counters.preemptions == 0
    async with open_in_process(tight) as client:
        for name in NAMES:
            await play(client, [log(tight, name, name)])
        lent = client.stats().pages_lent
        assert lent > 0
        together = await play(client, logs)  # they would need 120 pages of 90

        def came_back() -> bool:
            stats = client.stats()
            return (
                stats.pages_lent < lent and stats.adapters.evictions == len(NAMES) - stats.adapters.device > 0
            )

        with anyio.fail_after(PATIENCE):
            while not came_back():  # the last pages are reported with a later step, and by two actors
                await play(client, [log(tight, "later", None)])
        assert {id: one.tokens for id, one in together.items()} == {
            id: one.tokens for id, one in roomy.items()
        }


async def test_streams_continue_while_memory_is_lent_and_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    engine_spec = noting(assembled(tmp_path, 60).engine_spec, notes, monkeypatch)
    async with open_in_process(engine_spec) as client:
        running = log(engine_spec, "running", None, max_tokens=230, ignore_eos=True)
        async with client.stream([running]) as stream:
            async for _ in stream:
                break
            for name in NAMES:
                await play(client, [log(engine_spec, name, name)])
            lent = client.stats().pages_lent
            load = [log(engine_spec, f"base {i}", None, LENGTH - 10, ignore_eos=True) for i in range(3)]
            await play(client, load)
            assert client.stats().pages_lent < lent
    for note in ("lent", "back"):
        pieces, steps = steps_between(notes, note)
        assert steps > 3, f"{steps} steps between {pieces} pieces"
