"""A small Ray cluster on this machine starts an engine. A node refuses an engine that does not match it."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest
from crash_harness import NAMES, mixed, play_all, same, with_adapters
from patience import PATIENCE, soon
from tiny_adapters import make_zoo
from tiny_models import model_folder

from personae.actors.adapter_folders import adapter_folders
from personae.actors.cluster import ray_cluster
from personae.actors.cluster.adapter_files import AdapterFiles
from personae.actors.cluster.contact import Contact
from personae.actors.cluster.launch import RaySource, open_cluster
from personae.actors.cluster.listener import open_listener
from personae.actors.cluster.node import model_digest
from personae.actors.cluster.ray_cluster import open_ray
from personae.actors.frontend.engine_process import EngineProcess
from personae.actors.options import ClusterOptions, EngineOptions
from personae.actors.replicas import load_scaling
from personae.actors.replicas.launch import launch_replicas
from personae.engine.tokens import Tokenizer
from personae.errors import LoadError

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make test-ray")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"]),
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = (str(Path(__file__).resolve().parents[3] / ".pkg"), os.getenv("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


async def test_without_ray_the_start_says_what_to_install(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"--ray needs Ray: pip install ray cryptography\."):
        async with open_cluster(EngineOptions(model_folder("qwen3")), ClusterOptions(ray="auto"), 1):
            raise AssertionError("not reached")


@needs_ray
async def test_a_cluster_that_can_not_be_reached_is_refused_with_its_address() -> None:
    with pytest.raises(LoadError, match=r"--ray 127\.0\.0\.1:1: "):
        async with open_ray("127.0.0.1:1", None, 1, 1.0, 0.0, Path("model"), ""):
            raise AssertionError("not reached")


@needs_ray
async def test_ray_starts_an_engine_that_survives_its_death_and_a_node_refuses_what_does_not_fit(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = model_folder("qwen3")
    make_zoo(tmp_path / "adapters", base, NAMES)
    source = AdapterFiles(adapter_folders((tmp_path / "adapters",), ()), None)
    options = EngineOptions(
        base, device="cpu", dtype="float32", max_seqs=8, max_batch_tokens=64, kv_memory=2**22
    )
    started: list[int] = []
    load = EngineProcess._load

    async def noted(self: EngineProcess) -> None:
        started.append(self._process.pid)
        await load(self)

    monkeypatch.setattr(EngineProcess, "_load", noted)
    terms = Contact(cache=str(tmp_path / "cache"))
    async with (
        open_ray("local", None, 1, 1.0, 0.0, base, model_digest(base)) as ray,
        open_listener(ray.host) as listener,
    ):
        ray.admit = listener.admit
        assert [node.alive for node in await ray.look()] == [True]
        begin = await ray.place(0)
        for name, value, reason in (
            ("_model", str(tmp_path / "no"), "there is no model at"),
            ("_weights", "0" * 64, "is not the frontend's"),
        ):
            with monkeypatch.context() as wrong:
                wrong.setattr(ray, name, value)
                with pytest.raises(LoadError, match=rf"Node .*\(.*\): .*{reason}"):
                    await begin(terms)
        async with launch_replicas(
            RaySource(ray, listener, source, terms, 1),
            1,
            options,
            Tokenizer.load(base),
            max_restarts=20,
            silence_seconds=PATIENCE,
            report=lambda incident: None,
        ) as engines:
            logs = mixed(engines)
            calm = await play_all(engines.client, logs)
            os.kill(started[0], signal.SIGKILL)
            with anyio.fail_after(2 * PATIENCE):
                assert same(calm, await play_all(engines.client, logs))
    await soon(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), "engines end")


@needs_ray
async def test_the_load_decides_from_none_to_two_engines(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CALM": 1.0, "PATIENCE": 0.0, "LONGEST_WAIT": 0.01}.items():
        monkeypatch.setattr(load_scaling, name, value)
    base = model_folder("qwen3")
    options = with_adapters(tmp_path / "adapters", base, max_seqs=2, kv_memory=2**22)
    async with open_cluster(options, ClusterOptions(ray="local"), 0, most=2, by_load=True) as engines:
        client, logs = engines.client, mixed(engines)
        calm = await play_all(client, logs)
        await soon(lambda: not client.stats().replicas, "no engine is left")
        for wanted in (1, 2):
            with anyio.fail_after(2 * PATIENCE):
                while sum(each.ready for each in client.stats().replicas.values()) < wanted:
                    assert same(calm, await play_all(client, logs))
        await soon(lambda: not client.stats().replicas, "both have ended")
