"""Pages travel between engines in processes of their own: tokens stay the same, whatever fails."""

import os
import random
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from crash_harness import NAMES, mixed, play_all, same
from msgspec import structs
from patience import PATIENCE
from tiny_adapters import ZOO, make_adapter_folder
from tiny_models import VOCAB, model_folder

from personae.actors.assembly import assemble
from personae.actors.frontend.engine_process import EngineProcess
from personae.actors.frontend.frontend import LocalClient
from personae.actors.in_process import open_in_process
from personae.actors.multi_process import MultiProcessEngine
from personae.actors.options import EngineOptions
from personae.actors.replicas.launch import open_replicas
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.engine.tiers import transfer
from personae.errors import LoadError

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"]),
]
PAGE = 16


@pytest.fixture(autouse=True)
def _single_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3] / ".pkg"))


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    base = model_folder("qwen3")
    root = tmp_path_factory.mktemp("adapters")
    for name in NAMES[:-1]:
        make_adapter_folder(root / name, base, **ZOO[name])
    return EngineOptions(
        base,
        (root,),
        device="cpu",
        dtype="float32",
        max_seqs=8,
        max_batch_tokens=64,
        kv_memory=2**22,
        kv_transfer=True,
    )


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process ids of all engine cores that were started, in order."""
    started: list[int] = []
    load = EngineProcess._load

    async def noted(self: EngineProcess) -> None:
        started.append(self._process.pid)
        await load(self)

    monkeypatch.setattr(EngineProcess, "_load", noted)
    return started


@asynccontextmanager
async def two(options: EngineOptions, prefill: int) -> AsyncIterator[MultiProcessEngine]:
    async with open_replicas(
        options, 2, max_restarts=20, silence_seconds=PATIENCE, report=lambda incident: None, prefill=prefill
    ) as engines:
        yield engines


def long_prompts(count: int, tokens: int = 150) -> list[SequenceLog]:
    dice = random.Random(1)
    return [
        SequenceLog(
            f"long{number}",
            tuple(dice.choices(range(4, VOCAB), k=tokens)),
            tokens,
            SamplingParams(max_tokens=12, temperature=0.8, seed=number, ignore_eos=True),
        )
        for number in range(count)
    ]


async def answers(client: LocalClient, logs: list[SequenceLog]) -> tuple[dict[str, list[int]], int]:
    """The tokens of each log, and how many prompt tokens were cached."""
    found: dict[str, list[int]] = {log.id: [] for log in logs}

    async def one(log: SequenceLog) -> None:
        async with client.stream([log]) as stream:
            async for delta in stream:
                assert delta.error is None
                found[delta.id] += delta.tokens

    async with anyio.create_task_group() as tasks:
        for log in logs:
            tasks.start_soon(one, log)
    return found, client.stats().counters.tier_hits


async def alone(options: EngineOptions, logs: list[SequenceLog]) -> dict[str, list[int]]:
    """The tokens of each log with one engine."""
    async with open_in_process(assemble(replace(options, kv_transfer=False)).engine_spec) as client:
        return (await answers(client, logs))[0]  # type: ignore[arg-type]  # a LocalClient, too


async def test_a_prefill_engine_computes_prompts_and_the_other_fetches_their_pages(options) -> None:
    logs = long_prompts(6)
    expected = await alone(options, logs)
    async with two(options, prefill=1) as engines:
        found, hits = await answers(engines.client, logs)
        stats = engines.client.stats()
    assert found == expected
    assert stats.prefilled == 6
    assert hits == 6 * (150 // PAGE) * PAGE
    prompts = [each.counters.tokens for each in stats.replicas.values()]
    assert prompts[0] == 6 * 150, "the prefill engine computes prompts, and no answer"
    assert prompts[1] < 6 * (PAGE + 12), "the other one computes the ends of prompts, and the answers"
    assert stats.counters.tier_errors == 0


async def test_adapters_grammars_and_speculation_give_the_same_answers_with_a_prefill_engine(
    options,
) -> None:
    async with two(options, prefill=1) as engines:
        client = engines.client
        sequences = mixed(client.models("default"), 24)
        seen = await play_all(client, sequences)
        prefilled = client.stats().prefilled
    async with two(replace(options, kv_transfer=False), prefill=0) as engines:
        expected = await play_all(engines.client, sequences)
    assert prefilled
    same(seen, expected)


async def test_a_page_socket_that_answers_nonsense_or_closes_costs_nothing_but_time(
    options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert options
    nonsense = tmp_path / "nonsense"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(nonsense))
        listener.listen()

        def fetch(seconds: float) -> tuple[int, str]:
            from personae.engine.scheduling.page_names import page_keys, root_key

            path = page_keys(root_key(b"", None), range(64), PAGE)
            pages, problem = transfer.fetch_pages(str(nonsense), b"x" * 32, path, 1, 100, seconds)
            return len(pages), problem

        async def answer(data: bytes) -> None:
            connection, _ = await anyio.to_thread.run_sync(listener.accept)
            await anyio.to_thread.run_sync(transfer.receive_wanted, connection)
            connection.sendall(data)
            connection.close()

        coming = transfer._frame(transfer.PagesComing(3))
        for data, pages, why in (
            (b"", 0, "closed"),
            (b"\xff\xff\xff\xff", 0, "limit"),
            (b"\x03\x00\x00\x00abc", 0, "int"),
            (transfer._frame(transfer.PagesComing(9)), 0, "more pages than"),
            (transfer._frame(transfer.PagesComing(0, "no")), 0, "no"),
            (coming + bytes(250), 2, "closed"),
        ):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(answer, data)
                count, problem = await anyio.to_thread.run_sync(fetch, 5.0)
            assert count == pages
            assert why in problem.lower()
        assert (await anyio.to_thread.run_sync(fetch, 0.05)) == (0, "timed out")
    nonsense.unlink()
    count, problem = await anyio.to_thread.run_sync(fetch, 1.0)
    assert count == 0
    assert "No such file" in problem


async def test_another_model_gives_no_pages() -> None:
    ours, theirs = transfer.PageSource("ours", 100), transfer.PageSource("theirs", 100)
    wanted = transfer.PagesWanted(theirs.identity, b"root", (b"i",), 0)
    assert ours.refusal(wanted)
    assert not theirs.refusal(wanted)


async def test_streams_of_a_drained_engine_take_their_pages_along(options) -> None:
    logs = [structs.replace(log, params=structs.replace(log.params, max_tokens=90)) for log in long_prompts(4)]
    expected = await alone(options, logs)
    async with two(options, prefill=0) as engines:
        client, scaler = engines.client, engines.scaler
        assert scaler is not None

        async def drain() -> None:
            while client.stats().counters.tokens < 4 * 150 + 60:  # noqa: ASYNC110 - steps of processes
                await anyio.sleep(0.01)
            await scaler.scale(1, 0.0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain)
            found, _ = await answers(client, logs)
        stats = client.stats()
    assert found == expected
    assert stats.moved
    assert stats.counters.tier_hits >= stats.moved * (150 // PAGE) * PAGE
    assert stats.counters.tier_errors == 0


async def test_a_session_that_goes_to_another_engine_finds_its_pages_there(options) -> None:
    (log,) = long_prompts(1)
    async with two(options, prefill=0) as engines:
        client = engines.client
        first, _ = await answers(client, [structs.replace(log, session="s")])
        busy = max(client.stats().replicas.items(), key=lambda item: item[1].counters.tokens)[0]
        # The other engine becomes the only one with room.
        dispatcher = client._frontend._dispatcher  # type: ignore[attr-defined]  # a ReplicaSet
        dispatcher._replicas[busy].seqs = 0
        dispatcher._replicas[busy].live = {**dispatcher._replicas[busy].live}
        dispatcher._placement.choose = lambda request, replicas: next(
            each for each in replicas if each.index != busy
        )
        again, hits = await answers(client, [structs.replace(log, id="again", session="s")])
    assert again["again"] == first[log.id]
    assert hits == (150 - 1) // PAGE * PAGE


@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
async def test_a_death_on_either_side_loses_no_answer_and_changes_no_token(
    options, processes: list[int], victim: int
) -> None:
    logs = [structs.replace(log, params=structs.replace(log.params, max_tokens=60)) for log in long_prompts(8)]
    expected = await alone(options, logs)
    async with two(options, prefill=1) as engines:
        client = engines.client

        async def kill() -> None:
            while client.stats().counters.tokens < 300:  # noqa: ASYNC110 - steps of processes
                await anyio.sleep(0.005)
            os.kill(processes[victim], signal.SIGKILL)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            found, _ = await answers(client, logs)
        assert client.stats().moved
    assert found == expected


async def test_an_engine_for_answers_has_to_be_left(options) -> None:
    with pytest.raises(LoadError, match="--prefill-replicas 2 leaves no engine"):
        async with two(options, prefill=2):
            pass
