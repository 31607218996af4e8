"""llama.cpp's tests of its server, as far as they are of OpenAI's API."""

import json

import anyio

from personae.evals.harness.target import Body
from personae.evals.suites.entrypoints.kit import (
    CHAT,
    RESPONSES,
    TEXT,
    Server,
    check,
    expect,
    finishes,
    only,
    text_of,
    user,
)
from personae.evals.suites.entrypoints.vllm_routes import text_of as response_text
from personae.evals.suites.entrypoints.vllm_tools import gathered, tool

CHATS = "test_chat_completion.py"
COMPLETIONS = "test_completion.py"
CALLS = "test_tool_call.py"
ITEMS = "test_compat_oai_responses.py"
TALK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
WORDS = ["the", "to", "a", "is", "and", "you", "it", "I"]


@check("llama.cpp", CHATS, "test_chat_completion", "test_chat_completion_with_openai_library")
async def one_answer(server: Server) -> None:
    """An id, a model, counts; content in parts as well."""
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " the best book"}]
    for content in ("What is the best book", parts):
        answer = await server.answer(
            CHAT, messages=[TALK[0], {"role": "user", "content": content}], max_tokens=8, ignore_eos=True
        )
        expect("cmpl" in answer["id"], "an id with cmpl")
        expect(answer["usage"]["completion_tokens"] == 8, "eight tokens")
        expect(only(answer)["message"]["role"] == "assistant", "the assistant's")
        expect(only(answer)["finish_reason"] == "length", "finish_reason length")


@check("llama.cpp", CHATS, "test_chat_completion (system_fingerprint)")
@check("llama.cpp", COMPLETIONS, "test_completion_with_openai_library (system_fingerprint)")
async def fingerprint(server: Server) -> None:
    """Which build it is."""
    for path, asked in ((CHAT, {"messages": TALK}), (TEXT, {"prompt": "Once"})):
        answer = await server.answer(path, **asked, max_tokens=2)
        expect(answer.get("system_fingerprint"), "a system_fingerprint")


@check("llama.cpp", CHATS, "test_chat_completion_stream")
async def streamed(server: Server) -> None:
    """The role alone first, one id for all events, the end without content."""
    asked: Body = {"messages": TALK, "max_tokens": 8, "stream_options": {"include_usage": True}}
    *events, last = await server.stream(CHAT, **asked, ignore_eos=True)
    first = events[0]["choices"][0]["delta"]
    expect(first["role"] == "assistant" and not first.get("content"), "the role alone first")
    expect(not any(event["choices"][0]["delta"].get("role") for event in events[1:]), "once")
    expect(len({event["id"] for event in events}) == 1, "one id")
    expect({event["model"] for event in events} == {server.model}, "the model")
    expect(finishes(events) == ["length"], "one end")
    expect(last["usage"]["completion_tokens"] == 8, "eight tokens")


@check(
    "llama.cpp",
    CHATS,
    "test_chat_template_assistant_prefill",
    differs="a last message of the assistant's goes on with `continue_final_message`, as in vLLM",
)
async def prefill(server: Server) -> None:
    """The answer begins as the client says."""
    talk = [*TALK, {"role": "assistant", "content": [{"type": "text", "text": "Whill"}]}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    answer = await server.answer(CHAT, messages=talk, max_tokens=2, return_token_ids=True, **fields)
    prompt = (await server.answer("/detokenize", tokens=answer["prompt_token_ids"]))["prompt"]
    expect(prompt.endswith("Whill"), "the prompt ends in it")


FORMATS = (
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "foooooo"}}}, '"foooooo"'),
    ({"type": "json_object"}, None),
)


@check("llama.cpp", CHATS, "test_completion_with_response_format")
async def response_formats(server: Server) -> None:
    """JSON, JSON of a schema; unknown formats and types."""
    for format, text in FORMATS:
        content = (await server.chat(response_format=format, max_tokens=60))["message"]["content"]
        expect(text is None or content.strip() == text, f"{text}")
        json.loads(content)
    for schema in (123, {"type": 123}, {"type": "hiccup"}):
        wrong: Body = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        await server.refused(CHAT, messages=TALK, response_format=wrong)
    await server.refused(CHAT, messages=TALK, response_format={"type": "sound"})


@check("llama.cpp", CHATS, "test_completion_with_response_format (json_object with a schema, no name)")
async def older_formats(server: Server) -> None:
    """A schema with `json_object`, and one without a name."""
    for format in (
        {"type": "json_object", "schema": {"const": "42"}},
        {"type": "json_schema", "json_schema": {"schema": {"const": "42"}}},
    ):
        choice = await server.chat(response_format=format, max_tokens=20)
        expect(choice["message"]["content"].strip() == '"42"', "the schema's only text")


@check(
    "llama.cpp",
    CHATS,
    "test_completion_with_json_schema",
    "test_completion_with_grammar",
    differs="`json_schema` and `grammar` at the top are refused and say where they go",
)
async def bound(server: Server) -> None:
    """A schema's only text, and a grammar's."""
    grammar = 'root ::= "a"{5,5}'
    for field, value in (("json_schema", {"const": "42"}), ("grammar", grammar)):
        refusal = await server.refused(CHAT, messages=TALK, **{field: value})
        expect(f".{field}`" in refusal.error["message"], "where it goes")
    for binding, text in (({"json": {"const": "42"}}, '"42"'), ({"grammar": grammar}, "aaaaa")):
        choice = await server.chat(structured_outputs=binding, max_tokens=20)
        expect(choice["message"]["content"].strip() == text, f"{text}")


@check("llama.cpp", CHATS, "test_invalid_chat_completion_req")
async def conversations_that_are_none(server: Server) -> None:
    """No messages, and messages that are none."""
    wrong: list[object] = [
        None,
        "string",
        [123],
        [{}],
        [{"role": 123}],
        [{"role": "system", "content": 123}],
        [{"role": "system", "content": "test"}, {}],
    ]
    for messages in wrong:
        await server.refused(CHAT, messages=messages)


@check("llama.cpp", CHATS, "test_logprobs", "test_logprobs_stream")
async def logprobs(server: Server) -> None:
    """The tokens are the text, with bytes and ten of the likeliest, streamed and not."""
    asked: Body = {"messages": TALK, "max_tokens": 5, "logprobs": True, "top_logprobs": 10}
    choice = only(await server.answer(CHAT, **asked, ignore_eos=True))
    events = await server.stream(CHAT, **asked, ignore_eos=True)
    streamed = [
        entry
        for event in events
        for one in event["choices"]
        for entry in (one.get("logprobs") or {}).get("content") or ()
    ]
    for entries, text in (
        (choice["logprobs"]["content"], choice["message"]["content"]),
        (streamed, text_of(events)),
    ):
        expect("".join(entry["token"] for entry in entries) == text, "the tokens are the text")
        expect(all(entry["logprob"] <= 0 and entry["bytes"] for entry in entries), "bytes")
        expect(all(len(entry["top_logprobs"]) == 10 for entry in entries), "ten of the likeliest")


@check("llama.cpp", CHATS, "test_logit_bias")
@check("llama.cpp", COMPLETIONS, "test_logit_bias")
async def excluded(server: Server) -> None:
    """Tokens with a bias of -100 do not come."""
    tokens: set[int] = set()
    for word in WORDS:
        tokens |= set(
            (await server.answer("/tokenize", prompt=f" {word}", add_special_tokens=False))["tokens"]
        )
    bias = {str(token): -100 for token in tokens}
    for path, asked in ((CHAT, {"messages": TALK}), (TEXT, {"prompt": "What is the best book"})):
        answer = await server.answer(path, **asked, max_tokens=40, logit_bias=bias, return_token_ids=True)
        expect(not tokens & set(only(answer)["token_ids"]), "none of them")


@check("llama.cpp", CHATS, "test_context_size_exceeded", "test_context_size_exceeded_stream")
@check("llama.cpp", COMPLETIONS, "test_nocache_long_input_prompt")
async def too_long(server: Server) -> None:
    """A prompt that is longer than the context, streamed or not."""
    for fields in ({}, {"stream": True}):
        refusal = await server.refused(CHAT, messages=TALK * 2000, **fields)
        expect("context" in f"{refusal.error.get('code')} {refusal.error['message']}", "it says so")
    await server.refused(TEXT, prompt="I believe the meaning of life is " * 4000)


@check("llama.cpp", CHATS, "test_chat_completions_multiple_choices")
async def several_choices(server: Server) -> None:
    """Two answers."""
    answer = await server.answer(CHAT, messages=TALK, max_tokens=8, n=2, ignore_eos=True)
    expect([one["finish_reason"] for one in answer["choices"]] == ["length"] * 2, "two, of eight tokens")


@check("llama.cpp", COMPLETIONS, "test_completion_with_openai_library")
@check("llama.cpp", COMPLETIONS, "test_completion_stream_with_openai_library")
@check("llama.cpp", COMPLETIONS, "test_completion_stream_vs_non_stream")
async def completions(server: Server) -> None:
    """The same text streamed and not."""
    asked: Body = {"prompt": "I believe the meaning of life is", "max_tokens": 8, "ignore_eos": True}
    choice = only(await server.answer(TEXT, **asked))
    expect(choice["finish_reason"] == "length", "finish_reason length")
    expect(text_of(await server.stream(TEXT, **asked)) == choice["text"], "the same text")


@check("llama.cpp", COMPLETIONS, "test_consistent_result_same_seed", "test_different_result_different_seed")
@check("llama.cpp", COMPLETIONS, "test_consistent_result_different_batch_size")
async def seeds(server: Server) -> None:
    """The same seed says the same, also among others; another seed another thing."""
    asked: Body = {"prompt": "I believe the meaning of life is", "max_tokens": 24, "temperature": 1.5}
    texts: dict[int, set[str]] = {seed: set() for seed in range(4)}

    async def one(seed: int) -> None:
        texts[seed].add(only(await server.answer(TEXT, **asked, seed=seed))["text"])

    for seed in texts:
        await one(seed)
    async with anyio.create_task_group() as tasks:
        for seed in texts:
            tasks.start_soon(one, seed)
    expect(all(len(found) == 1 for found in texts.values()), "one text for a seed")
    expect(len(set.union(*texts.values())) == 4, "four texts for four seeds")


@check(
    "llama.cpp",
    COMPLETIONS,
    "test_completion_with_tokens_input",
    differs="a list of prompts is of texts or of lists of ids; both in one list are refused",
)
async def prompts(server: Server) -> None:
    """A prompt as ids, and several at once."""
    text = "I believe the meaning of life is"
    ids = (await server.answer("/tokenize", prompt=text))["tokens"]
    alone = only(await server.answer(TEXT, prompt=ids, max_tokens=8))["text"]
    answer = await server.answer(TEXT, prompt=[ids, ids], max_tokens=8)
    expect([one["text"] for one in answer["choices"]] == [alone] * 2, "equal texts")
    await server.refused(TEXT, prompt=[ids, text], max_tokens=8)


@check("llama.cpp", COMPLETIONS, "test_completion_parallel_slots")
async def at_once(server: Server) -> None:
    """Six requests at once say what each says alone."""
    asked: list[Body] = [{"prompt": f"A poem, number {place}", "max_tokens": 20} for place in range(6)]
    alone = [only(await server.answer(TEXT, **one))["text"] for one in asked]
    together = [""] * len(asked)

    async def ask(place: int) -> None:
        together[place] = only(await server.answer(TEXT, **asked[place]))["text"]

    async with anyio.create_task_group() as tasks:
        for place in range(len(asked)):
            tasks.start_soon(ask, place)
    expect(together == alone, "the same texts")


@check("llama.cpp", "test_ignore_eos.py", "test_ignore_eos_populates_logit_bias")
async def endless(server: Server) -> None:
    """`ignore_eos` goes on to `max_tokens`."""
    answer = await server.answer(CHAT, messages=TALK, max_tokens=60, ignore_eos=True)
    expect(answer["usage"]["completion_tokens"] == 60, "60 tokens")


@check(
    "llama.cpp",
    "test_tokenize.py",
    "test_tokenize_detokenize",
    "test_tokenize_with_pieces",
    differs="the fields are vLLM's: `prompt`, `token_strs`",
)
async def tokenized(server: Server) -> None:
    """A text in tokens and back, with each token's text."""
    text = "This is a test string with unicode \u5abd and emoji \N{HUGGING FACE}"
    found = await server.answer("/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True)
    expect(len(found["token_strs"]) == len(found["tokens"]) > 5, "a text for each token")
    again = await server.answer("/detokenize", tokens=found["tokens"])
    expect(again["prompt"].strip() == text, "the same text")


TEST = tool(
    "test",
    {
        "type": "object",
        "properties": {"success": {"type": "boolean", "const": True}},
        "required": ["success"],
    },
)
PYTHON = tool(
    "python",
    {"type": "object", "properties": {"code": {"type": "string", "maxLength": 40}}, "required": ["code"]},
)


@check("llama.cpp", CALLS, "test_completion_with_required_tool_real_model")
async def required_calls(server: Server) -> None:
    """One call of the tool with its argument, streamed and not."""
    for one, argument in ((TEST, "success"), (PYTHON, "code")):
        asked: Body = {
            "messages": user("Write an example"),
            "tools": [one],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 512,
        }
        message = only(await server.answer(CHAT, **asked))["message"]
        [call] = message["tool_calls"]
        expect(call["function"]["name"] == one["function"]["name"], "the tool")
        expect(argument in json.loads(call["function"]["arguments"]), f"its argument {argument}")
        streamed = gathered(await server.stream(CHAT, **asked))
        expect(streamed == [(call["function"]["name"], call["function"]["arguments"])], "the same streamed")


@check("llama.cpp", CALLS, "test_completion_without_tool_call_fast")
async def no_calls(server: Server) -> None:
    """No call without tools, with an empty list of them, and with `none`."""
    ways: list[Body] = [{}, {"tools": []}, {"tools": [PYTHON], "tool_choice": "none"}]
    for fields in ways:
        asked: Body = {"messages": user("say hello world with python"), "max_tokens": 128, **fields}
        expect(not only(await server.answer(CHAT, **asked))["message"].get("tool_calls"), "no call")
        expect(not gathered(await server.stream(CHAT, **asked)), "nor in the stream")


@check("llama.cpp", ITEMS, "test_responses_with_text_format")
async def text_formats(server: Server) -> None:
    """JSON, JSON of a schema and text; a schema that is missing."""
    asked: Body = {"input": "Write an example", "max_output_tokens": 60, "store": False}
    schema = {"type": "json_schema", "name": "test", "schema": {"const": "foooooo"}}
    for format, text in ((schema, '"foooooo"'), ({"type": "json_object"}, None), ({"type": "text"}, None)):
        answer = await server.answer(RESPONSES, **asked, text={"format": format})
        expect(text is None or response_text(answer).strip() == text, f"{text}")
    await server.refused(RESPONSES, **asked, text={"format": {"type": "json_schema", "name": "test"}})


@check("llama.cpp", ITEMS, "test_responses_with_openai_library", "test_responses_stream_with_openai_library")
async def responses(server: Server) -> None:
    """Ids that begin as OpenAI's do, and stay the same through a stream."""
    asked: Body = {"input": TALK, "max_output_tokens": 40, "store": False}
    answer = await server.answer(RESPONSES, **asked)
    expect(answer["id"].startswith("resp_"), "resp_…")
    messages = [item for item in answer["output"] if item["type"] == "message"]
    expect(messages[0]["id"].startswith("msg_"), "msg_…")
    events = await server.stream(RESPONSES, **asked)
    expect(len({event["response"]["id"] for event in events if "response" in event}) == 1, "one response")
    parts = [
        event for event in events if event["type"].startswith(("response.output_text", "response.content"))
    ]
    ids = {item["id"] for item in events[-1]["response"]["output"] if item["type"] == "message"}
    expect({event["item_id"] for event in parts} == ids, "its message's id with each part")
    pieces = "".join(event["delta"] for event in parts if event["type"] == "response.output_text.delta")
    expect(pieces == response_text(events[-1]["response"]), "the same text")


@check("llama.cpp", "test_basic.py", "test_server_start_simple", "test_server_models")
async def models(server: Server) -> None:
    """It is healthy and lists its models."""
    expect((await server.get("/health")).status_code == 200, "/health is a 200")
    cards = (await server.get("/v1/models")).json()["data"]
    expect(server.model in [card["id"] for card in cards], "the model")
