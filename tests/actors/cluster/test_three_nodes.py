"""A Ray cluster of three nodes, on loopback addresses: engines and nodes die and stop under load, engines are
added and removed, and no answer is lost or changed."""

import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from crash_harness import play_mixed, same, with_adapters
from engine_harness import Played
from patience import PATIENCE, soon
from tiny_models import model_folder

from personae.actors.cluster.launch import open_cluster
from personae.actors.frontend.engine_process import EngineProcess
from personae.actors.kit.child import Incident
from personae.actors.multi_process import MultiProcessEngine
from personae.actors.options import ClusterOptions
from personae.actors.replicas.scaling import ReplicaScaler
from personae.evals.ray_nodes import RayNodes

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make test-ray"),
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"]),
]
PATHS = os.pathsep.join(
    filter(None, [str(Path(__file__).resolve().parents[3] / ".pkg"), os.getenv("PYTHONPATH")])
)
CLIENTS = 4  # each plays the same eight sequences over and over
RAY_PATIENCE = 240.0  # until Ray takes a node for dead, and an engine has started at another


class UnbrokenLoad:
    """Clients that play `mixed` sequences again and again, and compare each answer with a calm one."""

    def __init__(self, engines: MultiProcessEngine) -> None:
        self._engines = engines
        self._calm: dict[str, Played] = {}
        self._on = True
        self.rounds = 0

    async def _client(self, number: int) -> None:
        turn = 0
        while self._on:
            assert same(self._calm, await play_mixed(self._engines, f"{number}.{turn}"))
            turn += 1
            self.rounds += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The clients play meanwhile. At the end they finish what they have begun."""
        self._calm = await play_mixed(self._engines, "calm")
        async with anyio.create_task_group() as tasks:
            for number in range(CLIENTS):
                tasks.start_soon(self._client, number)
            yield
            self._on = False

    async def more(self, rounds: int = CLIENTS) -> None:
        """So many more rounds have ended."""
        enough = self.rounds + rounds
        await soon(lambda: self.rounds >= enough, "answers go on")


def ready(scaler: ReplicaScaler) -> int:
    return sum(info.status == "ready" for info in scaler.list())


async def test_no_answer_is_lost_or_changed_whatever_happens_to_three_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PATHS)
    base = tmp_path / "model"
    base.symlink_to(model_folder("qwen3"))
    options = with_adapters(tmp_path / "adapters", base, max_seqs=32, kv_memory=2**24)
    pids: list[int] = []
    load = EngineProcess._load

    async def noted(self: EngineProcess) -> None:
        await load(self)
        pids.append(self._process.pid)

    monkeypatch.setattr(EngineProcess, "_load", noted)
    incidents: list[Incident] = []
    nodes = await to_thread.run_sync(RayNodes, 3)
    try:
        cluster = ClusterOptions(ray=nodes.address, cluster_host=nodes.host)
        async with open_cluster(
            options, cluster, 3, report=incidents.append, most=4, max_restarts=20
        ) as engines:
            scaler = engines.scaler
            assert scaler is not None

            async def again(what: str, loads: int) -> None:
                await soon(
                    lambda: len(pids) >= loads and ready(scaler) == 3,
                    f"three engines serve after {what}",
                    RAY_PATIENCE,
                )
                await clients.more()

            clients = UnbrokenLoad(engines)
            async with clients.running():
                await clients.more()
                loads = len(pids) + 1
                os.kill(pids[-1], signal.SIGKILL)
                await again("an engine was killed", loads)

                loads = len(pids) + 1
                nodes.strike_any(random.Random(0), signal.SIGKILL)
                await to_thread.run_sync(nodes.add)
                await again("a node was killed", loads)

                loads = len(pids) + 1
                nodes.strike_any(random.Random(1), signal.SIGSTOP)
                await to_thread.run_sync(nodes.add)
                await again("a node was stopped", loads)
                nodes.bury()

                await scaler.scale(2, drain_seconds=0.0)
                await soon(lambda: len(scaler.list()) == 2, "an engine is removed")
                await clients.more()
                base.rename(tmp_path / "elsewhere")
                await scaler.scale(3)
                await soon(
                    lambda: any(info.error for info in scaler.list()), "a node without the model refuses"
                )
                (error,) = (info.error for info in scaler.list() if info.error)
                assert error.startswith("Node 127.0.0.")
                assert f"there is no model at {base}" in error
                (tmp_path / "elsewhere").rename(base)
                await scaler.scale(3)
                await soon(lambda: ready(scaler) == 3, "an engine is added", RAY_PATIENCE)
                await clients.more()
            assert engines.client.stats().running == 0
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(nodes.close)
    with anyio.fail_after(PATIENCE):
        await soon(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "engines end")
