"""`personae chat` and `personae run`, against the real server."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from live_server import serving
from patience import PATIENCE
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from tool_chat import TAGS, TEMPLATE

from personae.api.app import create_app
from personae.api.commands.conversation import ChatFailed, Conversation
from personae.api.commands.line_editor import Commands, line_editor
from personae.api.commands.printable import printable
from personae.api.commands.terminal import talk
from personae.api.settings import ApiSettings
from personae.engine.generation_config import GenerationDefaults


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
        got += next(pieces).text
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
    for line in ("/help", "/nothing"):
        assert "/system TEXT" in said(conversation, line)
    for end in ("/exit", "/quit", "/bye"):
        assert said(conversation, end, "hi").count("Hello") == 0


def test_no_character_of_an_answer_steers_the_terminal(
    conversation: Conversation, engine: FakeEngine
) -> None:
    engine.answer = "a\x1b]0;title\x07b\x9b31mc\rd\u202ee\x7ff\n\tg"
    try:
        shown = said(conversation, "hi")
    finally:
        engine.answer = "Hello, world!"
    assert "a�]0;title�b�31mc�d�e�f\n" in shown
    assert not set("\x1b\x07\x9b\r\u202e\x7f") & set(shown)
    assert conversation.messages[-1]["content"].startswith("a\x1b]0;"), "the model sees what it wrote"


@pytest.mark.parametrize("code", [*range(32), *range(0x7F, 0xA0), 0x2028, 0x202E, 0x2066, 0xD800])
def test_only_line_ends_and_tabs_pass_of_what_is_not_text(code: int) -> None:
    assert printable(chr(code)) == (chr(code) if chr(code) in "\n\t" else "�")
    assert printable("é 漢 👩\u200d🚀") == "é 漢 👩\u200d🚀"


def test_errors_and_names_of_a_server_do_not_steer_it_either(conversation: Conversation) -> None:
    assert "\x1b" not in said(conversation, "/model \x1b[31mred")


def test_answers_are_bound_to_a_schema_until_it_is_taken_off(
    conversation: Conversation, engine: FakeEngine, tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"a": {"type": "integer"}}}')
    said(conversation, f"/schema {schema}", "hi", '/schema {"type": "integer"}', "hi", "/schema", "hi")
    kinds = [log.grammar is not None for log in engine.submitted[-3:]]
    assert kinds == [True, True, False]
    assert "no valid JSON" in said(conversation, "/schema {nonsense")
    assert "No such file" in said(conversation, "/schema nowhere.json")
    assert "is a JSON object" in said(conversation, "/schema [1]")


def test_an_adapter_is_chosen_and_left(conversation: Conversation, engine: FakeEngine) -> None:
    shown = said(conversation, "/adapter team/pirate", "hi", "/adapter none", "hi", "/adapter")
    assert [log.adapter for log in engine.submitted[-2:]] == ["d" * 64, None]
    assert "* base\n  team/pirate" in shown


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("/adapter team/pirate", "talking to team/pirate\n"),
        ("/adapter none", "talking to base\n"),
        ("/model team/pirate", "talking to team/pirate\n"),
        ("/system be brief", "the model has these instructions"),
        ("/system", "the model has no instructions"),
        ("/schema {}", "answers are bound to the schema"),
        ("/schema", "answers are free"),
        ("/reset", "what was said is forgotten"),
    ],
)
def test_a_command_says_what_it_did(conversation: Conversation, line: str, note: str) -> None:
    assert note in said(conversation, line)


def test_tokens_of_the_latest_answer_are_counted(conversation: Conversation) -> None:
    assert "there is no answer yet" in said(conversation, "/tokens")
    shown = said(conversation, "hi", "/tokens")
    assert re.search(r"prompt \d+ \(\d+ from the cache\), answer 14, together \d+", shown)


def test_reasoning_is_dimmed_and_not_part_of_the_answer() -> None:
    engine = FakeEngine(
        "<think>Hm.</think>Hello!", tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096
    )
    with serving(create_app(engine)) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        conversation = Conversation(url, None, None, client)
        console = Console(file=io.StringIO(), force_terminal=True, width=200)
        lines = iter(["hi", "/exit"])
        talk(conversation, console, lambda: next(lines))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    dimmed = "".join(re.findall("\x1b\\[2m(.*?)\x1b\\[0m", shown))
    assert "Hm." in dimmed
    assert "Hello!" not in dimmed
    assert conversation.messages[-1]["content"] == "Hello!"


def test_the_models_own_sampling_is_used(address: str) -> None:
    engine = FakeEngine()
    settings = ApiSettings(defaults=GenerationDefaults(temperature=0.25, top_k=7))
    with (
        serving(create_app(engine, settings)) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        said(Conversation(url, None, None, client), "hi")
    [log] = engine.submitted
    assert (log.params.temperature, log.params.top_k) == (0.25, 7)


def test_an_entry_has_several_lines_and_earlier_ones_come_back() -> None:
    with create_pipe_input() as typed, create_app_session(input=typed, output=DummyOutput()):
        read = line_editor(["/adapter", "/schema"], InMemoryHistory())
        typed.send_text("one\x1b\rtwo\r")
        assert read() == "one\ntwo"
        typed.send_text("\x1b[A\x05!\r")  # arrow up, end of line
        assert read() == "one\ntwo!"
        typed.send_text("\x04")
        with pytest.raises(EOFError):
            read()


def test_commands_are_completed() -> None:
    found = Commands(["/adapter", "/schema", "/system"]).get_completions(Document("/s"), CompleteEvent())
    assert [each.text for each in found] == ["/schema", "/system"]
    assert not list(Commands(["/adapter"]).get_completions(Document("a"), CompleteEvent()))


def test_a_conversation_for_which_the_server_runs_has_no_line_of_its_log() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "personae", "run", "demo"],
        input="Hello!\n/exit\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "talking to personae-demo" in done.stdout
    assert done.stderr == ""
