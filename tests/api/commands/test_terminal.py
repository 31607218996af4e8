"""`personae chat`, against the real server."""

import io
from collections.abc import Iterator

import httpx
import pytest
from fake_engine import FakeEngine
from live_server import serving
from patience import PATIENCE
from rich.console import Console

from personae.api.app import create_app
from personae.api.commands.terminal import ChatFailed, Conversation, talk


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    with serving(create_app(engine)) as address:
        yield address


@pytest.fixture
def conversation(address: str, engine: FakeEngine) -> Iterator[Conversation]:
    with httpx.Client(base_url=address, timeout=PATIENCE) as client:
        yield Conversation(address, None, None, client)
    engine.fail_after, engine.hold_after = None, None


def said(conversation: Conversation, *lines: str) -> str:
    """What the terminal shows when these lines are typed and the input ends."""
    typed = io.StringIO("".join(f"{line}\n" for line in lines))
    console = Console(file=io.StringIO(), width=200)
    console.input = lambda *_, **__: _line(typed)  # type: ignore[method-assign]  # typing, by a program
    talk(conversation, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _line(typed: io.StringIO) -> str:
    line = typed.readline()
    if not line:
        raise EOFError
    return line


def test_an_answer_is_shown_and_remembered(conversation: Conversation) -> None:
    assert "Hello, world!" in said(conversation, "hi")
    assert conversation.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello, world!"},
    ]


def test_the_whole_conversation_is_sent(conversation: Conversation, engine: FakeEngine) -> None:
    said(conversation, "/system be brief", "hi", "again")
    prompt = engine.tokenizer.decode(engine.submitted[-1].tokens)
    assert prompt == "system\nbe brief\nuser\nhi\nassistant\nHello, world!\nuser\nagain\nassistant\n"
    said(conversation, "/reset", "anew")
    assert engine.tokenizer.decode(engine.submitted[-1].tokens) == "system\nbe brief\nuser\nanew\nassistant\n"


def test_the_first_model_answers_until_another_is_chosen(
    conversation: Conversation, engine: FakeEngine
) -> None:
    shown = said(conversation, "hi", "/model team/pirate", "hi", "/model", "/model nobody")
    assert [log.adapter for log in engine.submitted[-2:]] == [None, "d" * 64]
    assert "* team/pirate" in shown
    assert "no such model; there are base, team/pirate" in shown


def test_closing_the_answer_stops_it_and_keeps_what_came(
    conversation: Conversation, engine: FakeEngine
) -> None:
    engine.hold_after = 5
    engine.left.clear()
    pieces = conversation.ask("hi")
    got = ""
    while got != "Hello":
        got += next(pieces)
    pieces.close()
    assert engine.left.wait(PATIENCE)
    assert conversation.messages[-1] == {"role": "assistant", "content": "Hello"}


def test_a_refusal_is_shown_and_forgotten(conversation: Conversation, engine: FakeEngine) -> None:
    assert "maximum context length is 512 tokens" in said(conversation, "x" * 600)
    assert conversation.messages == []
    engine.fail_after = 0
    assert "could not be finished" in said(conversation, "hi")


def test_a_server_that_is_not_there_is_said(conversation: Conversation) -> None:
    nowhere = Conversation("http://127.0.0.1:9", None, None)
    assert "personae serve" in said(nowhere)
    assert not talk(nowhere, Console(file=io.StringIO()))
    with pytest.raises(ChatFailed):
        nowhere.models()


def test_a_model_that_is_not_there_is_said_before_the_first_line_is_typed(address: str) -> None:
    with httpx.Client(base_url=address) as client:
        shown = said(Conversation(address, "nobody", None, client), "hi")
    assert shown == "no such model; there are base, team/pirate\n"


def test_markup_in_an_answer_is_text(conversation: Conversation, engine: FakeEngine) -> None:
    engine.answer = "[red]list[0][/red]"
    try:
        assert "[red]list[0][/red]" in said(conversation, "hi")
    finally:
        engine.answer = "Hello, world!"


def test_commands_that_do_not_exist_show_those_that_do(conversation: Conversation) -> None:
    assert "/system TEXT" in said(conversation, "/help").splitlines()[-2]
    assert said(conversation, "/exit", "hi").count("Hello") == 0
