"""Engines on other machines behave like processes of this one."""

import os
import random
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread

import anyio
import pytest
from anyio import to_thread
from crash_harness import NAMES, mixed, play, play_all, same
from engine_harness import Played
from patience import PATIENCE, soon
from patient_engine import PATIENT
from tiny_adapters import ZOO, make_adapter_folder, make_zoo
from tiny_models import VOCAB, model_folder

from personae.actors.adapter_folders import adapter_folders
from personae.actors.assembly import assemble
from personae.actors.cluster.adapter_files import AdapterFiles
from personae.actors.cluster.agent import run_engine
from personae.actors.cluster.contact import Contact, Dial
from personae.actors.cluster.dial import dial
from personae.actors.cluster.listener import Listener, open_listener
from personae.actors.cluster.remote_process import RemoteLaunch, RemoteProcess, StartEngine
from personae.actors.in_process import open_in_process
from personae.actors.options import EngineOptions
from personae.actors.replicas.launch import launch_replicas
from personae.actors.replicas.source import LocalSource
from personae.actors.spawn import COMMAND
from personae.engine.machine_sockets import ENGINE, new_identity
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.engine.tiers.transfer import CERTIFIED
from personae.engine.tokens import Tokenizer
from personae.errors import EngineCoreDied, RequestFailed

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"]),
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3] / ".pkg"))


class Node:
    """A machine that starts engines, each in a thread, as an agent does."""

    def __init__(self, listener: Listener, tmp_path: Path, command: tuple[str, ...] = COMMAND) -> None:
        self.identity = new_identity(ENGINE)
        self.pids: list[int] = []
        self.ended: list[int] = []
        self._command = command
        listener.admit(self.identity.certificate)
        self.terms = Contact(cache=str(tmp_path / "cache"))

    async def place(self) -> StartEngine:
        async def begin(contact: Contact) -> None:
            Thread(target=self._run, args=(Dial(contact, self.identity),), daemon=True).start()

        return begin

    def _run(self, call: Dial) -> None:
        self.ended.append(run_engine(call, self._command, self.pids.append))


@asynccontextmanager
async def node_on_loopback(
    tmp_path: Path, command: tuple[str, ...] = COMMAND
) -> AsyncIterator[tuple[Node, Listener]]:
    async with open_listener("127.0.0.1") as listener:
        yield Node(listener, tmp_path, command), listener


@pytest.mark.parametrize("encrypted", [False, True], ids=["loopback", "tls"])
async def test_streams_survive_the_death_of_a_remote_engine_and_uploads_reach_it(
    tmp_path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    if encrypted:  # in this process and in the engine: the certificate's name
        for module in ("listener", "dial"):
            monkeypatch.setattr(f"personae.actors.cluster.{module}.is_loopback", lambda host: False)
    base = model_folder("qwen3")
    make_zoo(tmp_path / "adapters", base, NAMES)
    source = AdapterFiles(adapter_folders((tmp_path / "adapters",), ()), tmp_path / "store")
    later = tmp_path / "later"
    make_adapter_folder(later / "one", base, **ZOO[list(ZOO)[2]])
    options = EngineOptions(
        base, device="cpu", dtype="float32", max_seqs=8, max_batch_tokens=64, kv_memory=2**22
    )
    async with node_on_loopback(tmp_path) as (node, listener):
        launch = RemoteLaunch(listener, node.place, source, node.terms)
        async with launch_replicas(
            LocalSource([launch] * 2),
            1 if encrypted else 2,
            options,
            Tokenizer.load(base),
            max_restarts=20,
            silence_seconds=PATIENCE,
            report=lambda incident: None,
        ) as engines:
            client = engines.client
            logs = mixed(engines)
            calm = await play_all(client, logs)
            killed: list[int] = []

            async def kill() -> None:
                await anyio.sleep(0.05)
                killed.append(node.pids[-1])
                os.kill(killed[0], signal.SIGKILL)

            with anyio.fail_after(2 * PATIENCE):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(kill)
                    disturbed = await play_all(client, logs)
            assert same(calm, disturbed)
            await soon(lambda: client.stats().restarts == 1, "it is started again")
            with anyio.fail_after(PATIENCE):
                while not all(stats.ready for stats in client.stats().replicas.values()):  # noqa: ASYNC110  nobody tells
                    await anyio.sleep(0.01)
            assert same(calm, await play_all(client, logs))
            assert -signal.SIGKILL in node.ended

            models = assemble(replace(options, adapters=(later,))).engine_spec.models
            digest = next(card.adapter for card in models.values() if card.adapter is not None)
            uploaded = SequenceLog("x", (5, 6), 2, SamplingParams(max_tokens=4, seed=1), adapter=digest)
            with pytest.raises(RequestFailed, match="the frontend does not have it"):
                await play(client, [uploaded], defaultdict(Played))
            (tmp_path / "store").mkdir()
            (later / "one").rename(tmp_path / "store" / digest)
            played = await play_all(client, [[uploaded]])
            assert played["x"].finish == "length"
    await soon(lambda: len(node.ended) == len(node.pids), "engines end with their frontend")


async def test_remote_engines_give_pages_to_one_another_and_the_tokens_are_as_from_one(tmp_path) -> None:
    base = model_folder("qwen3")
    options = EngineOptions(
        base,
        device="cpu",
        dtype="float32",
        max_seqs=8,
        max_batch_tokens=64,
        kv_memory=2**22,
        kv_transfer=True,
        page_identity=new_identity(CERTIFIED),
    )
    dice = random.Random(1)
    logs = [
        SequenceLog(f"{number}", tuple(dice.choices(range(4, VOCAB), k=150)), 150, params)
        for number in range(4)
        for params in [SamplingParams(max_tokens=12, temperature=0.8, seed=number, ignore_eos=True)]
    ]
    async with open_in_process(assemble(replace(options, page_identity=None)).engine_spec) as alone:
        expected = await play_all(alone, [logs])
    async with node_on_loopback(tmp_path, PATIENT) as (node, listener):
        launch = RemoteLaunch(listener, node.place, AdapterFiles({}, None), node.terms)
        async with launch_replicas(
            LocalSource([launch] * 2),
            2,
            options,
            Tokenizer.load(base),
            silence_seconds=PATIENCE,
            report=lambda incident: None,
            prefill=1,
        ) as engines:
            assert same(expected, await play_all(engines.client, [logs]))
            stats = engines.client.stats()
            assert stats.prefilled
            assert stats.counters.tier_hits, "over TCP, with TLS"
            assert len({each.page_address for each in engines.scaler.replicas}) == 2
    await soon(lambda: len(node.ended) == len(node.pids), "engines end with their frontend")


async def test_an_engine_that_ends_before_it_connects_is_reported_with_its_output(tmp_path) -> None:
    command = ("/bin/sh", "-c", "echo no such library; exit 3")
    async with node_on_loopback(tmp_path, command) as (node, listener):
        launch = RemoteLaunch(listener, node.place, AdapterFiles({}, None), node.terms)
        with (
            anyio.fail_after(PATIENCE),
            pytest.raises(EngineCoreDied, match=r"exit code 3(.|\n)*no such library"),
        ):
            await launch()


async def test_a_process_whose_node_is_gone_counts_as_killed_and_its_step_is_unknown(tmp_path) -> None:
    async with node_on_loopback(tmp_path) as (_, listener), listener.expect() as expected:
        call = Dial(Contact(listener.host, listener.port))
        line = await to_thread.run_sync(dial, call, expected.ticket)
        process = RemoteProcess(await expected.stream())
        line.close()
        assert await process.wait() == -signal.SIGKILL
        assert await process.last_step() is None
        with pytest.raises(anyio.EndOfStream):
            await process.output.receive()
        await process.output.aclose()


async def test_a_node_that_does_not_answer_is_not_waited_for(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("personae.actors.cluster.remote_process.ANSWER_SECONDS", 0.05)
    async with node_on_loopback(tmp_path) as (_, listener), listener.expect() as expected:
        call = Dial(Contact(listener.host, listener.port))
        line = await to_thread.run_sync(dial, call, expected.ticket)
        process = RemoteProcess(await expected.stream())
        assert await process.last_step() is None
        process.kill()
        assert await process.wait() == -signal.SIGKILL
        assert await to_thread.run_sync(line.recv, 100), "it was requested"
        line.close()
