"""vLLM's tests of /v1/completions."""

import json

from personae.evals.suites.entrypoints.kit import (
    TEXT,
    Server,
    check,
    expect,
    finishes,
    only,
    text_of,
)

FILE = "completion/test_completion.py"
IDS = [9, 10, 11, 12, 13]
PROMPT = "What is a lamp?"


@check("vLLM", FILE, "test_single_completion")
async def one_completion(server: Server) -> None:
    """An id, one choice of as many tokens as were asked for, and counts that add up."""
    answer = await server.answer(TEXT, prompt=PROMPT, max_tokens=5, ignore_eos=True)
    choice, usage = only(answer), answer["usage"]
    expect(answer["id"], "an id")
    expect(choice["finish_reason"] == "length", "finish_reason length")
    expect(usage["completion_tokens"] == 5, "five tokens")
    expect(usage["total_tokens"] == usage["prompt_tokens"] + 5, "a total that is the sum")
    expect(usage["prompt_tokens_details"]["cached_tokens"] >= 0, "how many tokens were cached")
    ids = await server.answer(TEXT, prompt=IDS, max_tokens=5, ignore_eos=True)
    expect(ids["usage"]["prompt_tokens"] == len(IDS), "a prompt of token ids is taken as it is")
    expect(only(ids).get("prompt_logprobs") is None, "no prompt_logprobs that nobody asked for")


@check("vLLM", FILE, "test_completion_truncation_side_controls_prompt_truncation")
async def truncation_side(server: Server) -> None:
    """A prompt that is cut keeps its beginning or its end, as asked."""
    prompt = [*range(20, 28)]
    for side, kept in (("right", prompt[:4]), ("left", prompt[-4:])):
        choice = await server.complete(
            prompt=prompt,
            max_tokens=1,
            return_token_ids=True,
            truncate_prompt_tokens=4,
            truncation_side=side,
        )
        expect(choice["prompt_token_ids"] == kept, f"cut on the {side}")


@check("vLLM", FILE, "test_no_logprobs", "test_zero_logprobs", "test_some_logprobs")
async def logprobs(server: Server) -> None:
    """None, or those of the chosen tokens and of so many others."""
    choice = await server.complete(prompt=IDS, max_tokens=5, logprobs=None)
    expect(choice["logprobs"] is None, "none without `logprobs`")
    for count, sizes in ((0, {1}), (5, {5, 6})):
        found = (await server.complete(prompt=IDS, max_tokens=5, logprobs=count))["logprobs"]
        expect(found and found["token_logprobs"] is not None, "those of the chosen tokens")
        expect(len(found["top_logprobs"][0]) in sizes, f"{sizes} of the likeliest for logprobs={count}")


@check("vLLM", FILE, "test_too_many_completion_logprobs")
async def too_many_logprobs(server: Server) -> None:
    """More than 20 are refused, streamed or not, and the next request is answered."""
    await server.refused(TEXT, prompt=IDS, max_tokens=5, logprobs=21)
    await server.refused(TEXT, prompt=IDS, max_tokens=5, logprobs=30, stream=True)
    await server.complete(prompt=IDS, max_tokens=5)


@check("vLLM", FILE, "test_prompt_logprobs_completion")
async def prompt_logprobs(server: Server) -> None:
    """Of every prompt, from 0 on."""
    prompts = ["The robot sings", "My name is"]
    for count in (0, 1):
        answer = await server.answer(TEXT, prompt=prompts, max_tokens=2, prompt_logprobs=count)
        expect(all(len(one["prompt_logprobs"]) > 0 for one in answer["choices"]), "those of both prompts")
    plain = await server.answer(TEXT, prompt=prompts, max_tokens=2)
    expect(all(one.get("prompt_logprobs") is None for one in plain["choices"]), "none without being asked")


@check("vLLM", FILE, "test_completion_streaming")
async def streamed(server: Server) -> None:
    """The same text in pieces; the reason for the end comes once, and last."""
    asked = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
    whole = await server.complete(**asked)
    events = await server.stream(TEXT, **asked)
    expect(text_of(events) == whole["text"], "the same text")
    expect(finishes(events) == ["length"], "one finish_reason")
    expect(events[-1]["choices"][0]["finish_reason"] == "length", "in the last event")


@check("vLLM", FILE, "test_parallel_no_streaming", "test_parallel_streaming")
async def several_choices(server: Server) -> None:
    """`n` choices with their numbers, each another, streamed and not."""
    asked = {"prompt": "Once upon a time", "n": 3, "max_tokens": 50, "temperature": 2.0, "seed": 42}
    answer = await server.answer(TEXT, **asked, logprobs=0)
    expect([one["index"] for one in answer["choices"]] == [0, 1, 2], "three choices, numbered")
    expect(all(one["finish_reason"] for one in answer["choices"]), "a reason for each end")
    texts = [one["text"] for one in answer["choices"]]
    expect(len(set(texts)) == 3, "three texts")
    events = await server.stream(TEXT, **asked)
    expect(len(finishes(events)) == 3, "three ends in the stream")
    expect([text_of(events, place) for place in range(3)] == texts, "the same texts in the stream")


@check("vLLM", FILE, "test_completion_stream_options")
async def stream_options(server: Server) -> None:
    """Usage at the end, in every event, or not at all; without `stream` the options are refused."""
    asked = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
    for options in (
        {},
        {"include_usage": False},
        {"include_usage": False, "continuous_usage_stats": True},
    ):
        events = await server.stream(TEXT, **asked, stream_options=options)
        expect(all(event.get("usage") is None for event in events), f"no usage with {options}")
    for continuous in (False, True):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        *events, last = await server.stream(TEXT, **asked, stream_options=options)
        expect(last["choices"] == [], "the last event has usage alone")
        counted = [last, *events] if continuous else [last]
        for event in counted:
            usage = event["usage"]
            expect(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], "a sum")
        if not continuous:
            expect(all(event.get("usage") is None for event in events), "usage at the end alone")
    for wrong in ({"include_usage": None}, {"include_usage": True}, {"continuous_usage_stats": True}):
        await server.refused(TEXT, **asked, stream=False, stream_options=wrong)


@check(
    "vLLM",
    FILE,
    "test_batch_completions",
    differs="beam search is refused by name; the rest is the same",
)
async def many_prompts(server: Server) -> None:
    """A choice for each prompt, in order, streamed and not; equal prompts have equal answers."""
    for prompts in ([PROMPT] * 2, [IDS] * 2):
        asked = {"prompt": prompts, "max_tokens": 5, "ignore_eos": True}
        answer = await server.answer(TEXT, **asked)
        expect(len(answer["choices"]) == 2, "two choices")
        expect(answer["choices"][0]["text"] == answer["choices"][1]["text"], "equal texts")
        events = await server.stream(TEXT, **asked)
        expect(all(len(event["choices"]) == 1 for event in events), "one choice an event")
        expect(text_of(events, 0) == text_of(events, 1) == answer["choices"][0]["text"], "the same streamed")
    refusal = await server.refused(TEXT, prompt=PROMPT, n=2, use_beam_search=True)
    expect(refusal.error.get("param") == "use_beam_search", "the field's name")


@check("vLLM", FILE, "test_echo_logprob_completion")
async def echo(server: Server) -> None:
    """The prompt stands before the answer, with its log-probabilities; its first token has none."""
    for count in (1, 0):
        for prompt in (PROMPT, IDS):
            choice = await server.complete(
                prompt=prompt, max_tokens=5, ignore_eos=True, echo=True, logprobs=count
            )
            if isinstance(prompt, str):
                expect(choice["text"].startswith(prompt), "the prompt first")
            found = choice["logprobs"]
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            expect(all(len(found[name]) > 5 for name in names), "entries for prompt and answer")
            expect(found["token_logprobs"][0] is None, "none for the first token")
            expect(found["top_logprobs"][0] is None, "nothing beside the first token")
            for top in found["top_logprobs"][1:]:
                expect(max(count, 1) <= len(top) <= count + 1, f"as many as asked for: {count}")


@check("vLLM", FILE, "test_invalid_json_schema", "test_invalid_regex", "test_invalid_grammar")
async def malformed_bindings(server: Server) -> None:
    """A schema with a text for a property, an open bracket, and a rule that is not there."""
    broken = {"type": "object", "properties": {"brand": {"type": "string"}, "foo": "bar"}}
    wrong = [
        {"json": broken},
        {"regex": r"[.*"},
        {"grammar": 'root ::= sentence_of_nobody\n\nsentence ::= "a" | "b"\n'},
    ]
    for one in wrong:
        await server.refused(TEXT, prompt=PROMPT, structured_outputs=one)


@check("vLLM", "completion/test_prompt_validation.py", "test_empty_prompt", "test_out_of_vocab_token_ids")
@check("vLLM", "completion/test_empty_prompt_list.py", "test_empty_prompt_list_rejected")
async def prompts_that_are_none(server: Server) -> None:
    """No prompt, an empty list, and a token that the model does not have."""
    for prompt in (None, [], [99_999_999]):
        await server.refused(TEXT, prompt=prompt, max_tokens=5)


@check("vLLM", "basic/test_return_token_ids.py", "test_basic_completion_with_emoji")
async def token_ids(server: Server) -> None:
    """The ids of prompt and answer, with characters of many bytes; none unless they are asked for."""
    prompt = "I love coding \N{ROCKET}"
    asked = {"prompt": prompt, "max_tokens": 10, "logprobs": 1}
    choice = await server.complete(**asked, return_token_ids=True)
    encoded = (await server.answer("/tokenize", prompt=prompt))["tokens"]
    expect(json.dumps(encoded)[1:-1] in json.dumps(choice["prompt_token_ids"]), "the prompt's ids")
    decoded = (await server.answer("/detokenize", tokens=choice["token_ids"]))["prompt"]
    expect(decoded.startswith(choice["text"]), "ids that are the text")
    plain = await server.complete(**asked, return_token_ids=False)
    expect(plain.get("token_ids") is None, "no ids of the answer")
    expect(plain.get("prompt_token_ids") is None, "no ids of the prompt")


@check("vLLM", "basic/test_return_token_ids.py", "test_comparison_with_prompt_logprobs_and_logprobs")
async def tokens_as_ids(server: Server) -> None:
    """Tokens named by their ids are those in `token_ids`, streamed and not."""
    asked = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 1, "return_token_ids": True}
    asked["return_tokens_as_token_ids"] = True
    choice = await server.complete(**asked, echo=True, prompt_logprobs=1)
    names = choice["logprobs"]["tokens"]
    expect(all(name.startswith("token_id:") for name in names), "names like token_id:7")
    ids = [int(name.removeprefix("token_id:")) for name in names]
    expect(ids == [*choice["prompt_token_ids"], *choice["token_ids"]], "the same ids")
    events = await server.stream(TEXT, **asked)
    choices = [one for event in events for one in event["choices"]]
    streamed = [id for one in choices for id in one.get("token_ids") or ()]
    told = [name for one in choices for name in (one.get("logprobs") or {}).get("tokens", ())]
    expect([f"token_id:{id}" for id in streamed] == told, "the same ids in the stream")
    expect(choices[0]["prompt_token_ids"], "the prompt's ids in the first event")
