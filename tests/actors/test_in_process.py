"""The whole engine in one process, with a tiny model: real threads, real tensors, the wall clock."""

import json
import random
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest
from engine_harness import Played
from msgspec.structs import replace as changed
from patience import PATIENCE, soon
from recording_engine import noting, steps_between
from tiny_adapters import ZOO, make_zoo
from tiny_models import VOCAB, model_folder
from virtual_clock import real_clock

from personae.actors.assembly import Assembly, assemble
from personae.actors.client import EngineClient
from personae.actors.enginecore.scheduler import SchedulerActor
from personae.actors.frontend.ingress import Ingress
from personae.actors.frontend.streamer import Streamer
from personae.actors.in_process import open_in_process
from personae.actors.kit.child import Incident
from personae.actors.options import EngineOptions
from personae.actors.spec import EngineSpec
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.engine.step import StepEngine
from personae.errors import GrammarError, Overloaded
from personae.grammar.spec import GrammarSpec
from personae.lora.adapter import Adapter
from personae.lora.library import AdapterLibrary
from personae.lora.stored import PageReader, store

pytestmark = real_clock
NAMES = [*list(ZOO)[:4], None]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["bug", "wish"]}, "urgent": {"type": "boolean"}},
    "required": ["kind", "urgent"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    base = model_folder("qwen3")
    root = tmp_path_factory.mktemp("adapters")
    make_zoo(root, base, NAMES)
    options = EngineOptions(
        base, (root,), device="cpu", dtype="float32", max_seqs=8, max_batch_tokens=64, kv_memory=2**22
    )
    return assemble(options)


def log(
    engine_spec: EngineSpec, id: str, name: str | None, length: int = 20, **changes: object
) -> SequenceLog:
    tokens = tuple(random.Random(id).choices(range(4, VOCAB), k=length))
    params = {"max_tokens": 12, "seed": 5, "temperature": 0.8, **changes}
    adapter = None if name is None else engine_spec.models[name].adapter
    return SequenceLog(id, tokens, length, SamplingParams(**params), adapter=adapter, eos=(0, 2))


async def play(client: EngineClient, logs: Sequence[SequenceLog]) -> dict[str, Played]:
    played: dict[str, Played] = defaultdict(Played)
    async with client.stream(logs) as stream:
        async for delta in stream:
            one = played[delta.id]
            assert one.finish is None, "a delta after the end"
            one.tokens += delta.tokens
            one.prompt_logprobs += delta.prompt_logprobs
            one.finish, one.error = delta.finish, delta.error
    assert all(one.finish is not None for one in played.values())
    return dict(played)


async def everything(client: EngineClient, logs: Sequence[SequenceLog]) -> dict[str, list[int]]:
    """Run each log in a stream of its own, all at the same time."""
    tokens: dict[str, list[int]] = {}

    async def one(log: SequenceLog) -> None:
        tokens.update((id, played.tokens) for id, played in (await play(client, [log])).items())

    async with anyio.create_task_group() as tasks:
        for log in logs:
            tasks.start_soon(one, log)
    return tokens


def everyone(engine_spec: EngineSpec) -> list[SequenceLog]:
    return [log(engine_spec, f"{name}-{i}", name, length=5 + 9 * i) for name in NAMES for i in range(5)]


async def test_many_streams_of_many_adapters_bring_what_each_brings_alone(assembly) -> None:
    engine_spec = assembly.engine_spec
    async with open_in_process(engine_spec) as client:
        together = await everything(client, everyone(engine_spec))
        alone = {}
        for one in everyone(engine_spec):
            alone.update(await everything(client, [one]))
        assert together == alone
        stats = client.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


async def test_the_size_of_the_cache_is_known_before_the_first_request(assembly) -> None:
    async with open_in_process(assembly.engine_spec) as client:
        await soon(lambda: client.stats().pages_total > 0, "it is known")
        stats = client.stats()
        assert stats.counters.steps == 0
        assert f"KV cache {stats.page_size * stats.pages_total} tokens" in assembly.about


async def test_leaving_a_stream_frees_its_slots_and_pages(assembly) -> None:
    engine_spec = assembly.engine_spec
    async with open_in_process(engine_spec) as client:
        logs = [log(engine_spec, f"long-{i}", NAMES[i % 5], max_tokens=400) for i in range(12)]
        async with client.stream(logs) as stream:
            async for _ in stream:
                break
        await play(client, [log(engine_spec, "after", None)])
        stats = client.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


async def test_a_client_that_disconnects_while_it_waits_for_admission_leaves_nothing(assembly) -> None:
    engine_spec = assembly.engine_spec
    async with open_in_process(engine_spec) as client:
        with anyio.CancelScope() as gone:
            gone.cancel()
            async with client.stream([log(engine_spec, "gone", NAMES[0], max_tokens=900)]):
                raise AssertionError("cancelled before")
        await play(client, [log(engine_spec, "after", None)])
        stats = client.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


async def test_a_stopped_sequence_delivers_nothing_more_and_its_siblings_continue(assembly) -> None:
    engine_spec = assembly.engine_spec
    async with open_in_process(engine_spec) as client:
        logs = [log(engine_spec, f"{i}", None, max_tokens=30) for i in range(3)]
        seen: dict[str, int] = defaultdict(int)
        async with client.stream(logs) as stream:
            async for delta in stream:
                assert not (delta.id == "1" and seen["1"]), "a delta after stop()"
                seen[delta.id] += len(delta.tokens)
                if delta.id == "1":
                    stream.stop("1")
        assert seen["0"] == seen["2"] == 30


async def test_a_full_server_refuses_and_accepts_again_when_there_is_room(assembly) -> None:
    engine_spec = replace(assembly.engine_spec, max_live=4)
    async with open_in_process(engine_spec) as client:
        async with client.stream([log(engine_spec, f"{i}", None, max_tokens=200) for i in range(3)]):
            with pytest.raises(Overloaded, match="holds 3 of at most 4"):
                await play(client, [log(engine_spec, f"{i}", None) for i in "ab"])
        assert (await play(client, [log(engine_spec, "later", None)]))["later"].finish == "length"


async def test_answers_bound_to_a_schema_validate_in_a_batch_with_free_ones(assembly) -> None:
    engine_spec = assembly.engine_spec
    spec = GrammarSpec("json_schema", json.dumps(SCHEMA))
    async with open_in_process(engine_spec) as client:
        logs = [log(engine_spec, f"free-{i}", NAMES[i]) for i in range(5)]
        bound = [log(engine_spec, f"bound-{i}", NAMES[i], max_tokens=300) for i in range(5)]
        free_alone = await everything(client, logs)
        tokens = await everything(client, [*logs, *(changed(one, grammar=spec) for one in bound)])
        for i in range(5):
            text = client.tokenizer.decode(tokens[f"bound-{i}"])
            jsonschema.validate(json.loads(text), SCHEMA)
            assert tokens[f"free-{i}"] == free_alone[f"free-{i}"]


async def test_a_malformed_grammar_fails_its_own_request_and_the_next_one_works(assembly) -> None:
    engine_spec = assembly.engine_spec
    async with open_in_process(engine_spec) as client:
        bad = changed(log(engine_spec, "bad", None), grammar=GrammarSpec("json_schema", '{"type": "thing"}'))
        with pytest.raises(GrammarError):
            await play(client, [bad])
        good = changed(
            log(engine_spec, "good", None, max_tokens=300),
            grammar=GrammarSpec("json_schema", json.dumps(SCHEMA)),
        )
        assert (await play(client, [good]))["good"].finish == "stop"


class CrashingEngine(StepEngine):
    """Raises at the given steps, once per epoch."""

    crash_at: int

    def forward(self, packed, overlap):  # type: ignore[no-untyped-def]  # as in StepEngine
        self.crash_at -= 1
        if self.crash_at == 0:
            raise RuntimeError("injected: the device is gone")
        return super().forward(packed, overlap)


async def test_streams_continue_token_for_token_when_the_executor_crashes(assembly) -> None:
    engine_spec = assembly.engine_spec
    crashes = [5]  # only one: a sequence that runs in a second crash is ended
    incidents: list[Incident] = []

    def build() -> StepEngine:
        engine = engine_spec.build_step_engine()
        engine.__class__ = type("Crashing", (CrashingEngine, type(engine)), {})
        engine.crash_at = crashes.pop(0) if crashes else 0
        return engine

    spec = GrammarSpec("json_schema", json.dumps(SCHEMA))
    logs = [
        *everyone(engine_spec),
        changed(log(engine_spec, "bound", NAMES[0], max_tokens=300), grammar=spec),
        log(engine_spec, "echo", NAMES[1], length=90, prompt_logprobs=1),
    ]
    async with open_in_process(engine_spec) as client:
        calm = await everything(client, logs)
        (echo,) = (await play(client, [logs[-1]])).values()
    async with open_in_process(replace(engine_spec, build_step_engine=build), incidents.append) as client:
        assert await everything(client, logs[:-1]) == {id: calm[id] for id in calm if id != "echo"}
        crashes.append(2)
    assert not crashes[:-1]
    assert len([i for i in incidents if "injected" in str(i.error)]) == 1
    crashes[:] = [2]
    async with open_in_process(replace(engine_spec, build_step_engine=build), incidents.append) as client:
        (again,) = (await play(client, [logs[-1]])).values()
        assert not crashes
        assert again == echo


async def test_streams_continue_between_the_pieces_of_a_cold_adapter(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    engine_spec = noting(assembly.engine_spec, notes, monkeypatch)
    async with open_in_process(engine_spec) as client:
        running = log(engine_spec, "running", None, max_tokens=200)
        async with client.stream([running]) as stream:
            async for _ in stream:
                break
            await play(client, [log(engine_spec, "cold", NAMES[0])])
        pieces, steps = steps_between(notes, "placed")
        assert pieces == 7 * 2, "a page of A and one of B each, in all layers"
        assert steps > pieces // 4


def taken(engine_spec: EngineSpec, digest: str) -> Adapter:
    return engine_spec.library.take(digest, engine_spec.library.read(digest))


async def test_streams_continue_while_a_thread_reads_a_cold_adapter_into_its_pages(
    assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_spec = assembly.engine_spec
    digest = engine_spec.models[NAMES[0]].adapter
    (tmp_path / digest).mkdir()
    store(taken(engine_spec, digest), tmp_path / digest, assembly.bounds.shapes, "F32")
    target = AdapterLibrary(assembly.bounds.shapes, {}, tmp_path, 0, stored="F32")
    goes_on = threading.Event()
    fill = PageReader._fill

    def filling(self: PageReader, *what: Any) -> None:
        assert goes_on.wait(PATIENCE)
        fill(self, *what)

    cold = log(engine_spec, "cold", NAMES[0])
    async with open_in_process(engine_spec) as client:
        expected = await play(client, [cold])
    monkeypatch.setattr(PageReader, "_fill", filling)
    builder = replace(engine_spec.build_step_engine.__self__, read_adapter=target.take)
    from_file = replace(engine_spec, library=target, build_step_engine=builder.build)
    async with open_in_process(from_file) as client:
        answers: dict[str, Any] = {}

        async def ask() -> None:
            answers.update(await play(client, [cold]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            for number in range(3):
                await play(client, [log(engine_spec, f"base {number}", None)])
            assert not answers, "its adapter is not there"
            goes_on.set()
        assert answers == expected


async def test_actors_that_send_to_the_streamer_stop_before_it(assembly, monkeypatch) -> None:
    order: list[str] = []
    for actor in (Ingress, SchedulerActor, Streamer):

        async def stopped(self: object, name: str = actor.__name__) -> None:
            order.append(name)

        monkeypatch.setattr(actor, "stopped", stopped)
    async with open_in_process(assembly.engine_spec) as client:
        await play(client, [log(assembly.engine_spec, "one", None)])
    assert order == ["SchedulerActor", "Ingress", "Streamer"]
