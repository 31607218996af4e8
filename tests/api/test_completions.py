"""Text completions, asked over ASGI."""

import threading
from collections.abc import Sequence
from typing import Any

import asgi
import pytest
from fake_engine import BOS_ID, END_ID, FakeEngine, byte_tokenizer, logprobs_of
from starlette.applications import Starlette
from tokenizers import processors

from personae.api.app import create_app
from personae.api.settings import ApiSettings

pytestmark = pytest.mark.anyio


async def complete(app: Starlette, prompt: Any, **extra: Any) -> dict[str, Any]:
    async with asgi.client(app) as client:
        response = await client.post("/v1/completions", json={"model": "base", "prompt": prompt, **extra})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(app: Starlette, prompt: Any, **extra: Any) -> list[Any]:
    visit = await asgi.Visit(
        "/v1/completions", {"model": "base", "prompt": prompt, "stream": True, **extra}
    ).run(app)
    assert visit.status == 200, visit.chunks
    return visit.events()


async def test_a_prompt_may_be_text_ids_or_a_list_of_either(app: Starlette, engine: FakeEngine) -> None:
    ids = engine.tokenizer.encode("ab")
    for prompt, count in (("ab", 1), (ids, 1), (["ab", "ab"], 2), ([ids, ids, ids], 3)):
        before = len(engine.submitted)
        answer = await complete(app, prompt)
        assert [choice["text"] for choice in answer["choices"]] == ["Hello, world!"] * count
        logs = engine.submitted[before:]
        assert [log.tokens for log in logs] == [tuple(ids)] * count
        assert answer["usage"]["prompt_tokens"] == 2 * count


@pytest.mark.parametrize(("asked", "kept"), [(5, 5), (-1, 512 - 16), (512, 512 - 16), (None, None)])
async def test_a_prompt_is_cut_to_its_last_tokens_before_anything_is_made_of_it(
    asked: int | None, kept: int | None, app: Starlette, engine: FakeEngine
) -> None:
    text = "".join(chr(97 + at % 26) for at in range(600 if asked in (5, -1) else 400))
    kept = len(text) if kept is None else min(kept, len(text))
    prompts = (text, engine.tokenizer.encode(text), [text, "short"])
    for prompt in prompts:
        fields = {"truncate_prompt_tokens": asked, "echo": True, "logprobs": 0}
        answer = await complete(app, prompt, max_tokens=16, **fields)
        log = engine.submitted.pop(0)
        assert log.tokens == tuple(engine.tokenizer.encode(text[-kept:]))
        choice = answer["choices"][0]
        assert choice["text"].startswith(text[-kept:] + "Hello")
        assert (
            len(choice["logprobs"]["tokens"])
            == answer["usage"]["completion_tokens"] // (len(answer["choices"])) + kept
        )
        if prompt is prompts[2]:
            assert engine.submitted.pop().tokens == tuple(engine.tokenizer.encode("short"[-kept:]))
            assert answer["usage"]["prompt_tokens"] == kept + len("short")


async def test_choices_are_numbered_prompt_by_prompt() -> None:
    engine = FakeEngine(answer=lambda log: chr(log.tokens[0] + 64))
    answer = await complete(create_app(engine), [[1], [2]], n=2, max_tokens=1, seed=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["A", "A", "B", "B"]
    assert [log.after is None for log in engine.submitted] == [True, False, True, False]


async def test_sixteen_tokens_are_the_default_but_no_more_than_fit(
    app: Starlette, engine: FakeEngine
) -> None:
    await complete(app, "x")
    await complete(app, "x" * 508)
    assert [log.params.max_tokens for log in engine.submitted] == [16, 4]


async def test_echo_puts_the_prompt_first(app: Starlette) -> None:
    answer = await complete(app, ["naïve ", "b "], echo=True, max_tokens=5)
    assert [choice["text"] for choice in answer["choices"]] == ["naïve Hello", "b Hello"]
    chunks = await events(app, "naïve ", echo=True, max_tokens=5)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "naïve Hello"


async def test_echo_of_ids_shows_their_text(app: Starlette, engine: FakeEngine) -> None:
    answer = await complete(app, [BOS_ID, *engine.tokenizer.encode("hey ")], echo=True, max_tokens=1)
    assert answer["choices"][0]["text"] == "hey H"


async def test_logprobs_run_in_parallel_with_the_tokens(app: Starlette) -> None:
    logprobs = (await complete(app, "x", logprobs=2, max_tokens=3))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["H", "e", "l"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    assert [top[token] for top, token in zip(logprobs["top_logprobs"], "Hel", strict=True)] == logprobs[
        "token_logprobs"
    ]


async def test_echo_with_logprobs_scores_the_prompt(app: Starlette, engine: FakeEngine) -> None:
    choice = (await complete(app, "aé!", logprobs=0, echo=True, max_tokens=2))["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "aé!He"
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!", "H", "e"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]
    ids = engine.tokenizer.encode("aé!He")
    assert logprobs["token_logprobs"] == [None, *(logprobs_of(id, 0).logprob for id in ids[1:])]
    assert logprobs["top_logprobs"][0] is None


async def test_echo_with_logprobs_streams_the_same_as_it_answers(app: Starlette) -> None:
    asked: dict[str, Any] = {"logprobs": 2, "echo": True, "max_tokens": 4, "n": 2}
    whole = (await complete(app, "héllo", **asked))["choices"]
    chunks = [chunk["choices"][0] for chunk in (await events(app, "héllo", **asked))[:-1]]
    for choice in whole:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for chunk in mine for value in chunk["logprobs"][name]] == values


async def test_an_echo_without_an_answer_only_scores_the_prompt(app: Starlette) -> None:
    answer = await complete(app, "abc", echo=True, max_tokens=0, logprobs=1)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert answer["usage"]["completion_tokens"] == 0


async def test_ids_of_prompt_and_answer_come_when_asked_for(app: Starlette) -> None:
    choice = (await complete(app, [5, 6], return_token_ids=True, ignore_eos=True))["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6]
    assert len(choice["token_ids"]) == 16
    chunks = (await events(app, [5, 6], return_token_ids=True, ignore_eos=True))[:-1]
    assert [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [5, 6]
    assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in chunks[1:])


async def test_prompt_logprobs_have_vllms_form(app: Starlette) -> None:
    choice = (await complete(app, [5, 6], prompt_logprobs=1))["choices"][0]
    scored = logprobs_of(6, 1)
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {
        "6": {"logprob": scored.logprob, "rank": 1, "decoded_token": FakeEngine().tokenizer.token_text(6)}
    }


async def test_the_stopping_token_counts_but_is_not_text(app: Starlette) -> None:
    answer = await complete(app, "x", logprobs=0, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["text"] == "Hello, world!"
    assert choice["token_ids"][-1] == END_ID
    assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == 14


async def test_min_tokens_keeps_the_answer_going(app: Starlette) -> None:
    choice = (await complete(app, "x", min_tokens=15, max_tokens=20))["choices"][0]
    assert choice["text"].startswith("Hello, world!H")


@pytest.mark.parametrize(("count", "overlap"), [(20, False), (200, True)])
async def test_many_prompts_are_encoded_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, count: int, overlap: bool
) -> None:
    engine = FakeEngine()
    threads: list[threading.Thread] = []
    encode = engine.tokenizer.encode_batch

    def noting(texts: Sequence[str], *options: Any) -> list[list[int]]:
        if len(texts) == count:
            threads.append(threading.current_thread())
        return encode(texts, *options)

    monkeypatch.setattr(engine.tokenizer, "encode_batch", noting)
    answer = await complete(create_app(engine), ["word " * 30] * count, max_tokens=1)
    assert len(answer["choices"]) == count
    assert [thread is not threading.main_thread() for thread in threads] == [overlap]


async def test_best_of_may_only_be_n(app: Starlette) -> None:
    answer = await complete(app, "x", n=2, best_of=2, suffix=None)
    assert len(answer["choices"]) == 2


async def test_special_tokens_are_added_to_text_unless_told_not_to() -> None:
    engine = FakeEngine()
    bos = engine.tokenizer.backend.id_to_token(BOS_ID)
    engine.tokenizer.backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], special_tokens=[(bos, BOS_ID)]
    )
    app = create_app(engine)
    await complete(app, "a")
    await complete(app, "a", add_special_tokens=False)
    assert [log.tokens[0] == BOS_ID for log in engine.submitted] == [True, False]


async def test_requests_without_a_seed_get_the_servers_if_it_has_one(engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(seed=77))
    async with asgi.client(app) as client:
        for seed in ({}, {"seed": 5}):
            answer = await client.post("/v1/completions", json={"model": "base", "prompt": "x", **seed})
            assert answer.status_code == 200
    assert [log.params.seed for log in engine.submitted] == [77, 5]


async def test_a_text_with_a_token_that_the_model_does_not_have_is_refused_by_name() -> None:
    tokenizer = byte_tokenizer()
    (last,) = tokenizer.encode("z")
    engine = FakeEngine(vocab_size=last)
    async with asgi.client(create_app(engine)) as client:
        response = await client.post("/v1/completions", json={"model": "base", "prompt": ["abc", "az"]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt[1]"
    assert f"the token {last} ('z')" in response.json()["error"]["message"]
    assert engine.submitted == []
