"""Schemas that mean far more than they say, sent to the whole product while others use it."""

from collections.abc import Iterator
from functools import partial

import anyio
import httpx
import pytest
from patience import soon
from real_server import Running, running
from tiny_models import make_model_folder

from personae.api.options import ServeOptions
from personae.evals.hostile import CONTROL, GRAMMARS, SCHEMAS, Bystander, bound_by, measure, outcome_of, send
from personae.grammar import compiler
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.sandbox.server import SandboxLimits

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]  # of the client
BOMBS = ("conditions that multiply",)
QUICK = ("deep", "too deep", "a huge maxLength", "a pattern that backtracks", "recursive", "itself")
# Less than the usual, because tests wait until it is spent, and on a busy machine more of a core for it.
LIMITS = SandboxLimits(processor=1.5, masks=2.0, patience=40.0, share=0.25)
ENOUGH = 50  # tokens of another client
# Of a bomb. The last is for a machine that is too busy to give it what it may have.
ENDS = {"200", "400 grammar_too_complex", "400 grammar_too_slow", "503 overloaded"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = ServeOptions(make_model_folder(tmp_path_factory.mktemp("model")), max_seqs=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "GrammarCompiler", partial(GrammarCompiler, limits=LIMITS))
        with running(options) as server:
            yield server


async def test_bombs_cost_only_their_senders_and_others_are_answered_meanwhile(server: Running) -> None:
    outcomes: dict[str, str] = {}
    answered: list[str] = []

    async def light(client: httpx.AsyncClient, model: str, name: str) -> None:
        outcomes[name], _ = await send(client, model, SCHEMAS[name])

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        bystander = Bystander(client, model)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bystander.read)
            async with anyio.create_task_group() as bombs:
                for name in BOMBS:
                    bombs.start_soon(light, client, model, name)
                while not outcomes:
                    schema = {"type": "string", "maxLength": 2 + len(answered)}  # a new one every time
                    answered.append((await send(client, model, schema))[0])
            tasks.cancel_scope.cancel()
    assert set(outcomes.values()) <= ENDS, outcomes
    assert set(answered) == {"200"}
    assert len(answered) > 3
    assert len(bystander.gaps) > 10


async def test_an_ambiguous_grammar_ends_its_own_request_and_others_are_answered_meanwhile(
    server: Running,
) -> None:
    outcomes: list[str] = []

    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        bystander = Bystander(client, model)

        async def ambiguous(number: int) -> None:
            field, value = GRAMMARS["GBNF: ambiguous, of any text"]
            body = bound_by(model, field, f"{value}\n# {number}", max_tokens=100)
            outcomes.append(outcome_of(await client.post("/v1/chat/completions", json=body)))

        async with anyio.create_task_group() as senders:
            for number in range(2):
                senders.start_soon(ambiguous, number)
            await anyio.sleep(0.5)  # the masks have begun to take long
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(bystander.read)
                await soon(lambda: len(bystander.gaps) >= ENOUGH, "the other client's tokens")
                tasks.cancel_scope.cancel()  # slow masks get idle cores only
            assert len(outcomes) < 2, "it was answered meanwhile"
    # The last is for a machine that is too busy to make the masks in time.
    assert set(outcomes) <= ENDS | {"503 grammar_delayed"}, outcomes


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("GBNF: itself", "400 invalid_schema"),
        ("GBNF: never ends", "400 invalid_schema"),
        ("a choice of 512 KB", "400 grammar_too_large"),
    ],
)
async def test_what_no_text_matches_or_is_far_too_long_is_refused_before_it_is_compiled(
    server: Running, name: str, outcome: str
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        response = await client.post("/v1/chat/completions", json=bound_by(model, *GRAMMARS[name]))
    assert outcome_of(response) == outcome
    assert response.json()["error"]["param"].startswith("structured_outputs.")


@pytest.mark.parametrize("name", QUICK)
async def test_a_hostile_schema_is_served_or_refused_in_the_servers_own_words(
    server: Running, name: str
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        got, _ = await send(client, model, SCHEMAS[name])
    assert got == "200" or got.startswith("400 "), got


async def test_the_eval_tells_what_each_sender_got_and_how_long_the_other_waited(server: Running) -> None:
    found = await measure(server.url, calm=0.2, rounds=2, names=(CONTROL, "itself"))
    assert {name: seen.outcomes for name, seen in found.rounds.items()} == {
        CONTROL: ["200", "200"],
        "itself": ["400 invalid_schema", "400 invalid_schema"],
    }
    assert min(len(found.calm), len(found.attacked)) > 10
    for seen in found.rounds.values():
        assert len(seen.calm) == len(seen.attacked) == 2
        assert max(seen.calm) <= max(found.calm)
        assert max(seen.attacked) <= max(found.attacked)
