"""Other people's clients have a conversation with tools, each in a process of its own, with the server in
front of an engine that answers by script: two calls in one turn, their results, the answer, and one more
question.

What a client made of an answer goes back as it is, so whatever it adds to a message, the server has to take.
`make clients` installs what conflicts with the server's own packages; with PERSONAE_CLIENTS=required, as
CI has it, a client that is missing is a failure.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from client_programs import CLIENTS as HERE
from client_programs import interpreter
from fake_engine import FakeEngine, byte_tokenizer
from litellm_proxy import proxying
from live_server import serving
from tool_chat import TAGS, TEMPLATE, call

from personae.api.app import create_app
from personae.engine.sequence import SequenceLog

SECONDS = 300  # for a program; the slowest takes 20

ANSWERS = ["It is 7 degrees at 10:15.", "You are welcome."]
CALLS = [["get_weather", {"city": "Oslo"}], ["get_time", {}]]
TURNS = 3  # requests of a conversation
SAID = """<|im_start|>user
How is the weather in Oslo, and how late is it?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call><tool_call>
{"name": "get_time", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>tool
7 degrees in Oslo<|im_end|>
<|im_start|>tool
10:15<|im_end|>
<|im_start|>assistant
It is 7 degrees at 10:15.<|im_end|>
<|im_start|>user
Thanks!<|im_end|>
<|im_start|>assistant
"""


class Client(NamedTuple):
    """A program, what runs it, and the ways in which it has the conversation."""

    name: str
    program: str
    home: str
    ways: tuple[str, ...]


CHAT = ("chat", "chat, streamed")
RESPONSES = ("responses", "responses, streamed")
CLIENTS = (
    Client("openai", "python/openai_loop.py", "", CHAT + RESPONSES),
    Client("LangChain", "python/langchain_loop.py", "", CHAT + RESPONSES),
    Client("pydantic-ai", "python/pydantic_ai_loop.py", "", CHAT + RESPONSES),
    Client("OpenAI Agents", "python/openai_agents_loop.py", "openai-agents", CHAT + RESPONSES),
    Client(
        "LiteLLM",
        "python/litellm_loop.py",
        "litellm",
        tuple(
            f"{provider}/{how}"
            for provider in ("hosted_vllm", "openai")
            for how in ("", ", streamed", " responses")
        ),
    ),
    Client("openai for node", "node/openai_loop.mjs", "node", (*CHAT, *RESPONSES, "runTools")),
    Client(
        "Vercel AI SDK",
        "node/ai_sdk_loop.mjs",
        "node",
        tuple(
            name + how
            for name in ("openai-compatible", "openai chat", "openai responses")
            for how in ("", ", streamed")
        ),
    ),
)
PROXY = Client("LiteLLM's proxy", "python/openai_loop.py", "litellm", CHAT + RESPONSES)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=8192)


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    def answer(log: SequenceLog) -> str:
        prompt = prompt_of(engine, log)
        if "Thanks!" in prompt:
            return ANSWERS[1]
        if "10:15<|im_end|>" in prompt:
            return "<think>Both came.</think>" + ANSWERS[0]
        return "<think>I have to look.</think>" + call("get_weather", city="Oslo") + call("get_time")

    engine.answer = answer
    with serving(create_app(engine)) as url:
        yield f"{url}/v1"


def prompt_of(engine: FakeEngine, log: SequenceLog) -> str:
    return engine.tokenizer.decode(log.tokens[: log.prompt_length], skip_special_tokens=False)


def run(client: Client, *arguments: str) -> list[dict[str, Any]]:
    """The lines of a client's program. What it says of other packages' endings is no failure."""
    done = subprocess.run(
        [interpreter(client.home), str(HERE / client.program), *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def judge(client: Client, engine: FakeEngine, lines: list[dict[str, Any]]) -> None:
    """Every way brought the calls and the answers, and the server got all of it in the last turn."""
    assert {line["way"] for line in lines} == set(client.ways)
    for line in lines:
        assert line == {"way": line["way"], "calls": CALLS, "texts": ANSWERS}
    assert len(engine.submitted) == TURNS * len(client.ways)
    for line, log in zip(lines, engine.submitted[TURNS - 1 :: TURNS], strict=True):
        prompt = re.sub(r"<think>.*?</think>", "", prompt_of(engine, log), flags=re.DOTALL)
        tools, _, conversation = prompt.partition("</tool_call>.<|im_end|>\n")
        assert '"get_weather"' in tools, line["way"]
        assert conversation == SAID, line["way"]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_has_a_conversation_with_tools(client: Client, engine: FakeEngine, address: str) -> None:
    engine.submitted.clear()
    judge(client, engine, run(client, address))


def test_a_client_has_a_conversation_with_tools_through_litellms_proxy(
    engine: FakeEngine, address: str, tmp_path: Path
) -> None:
    python = interpreter(PROXY.home)
    engine.submitted.clear()
    with proxying(Path(python).parent, address, tmp_path) as (proxy, key):
        judge(PROXY, engine, run(PROXY, proxy, key))
