"""vLLM's tests of the routes other than completions, and of responses."""

from typing import Any

import anyio

from personae.evals.harness.target import Body
from personae.evals.suites.entrypoints.kit import (
    CHAT,
    RESPONSES,
    TEXT,
    Server,
    check,
    expect,
    user,
)
from personae.evals.suites.entrypoints.vllm_tools import TOOLS

BASIC = "instrumentator/test_basic.py"
TOKENS = "tokenize/test_tokenization.py"
METRICS = "instrumentator/test_metrics.py"
ITEMS = "responses/test_simple.py"


@check("vLLM", BASIC, "test_show_version", "test_check_health")
async def version_and_health(server: Server) -> None:
    """A version, and a 200."""
    version = await server.get("/version")
    expect(version.status_code == 200 and version.json()["version"], "a version")
    expect((await server.get("/health")).status_code == 200, "/health is a 200")


@check("vLLM", BASIC, "test_request_cancellation")
async def cancelled(server: Server) -> None:
    """Many long requests whose clients leave; the next request is answered."""

    async def impatient() -> None:
        with anyio.move_on_after(0.5):
            await server.send(TEXT, model=server.model, prompt="Once", max_tokens=1500, ignore_eos=True)

    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(impatient)
    await server.chat(max_tokens=10)


@check("vLLM", BASIC, "test_request_wrong_content_type")
async def content_type(server: Server) -> None:
    """A form is no JSON."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = await server.client.post(CHAT, content="model=a", headers=headers)
    expect(400 <= response.status_code < 500, f"a 4xx, not {response.status_code}")


@check("vLLM", BASIC, "test_server_load")
async def load(server: Server) -> None:
    """How many requests are in hand."""
    found = await server.get("/load")
    expect(found.status_code == 200 and found.json()["server_load"] == 0, "none are")


@check("vLLM", TOKENS, "test_tokenize_completions", "test_detokenize")
async def tokenized(server: Server) -> None:
    """Ids of a text, how many, the length of the context; and the text again."""
    prompt = "vllm1 This is a test prompt."
    for special in (False, True):
        found = await server.answer("/tokenize", prompt=prompt, add_special_tokens=special)
        expect(found["count"] == len(found["tokens"]) and found["max_model_len"] > 0, "counts")
        expect(found.get("token_strs") is None, "no texts of tokens")
    plain = await server.answer("/tokenize", prompt=prompt, add_special_tokens=False)
    again = await server.answer("/detokenize", tokens=plain["tokens"])
    expect(again["prompt"] == prompt, "the same text")


@check("vLLM", TOKENS, "test_tokenize_chat", "test_tokenize_chat_with_tools")
async def conversations(server: Server) -> None:
    """A conversation's ids are those of its prompt, with and without what makes the model answer."""
    talk = [*user("Hi there!"), {"role": "assistant", "content": "Nice to meet you!"}, *user("A question")]
    for tools in (None, TOOLS):
        fields: Body = {} if tools is None else {"tools": tools}
        lengths = {}
        for generation, goes_on in ((False, False), (True, False), (False, True)):
            messages = [*talk, {"role": "assistant", "content": "Sure,"}] if goes_on else talk
            found = await server.answer(
                "/tokenize",
                messages=messages,
                add_generation_prompt=generation,
                continue_final_message=goes_on,
                add_special_tokens=False,
                **fields,
            )
            prompt = (await server.answer("/detokenize", tokens=found["tokens"]))["prompt"]
            expect("A question" in prompt, "the conversation")
            expect(tools is None or "get_forecast" in prompt, "the tools")
            expect(not goes_on or prompt.rstrip().endswith("Sure,"), "it ends in the message that goes on")
            expect(found["count"] == len(found["tokens"]), "a count")
            lengths[generation, goes_on] = found["count"]
        expect(lengths[True, False] > lengths[False, False], "a generation prompt is longer")


@check("vLLM", TOKENS, "test_tokenize_with_return_token_strs")
async def texts_of_tokens(server: Server) -> None:
    """A text for each token."""
    found = await server.answer("/tokenize", prompt="This is a test! vllm1", return_token_strs=True)
    expect(len(found["token_strs"]) == found["count"], "as many texts as tokens")


NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries"),
    *("prefix_cache_hits", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total"),
    *("cache_config_info", "request_success_total", "request_prompt_tokens", "request_generation_tokens"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds",),
)
LATER = ("iteration_tokens_total", "request_params_n", "request_params_max_tokens")


async def _metrics(server: Server) -> str:
    response = await server.get("/metrics")
    expect(response.status_code == 200, "/metrics is a 200")
    return response.text


@check("vLLM", METRICS, "test_metrics_exist")
async def metrics(server: Server) -> None:
    """Metrics under vLLM's names, once there has been a request."""
    await server.complete(max_tokens=5)
    found = await _metrics(server)
    missing = [name for name in NAMES if f"vllm:{name}" not in found]
    expect(not missing, f"also {', '.join(missing)}")


@check("vLLM", METRICS, "test_metrics_exist (iteration_tokens_total, request_params_*)")
async def newer_metrics(server: Server) -> None:
    """Those that a server may lack."""
    await server.complete(max_tokens=5)
    found = await _metrics(server)
    missing = [name for name in LATER if f"vllm:{name}" not in found]
    expect(not missing, f"also {', '.join(missing)}")


def _total(text: str, name: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith(f"vllm:{name}")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@check("vLLM", METRICS, "test_metrics_counts")
async def counted(server: Server) -> None:
    """Tokens and requests are counted as they are."""
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    before = await _metrics(server)
    for _ in range(3):
        await server.complete(prompt=[9, 10, 11, 12], max_tokens=10, ignore_eos=True)
    grown: list[float] = []
    for _ in range(100):  # the last figures come with a later step
        after = await _metrics(server)
        grown = [_total(after, name) - _total(before, name) for name in names]
        if grown == [12, 30, 3]:
            return
        await anyio.sleep(0.1)
    expect(False, f"12, 30 and 3 more of {', '.join(names)}, not {grown}")


@check("vLLM", METRICS, "test_abort_metrics_reset")
async def aborted(server: Server) -> None:
    """Nothing runs, waits or is held once the clients have left."""
    with anyio.move_on_after(0.5):
        await server.send(TEXT, model=server.model, prompt=["Once"] * 3, max_tokens=1500, ignore_eos=True)
    names = ("num_requests_running", "num_requests_waiting")
    for _ in range(300):
        text = await _metrics(server)
        if not sum(_total(text, name) for name in names):
            return
        await anyio.sleep(0.1)
    expect(False, "nothing runs or waits")


@check("vLLM", "lora/test_lora_adapters.py", "test_static_lora_lineage")
async def lineage(server: Server) -> None:
    """The base has no parent; its adapters have it for one."""
    cards = (await server.get("/v1/models")).json()["data"]
    bases = [card["id"] for card in cards if card["parent"] is None]
    expect(bases, "a base")
    expect(all(card["parent"] in (None, *bases) for card in cards), "adapters of it")


@check("vLLM", "lora/test_lora_adapters.py", "test_dynamic_lora_not_found")
async def no_such_adapter(server: Server) -> None:
    """A folder that is not there, or from which nothing may be loaded."""
    response = await server.send("/v1/load_lora_adapter", lora_name="nobody", lora_path="/not/an/adapter")
    expect(response.status_code in (403, 404), f"a 404, or a 403, not {response.status_code}")


async def _respond(server: Server, **fields: Any) -> Body:
    return await server.answer(RESPONSES, **{"max_output_tokens": 100, "store": False, **fields})


@check("vLLM", ITEMS, "test_basic", "test_extra_sampling_params")
async def a_response(server: Server) -> None:
    """A text, with what steers sampling."""
    answer = await _respond(
        server, input="Hello!", temperature=0.7, top_p=0.9, top_k=40, repetition_penalty=1.1, seed=4
    )
    expect(answer["status"] in ("completed", "incomplete"), "it ends")
    expect(text_of(answer), "a text")


def text_of(answer: Body) -> str:
    """What a response says."""
    messages = [item for item in answer["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


@check("vLLM", ITEMS, "test_max_tokens")
async def cut(server: Server) -> None:
    """A response that spends its tokens is incomplete, and says why."""
    answer = await _respond(server, input="Tell me a long story.", max_output_tokens=3)
    expect(answer["status"] == "incomplete", "incomplete")
    expect(answer["incomplete_details"]["reason"] == "max_output_tokens", "the reason")


@check("vLLM", ITEMS, "test_reasoning_item")
async def reasoning_last(server: Server) -> None:
    """Reasoning with its text that nothing follows."""
    thought = {"type": "reasoning_text", "text": "A greeting."}
    items = [
        {"type": "message", "role": "user", "content": "Hello!"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [thought]},
    ]
    expect((await _respond(server, input=items))["status"], "an answer")


@check(
    "vLLM",
    ITEMS,
    "test_input_history_openai_shape_e2e",
    "test_input_history_openresponses_shape_e2e",
    "test_multiturn_history_replay_without_ids_e2e",
)
async def history(server: Server) -> None:
    """Past messages and reasoning, with and without ids and statuses."""
    for ids in (True, False):
        message = {"id": "msg_1", "status": "completed"} if ids else {}
        reasoning = {"id": "rs_1", "status": "completed"} if ids else {}
        said = {"type": "output_text", "text": "Acknowledged."}
        items = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"type": "message", "role": "assistant", "content": [said], **message},
            {"type": "reasoning", "summary": [], "encrypted_content": None, **reasoning},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello!"}]},
        ]
        expect(text_of(await _respond(server, input=items)), "a text")


@check("vLLM", ITEMS, "test_streaming_output_consistency", "test_streaming_types")
async def streamed(server: Server) -> None:
    """The pieces are the text at the end, and what is opened is closed."""
    events = await server.stream(RESPONSES, input="Hello!", max_output_tokens=100, store=False)
    kinds = [event["type"] for event in events]
    expect(kinds[0] == "response.created", "response.created first")
    last = events[-1]
    expect(last["type"] in ("response.completed", "response.incomplete"), "the response last")
    pieces = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    expect("".join(pieces) == text_of(last["response"]), "the same text")
    for opened, closed in (
        ("response.output_item.added", "response.output_item.done"),
        ("response.content_part.added", "response.content_part.done"),
    ):
        expect(kinds.count(opened) == kinds.count(closed) > 0, f"a {closed} for each {opened}")


@check("vLLM", ITEMS, "test_streaming_logprobs")
async def logprobs(server: Server) -> None:
    """Log-probabilities with the pieces of the text."""
    asked = {"input": "Hello!", "top_logprobs": 3, "include": ["message.output_text.logprobs"]}
    events = await server.stream(RESPONSES, **asked, max_output_tokens=60, store=False)
    pieces = [event for event in events if event["type"] == "response.output_text.delta"]
    entries = [entry for piece in pieces for entry in piece["logprobs"]]
    expect(entries and all(entry["logprob"] <= 0 for entry in entries), "one for each token")
    expect(all(0 < len(entry["top_logprobs"]) <= 3 for entry in entries), "and three of the likeliest")
