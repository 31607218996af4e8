"""`personae chat`: a conversation with a running server, in the terminal."""

import json
from collections.abc import Generator, Iterator
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from personae.api.commands.remote import refusal, server_root, unreachable

_PATIENCE = httpx.Timeout(10.0, read=None)
_HELP = "/model NAME, /system TEXT, /reset, /exit; Ctrl-C stops an answer"


class ChatFailed(Exception):
    """The server refused, or does not answer; the message is for the user."""


class Conversation:
    """The conversation so far, and its model. The server stores nothing between two answers."""

    def __init__(
        self,
        url: str,
        model: str | None,
        system: str | None,
        client: httpx.Client | None = None,
        *,
        key: str | None = None,
    ) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._client = client or httpx.Client(base_url=server_root(url), timeout=_PATIENCE, headers=headers)
        self.system = system
        self.messages: list[dict[str, str]] = []
        self._model: str | None = None
        self._asked = model

    @property
    def model(self) -> str:
        """The model or adapter that answers; the server's first by default. Raises ChatFailed."""
        if self._model is None:
            self._model = self.models()[0] if self._asked is None else self._known(self._asked)
        return self._model

    @model.setter
    def model(self, name: str) -> None:
        self._model = self._known(name)

    def _known(self, name: str) -> str:
        known = self.models()
        if name not in known:
            raise ChatFailed(f"no such model; there are {', '.join(known)}")
        return name

    def models(self) -> list[str]:
        """The names that the server serves. Raises ChatFailed."""
        try:
            response = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise ChatFailed(unreachable(str(self._client.base_url), error)) from None
        if response.is_error:
            raise ChatFailed(refusal(response))
        return [card["id"] for card in response.json()["data"]]

    def ask(self, text: str) -> Generator[str, None, None]:
        """Send `text` and iterate over the answer as it arrives.

        What has arrived when the iterator is closed is remembered as the answer. Raises ChatFailed; then
        nothing is remembered.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": system + asked, "stream": True}
        answer = ""
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise ChatFailed(refusal(response))
                for piece in _pieces(response):
                    answer += piece
                    yield piece
        except httpx.HTTPError as error:
            raise ChatFailed(f"the connection broke: {error}") from None
        finally:
            if answer:
                self.messages = [*asked, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        self.messages = []


def _pieces(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise ChatFailed(event["error"]["message"])
        for choice in event["choices"]:
            if content := choice["delta"].get("content"):
                yield content


def talk(conversation: Conversation, console: Console | None = None) -> bool:
    """Read lines and print answers until the input ends or /exit; False if no server answers."""
    console = console or Console(highlight=False)
    try:
        console.print(f"[dim]talking to {escape(conversation.model)}; {_HELP}[/dim]")
    except ChatFailed as error:
        console.print(f"[red]{escape(str(error))}[/red]")
        return False
    while True:
        try:
            line = console.input("[bold cyan]> [/bold cyan]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return True
        if line == "/exit":
            return True
        try:
            if line.startswith("/"):
                _command(conversation, console, line)
            elif line:
                _answer(conversation, console, line)
        except ChatFailed as error:
            console.print(f"[red]{escape(str(error))}[/red]")


def _answer(conversation: Conversation, console: Console, text: str) -> None:
    pieces = conversation.ask(text)
    try:
        for piece in pieces:
            console.print(piece, end="", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        pieces.close()
        console.print("[dim] (stopped)[/dim]", end="")
    console.print()


def _command(conversation: Conversation, console: Console, line: str) -> None:
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/reset":
            conversation.reset()
        case "/system":
            conversation.system = rest or None
        case "/model" if rest:
            conversation.model = rest
        case "/model":
            names = (
                f"* {name}" if name == conversation.model else f"  {name}" for name in conversation.models()
            )
            console.print("\n".join(names), markup=False)
        case _:
            console.print(f"[dim]{_HELP}[/dim]")
