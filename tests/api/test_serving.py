"""The product as a client sees it: a real model, real adapters, real HTTP, the `openai` client."""

import asyncio
import gc
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch
from hf import hf_logits, hf_model
from patience import PATIENCE, eventually
from peft import PeftModel
from real_server import Running, running
from tiny_adapters import make_zoo
from tiny_models import VOCAB, model_folder

from personae.actors.frontend.inbox import Inbox
from personae.actors.frontend.streamer import LiveStream
from personae.api.options import ServeOptions
from personae.engine.scheduling.live import LiveSequence
from personae.engine.sequence import SequenceLog
from personae.engine.step import StepEngine

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["bug", "wish", "praise"]},
        "urgent": {"type": "boolean"},
        "count": {"type": "integer"},
    },
    "required": ["kind", "urgent"],
    "additionalProperties": False,
}
BOUND = {"type": "json_schema", "json_schema": {"name": "ticket", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_zoo(tmp_path_factory.mktemp("adapters"), base)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[StepEngine]]:
    """The step engines that the server makes, to look at what they still hold."""
    made: list[StepEngine] = []
    init = StepEngine.__init__

    def noted(self: StepEngine, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepEngine, "__init__", noted)
        yield made


@pytest.fixture(scope="module")
def server(base: Path, adapters: dict[str, Path], engines: list[StepEngine]) -> Iterator[Running]:
    options = ServeOptions(
        base,
        adapters=(next(iter(adapters.values())).parent,),
        device="cpu",
        dtype="float32",
        max_seqs=24,
        max_batch_tokens=128,
        kv_memory=2**23,
        served_model_name="base",
        one_process=True,
    )
    with running(options) as server:
        yield server


def nothing_is_left(server: Running, engines: list[StepEngine]) -> None:
    def idle() -> bool:
        stats = server.client.stats()
        return (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)

    eventually(idle, "no sequence and no page in use")
    (engine,) = engines
    pool = engine.worker.adapters
    used = server.client.stats()
    assert (used.adapter_running, used.adapter_waiting) == (Counter(), Counter())
    # The store holds those that are idle, once each; nobody else does.
    eventually(lambda: all(pool.pins(digest) == 1 for digest in pool.residents), "no adapter in use")
    pool.check_integrity()

    def remains() -> Counter[str]:
        gc.collect()
        kinds = (SequenceLog, LiveSequence, LiveStream, Inbox)
        return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in kinds)

    eventually(lambda: remains() <= Counter(SequenceLog=24), f"{remains()} outlive their requests")


@pytest.mark.parametrize("echoed", [1, 40, 150])
def test_echo_and_logprobs_over_http_are_those_of_peft_with_all_adapters_in_one_batch(
    server: Running, base: Path, adapters: dict[str, Path], echoed: int
) -> None:
    prompt = random.Random(echoed).choices(range(4, VOCAB), k=echoed)
    names = [*adapters, "base"]

    async def ask() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "echo": True, "logprobs": 4}
            body |= {"ignore_eos": True, "return_token_ids": True}
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json={**body, "model": name}) for name in names)
            )
        return [answer.raise_for_status().json() for answer in answers]

    for name, answer in zip(names, asyncio.run(ask()), strict=True):
        model = hf_model(base)
        if name != "base":
            model = PeftModel.from_pretrained(model, adapters[name]).eval()
        choice = answer["choices"][0]
        tokens = prompt + choice["token_ids"]
        assert len(tokens) == echoed + 8
        truth = torch.log_softmax(hf_logits(model, tokens), -1)
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None
        for position in range(1, len(tokens)):
            row = truth[position - 1]
            assert found["token_logprobs"][position] == pytest.approx(
                float(row[tokens[position]]), rel=1e-4, abs=1e-4
            )
            best = max(found["top_logprobs"][position].values())
            assert best == pytest.approx(float(row.max()), rel=1e-4, abs=1e-4)
        assert choice["token_ids"] == [int(truth[echoed - 1 + i].argmax()) for i in range(8)]


def test_two_hundred_streams_over_nine_models_each_end_once_and_leave_nothing(
    server: Running, adapters: dict[str, Path], engines: list[StepEngine]
) -> None:
    names = [*adapters, "base"]
    outcome: Counter[str] = Counter()

    async def one(client: openai.AsyncOpenAI, number: int) -> None:
        rng = random.Random(number)
        bound, leaves = number % 3 == 0, number % 7 == 0
        stream = await client.chat.completions.create(
            model=names[number % len(names)],
            messages=[{"role": "user", "content": f"question {number} " + "x" * rng.randrange(60)}],
            max_tokens=200 if bound else rng.randrange(1, 40),
            temperature=1.0,
            seed=number,
            stream=True,
            stream_options={"include_usage": True},
            response_format=BOUND if bound else openai.omit,
        )
        text, ends, usages = "", [], 0
        async for chunk in stream:
            usages += chunk.usage is not None
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if choice.finish_reason:
                    ends.append(choice.finish_reason)
            if leaves and text:
                await stream.close()
                outcome["left"] += 1
                return
        assert (len(ends), usages) == (1, 1), f"stream {number} ended {ends}"
        outcome[ends[0]] += 1
        if bound and ends[0] == "stop":
            jsonschema.validate(json.loads(text), SCHEMA)
            outcome["valid"] += 1
        elif bound:
            assert ends[0] == "length"

    async def load() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            await asyncio.gather(*(one(client, number) for number in range(200)))

    asyncio.run(load())
    assert outcome["stop"] + outcome["length"] + outcome["left"] == 200
    assert outcome["left"] > 20
    assert outcome["valid"] > 40
    nothing_is_left(server, engines)


def test_what_is_wrong_is_refused_while_others_stream(server: Running, engines: list[StepEngine]) -> None:
    wrong: list[tuple[dict[str, Any], int, str | None]] = [
        ({"prompt": list(range(4, 1029)), "max_tokens": 4}, 400, "prompt"),
        ({"prompt": "a", "max_tokens": 5000}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": -2}, 400, "max_tokens"),
        ({"prompt": "a", "n": 17}, 400, "n"),
        ({"prompt": "a", "model": "nobody"}, 404, "model"),
        ({"prompt": [VOCAB]}, 400, "prompt[0]"),
        ({"prompt": "a", "wonder": 1}, 400, "wonder"),
        ({"prompt": "a", "logit_bias": {"512": 1}}, 400, "logit_bias"),
    ]

    async def ask() -> tuple[list[httpx.Response], httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            calm = asyncio.create_task(
                client.post(
                    "/v1/completions", json={"model": "base", "prompt": "calm", "max_tokens": 200, "seed": 1}
                )
            )
            refused = [
                await client.post("/v1/completions", json={"model": "base", **body}) for body, _, _ in wrong
            ]
            return refused, await calm

    refused, calm = asyncio.run(ask())
    for answer, (body, status, param) in zip(refused, wrong, strict=True):
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), body
    assert calm.json()["choices"][0]["finish_reason"] in ("length", "stop")
    nothing_is_left(server, engines)


def test_a_schema_that_is_no_schema_is_the_callers_error_and_the_next_one_works(server: Running) -> None:
    def ask(schema: Any) -> httpx.Response:
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        body = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}
        return httpx.post(
            f"{server.url}/v1/chat/completions", json={**body, "response_format": form}, timeout=PATIENCE
        )

    for schema in ({"type": "thing"}, {"type": 3}, {"$ref": "#/nowhere"}, {"enum": 7}):
        error = ask(schema).json()["error"]
        assert error["type"] == "invalid_request_error", schema
        assert error["param"] == "response_format.json_schema.schema", schema
    assert ask(SCHEMA).status_code == 200


@pytest.mark.parametrize("n", [1, 4])
def test_n_choices_with_a_seed_are_the_same_each_time_and_differ_among_themselves(
    server: Running, n: int
) -> None:
    def ask() -> list[str]:
        body = {"model": "rslora", "prompt": "Once", "max_tokens": 20, "n": n, "seed": 9, "temperature": 1.2}
        choices = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"]
        return [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]

    first = ask()
    assert first == ask()
    assert len(set(first)) == n
