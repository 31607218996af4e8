"""Agents that people use, run as they are: each reads a file with a tool of its own, and a second question
goes on with the conversation. `personae launch` says how they are started. The server is in front of an
engine that answers by script.

They have a home of their own, no account, and only this server to talk to.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from client_programs import CLIENTS, interpreter, missing
from fake_engine import FakeEngine, byte_tokenizer
from live_server import serving
from tool_chat import TAGS, TEMPLATE, call
from uploads import open_fixture

from personae.api.app import create_app
from personae.api.commands.agents import prepared
from personae.api.responses.store import ResponseStore
from personae.engine.sequence import SequenceLog

PROGRAMS = CLIENTS / "node" / "node_modules" / ".bin"
SECONDS = 120  # for a program; it takes 3
NOTE = "The note says seven.\n"
QUESTION, THANKS = "What does note.txt say?", "Thanks, and good bye!"
ANSWERS = ["It says seven.", "You are welcome."]
NOWCLIENTS = "http://127.0.0.1:9"  # nothing listens there
QUIET = {"NO_PROXY": "127.0.0.1", "HTTPS_PROXY": NOWCLIENTS, "HTTP_PROXY": NOWCLIENTS}


class Agent(NamedTuple):
    """A program: its arguments for a question (and whether the conversation goes on), its call that reads a
    file, and what it answered."""

    name: str
    arguments: Callable[[str, bool], list[str]]
    call: str
    answer: Callable[[str], str]


def _claude(question: str, more: bool) -> list[str]:
    arguments = ["--print", "--allowedTools", "Bash", "--output-format", "json"]
    return [*arguments, *(["--continue"] if more else []), question]


def _claudes_answer(output: str) -> str:
    return str(json.loads(output)["result"])


def _codex(question: str, more: bool) -> list[str]:
    arguments = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    return ["exec", *(["resume", "--last"] if more else []), *arguments, question]


def _codexs_answer(output: str) -> str:
    events = [json.loads(line) for line in output.splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return str([item["text"] for item in items if item["type"] == "agent_message"][-1])


AGENTS = (
    Agent("claude", _claude, call("Bash", command="cat note.txt"), _claudes_answer),
    Agent("codex", _codex, call("exec_command", cmd="cat note.txt"), _codexs_answer),
)


@pytest.mark.parametrize("length", [400_000, 100_000], ids=["long context", "less than it asks for"])
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_reads_a_file_and_goes_on(agent: Agent, length: int, tmp_path: Path) -> None:
    interpreter("node")
    if not (PROGRAMS / agent.name).exists():
        missing(f"{agent.name} is not installed: `make clients` installs it")
    engine = FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=length, burst=16)

    def answer(log: SequenceLog) -> str:
        prompt = engine.tokenizer.decode(log.tokens[: log.prompt_length], skip_special_tokens=False)
        thought = "I see.\n</think>\n\n" if prompt.endswith("<think>\n") else ""
        _, _, conversation = prompt.rpartition(QUESTION)
        if THANKS in conversation:
            return thought + ANSWERS[1]
        return thought + (ANSWERS[0] if NOTE.strip() in conversation else agent.call)

    engine.answer = answer
    (work := tmp_path / "work").mkdir()
    (work / "note.txt").write_text(NOTE)
    env = {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "HOME": str(tmp_path), **QUIET}
    with serving(create_app(engine)) as url:
        for more, (question, expected) in enumerate(zip((QUESTION, THANKS), ANSWERS, strict=True)):
            arguments = agent.arguments(question, bool(more))
            launch = prepared(agent.name, arguments, url=url, model=None, key=None, env=env)
            done = subprocess.run(
                [launch.program, *launch.arguments[1:]],
                cwd=work,
                env=launch.env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
            assert agent.answer(done.stdout) == expected, done.stdout
    assert len(engine.submitted) == 3
    last = engine.submitted[-1]
    history = engine.tokenizer.decode(last.tokens[: last.prompt_length], skip_special_tokens=False)
    places = [history.rindex(part) for part in (QUESTION, "cat note.txt", NOTE.strip(), ANSWERS[0], THANKS)]
    assert places == sorted(places)


def test_the_ai_sdk_refers_to_stored_items_by_default(tmp_path: Path) -> None:
    node = interpreter("node")
    engine = FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=8192)
    thought = "<think>I look.</think>"

    def answer(log: SequenceLog) -> str:
        prompt = engine.tokenizer.decode(log.tokens[: log.prompt_length], skip_special_tokens=False)
        if "Thanks!" in prompt:
            return "You are welcome."
        if "10:15<|im_end|>" in prompt:
            return f"{thought}It is 10:15."
        return thought + call("get_weather", city="Oslo") + call("get_time")

    engine.answer = answer
    with open_fixture(tmp_path) as fixture:
        app = create_app(engine, stored=ResponseStore(fixture.data))
        with serving(app) as url:
            done = subprocess.run(
                [node, str(CLIENTS / "node" / "ai_sdk_loop.mjs"), f"{url}/v1", "defaults"],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    told = [json.loads(line) for line in done.stdout.splitlines()]
    calls, texts = [["get_weather", {"city": "Oslo"}], ["get_time", {}]], ["It is 10:15.", "You are welcome."]
    ways = ["openai responses", "openai responses, streamed"]
    assert told == [{"way": way, "calls": calls, "texts": texts} for way in ways]
    parts = (
        "I look.",
        "get_weather",
        "get_time",
        "7 degrees in Oslo",
        "10:15<|im_end|>",
        *texts[:1],
        "Thanks!",
    )
    assert len(engine.submitted) == 6
    for last in engine.submitted[2::3]:
        history = engine.tokenizer.decode(last.tokens[: last.prompt_length], skip_special_tokens=False)
        conversation = history.partition("</tool_call>.<|im_end|>\n")[2]
        places = [conversation.index(part) for part in parts]
        assert places == sorted(places)
