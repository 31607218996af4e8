"""Engines of several ranks on the nodes of a Ray cluster, on loopback addresses: a stage's ranks are on one
node, the stages on different ones, and a node that dies under load costs no answer."""

import os
import signal
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from crash_harness import play_mixed, same, with_adapters
from patience import PATIENCE, soon
from tiny_models import model_folder

from personae.actors.cluster import launch
from personae.actors.cluster.launch import open_cluster
from personae.actors.multi_process import open_multi_process
from personae.actors.options import ClusterOptions
from personae.errors import LoadError
from personae.evals.ray_nodes import RayNodes

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make test-ray"),
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"]),
]
PATHS = os.pathsep.join(
    filter(None, [str(Path(__file__).resolve().parents[3] / ".pkg"), os.getenv("PYTHONPATH")])
)
FIRST, RANK = b"personae.actors.enginecore", b"personae.engine.parallel.process"
CLIENTS = 4


def running(nodes: RayNodes, what: bytes) -> dict[int, str]:
    """The processes of a kind: the node of each."""
    found = {}
    for address, pids in nodes.processes().items():
        for pid in pids:
            path = Path(f"/proc/{pid}/cmdline")
            if path.exists() and what in path.read_bytes().split(b"\0"):
                found[pid] = address
    return found


async def test_ranks_lie_on_nodes_as_ray_was_told_and_a_node_of_theirs_that_dies_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PATHS)
    base = model_folder("qwen3")
    options = with_adapters(tmp_path / "adapters", base, max_seqs=32, kv_memory=2**24)
    async with open_multi_process(options) as alone:
        calm = await play_mixed(alone, "calm")
    nodes = await to_thread.run_sync(RayNodes, 3, 2)
    pids: set[int] = set()
    try:
        cluster = ClusterOptions(ray=nodes.address, cluster_host=nodes.host)
        async with open_cluster(replace(options, tensor_parallel_size=2), cluster, 1) as engines:
            assert same(calm, await play_mixed(engines, "tensor"))
            first, others = running(nodes, FIRST), running(nodes, RANK)
            assert len(first) == len(others) == 1
            assert set(first.values()) == set(others.values())
            pids |= first.keys() | others.keys()

        two = replace(options, pipeline_parallel_size=2)
        with monkeypatch.context() as wrong:
            wrong.setattr(launch, "model_digest", lambda model: "0" * 64)
            with pytest.raises(LoadError, match=r"^Node 127\.0\.0\.\d+ \(.*\): the model at .* is not the"):
                async with open_cluster(two, cluster, 1):
                    raise AssertionError("not reached")
        async with open_cluster(two, cluster, 1, report=lambda incident: None, max_restarts=20) as engines:
            assert same(calm, await play_mixed(engines, "stages"))
            first, others = running(nodes, FIRST), running(nodes, RANK)
            assert len(first) == len(others) == 1
            assert set(first.values()) != set(others.values())
            pids |= first.keys() | others.keys()
            [(rank, its_node)] = others.items()

            async def client(number: int) -> None:
                for turn in range(2):
                    assert same(calm, await play_mixed(engines, f"{number}.{turn}"))

            async with anyio.create_task_group() as tasks:
                for number in range(CLIENTS):
                    tasks.start_soon(client, number)
                await soon(lambda: engines.client.stats().running > 0, "the clients are answered")
                nodes.strike(its_node, signal.SIGKILL)
            again, elsewhere = running(nodes, FIRST), running(nodes, RANK)
            assert len(again) == len(elsewhere) == 1
            assert set(again.values()) != set(elsewhere.values())
            assert rank not in elsewhere
            assert engines.client.stats().running == 0
            pids |= again.keys() | elsewhere.keys()
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(nodes.close)
    with anyio.fail_after(PATIENCE):
        await soon(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all ranks end")
