"""Reads what the user types: with editing, history and completion of commands where there is a terminal."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

ReadLine = Callable[[], str]


class Commands(Completer):
    """Completes the names of commands."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """The commands that begin as the line does."""
        line = document.text_before_cursor
        if line.startswith("/"):
            for name in self._names:
                if name.startswith(line):
                    yield Completion(name, start_position=-len(line))


def line_editor(commands: Sequence[str], history: History | None = None) -> ReadLine:
    """Reads one entry, which may have several lines: Enter ends it, Alt-Enter begins a line.

    What it returns raises EOFError and KeyboardInterrupt.
    """
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    session: PromptSession[str] = PromptSession(
        FormattedText([("bold ansicyan", "> ")]),
        history=_history() if history is None else history,
        completer=Commands(commands),
        complete_while_typing=False,
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        enable_open_in_editor=True,
    )
    return session.prompt


def is_interactive() -> bool:
    """Whether a person types."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _history() -> History:
    """That of the user's earlier conversations, which only the user may read."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = base / "personae" / "chat_history"
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        return FileHistory(path)
    return InMemoryHistory()
