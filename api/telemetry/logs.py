"""What the server logs: a line for each answer, and for each problem, with the request's id.

A line that is logged while a request is served has what is known of the request: its id (the client's
`x-request-id`), its tenant, the model and the id of the answer. Prompts and answers are never logged.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

import msgspec

LogFormat = Literal["text", "json"]
LogLevel = Literal["info", "warning", "error"]

_about: ContextVar[dict[str, Any] | None] = ContextVar("about", default=None)
_QUIET = {"/health", "/ready", "/ping", "/load", "/metrics"}  # asked every few seconds: shown with DEBUG only
_IN_TEXT = ("tenant", "model", "prompt_tokens", "cached_tokens", "completion_tokens", "code")
_LONGEST_PATH = 200
access = logging.getLogger("personae.access")


class Writes(Protocol):
    """What lines can be written to."""

    def write(self, text: str, /) -> int: ...  # noqa: D102  as of a file

    def flush(self) -> None: ...  # noqa: D102  as of a file


@contextmanager
def request(request_id: str) -> Iterator[None]:
    """Everything that is logged inside the block, also by tasks that are started in it, is about this
    request."""
    token = _about.set({"request_id": request_id})
    try:
        yield
    finally:
        _about.reset(token)


def note(**known: object) -> None:
    """Add facts about the current request, if there is one."""
    about = _about.get()
    if about is not None:
        about.update(known)


def count(**numbers: int) -> None:
    """Add to numbers that are known of the current request, if there is one."""
    about = _about.get()
    if about is not None:
        for name, number in numbers.items():
            about[name] = about.get(name, 0) + number


def answered(method: str, path: str, route: str, status: int, seconds: float) -> None:
    """Log an answer. Status 499: the client left before there was one."""
    level = logging.DEBUG if route in _QUIET else logging.INFO
    if access.isEnabledFor(level):
        shown = "".join(char if char.isprintable() else "?" for char in path[:_LONGEST_PATH])
        note(method=method, path=shown, route=route, status=status, seconds=round(seconds, 4))
        access.log(level, "%s %s %d %.3fs", method, shown, status, seconds)


class TextFormatter(logging.Formatter):
    """For people: time, level, logger, message, and what is known of the request if there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the traceback if there is one."""
        line, *rest = super().format(record).split("\n")
        about = _about.get()
        if about is not None:
            known = [f"{name}={about[name]}" for name in _IN_TEXT if about.get(name)]
            line += f" [{' '.join([about['request_id'], *known])}]"
        return "\n".join([line, *rest])


class JsonFormatter(logging.Formatter):
    """For programs: one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line: `time` (RFC 3339), `level`, `logger`, `message`, perhaps `error`, and the request."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage().encode("utf-8", "backslashreplace").decode(),
            **(_about.get() or {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure(kind: LogFormat, level: LogLevel, stream: Writes | None = None) -> None:
    """Log to `stream`, else to stderr, from `level` on."""
    handler: logging.StreamHandler[Any] = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.ERROR if level == "error" else logging.WARNING)
