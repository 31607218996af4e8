"""Several engines in processes of their own, with a tiny model: streams continue at another when one dies."""

import os
import random
import shutil
import signal
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest
from crash_harness import mixed, play_all, same
from marks import long
from msgspec import structs
from patience import PATIENCE, soon

from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.actors.process import ChildProcess, CoreProcess
from personae.actors.replicas import load_scaling
from personae.actors.replicas.exact import ExactPrefixes
from personae.actors.replicas.launch import launch_replicas, open_replicas, shares
from personae.actors.replicas.source import LocalSource
from personae.actors.spawn import COMMAND
from personae.engine.params import SamplingParams
from personae.engine.scheduling.page_names import block_names
from personae.engine.sequence import SequenceLog
from personae.engine.tokens import Tokenizer
from personae.errors import EngineLost, LoadError, ModelLoadError, RequestError

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"]),
    pytest.mark.usefixtures("single_threaded"),
]


@pytest.mark.parametrize("how", [long(signal.SIGKILL), signal.SIGSTOP])
async def test_streams_continue_at_another_replica_token_for_token_when_one_dies_or_is_silent(
    options, processes: list[int], how: signal.Signals
) -> None:
    async with open_replicas(
        options,
        2,
        max_restarts=20,
        silence_seconds=3.0 if how == signal.SIGSTOP else PATIENCE,
        report=lambda incident: None,
    ) as engines:
        logs = mixed(engines)
        client = engines.client
        calm = await play_all(client, logs)
        assert [stats.ready for stats in client.stats().replicas.values()] == [True, True]
        disturbed = []

        async def kill() -> None:
            rng = random.Random(3)
            for started in (3, 4):
                await anyio.sleep(rng.uniform(0.02, 0.2))
                os.kill(processes[-1], how)
                while len(processes) < started:  # noqa: ASYNC110  there is no event for it
                    await anyio.sleep(0.1)
                while not all(stats.ready for stats in client.stats().replicas.values()):  # noqa: ASYNC110  there is no event for it
                    await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()

        with anyio.fail_after(2 * PATIENCE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kill)
                while True:
                    with anyio.CancelScope(shield=True):
                        disturbed.append(await play_all(client, logs))
                    await anyio.lowlevel.checkpoint()
        assert len(disturbed) > 1
        assert all(same(calm, one) for one in disturbed)
        stats = client.stats()
        assert stats.restarts >= 2
        assert stats.moved > 0
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


async def test_every_replica_has_its_own_figures_and_the_engine_shows_their_sum(options) -> None:
    async with open_replicas(options, 2) as engines:
        await play_all(engines.client, mixed(engines))
        stats = engines.client.stats()
        assert all(each.counters.steps > 0 for each in stats.replicas.values()), "both were used"
        assert stats.counters.steps == sum(each.counters.steps for each in stats.replicas.values())
        assert stats.pages_total == sum(each.pages_total for each in stats.replicas.values())
        paths = {gauge.path for gauge in stats.actors}
        assert {
            "personae/dispatcher",
            "personae/engine-1/frontend/streamer",
            "engine-0/core/executor",
        } <= paths


async def test_no_engine_runs_while_nobody_asks_and_a_request_waits_for_one(
    options, processes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_scaling, "CALM", 0.5)
    async with open_replicas(options, 0, most=1, by_load=True) as engines:
        client, logs = engines.client, mixed(engines)
        calm = await play_all(client, logs)
        await soon(lambda: not client.stats().replicas, "the engine ends")
        await soon(lambda: not Path(f"/proc/{processes[0]}").exists(), "its process ends")
        stats = client.stats()
        assert stats.ready
        assert stats.cold_start_seconds > 0
        with anyio.fail_after(2 * PATIENCE):
            assert same(calm, await play_all(client, logs))
        assert len(processes) == 2


async def test_engines_come_and_go_while_streams_run_and_every_token_is_the_same(options) -> None:
    async with open_replicas(options, 1, most=2, report=lambda incident: None) as engines:
        scaler = engines.scaler
        assert scaler is not None
        logs = mixed(engines)
        client = engines.client
        calm = await play_all(client, logs)
        disturbed = []

        async def scale() -> None:
            while not client.stats().moved:
                for count in (2, 1):
                    counted = client.stats().counters.steps
                    await scaler.scale(count, drain_seconds=0.0)
                    while [info.status for info in scaler.list()] != ["ready"] * count:  # noqa: ASYNC110  there is no event for it
                        await anyio.sleep(0.01)
                    assert client.stats().counters.steps >= counted, "what an engine counted stays"
                    await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()

        with anyio.fail_after(2 * PATIENCE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(scale)
                while True:
                    with anyio.CancelScope(shield=True):
                        disturbed.append(await play_all(client, logs))
                    await anyio.lowlevel.checkpoint()
        assert all(same(calm, one) for one in disturbed)
        stats = client.stats()
        assert (stats.restarts, stats.running, stats.waiting) == (0, 0, 0)
        with pytest.raises(RequestError, match="must be from 1 to 2"):
            await scaler.scale(3)


async def test_engines_report_what_is_in_their_prefix_caches_if_the_option_is_set(options) -> None:
    heard: dict[int, ExactPrefixes] = defaultdict(ExactPrefixes)
    recording = replace(options, record_kv_events=True)
    async with open_replicas(
        recording, 2, on_kv_events=lambda engine, events: heard[engine].hear(events)
    ) as engines:
        first = SequenceLog("0", tuple(range(5, 69)), 64, SamplingParams(max_tokens=4, seed=1))
        logs = [[structs.replace(first, id=f"{number}", salt=b"%d" % number)] for number in range(8)]
        await play_all(engines.client, logs)
        assert heard.keys() == {0, 1}
        size = heard[0].block_size or heard[1].block_size
        for (log,) in logs:
            names = tuple(block_names(log, size))
            assert len(names) == 64 // size
            assert any(names[0] in prefixes.names for prefixes in heard.values())
            assert max(prefixes.match(names) for prefixes in heard.values()) == 64


async def test_options_that_the_first_engine_refuses_end_the_start(options, tmp_path) -> None:
    with pytest.raises(ModelLoadError):
        async with open_replicas(EngineOptions(tmp_path, device="cpu"), 2):
            raise AssertionError("not reached")


async def test_an_unexpected_error_when_another_engine_starts_ends_the_start_with_its_reason(options) -> None:
    async def refuse() -> CoreProcess:
        raise RuntimeError("the node answers in another language")

    first = partial(ChildProcess.launch, COMMAND, {})
    with anyio.fail_after(PATIENCE):
        with pytest.raises(EngineLost, match="engine-1 could not be started: the node answers in another"):
            async with launch_replicas(
                LocalSource([first, refuse]),
                2,
                options,
                Tokenizer.load(options.model),
                report=lambda incident: None,
            ):
                raise AssertionError("not reached")


async def test_cores_are_shared_evenly_and_more_engines_than_gpus_are_refused(
    options, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shares(options, 3) == [{}, {}, {}], "what the operator says holds"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    monkeypatch.setattr("personae.kernels.cgroup.processors", lambda: None)
    assert shares(options, 3) == [{"OMP_NUM_THREADS": "2"}] * 3
    assert shares(options, 9) == [{"OMP_NUM_THREADS": "1"}] * 9
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    on_gpu = EngineOptions(options.model, device="cuda")
    assert shares(on_gpu, 2) == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "6"}]
    with pytest.raises(LoadError, match="--replicas 3 needs 3 GPUs; there are 2"):
        shares(on_gpu, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,1,0")
    on_two = EngineOptions(options.model, device="cuda", tensor_parallel_size=2)
    assert shares(on_two, 2) == [{"CUDA_VISIBLE_DEVICES": "4,6"}, {"CUDA_VISIBLE_DEVICES": "1,0"}]
    with pytest.raises(LoadError, match="--replicas 3 needs 6 GPUs; there are 4"):
        shares(on_two, 3)


async def test_an_adapter_that_is_added_later_serves_at_every_engine_by_its_digest(options, tmp_path) -> None:
    cards = assemble(options).engine_spec.models
    (name, card) = next((name, card) for name, card in cards.items() if card.adapter is not None)
    store = tmp_path / "store"
    async with open_replicas(replace(options, adapters=(), adapter_store=store), 2) as engines:
        assert set(engines.client.models("default")).isdisjoint({name}), "it is not there yet"
        assert card.adapter is not None
        shutil.copytree(options.adapters[0] / name, store / card.adapter)
        first = SequenceLog("0", (5, 6, 7), 3, SamplingParams(max_tokens=8, seed=1), adapter=card.adapter)
        logs = [[structs.replace(first, id=f"{number}")] for number in range(24)]
        played = await play_all(engines.client, logs)
        loads = [each.adapters.loads for each in engines.client.stats().replicas.values()]
    assert all(loads), f"both engines have loaded it: {loads}"
    assert {(tuple(one.tokens), one.finish) for one in played.values()} == {
        (tuple(played["0"].tokens), "length")
    }
