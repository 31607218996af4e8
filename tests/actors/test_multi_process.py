"""The frontend and the engine core as two processes, with a tiny model: streams continue whatever happens to
the engine core."""

import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from crash_harness import NAMES, Clock, mixed, play, play_all, same
from engine_harness import Played
from msgspec.structs import replace
from patience import PATIENCE, soon
from tiny_models import VOCAB

from personae.actors.frontend import engine_process
from personae.actors.kit.child import Incident
from personae.actors.multi_process import MultiProcessEngine, open_multi_process
from personae.actors.options import EngineOptions
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.errors import EngineLost, ModelLoadError, Overloaded, RequestFailed

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"]),
    pytest.mark.usefixtures("single_threaded"),
]
FAULTY = str(Path(__file__).resolve().parent.parent / "support" / "faulty_core.py")


def engine_cores() -> list[int]:
    """The process ids of this process's children that are engine cores."""
    return children(os.getpid(), r"personae\.actors\.enginecore|faulty_core\.py")


def children(of: int, command: str) -> list[int]:
    """The process ids of a process's children with such a command."""
    found = subprocess.run(
        ["pgrep", "-P", str(of), "-f", command], capture_output=True, text=True, timeout=PATIENCE
    )
    return [int(line) for line in found.stdout.split()]


def names_of_sockets(pid: int) -> list[str]:
    """The paths of a process's Unix sockets. Unnamed sockets have none."""
    targets = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    inodes = {target[8:-1] for target in targets if target.startswith("socket:[")}
    assert inodes
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [line[7] for line in lines if line[6] in inodes and len(line) > 7]


@asynccontextmanager
async def faulty(
    options: EngineOptions, fault: str, folder: Path, incidents: list[Incident] | None = None, **more: object
) -> AsyncIterator[MultiProcessEngine]:
    report = (incidents if incidents is not None else []).append
    command = (sys.executable, FAULTY, fault, str(folder))
    async with open_multi_process(options, report=report, command=command, **more) as engine_processes:
        yield engine_processes


async def test_streams_continue_token_for_token_when_the_engine_core_is_killed(options) -> None:
    async with open_multi_process(options, max_restarts=20) as engine_processes:
        logs = mixed(engine_processes)
        calm = await play_all(engine_processes.client, logs)
        assert calm["bound"].finish == "stop"
        kills = 0

        async def kill() -> None:
            nonlocal kills
            rng = random.Random(3)
            while kills < 3:
                await anyio.sleep(rng.uniform(0.02, 0.3))
                stats = engine_processes.client.stats()
                if stats.ready and stats.restarts == kills:  # the last death was noticed
                    [pid] = engine_cores()
                    os.kill(pid, signal.SIGKILL)
                    kills += 1

        disturbed = []
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kill)
                while kills < 3:
                    disturbed.append(await play_all(engine_processes.client, logs))
        assert all(same(calm, one) for one in disturbed)
        after = await play_all(engine_processes.client, logs)
        assert engine_processes.client.stats().restarts == 3
        assert same(calm, after)
        stats = engine_processes.client.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


async def test_a_spare_process_goes_on_with_the_streams_of_one_that_was_killed(
    options, processes: list[int]
) -> None:
    def spares() -> set[int]:
        return set(engine_cores()) - set(processes)

    async with open_multi_process(options, max_restarts=20, spare=True) as engine_processes:
        client, logs = engine_processes.client, mixed(engine_processes)
        calm = await play_all(client, logs)
        await soon(lambda: len(spares()) == 1, "there is a spare process")
        [ended] = spares()
        os.kill(ended, signal.SIGKILL)
        await soon(lambda: len(spares() - {ended}) == 1, "there is another one")
        [spare] = spares() - {ended}

        async def kill() -> None:
            await soon(lambda: client.stats().running > 2, "some streams have begun")
            os.kill(processes[0], signal.SIGKILL)

        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kill)
                disturbed = await play_all(client, logs)
        assert processes[1:] == [spare]
        assert same(calm, disturbed)
        await soon(lambda: len(spares()) == 1, "there is a spare process again")
    assert not engine_cores()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the KV cache ends with its engine core")
async def test_after_every_kill_the_streams_find_all_their_pages(
    options, processes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """As the engine core has 16 steps between two kills, each one leaves its pages."""
    caplog.set_level("INFO", "personae.engine")
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=0, ignore_eos=True)
    async with open_multi_process(options, max_restarts=20, spare=True) as engine_processes:
        client = engine_processes.client
        cards = client.models("default")
        prompts = [tuple(random.Random(each).choices(range(4, VOCAB), k=30 + 7 * each)) for each in range(4)]
        logs = [
            SequenceLog(
                f"long{number}",
                prompt,
                len(prompt),
                replace(params, seed=number),
                adapter=cards[name].adapter if name else None,
                session="one" if number else None,
                session_seconds=60.0 if number else 0.0,
            )
            for number, (prompt, name) in enumerate(zip(prompts, [*NAMES, NAMES[0]], strict=True))
        ]
        calm = await play_all(client, [[log] for log in logs])

        def have_begun(played: dict[str, Played]) -> bool:
            return sum(len(one.tokens) > 20 for one in played.values()) == len(logs)

        for kills in range(1, 4):
            await soon(lambda: len(engine_cores()) == 2, "there is a spare process")
            again = [replace(log, id=f"{kills}{log.id}") for log in logs]
            disturbed: dict[str, Played] = defaultdict(Played)
            with anyio.fail_after(PATIENCE):
                async with anyio.create_task_group() as tasks:
                    for log in again:
                        tasks.start_soon(play, client, [log], disturbed)
                    await soon(partial(have_begun, disturbed), "all streams have brought tokens")
                    before = client.stats().counters
                    os.kill(processes[-1], signal.SIGKILL)
            after = client.stats().counters
            assert client.stats().restarts == kills
            assert same(calm, {id[1:]: one for id, one in disturbed.items()})
            looked_up = after.prefix_queries - before.prefix_queries
            assert looked_up - (after.prefix_hits - before.prefix_hits) == len(logs), "a token of each"
            assert looked_up > sum(len(log.tokens) + 20 for log in logs)
    assert sum(line.endswith("pages of the KV cache are there already") for line in caplog.messages) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the KV cache ends with its engine core")
async def test_an_engine_core_that_ended_by_itself_leaves_no_pages(
    options, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "personae.engine")
    async with faulty(options, "crash@30", tmp_path, spare=True) as engine_processes:
        logs = mixed(engine_processes)
        disturbed = await play_all(engine_processes.client, logs)
        assert same(disturbed, await play_all(engine_processes.client, logs))
        assert engine_processes.client.stats().restarts == 1
    assert not [line for line in caplog.messages if "are there already" in line]


async def test_a_spare_process_has_loaded_everything_before_it_is_needed(
    options, processes: list[int], tmp_path: Path
) -> None:
    model = shutil.copytree(options.model, tmp_path / "model")
    options = dataclasses.replace(options, model=model)
    async with open_multi_process(options, spare=True) as engine_processes:
        client, logs = engine_processes.client, mixed(engine_processes)
        calm = await play_all(client, logs)
        await soon(lambda: len(engine_cores()) == 2, "there is a spare process")
        [spare] = set(engine_cores()) - set(processes)
        await soon(lambda: children(spare, "forkserver"), "it has what compiles grammars, which comes last")
        shutil.rmtree(model)
        os.kill(processes[0], signal.SIGKILL)
        await soon(lambda: len(processes) == 2 and client.stats().ready, "another engine core serves")
        assert processes[1] == spare
        assert same(calm, await play_all(client, logs))


async def test_a_spare_process_that_cannot_load_ahead_loads_when_it_is_needed(
    options, processes: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with faulty(options, "ahead", tmp_path, spare=True) as engine_processes:
        client, logs = engine_processes.client, mixed(engine_processes)
        calm = await play_all(client, logs)
        await soon(lambda: len(engine_cores()) == 2, "there is a spare process")
        [spare] = set(engine_cores()) - set(processes)
        await soon((tmp_path / "refused").exists, "it has tried to load")
        os.kill(processes[0], signal.SIGKILL)
        await soon(lambda: len(processes) == 2 and client.stats().ready, "another engine core serves")
        assert processes[1] == spare
        assert same(calm, await play_all(client, logs))
    assert "the spare process loads only when it is needed: planted: no memory" in caplog.messages


@pytest.mark.parametrize("shared", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}])
async def test_streams_continue_token_for_token_when_a_rank_of_the_model_is_killed(options, shared) -> None:
    shared = dataclasses.replace(options, **shared)
    async with open_multi_process(shared, max_restarts=20) as engine_processes:
        client, logs = engine_processes.client, mixed(engine_processes)
        calm = await play_all(client, logs)

        async def kill() -> None:
            await soon(lambda: client.stats().running > 2, "some streams have begun")
            [core] = engine_cores()
            rank, *_ = children(core, r"personae\.engine\.parallel")
            os.kill(rank, signal.SIGKILL)

        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kill)
                disturbed = await play_all(client, logs)
        assert client.stats().restarts == 1
        assert same(calm, disturbed)
        [core] = engine_cores()
    await soon(lambda: not children(core, "personae"), "the ranks end with their engine")


async def test_an_engine_core_that_was_killed_finds_its_prefixes_on_the_disk(options, tmp_path) -> None:
    disk = dataclasses.replace(options, kv_disk=tmp_path, kv_disk_bytes=2**24)
    prompt = tuple(random.Random(5).choices(range(4, 200), k=200))
    params = SamplingParams(max_tokens=4, temperature=0.0, seed=0)

    def written() -> int:
        return sum(path.read_bytes().count(b"PKVPAGE") for path in tmp_path.rglob("pages-*.kv"))

    async with open_multi_process(disk, max_restarts=20) as engine_processes:
        client, found = engine_processes.client, []
        for restarts in range(2):
            log = SequenceLog(f"{restarts}", prompt, len(prompt), params, salt=b"ann")
            with anyio.fail_after(PATIENCE):
                async with client.stream([log]) as stream:
                    deltas = [delta async for delta in stream]
                found.append((deltas[0].cached, [token for delta in deltas for token in delta.tokens]))
                if not restarts:
                    await soon(lambda: written() >= 12, "the pages are on the disk")
                    [pid] = engine_cores()
                    os.kill(pid, signal.SIGKILL)
                    await soon(lambda: client.stats().restarts == 1 and client.stats().ready, "it is back")
    assert found == [(0, found[0][1]), (192, found[0][1])]


async def test_an_exception_in_the_executor_is_reported_with_its_output_and_the_streams_continue(
    options, tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    incidents: list[Incident] = []
    async with faulty(options, "crash@9", tmp_path, incidents) as engine_processes:
        logs = mixed(engine_processes)
        disturbed = await play_all(engine_processes.client, logs)
        assert same(disturbed, await play_all(engine_processes.client, logs))
        assert engine_processes.client.stats().restarts == 1
    delivered = [str(incident.error) for incident in incidents if incident.error is not None]
    assert any("exit code 1" in text and "planted: the device is gone" in text for text in delivered)
    core = [text for text in caplog.messages if "is back" in text]
    assert len(core) == 1
    assert re.fullmatch(r"the engine is back after [\d.]+ s; [1-9]\d* answers continue", core[0])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(engine_process, "current_time", clock.now)
    monkeypatch.setattr(engine_process, "anyio", SimpleNamespace(sleep=clock.sleep))
    return clock


@pytest.mark.parametrize("how", ["stopped", "stuck"])
async def test_an_engine_core_that_hangs_is_replaced_and_the_streams_continue(
    options, tmp_path, clock, how
) -> None:
    fault = "hang@9" if how == "stuck" else "none"
    disturbed: dict[str, Played] = {}
    async with faulty(options, fault, tmp_path, hang_seconds=PATIENCE, max_restarts=20) as engine_processes:
        logs = mixed(engine_processes)
        if how == "stopped":
            for pid in engine_cores():
                os.kill(pid, signal.SIGSTOP)

        async def play_disturbed() -> None:
            disturbed.update(await play_all(engine_processes.client, logs))

        with anyio.fail_after(2 * PATIENCE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(play_disturbed)
                if how == "stuck":
                    await soon((tmp_path / "done").exists, "it is stuck")
                while engine_processes.client.stats().restarts == 0:
                    clock.ahead += 2 * PATIENCE  # again if an earlier message was read only now
                    await anyio.sleep(0.1)
        assert same(disturbed, await play_all(engine_processes.client, logs))


async def test_a_request_that_kills_the_engine_core_is_found_and_ended_and_the_others_continue(
    options, tmp_path
) -> None:
    async with faulty(options, f"poison:{VOCAB - 1}", tmp_path) as engine_processes:
        logs = [[log for log in logs if VOCAB - 1 not in log.tokens] for logs in mixed(engine_processes)]
        poison = replace(logs[1][0], id="poison", tokens=(5, VOCAB - 1), prompt_length=2)
        played: dict[str, Played] = {}

        async def others() -> None:
            played.update(await play_all(engine_processes.client, logs))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(others)
            with pytest.raises(RequestFailed) as refused:
                await play(engine_processes.client, [poison], defaultdict(Played))
        assert refused.value.code == "quarantined"
        assert same(played, await play_all(engine_processes.client, logs))
        assert engine_processes.client.stats().restarts == 2


async def test_an_engine_core_that_is_given_up_ends_streams_with_a_503_and_is_not_ready(
    options, tmp_path
) -> None:
    async with faulty(options, f"poison:{VOCAB - 1}", tmp_path, max_restarts=1) as engine_processes:
        poison = replace(mixed(engine_processes)[1][0], tokens=(5, VOCAB - 1), prompt_length=2)
        with pytest.raises(Overloaded) as refused:
            await play(engine_processes.client, [poison], defaultdict(Played))
        assert refused.value.code == "engine_lost"
        assert refused.value.retry_after is not None
        await engine_processes.client.lost()
        assert not engine_processes.client.stats().ready
        with pytest.raises(Overloaded, match="another replica"):
            await play(engine_processes.client, [poison], defaultdict(Played))


async def test_a_load_error_of_the_engine_core_is_raised_as_itself_and_no_process_stays(
    options, tmp_path
) -> None:
    with pytest.raises(ModelLoadError, match="no such weights"):
        async with faulty(options, "load", tmp_path):
            raise AssertionError("not reached")
    assert engine_cores() == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("killed", r"The engine was killed while it loaded the model: probably out of memory, [\d.]+ GiB .*"),
        (
            "broken",
            r"The engine ended with exit code 1 while it loaded the model: RuntimeError: .* a bug",
        ),
    ],
)
async def test_an_engine_core_that_ends_while_it_loads_is_reported_in_one_sentence_and_not_restarted(
    options, tmp_path, fault: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    incidents: list[Incident] = []
    with pytest.raises(EngineLost) as lost:
        async with faulty(options, fault, tmp_path, incidents):
            raise AssertionError("not reached")
    assert re.fullmatch(expected, lost.value.message), lost.value.message
    assert [incident for incident in incidents if incident.error is not None] == []
    assert engine_cores() == []
    if fault == "killed":
        assert caplog.messages == []


async def test_loading_progress_is_reported_and_the_socket_has_no_name(options) -> None:
    progress: list[tuple[str, int, int]] = []
    async with open_multi_process(options, lambda *reached: progress.append(reached)) as engine_processes:
        phases = list(dict.fromkeys(phase for phase, _, _ in progress))
        assert phases == ["kernels", "weights", "adapters", "warm-up"]
        _, done, total = [each for each in progress if each[0] == "weights"][-1]
        assert done == total > 0
        assert set(engine_processes.client.models("default")) >= set(NAMES[:-1])
        (core,) = engine_cores()
        assert names_of_sockets(core) == names_of_sockets(os.getpid()) == []
    assert engine_cores() == []


async def test_the_engine_core_s_lines_are_logged_again_by_their_own_logger(options, caplog) -> None:
    tells = (
        "import logging; from personae.actors.enginecore import core; begin = core.assemble; "
        "log = logging.getLogger('personae.kernels'); "
        "core.assemble = lambda *a, **k: (log.warning('slow: %d %%', 3), begin(*a, **k))[1]; core.main()"
    )
    async with open_multi_process(options, command=(sys.executable, "-u", "-c", tells)):
        pass
    logged = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert ("personae.kernels", "WARNING", "slow: 3 %") in logged
    assert not any("personae.kernels" in message for _, _, message in logged)


async def test_the_engine_core_excludes_loaded_objects_from_garbage_collection(options, caplog) -> None:
    tells = (
        "import gc; freeze = gc.freeze; "
        "gc.freeze = lambda: (freeze(), print('spared', gc.get_freeze_count(), flush=True)); "
        "from personae.actors.enginecore.core import main; main()"
    )
    with caplog.at_level("INFO", "personae.engine"):
        async with open_multi_process(options, command=(sys.executable, "-c", tells)) as engine_processes:
            await play_all(engine_processes.client, mixed(engine_processes)[:1])
    (spared,) = [int(line.split()[1]) for line in caplog.messages if line.startswith("spared")]
    assert spared > 50_000, "a full collection of these takes longer than a step"
