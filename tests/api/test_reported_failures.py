"""Failures that users of other engines report, each shown not to happen here: a model with random weights,
which prefers whatever is worst, behind the whole product."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
from patience import PATIENCE
from real_server import Running, running
from tiny_models import make_model_folder, write_json
from tool_chat import TEMPLATE, tool, write_tags

from personae.api.options import ServeOptions
from personae.api.params import sibling
from personae.engine.params import SamplingParams
from personae.grammar.schema.document import MAX_WHITESPACE

HI: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["metre", "mile"]},
        "exact": {"type": "boolean"},
    },
    "required": ["size", "unit", "exact"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "length", "schema": SCHEMA}}
COUNT = tool("count", strict=True, to={"type": "integer", "minimum": 3, "maximum": 5})
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With room in its KV cache for few of the sequences that it runs."""
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    write_tags(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings | {"chat_template": TEMPLATE})
    options = ServeOptions(
        folder, max_seqs=8, max_model_len=512, kv_memory=2**19, dtype="float32", served_model_name="base"
    )
    with running(options) as server:
        yield server


def ask(server: Running, **extra: Any) -> httpx.Response:
    body = {"model": "base", "messages": HI, "max_tokens": 200, "seed": 1, **QUIET, **extra}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def choices(server: Running, **extra: Any) -> list[dict[str, Any]]:
    response = ask(server, **extra)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"]
    return text


def holds(choice: dict[str, Any]) -> bool:
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(text_of(choice)), SCHEMA)
    return True


def liking(server: Running, *texts: str) -> dict[str, float]:
    """A bias by which the model writes the tokens of these texts wherever it may."""
    ids: set[int] = set()
    for text in texts:
        answer = httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=PATIENCE)
        ids |= set(answer.json()["tokens"])
    return {str(id): 100.0 for id in ids}


@pytest.mark.parametrize("blank", [" ", "\n", "\n\n"])
def test_a_model_that_wants_to_write_blanks_for_ever_cannot(server: Running, blank: str) -> None:
    [choice] = choices(server, response_format=FORMAT, max_tokens=400, logit_bias=liking(server, blank))
    assert holds(choice)
    assert max(map(len, re.findall(r"\s+", text_of(choice))), default=0) <= MAX_WHITESPACE


def test_required_and_reasoning_give_both(server: Running) -> None:
    found = choices(
        server,
        tools=[COUNT],
        tool_choice="required",
        parallel_tool_calls=False,
        chat_template_kwargs={"enable_thinking": True},
        logit_bias=liking(server, "</think>"),
        n=3,
    )
    for choice in found:
        [one] = choice["message"]["tool_calls"]
        assert json.loads(one["function"]["arguments"])["to"] in (3, 4, 5)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None


def test_a_call_is_never_cut_off(server: Running) -> None:
    refused = ask(server, tools=[COUNT], tool_choice="required", max_tokens=5)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "max_tokens_too_small"
    for budget in (28, 40):
        [choice] = choices(server, tools=[COUNT], tool_choice="required", max_tokens=budget)
        assert choice["message"]["tool_calls"]
        for one in choice["message"]["tool_calls"]:
            assert json.loads(one["function"]["arguments"])["to"] in (3, 4, 5)


def test_a_malformed_grammar_after_a_good_one_harms_only_itself(server: Running) -> None:
    before = [
        choices(server, structured_outputs={"regex": "[ab]{8}"}),
        choices(server, response_format=FORMAT),
    ]
    wrong: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": "[ab"}},
        {"structured_outputs": {"grammar": "root ::= ("}},
        {"structured_outputs": {"grammar": "start: nobody"}},
        {"structured_outputs": {"json": {"type": "nothing"}}},
        {"structured_outputs": {"json": {"$ref": "#/nowhere"}}},
    ]
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(choices, server, response_format=FORMAT, seed=seed) for seed in range(2)]
        for asked in wrong:
            answer = ask(server, **asked)
            assert answer.status_code == 400, asked
            assert answer.json()["error"]["param"].startswith("structured_outputs.")
        assert all(holds(answer.result()[0]) for answer in good)
    after = [
        choices(server, structured_outputs={"regex": "[ab]{8}"}),
        choices(server, response_format=FORMAT),
    ]
    assert [text_of(one) for [one] in before] == [text_of(one) for [one] in after]


def test_a_schema_binds_no_reasoning_and_reasoning_is_no_answer(server: Running) -> None:
    [choice] = choices(
        server,
        response_format=FORMAT,
        chat_template_kwargs={"enable_thinking": True},
        logit_bias=liking(server, "</think>"),
    )
    assert holds(choice)
    assert "</think>" not in text_of(choice)
    [short] = choices(
        server, response_format=FORMAT, chat_template_kwargs={"enable_thinking": True}, max_tokens=34
    )
    jsonschema.validate(json.loads(text_of(short)), SCHEMA)
    assert short["message"]["reasoning_content"]


@pytest.mark.parametrize("schema", [{}, True, {"description": "anything"}], ids=str)
def test_a_schema_that_says_nothing_is_any_json(server: Running, schema: Any) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
    bias = liking(server, "7")
    [choice] = choices(server, response_format=format, logit_bias=bias, max_tokens=30)
    assert choice["finish_reason"] in ("stop", "length")
    assert text_of(choice).strip()[0] in '{["-0123456789tfn'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    [choice] = choices(server, tools=tools, tool_choice="required", max_tokens=60)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith("{")


def test_every_one_of_n_answers_is_bound_and_they_differ(server: Running) -> None:
    found = choices(server, response_format=FORMAT, n=6)
    assert all(map(holds, found))
    assert len(set(map(text_of, found))) > 1


def test_answers_that_are_preempted_are_those_that_they_would_have_been(server: Running) -> None:
    def preemptions() -> float:
        metrics = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
        return float(re.findall(r"^vllm:num_preemptions_total\S* (\S+)", metrics, re.MULTILINE)[0])

    def pages() -> tuple[int, int]:
        """Tokens of a page, and how many pages there are."""
        metrics = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
        [info] = re.findall(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
        found = dict(re.findall(r'(\w+)="(\d+)"', info))
        return int(found["block_size"]), int(found["num_gpu_blocks"])

    wide = {"structured_outputs": {"regex": "[a-f]{200}"}, "logit_bias": liking(server, *"abcdef")}
    first = SamplingParams(max_tokens=200, seed=1)
    seeds = [sibling(first, place).seed for place in range(6)]
    alone = [text_of(choices(server, **wide, seed=seed)[0]) for seed in seeds]
    before = preemptions()
    answers = choices(server, **wide, seed=1, n=6, return_token_ids=True)
    assert [text_of(answer) for answer in answers] == alone
    assert all(re.fullmatch("[a-f]{200}", text) for text in alone)
    assert len(set(alone)) > 1
    size, count = pages()
    wanted = sum(len(answer["token_ids"]) // size for answer in answers)
    assert wanted > count, "they cannot all be there at the end, however they go on"
    assert preemptions() > before


def test_a_stop_string_ends_a_bound_answer_and_says_so(server: Running) -> None:
    [whole] = choices(server, response_format=FORMAT)
    stop = text_of(whole)[len(text_of(whole)) // 2 :][:2]
    [choice] = choices(server, response_format=FORMAT, stop=stop)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert text_of(choice) == text_of(whole)[: text_of(whole).index(stop)]


def test_logprobs_of_a_bound_answer_are_the_models_own(server: Running) -> None:
    asked = {"logprobs": True, "top_logprobs": 5, "return_token_ids": True}
    [choice] = choices(server, response_format=FORMAT, **asked)
    assert holds(choice)
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(choice["token_ids"])
    assert "".join(entry["token"] for entry in entries[:-1]) == text_of(choice)
    assert all(len(entry["top_logprobs"]) == 5 and entry["logprob"] < 0 for entry in entries)
    likeliest = [max(one["logprob"] for one in entry["top_logprobs"]) for entry in entries]
    assert any(entry["logprob"] < best for entry, best in zip(entries, likeliest, strict=True)), (
        "the model wanted something else, and that is shown"
    )
