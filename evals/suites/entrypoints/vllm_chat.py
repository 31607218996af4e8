"""vLLM's tests of /v1/chat/completions."""

import json
import re
from typing import Any

import jsonschema_rs

from personae.evals.harness.target import Body
from personae.evals.suites.entrypoints.kit import (
    CHAT,
    JSON,
    Server,
    check,
    expect,
    finishes,
    only,
    text_of,
    user,
)

FILE = "chat_completion/test_chat.py"
BIAS = "chat_completion/test_chat_logit_bias_validation.py"
STOPS = "chat_completion/test_chat_stop_token_ids_validation.py"
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1+1?"}]
PERSON: Body = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ADDRESS = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"
LANGUAGES = ["Ada", "C", "Haskell", "Rust", "Zig"]


async def _talk(server: Server, **fields: Any) -> Body:
    return await server.chat(messages=TALK, **fields)


@check("vLLM", FILE, "test_no_logprobs_chat", "test_zero_logprobs_chat", "test_some_logprobs_chat")
async def logprobs(server: Server) -> None:
    """None, those of the tokens alone, or with so many others."""
    asked = {"max_completion_tokens": 5}
    expect((await _talk(server, **asked, logprobs=False))["logprobs"] is None, "none")
    for count in (0, 5):
        choice = await _talk(server, **asked, logprobs=True, top_logprobs=count)
        expect(len(choice["logprobs"]["content"][0]["top_logprobs"]) == count, f"{count} of the likeliest")


@check("vLLM", FILE, "test_too_many_chat_logprobs")
async def too_many_logprobs(server: Server) -> None:
    """More than 20 are refused, streamed or not, and the next request is answered."""
    asked = {"messages": TALK, "max_completion_tokens": 10, "logprobs": True}
    await server.refused(CHAT, **asked, top_logprobs=21, stream=True)
    await server.refused(CHAT, **asked, top_logprobs=30)
    expect((await _talk(server, max_completion_tokens=10))["message"]["content"] is not None, "an answer")


@check("vLLM", FILE, "test_prompt_logprobs_chat", "test_more_than_one_prompt_logprobs_chat")
async def prompt_logprobs(server: Server) -> None:
    """Of the prompt's tokens, as many as asked for."""
    talk = [*TALK, {"role": "assistant", "content": "It is 2."}, *user("And 2+2?")]
    asked = {"messages": talk, "max_completion_tokens": 3}
    for count in (0, 1, 2):
        found = (await server.answer(CHAT, **asked, prompt_logprobs=count))["prompt_logprobs"]
        expect(found and found[0] is None, "none for the first token")
        expect(max(1, count) <= len(found[3]) <= count + 1, f"{count} of the likeliest")
    plain = await server.answer(CHAT, **asked)
    expect(plain.get("prompt_logprobs") is None, "none without being asked")


@check("vLLM", FILE, "test_single_chat_session")
async def a_conversation(server: Server) -> None:
    """Counts that add up, and an answer that goes back for a second turn."""
    answer = await server.answer(
        CHAT, messages=TALK, max_completion_tokens=5, ignore_eos=True, logprobs=True, top_logprobs=5
    )
    choice, usage = only(answer), answer["usage"]
    expect(answer["id"] and choice["finish_reason"] == "length", "an id, and finish_reason length")
    expect(usage["total_tokens"] == usage["prompt_tokens"] + 5, "counts that add up")
    expect(choice["message"]["role"] == "assistant", "an assistant's message")
    again = [*TALK, {"role": "assistant", "content": choice["message"]["content"]}, *user("As JSON.")]
    expect((await server.chat(messages=again, max_completion_tokens=5))["message"]["content"], "an answer")


@check("vLLM", FILE, "test_chat_streaming")
async def streamed(server: Server) -> None:
    """The same text in pieces; the reason for the end comes once, and last."""
    whole = await _talk(server, max_completion_tokens=10)
    events = await server.stream(CHAT, messages=TALK, max_completion_tokens=10)
    roles = [one["delta"]["role"] for event in events for one in event["choices"] if one["delta"].get("role")]
    expect(set(roles) == {"assistant"}, "the assistant's role")
    expect(text_of(events) == whole["message"]["content"], "the same text")
    expect(finishes(events) == [whole["finish_reason"]], "the same end, once")
    expect(events[-1]["choices"][0]["finish_reason"], "in the last event")


@check(
    "vLLM",
    FILE,
    "test_chat_completion_stream_options",
    differs="the event with the role counts 0 tokens; `min_characters`, which vLLM ignores, is refused",
)
async def stream_options(server: Server) -> None:
    """Usage at the end, in every event, or not at all; without `stream` the options are refused."""
    asked = {"messages": TALK, "max_completion_tokens": 10, "min_tokens": 10}
    events = await server.stream(CHAT, **asked, stream_options={"include_usage": False})
    expect(all(event.get("usage") is None for event in events), "no usage")
    *events, last = await server.stream(CHAT, **asked, stream_options={"include_usage": True})
    expect(last["choices"] == [] and last["usage"]["completion_tokens"] == 10, "usage alone at the end")
    expect(all(event.get("usage") is None for event in events), "and nowhere else")
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await server.stream(CHAT, **asked, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    expect(counts == sorted(counts) and counts[-1] == 10, "counts that grow to the end's")
    for wrong in ({"include_usage": None}, {"include_usage": True}):
        await server.refused(CHAT, **asked, stream=False, stream_options=wrong)
    refusal = await server.refused(CHAT, **asked, min_characters=10)
    expect(refusal.error.get("param") == "min_characters", "the field's name")


@check(
    "vLLM",
    FILE,
    "test_structured_outputs_choice_chat",
    "test_structured_outputs_json_chat",
    "test_structured_outputs_regex_chat",
    "test_structured_outputs_choice_chat_logprobs",
)
async def bound(server: Server) -> None:
    """One of some texts, JSON of a schema and text of a pattern, in two turns; finite log-probabilities."""
    talk = user("Name one.")
    for binding, holds in (
        ({"choice": LANGUAGES}, lambda text: text in LANGUAGES),
        ({"regex": ADDRESS}, lambda text: re.fullmatch(ADDRESS, text)),
        ({"json": PERSON}, lambda text: jsonschema_rs.is_valid(PERSON, json.loads(text))),
    ):
        for _ in range(2):
            choice = await server.chat(
                messages=talk,
                temperature=0.7,
                max_completion_tokens=200,
                structured_outputs=binding,
                logprobs=True,
                top_logprobs=5,
            )
            text = choice["message"]["content"]
            expect(holds(text), f"{text!r} is bound by {[*binding]}")
            tops = [top for entry in choice["logprobs"]["content"] for top in entry["top_logprobs"]]
            expect(all(top["logprob"] >= -9999.0 for top in tops), "no log-probability below -9999")
            talk = [*talk, {"role": "assistant", "content": text}, *user("Another one.")]


@check("vLLM", FILE, "test_structured_outputs_type_error", "test_long_seed")
async def values_of_the_wrong_kind(server: Server) -> None:
    """An object for a pattern, and seeds that do not fit in 64 bits."""
    await server.refused(CHAT, messages=TALK, structured_outputs={"regex": {"1": "Python"}})
    for seed in (-(2**63) - 1, 2**63):
        await server.refused(CHAT, messages=TALK, seed=seed)


@check(
    "vLLM",
    FILE,
    "test_response_format_json_object",
    "test_response_format_json_schema",
    "test_response_format_text",
)
async def response_formats(server: Server) -> None:
    """JSON, JSON of a schema, and text."""
    schema = {"type": "object", "properties": {"result": {"type": "integer"}}, "required": ["result"]}
    named = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    for format in ({"type": "json_object"}, named):
        choice = await _talk(server, response_format=format, max_completion_tokens=200)
        expect(isinstance(json.loads(choice["message"]["content"]), dict), "an object")
    text = await _talk(server, response_format={"type": "text"}, max_completion_tokens=10)
    expect(text["message"]["content"] is not None, "a text")


@check("vLLM", FILE, "test_extra_fields_allowed")
async def extra_fields(server: Server) -> None:
    """An unknown key in a message."""
    message = {"role": "user", "content": "What is 1+1?", "extra_field": "0"}
    expect((await server.chat(messages=[message]))["message"]["content"], "an answer")


@check("vLLM", FILE, "test_complex_message_content")
async def parts(server: Server) -> None:
    """Content in parts is the content."""
    asked: Body = {"max_completion_tokens": 20}
    whole = await server.chat("What is 1+1?", **asked)
    content = [{"type": "text", "text": "What is 1+1?"}]
    found = await server.chat(messages=[{"role": "user", "content": content}], **asked)
    expect(found["message"]["content"] == whole["message"]["content"], "the same answer")


@check("vLLM", FILE, "test_custom_role", differs="a role that templates do not know is refused by name")
async def roles(server: Server) -> None:
    """A role of the client's own."""
    for content in ("What is 1+1?", [{"type": "text", "text": "What is 1+1?"}]):
        refusal = await server.refused(CHAT, messages=[{"role": "my-custom-role", "content": content}])
        expect("messages[0]" in (refusal.error.get("param") or ""), "the message's place")


@check(
    "vLLM",
    FILE,
    "test_chat_completion_n_parameter_non_streaming",
    "test_chat_completion_n_parameter_streaming",
    "test_chat_completion_n_with_seed",
    "test_chat_completion_n_equals_1",
)
async def several_choices(server: Server) -> None:
    """`n` choices with their numbers, streamed and not."""
    asked = {"messages": user("Hello!"), "max_completion_tokens": 20, "temperature": 1.5}
    for count in (1, 2, 3):
        answer = await server.answer(CHAT, **asked, n=count)
        expect([one["index"] for one in answer["choices"]] == [*range(count)], f"{count}, numbered")
        texts = [one["message"]["content"] for one in answer["choices"]]
        expect(all(texts) and (count == 1 or len(set(texts)) > 1), "texts that differ")
        events = await server.stream(CHAT, **asked, n=count)
        expect([text_of(events, place) for place in range(count)] == texts, "the same texts in the stream")


@check("vLLM", BIAS, "test_chat_logit_bias_valid")
@check("vLLM", STOPS, "test_chat_stop_token_ids_valid")
async def tokens_of_the_vocabulary(server: Server) -> None:
    """A bias and a stop for a token that there is."""
    [token] = (await server.answer("/tokenize", prompt="a", add_special_tokens=False))["tokens"]
    for fields in ({"logit_bias": {str(token): 1.0}}, {"stop_token_ids": [token]}):
        expect((await server.chat(max_tokens=5, **fields))["message"]["content"] is not None, "an answer")


@check(
    "vLLM",
    BIAS,
    "test_chat_logit_bias_invalid",
    "test_chat_logit_bias_non_integer_key",
    "test_chat_logit_bias_non_numeric_value",
)
@check("vLLM", STOPS, "test_chat_stop_token_ids_out_of_vocab", "test_chat_stop_token_ids_negative")
async def tokens_that_are_none(server: Server) -> None:
    """Ids outside the vocabulary, and what is no id or no number."""
    for fields in (
        {"logit_bias": {"99999999": 1.0}},
        {"logit_bias": {"not_a_token_id": 50}},
        {"logit_bias": {"1": "not_a_number"}},
        {"stop_token_ids": [99999999]},
        {"stop_token_ids": [-1]},
    ):
        refusal = await server.refused(CHAT, messages=TALK, max_tokens=5, **fields)
        [name] = fields
        told = f"{refusal.error.get('param')} {refusal.error['message']}"
        expect(name in told, f"the field's name, {name}")


@check("vLLM", "chat_completion/test_non_object_body_validation.py", "*")
async def bodies(server: Server) -> None:
    """JSON that is no object, and an empty salt."""
    for body in ('"text"', '["not", "an", "object"]', "42", "null", "{"):
        response = await server.client.post(CHAT, content=body, headers=JSON)
        expect(response.status_code == 400, f"a 400 for {body}, not {response.status_code}")
    await server.refused(CHAT, messages=TALK, cache_salt="")


@check("vLLM", "chat_completion/test_chat_echo.py", "test_chat_session_with_echo_and_continue_final_message")
async def echo(server: Server) -> None:
    """The last message is continued, and given back with `echo` alone."""
    saying = "Hello! How can"
    for wanted in (True, False):
        choice = await server.chat(
            messages=[*user("Hello!"), {"role": "assistant", "content": saying}],
            echo=wanted,
            continue_final_message=True,
            add_generation_prompt=False,
            max_tokens=40,
        )
        expect((saying in choice["message"]["content"]) is wanted, f"echo={wanted}")


@check("vLLM", "chat_completion/test_chat_echo.py", "test_top_logprobs")
async def as_many_as_there_may_be(server: Server) -> None:
    """`top_logprobs: -1` is as many as the server gives."""
    choice = await server.chat(max_tokens=1, logprobs=True, top_logprobs=-1)
    expect(len(choice["logprobs"]["content"][0]["top_logprobs"]) >= 20, "20 or more")


@check("vLLM", "basic/test_return_token_ids.py", "test_chat_completion_with_emoji_and_token_ids")
async def token_ids(server: Server) -> None:
    """Ids of prompt and answer; in a stream the prompt's come once."""
    asked = {"messages": user("I love cats \N{CAT FACE}"), "max_tokens": 20, "return_token_ids": True}
    answer = await server.answer(CHAT, **asked)
    prompt = (await server.answer("/detokenize", tokens=answer["prompt_token_ids"]))["prompt"]
    expect("\N{CAT FACE}" in prompt, "the prompt in its ids")
    events = await server.stream(CHAT, **asked)
    with_prompt = [event for event in events if event.get("prompt_token_ids")]
    expect(with_prompt == events[:1], "the prompt's ids in the first event alone")
    expect(with_prompt[0]["prompt_token_ids"] == answer["prompt_token_ids"], "the same ids")
    ids = [id for event in events for one in event["choices"] for id in one.get("token_ids") or ()]
    expect(ids == only(answer)["token_ids"], "the same ids in the stream")
