"""Pages travel between engines in processes of their own: tokens stay the same, whatever fails."""

import os
import random
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from crash_harness import mixed, play_all, same
from engine_harness import Played
from msgspec import structs
from patience import PATIENCE, soon
from patient_engine import PATIENT
from tiny_models import VOCAB

from personae.actors.assembly import assemble
from personae.actors.frontend.frontend import LocalClient
from personae.actors.in_process import open_in_process
from personae.actors.messages import ChangeRole, Message
from personae.actors.multi_process import MultiProcessEngine
from personae.actors.options import EngineOptions, PrefillReplicas
from personae.actors.replicas import roles
from personae.actors.replicas.dispatcher import Dispatcher
from personae.actors.replicas.launch import open_replicas
from personae.engine.params import SamplingParams
from personae.engine.scheduling.page_names import page_keys, root_key
from personae.engine.sequence import SequenceLog
from personae.engine.tiers import transfer
from personae.errors import LoadError

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"]),
    pytest.mark.usefixtures("single_threaded"),
]
PAGE = 16


@pytest.fixture(scope="module")
def options(options: EngineOptions) -> EngineOptions:
    return replace(options, kv_transfer=True)


@asynccontextmanager
async def two(options: EngineOptions, prefill: PrefillReplicas) -> AsyncIterator[MultiProcessEngine]:
    async with open_replicas(
        options,
        2,
        max_restarts=20,
        silence_seconds=PATIENCE,
        report=lambda incident: None,
        command=PATIENT,
        prefill=prefill,
    ) as engines:
        yield engines


def logs_of(count: int, tokens: int = 150, answer: int = 12) -> list[SequenceLog]:
    dice = random.Random(1)
    return [
        SequenceLog(
            f"{tokens}-{number}",
            tuple(dice.choices(range(4, VOCAB), k=tokens)),
            tokens,
            SamplingParams(max_tokens=answer, temperature=0.8, seed=number, ignore_eos=True),
        )
        for number in range(count)
    ]


def longer(log: SequenceLog) -> SequenceLog:
    """The log with 100 more tokens before its prompt."""
    before = tuple(random.Random(2).choices(range(4, VOCAB), k=100))
    return structs.replace(log, tokens=before + log.tokens, prompt_length=100 + log.prompt_length)


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


async def killing(
    engines: MultiProcessEngine, processes: list[int], victim: int, sequences: list[list[SequenceLog]]
) -> dict[str, Played]:
    """What the sequences answer while an engine is killed, which then comes back."""
    client, started = engines.client, len(processes)
    before = client.stats().replicas[victim].counters.tokens
    played: list[dict[str, Played]] = []

    async def play() -> None:
        played.append(await play_all(client, [[renamed(log, victim) for log in logs] for logs in sequences]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(play)
        with anyio.fail_after(PATIENCE):
            while client.stats().replicas[victim].counters.tokens < before + 20:  # noqa: ASYNC110 - a process
                await anyio.sleep(0.005)
        os.kill(processes[victim], signal.SIGKILL)
    with anyio.fail_after(PATIENCE):
        while not all(each.ready for each in client.stats().replicas.values()):  # noqa: ASYNC110 - a process
            await anyio.sleep(0.05)
    assert len(processes) == started + 1
    processes[victim] = processes.pop()
    return {id.removeprefix(f"{victim}-"): one for id, one in played[0].items()}


def renamed(log: SequenceLog, number: int) -> SequenceLog:
    after = None if log.after is None else f"{number}-{log.after}"
    return structs.replace(log, id=f"{number}-{log.id}", after=after, salt=str(number).encode())


async def drained(engines: MultiProcessEngine, options: EngineOptions) -> None:
    logs = [
        structs.replace(log, id=f"drained-{log.id}", params=structs.replace(log.params, max_tokens=90))
        for log in logs_of(4, 151)
    ]
    expected = await alone(options, logs)
    client, scaler, before = engines.client, engines.scaler, engines.client.stats()
    assert scaler is not None

    async def drain() -> None:
        with anyio.fail_after(PATIENCE):
            while client.stats().replicas[1].running < 4:  # noqa: ASYNC110 - steps of a process
                await anyio.sleep(0.005)
        await scaler.scale(1, 0.0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        found, _ = await answers(client, logs)
    assert found == expected
    assert client.stats().moved > before.moved  # whether their pages came in time depends on the machine


async def test_two_engines_share_the_work_and_their_pages_and_every_token_is_as_from_one(
    options, processes: list[int]
) -> None:
    logs = logs_of(6)
    expected = await alone(options, logs)
    async with two(options, prefill=1) as engines:
        found, hits = await answers(engines.client, logs)
        stats = engines.client.stats()
        assert engines.scaler is not None
        assert [info.role for info in engines.scaler.list()] == ["prefill", "decode"]
        assert stats.prefill_engines == 1
        assert found == expected
        assert stats.prefilled, "unless the other engine is sooner"
        assert 0 < hits <= 6 * (150 // PAGE) * PAGE
        tokens = [each.counters.tokens for each in stats.replicas.values()]
        assert tokens[0] == 150 * stats.prefilled, "the prefill engine computes prompts, and no answer"
        assert tokens[1] <= 6 * (150 + 12) - hits, "the other one computes what it did not fetch, and answers"

        # Adapters, grammars, siblings, logprobs; and each engine is killed once.
        sequences = [[longer(log) for log in logs] for logs in mixed(engines)]
        calm = await play_all(engines.client, sequences)
        for victim in (0, 1):
            seen = await killing(engines, processes, victim, sequences)
            assert same(seen, calm)
        assert engines.client.stats().moved
        async with open_in_process(assemble(replace(options, kv_transfer=False)).engine_spec) as client:
            assert same(await play_all(client, sequences), calm)

        # Streams that leave a drained engine take their pages along.
        await drained(engines, options)


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[ChangeRole]:
    """Roles that change, which they do within moments."""
    quick = {"EVERY": 0.05, "WINDOW": 0.5, "PATIENCE": 0.1, "CALM": 0.5, "LEAST": 0.01}
    for name, value in quick.items():
        monkeypatch.setattr(roles, name, value)
    noted: list[ChangeRole] = []
    handle = Dispatcher.receive

    async def receive(self: Dispatcher, message: Message) -> None:
        await handle(self, message)
        if isinstance(message, ChangeRole):
            noted.append(message)

    monkeypatch.setattr(Dispatcher, "receive", receive)
    return noted


async def test_an_engine_changes_its_role_and_back_under_streams_and_every_token_is_as_from_one(
    options, changes: list[ChangeRole]
) -> None:
    short, long = logs_of(4, 8, 200), logs_of(3, 600)
    expected = await alone(options, short + long)
    crossed: Counter[bool] = Counter()  # streams that ran while an engine began to do prompts only, or ceased

    async with two(options, prefill="auto") as engines:
        client, number = engines.client, 0

        async def ask(log: SequenceLog) -> None:
            nonlocal number
            number += 1
            id = f"{number}-{log.id}"
            before = len(changes)
            found, _ = await answers(client, [structs.replace(log, id=id, salt=id.encode())])
            assert found[id] == expected[log.id]
            crossed.update({change.prefill for change in changes[before:]})

        async def go_on(logs: list[SequenceLog], until: int) -> None:
            while len(changes) < until:
                for log in logs:
                    await ask(log)

        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                for log in short:
                    tasks.start_soon(go_on, [log], 2)
                tasks.start_soon(go_on, long, 1)
        await soon(lambda: not client.stats().prefill_engines, "all engines do all")
        stats = client.stats()
        assert [change.prefill for change in changes[:2]] == [True, False]
        assert changes[0].replica == changes[1].replica
        assert crossed[True]
        assert crossed[False]
        assert (stats.running, stats.waiting, stats.pages_used, stats.restarts) == (0, 0, 0, 0)


async def test_a_page_socket_that_answers_nonsense_or_closes_costs_nothing_but_time(
    tmp_path: Path,
) -> None:
    nonsense = tmp_path / "nonsense"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(nonsense))
        listener.listen()

        def fetch(seconds: float) -> tuple[int, str]:
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


async def test_an_engine_for_answers_has_to_be_left(options) -> None:
    with pytest.raises(LoadError, match="--prefill-replicas 2 leaves no engine"):
        async with two(options, prefill=2):
            pass
