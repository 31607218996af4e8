"""Chat completions, asked over ASGI."""

import json
from typing import Any

import asgi
import msgspec
import pytest
from fake_engine import CHATML, END_ID, START_ID, FakeEngine, byte_tokenizer
from starlette.applications import Starlette

from personae.api.app import create_app
from personae.api.settings import ApiSettings
from personae.engine.generation_config import GenerationDefaults
from personae.errors import GrammarError, Overloaded

pytestmark = pytest.mark.anyio


def body(**extra: Any) -> dict[str, Any]:
    return {"model": "base", "messages": [{"role": "user", "content": "hi"}], **extra}


async def chat(app: Starlette, **extra: Any) -> dict[str, Any]:
    async with asgi.client(app) as client:
        response = await client.post("/v1/chat/completions", json=body(**extra))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(app: Starlette, **extra: Any) -> list[Any]:
    visit = await asgi.Visit("/v1/chat/completions", body(stream=True, **extra)).run(app)
    assert visit.status == 200, visit.chunks
    return visit.events()


def streamed_text(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return "".join(c["delta"].get("content", "") for c in choices if c["index"] == index)


async def test_an_answer_has_text_usage_and_a_reason_to_end(app: Starlette) -> None:
    answer = await chat(app)
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt = len("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n") - len("<|im_start|>") * 2 - 10 + 3
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 14,
        "total_tokens": prompt + 14,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_the_prompt_is_the_rendered_template(app: Starlette, engine: FakeEngine) -> None:
    await chat(app)
    prompt = engine.tokenizer.decode(engine.submitted[0].tokens, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert engine.submitted[0].tokens[0] == START_ID
    assert engine.submitted[0].eos == (END_ID,)


async def test_an_adapter_is_chosen_by_model(app: Starlette, engine: FakeEngine) -> None:
    answer = await chat(app, model="team/pirate")
    assert answer["model"] == "team/pirate"
    assert engine.submitted[0].adapter == "d" * 64


async def test_max_tokens_cuts_the_answer_and_says_so(app: Starlette) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        choice = (await chat(app, **{name: 5}))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "length")


async def test_without_max_tokens_the_answer_may_fill_the_context(app: Starlette, engine: FakeEngine) -> None:
    answer = await chat(app)
    assert engine.submitted[0].params.max_tokens == 512 - answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("burst", [1, 4, 100])
async def test_text_after_a_stop_string_is_never_delivered(burst: int) -> None:
    engine = FakeEngine(burst=burst)
    app = create_app(engine)
    choice = (await chat(app, stop=["wor", "nothing"], return_token_ids=True))["choices"][0]
    assert choice["message"]["content"] == "Hello, "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "wor")
    assert engine.tokenizer.decode(choice["token_ids"]) == "Hello, wor"
    kept = await chat(app, stop="wor", include_stop_str_in_output=True)
    assert kept["choices"][0]["message"]["content"] == "Hello, wor"
    assert engine.live == set()


async def test_a_stop_string_ends_the_sequence_in_the_engine(app: Starlette, engine: FakeEngine) -> None:
    await chat(app, stop="ell", n=2)
    assert sorted(engine.stopped) == sorted(log.id for log in engine.submitted)
    assert engine.cancelled == []


async def test_a_stop_token_ends_the_answer_and_is_named(app: Starlette) -> None:
    comma = byte_tokenizer().encode(",", False)[0]
    choice = (await chat(app, stop_token_ids=[comma]))["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("Hello", comma)


async def test_half_a_stop_string_at_the_end_is_delivered(app: Starlette) -> None:
    assert (await chat(app, stop="d!?"))["choices"][0]["message"]["content"] == "Hello, world!"


async def test_characters_of_several_tokens_come_whole() -> None:
    app = create_app(FakeEngine(answer="naïve – 🎭"))
    chunks = await events(app)
    assert streamed_text(chunks) == "naïve – 🎭"
    assert all("\ufffd" not in json.dumps(chunk, ensure_ascii=False) for chunk in chunks)


async def test_siblings_share_the_prompt_and_have_seeds_of_their_own(
    app: Starlette, engine: FakeEngine
) -> None:
    answer = await chat(app, n=3, seed=7)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    first, second, third = engine.submitted
    assert first.params.seed == 7
    assert len({log.params.seed for log in engine.submitted}) == 3
    assert (first.after, second.after, third.after) == (None, first.id, first.id)
    assert answer["usage"]["prompt_tokens"] == first.prompt_length
    again = FakeEngine()
    await chat(create_app(again), n=3, seed=7)
    assert [log.params.seed for log in again.submitted] == [log.params.seed for log in engine.submitted]


async def test_a_seed_is_drawn_when_none_is_given(app: Starlette, engine: FakeEngine) -> None:
    await chat(app)
    await chat(app)
    first, second = engine.submitted
    assert first.params.seed != second.params.seed


async def test_the_models_own_defaults_hold_where_the_request_is_silent() -> None:
    engine = FakeEngine()
    defaults = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    app = create_app(engine, ApiSettings(defaults=defaults))
    await chat(app)
    await chat(app, temperature=0, top_p=1, top_k=-1, repetition_penalty=1)
    silent, outspoken = (log.params for log in engine.submitted)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.repetition_penalty) == (0.6, 0.9, 20, 1.1)
    assert (outspoken.temperature, outspoken.top_p, outspoken.top_k) == (0, 1, 0)
    assert outspoken.repetition_penalty == 1


async def test_every_sampling_parameter_reaches_the_engine(app: Starlette, engine: FakeEngine) -> None:
    await chat(
        app,
        temperature=0.5,
        top_p=0.5,
        top_k=5,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"5": -100, "6": 1.5},
        min_tokens=2,
        max_tokens=4,
        ignore_eos=True,
        stop_token_ids=[9],
        allowed_token_ids=[9, 7],
        bad_words=["no"],
        jump_forward=True,
        seed=-3,
    )
    params = engine.submitted[0].params
    assert msgspec.to_builtins(params) == {
        "max_tokens": 4,
        "seed": -3,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.2,
        "logit_bias": {5: -100.0, 6: 1.5},
        "min_tokens": 2,
        "stop_token_ids": (9,),
        "allowed_tokens": msgspec.to_builtins((1 << 7 | 1 << 9).to_bytes(40, "little")),
        "bad_words_token_ids": tuple(tuple(engine.tokenizer.encode(word, False)) for word in ("no", " no")),
        "ignore_eos": True,
        "logprobs": None,
        "logprob_tokens": (),
        "prompt_logprobs": None,
        "pooling": None,
        "jump_forward": True,
        "prediction": (),
        "speculate": True,
    }


async def test_a_temperature_too_small_to_divide_by_is_greedy(app: Starlette, engine: FakeEngine) -> None:
    await chat(app, temperature=1e-12)
    assert engine.submitted[0].params.temperature == 0


async def test_logprobs_name_each_token_with_its_bytes(app: Starlette) -> None:
    app = create_app(FakeEngine(answer="aé"))
    content = (await chat(app, logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[97], [0xC3], [0xA9], list(b"<|im_end|>")]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["top_logprobs"][0] == {"token": "a", "logprob": content[0]["logprob"], "bytes": [97]}


async def test_streamed_logprobs_are_those_of_the_whole_answer(app: Starlette) -> None:
    whole = (await chat(app, logprobs=True, top_logprobs=3))["choices"][0]["logprobs"]["content"]
    chunks = await events(app, logprobs=True, top_logprobs=3)
    parts = [c["logprobs"] for chunk in chunks[:-1] for c in chunk["choices"] if c["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == whole


async def test_prompt_logprobs_and_token_ids_come_when_asked_for(app: Starlette, engine: FakeEngine) -> None:
    answer = await chat(app, prompt_logprobs=2, return_token_ids=True)
    prompt = answer["prompt_token_ids"]
    assert tuple(prompt) == engine.submitted[0].tokens
    assert answer["prompt_logprobs"][0] is None
    for token, candidates in zip(prompt[1:], answer["prompt_logprobs"][1:], strict=True):
        assert candidates[str(token)]["rank"] == 1
    assert answer["choices"][0]["token_ids"][-1] == END_ID
    plain = await chat(app)
    assert plain["prompt_logprobs"] is None
    assert plain["prompt_token_ids"] is None
    assert "token_ids" not in plain["choices"][0]


async def test_a_stream_begins_with_the_role_and_ends_with_done(app: Starlette) -> None:
    *chunks, done = await events(app)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert streamed_text(chunks) == "Hello, world!"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_stream_carries_the_usage_when_asked(app: Starlette) -> None:
    *chunks, last, done = await events(app, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == (await chat(app))["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_a_stream_of_several_choices_keeps_them_apart() -> None:
    app = create_app(FakeEngine(answer=lambda log: f"I am {log.id[-1]}"))
    chunks = await events(app, n=3)
    assert [streamed_text(chunks, index) for index in range(3)] == ["I am 0", "I am 1", "I am 2"]


async def test_streamed_token_ids_add_up(app: Starlette, engine: FakeEngine) -> None:
    chunks = (await events(app, return_token_ids=True))[:-1]
    assert tuple(chunks[0]["prompt_token_ids"]) == engine.submitted[0].tokens
    ids = [id for chunk in chunks for c in chunk["choices"] for id in c.get("token_ids", [])]
    assert engine.tokenizer.decode(ids, skip_special_tokens=False) == "Hello, world!<|im_end|>"


async def test_special_tokens_are_shown_on_request() -> None:
    app = create_app(FakeEngine(answer="a<s>b"))
    assert (await chat(app))["choices"][0]["message"]["content"] == "ab"
    shown = await chat(app, skip_special_tokens=False)
    assert shown["choices"][0]["message"]["content"] == "a<s>b"


async def test_a_schema_becomes_a_grammar(app: Starlette, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["b"]}
    await chat(app, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    await chat(app, response_format={"type": "json_object"})
    await chat(app, response_format={"type": "text"})
    bound, free_json, text = (log.grammar for log in engine.submitted)
    assert bound is not None
    assert (bound.kind, json.loads(bound.source), bound.strict) == ("json_schema", schema, False)
    assert list(json.loads(bound.source)["properties"]) == ["b", "a"], "the order of properties is kept"
    assert free_json is not None
    assert free_json.kind == "json_object"
    assert text is None


async def test_a_grammar_refused_while_compiling_is_a_400_even_in_a_stream(engine: FakeEngine) -> None:
    engine.refuse_late = GrammarError("`/foo` cannot be enforced.")
    app = create_app(engine)
    for stream in (False, True):
        visit = await asgi.Visit(
            "/v1/chat/completions", body(stream=stream, response_format={"type": "json_object"})
        ).run(app)
        assert visit.status == 400
        assert visit.error["param"] == "response_format"


async def test_a_full_engine_is_a_503_that_says_when_to_come_back(engine: FakeEngine) -> None:
    engine.refuse = Overloaded("full", retry_after=2.2)
    app = create_app(engine)
    for stream in (False, True):
        visit = await asgi.Visit("/v1/chat/completions", body(stream=stream)).run(app)
        assert (visit.status, visit.headers["retry-after"]) == (503, "3")


async def test_a_sequence_that_fails_fails_its_request_and_frees_its_siblings(engine: FakeEngine) -> None:
    engine.fail_after = 3
    app = create_app(engine)
    visit = await asgi.Visit("/v1/chat/completions", body(n=2)).run(app)
    assert visit.status == 500
    assert visit.error["code"] == "request_failed"
    assert engine.live == set()


async def test_an_error_after_the_stream_began_is_an_event(engine: FakeEngine) -> None:
    engine.fail_after = 5
    visit = await asgi.Visit("/v1/chat/completions", body(stream=True)).run(create_app(engine))
    assert visit.status == 200
    *chunks, last = visit.events()
    assert streamed_text(chunks) == "Hello"
    assert last["error"]["code"] == "request_failed"


async def test_a_message_can_be_continued_and_echoed(app: Starlette, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    answer = await chat(app, messages=messages, continue_final_message=True, echo=True)
    assert answer["choices"][0]["message"]["content"] == "Well, Hello, world!"
    prompt = engine.tokenizer.decode(engine.submitted[0].tokens, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nWell, ")


async def test_template_arguments_reach_the_template() -> None:
    engine = FakeEngine(tokenizer=byte_tokenizer(CHATML + "{% if thinking is defined %}<think>{% endif %}"))
    await chat(create_app(engine), chat_template_kwargs={"thinking": True})
    assert engine.tokenizer.decode(engine.submitted[0].tokens).endswith("<think>")


async def test_a_model_without_a_template_says_so() -> None:
    app = create_app(FakeEngine(tokenizer=byte_tokenizer(None)))
    visit = await asgi.Visit("/v1/chat/completions", body()).run(app)
    assert visit.status == 400
    assert "no chat template" in visit.error["message"]


async def test_what_asks_for_nothing_is_accepted(app: Starlette) -> None:
    await chat(
        app,
        store=False,
        logit_bias=None,
        user="u",
        metadata={"a": "b"},
        parallel_tool_calls=True,
        service_tier="auto",
        tools=[],
        tool_choice="none",
        modalities=["text"],
        reasoning_effort=None,
        verbosity="medium",
        prompt_cache_key="k",
        safety_identifier="s",
        stream_options=None,
        audio=None,
    )


async def test_a_token_that_only_the_tokenizer_has_is_refused_and_reaches_no_kernel() -> None:
    engine = FakeEngine(vocab_size=ord("h"))  # fewer rows in the embedding than ids in the tokenizer
    async with asgi.client(create_app(engine)) as client:
        response = await client.post("/v1/chat/completions", json=body())
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert "which this model does not have" in error["message"]
    assert engine.submitted == []
