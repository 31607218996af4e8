"""A model over two machines without Ray: processes that know each other's address and a file, and nothing
else."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import anyio
import pytest
from crash_harness import play_mixed, same, with_adapters
from patience import PATIENCE, soon
from tiny_models import model_folder

import personae
from personae.actors.cluster import stage_machines
from personae.actors.cluster.stage_machines import Joins, check_machines, gather, serve_stage
from personae.actors.multi_process import open_multi_process
from personae.actors.options import EngineOptions
from personae.engine.machine_sockets import new_identity
from personae.errors import LoadError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _single_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".pkg"))


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return "{}:{}".format(*listener.getsockname())


def asked(folder: Path, **options: Any) -> EngineOptions:
    return EngineOptions(
        Path("model"),
        pipeline_parallel_size=2,
        dist_init_addr=free_address(),
        dist_identity=folder / "machines.pem",
        **{"nnodes": 2, **options},
    )


@contextmanager
def other_machine(options: EngineOptions, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The command on a machine other than the first."""
    assert options.dist_init_addr is not None
    (folder / "tmp").mkdir(parents=True)
    command = (
        f"serve {options.model} --nnodes 2 --node-rank 1 --pipeline-parallel-size 2 "
        f"--dist-init-addr {options.dist_init_addr} --dist-identity {options.dist_identity}"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "personae", *command.split()],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder / "tmp")},
    ) as running:
        try:
            yield running
        finally:
            running.terminate()


def ranks_of(machine: "subprocess.Popen[bytes]") -> list[int]:
    found = subprocess.run(
        ["pgrep", "-P", str(machine.pid)], capture_output=True, text=True, timeout=PATIENCE
    )
    return [int(line) for line in re.findall(r"\d+", found.stdout)]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_two_machines_answer_as_one_process_and_a_rank_or_a_machine_that_is_killed_costs_no_answer(
    tmp_path: Path,
) -> None:
    base = model_folder("qwen3")
    alone = with_adapters(tmp_path / "adapters", base, max_seqs=32, kv_memory=2**24)
    async with open_multi_process(alone) as engines:
        calm = await play_mixed(engines, "calm")
    identity = tmp_path / "machines.pem"
    stage_machines._own_identity(identity)  # what the first machine makes, and an administrator copies
    options = replace(
        alone,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        nnodes=2,
        dist_init_addr=free_address(),
        dist_identity=identity,
    )
    with ExitStack() as stack, anyio.fail_after(2 * PATIENCE):
        others = [stack.enter_context(other_machine(options, tmp_path / "second"))]
        async with open_multi_process(options, max_restarts=20) as engines:
            assert same(calm, await play_mixed(engines, "before"))

            async def disturbed(name: str, kill: Callable[[], None]) -> None:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(when_streams_have_begun, kill)
                    assert same(calm, await play_mixed(engines, name))

            async def when_streams_have_begun(kill: Callable[[], None]) -> None:
                await soon(lambda: engines.client.stats().running > 2, "some streams have begun")
                kill()

            first = ranks_of(others[0])
            await disturbed("rank", lambda: os.kill(first[1], signal.SIGKILL))
            again = ranks_of(others[0])
            assert len(first) == len(again) == 2
            assert not set(first) & set(again)

            def replace_the_machine() -> None:
                others[0].kill()
                for rank in again:
                    os.kill(rank, signal.SIGKILL)
                others.append(stack.enter_context(other_machine(options, tmp_path / "third")))

            await disturbed("machine", replace_the_machine)
            assert engines.client.stats().restarts == 2
        await soon(lambda: not ranks_of(others[1]), "the ranks end with the engine")
    assert [other.returncode for other in others] == [-signal.SIGKILL, 0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nnodes": 1, "node_rank": 1}, "--node-rank needs --nnodes."),
        ({"node_rank": 2}, "--node-rank 2: it must be less than --nnodes, which is 2."),
        ({"nnodes": 3}, "--nnodes 3 needs --pipeline-parallel-size 3: each machine has one stage."),
        ({"dist_init_addr": None}, "--nnodes 2 needs --dist-init-addr."),
        ({"dist_identity": None}, "--nnodes 2 needs --dist-identity."),
    ],
)
def test_options_that_contradict_each_other_are_named(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    options = replace(asked(tmp_path), **changes)
    with pytest.raises(LoadError, match=f"^{re.escape(said)}$"):
        check_machines(options)


@contextmanager
def gathering(options: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first machine waits for the second one, for which the time runs out."""
    monkeypatch.setattr(stage_machines, "GATHER_SECONDS", 2.0)
    errors, listening = list[str](), Event()

    def wait() -> None:
        try:
            gather(options, lambda there, all: listening.set())
        except LoadError as error:
            errors.append(error.message)

    waiting = Thread(target=wait)
    waiting.start()
    listening.wait(PATIENCE)
    yield
    waiting.join()
    assert errors == [
        f"--nnodes 2: the machine with --node-rank 1 has not called {options.dist_init_addr} within 2 s."
    ]


def test_a_machine_that_does_not_fit_is_refused_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = asked(tmp_path)
    with (
        gathering(first, monkeypatch),
        pytest.raises(LoadError, match="refuses: It has --nnodes 3, the first machine has 2"),
    ):
        serve_stage(replace(first, node_rank=1, nnodes=3, pipeline_parallel_size=3))
    for joins, said in (
        (Joins(1, 2, "0.0.0"), f"It has Personae 0.0.0, the first machine has {personae.__version__}."),
        (Joins(2, 2, personae.__version__), "--node-rank 2: the machines have 0 to 1."),
        (Joins(1, 2, personae.__version__), None),
    ):
        assert stage_machines._refusal(joins, first) == said


def test_a_machine_with_another_identity_and_a_stranger_get_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = asked(tmp_path)
    other = new_identity(stage_machines.NODES)
    (tmp_path / "other.pem").write_text(other.key + other.certificate, encoding="ascii")
    with gathering(first, monkeypatch):
        with socket.create_connection(stage_machines.host_and_port(first.dist_init_addr or "")) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stranger.settimeout(PATIENCE)
            with suppress(ConnectionResetError):
                assert b"HTTP" not in stranger.recv(100)
        with pytest.raises(LoadError, match="has another identity than --dist-identity"):
            serve_stage(replace(first, node_rank=1, dist_identity=tmp_path / "other.pem"))
    assert (tmp_path / "machines.pem").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "there is no such file. The first machine makes it"), ("a key", "has no key with a certificate")],
)
def test_a_file_without_an_identity_is_named(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "machines.pem").write_text(content, encoding="ascii")
    with pytest.raises(LoadError, match=f"--dist-identity .*machines.pem:? {said}"):
        serve_stage(asked(tmp_path, node_rank=1))
