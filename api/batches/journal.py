"""Writes the results of a batch to two files that only grow, one line per result.

A result counts once its line is on disk (fsync). A write that was interrupted leaves an incomplete last line.
`Journal` cuts it off when it opens, and those requests run again. So a result is there once or not at all,
and the counts of a batch are always the lines of its files.

Blocking; for threads, one at a time.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from personae.api.batches.model import BatchResponse, BatchUsage, Counts, NotRun, OutputLine
from personae.api.http.upload import sync_folder
from personae.api.wire.answers import AnswerDetails, CachedTokens
from personae.lora.disk import check_free

OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"
EXPIRED = NotRun("batch_expired", "The completion window ended before this request could be run.")
CANCELLED = NotRun("batch_cancelled", "The batch was cancelled before this request was run.")


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """The token counts, in the names of completions and in those of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details = _Details()
    completion_tokens_details: _Details = _Details()
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details = _Details()
    output_tokens_details: _Details = _Details()


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_line = msgspec.json.Decoder(OutputLine).decode
_body = msgspec.json.Decoder(_Body).decode


class Journal:
    """Opens the two files in `folder`, or creates them. `done` has the custom ids that have a line."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self.paths = {name: folder / name for name in (OUTPUT, ERRORS)}
        self.done: set[str] = set()
        self._completed = self._failed = 0
        self._prompt = self._cached = self._answer = self._reasoning = 0
        self._sizes: dict[str, int] = {}
        for name, path in self.paths.items():
            path.touch(mode=0o600)
            self._sizes[name] = self._read(name)
        sync_folder(folder)
        sync_folder(folder.parent)

    @property
    def size(self) -> int:
        """Bytes of both files."""
        return sum(self._sizes.values())

    def counts(self, total: int) -> Counts:
        """The counts of the batch. Requests that were not run are neither completed nor failed."""
        return Counts(total, self._completed, self._failed)

    def usage(self) -> BatchUsage:
        """Tokens of all answers so far."""
        return BatchUsage(
            self._prompt,
            CachedTokens(self._cached),
            self._answer,
            AnswerDetails(self._reasoning),
            total_tokens=self._prompt + self._answer,
        )

    def write(self, lines: Iterable[OutputLine]) -> None:
        """Write the lines to disk, without those whose custom id is done already.

        Raises OSError. What is not on disk then does not count, and can be written again.
        """
        new = {line.custom_id: line for line in lines if line.custom_id not in self.done}
        for name in (OUTPUT, ERRORS):
            mine = [line for line in new.values() if file_of(line) == name]
            if mine:
                self._append(name, b"".join(msgspec.json.encode(line) + b"\n" for line in mine))
            for line in mine:
                self._count(line)

    def remove(self) -> None:
        """Remove what is left after its files have been moved."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _append(self, name: str, data: bytes) -> None:
        check_free(self._folder, len(data))
        with self.paths[name].open("r+b") as file:
            file.truncate(self._sizes[name])  # what an earlier attempt may have left
            file.seek(self._sizes[name])
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._sizes[name] += len(data)

    def _read(self, name: str) -> int:
        """Read what is there, and cut off an incomplete last line. Returns the remaining size."""
        size = 0
        with self.paths[name].open("r+b") as file:
            for text in file:
                try:
                    if not text.endswith(b"\n"):
                        break
                    line = _line(text)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    break
                self._count(line)
                size += len(text)
            file.truncate(size)
            os.fsync(file.fileno())
        return size

    def _count(self, line: OutputLine) -> None:
        self.done.add(line.custom_id)
        if line.response is None:
            return
        if file_of(line) == ERRORS:
            self._failed += 1
            return
        self._completed += 1
        usage = _body(line.response.body).usage or _Usage()
        self._prompt += usage.prompt_tokens + usage.input_tokens
        self._answer += usage.completion_tokens + usage.output_tokens
        for details in (usage.prompt_tokens_details, usage.input_tokens_details):
            self._cached += details.cached_tokens
        for details in (usage.completion_tokens_details, usage.output_tokens_details):
            self._reasoning += details.reasoning_tokens


def results_in(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """The results of a batch that nobody runs: of each its custom id, its file and its line."""
    for name, path in Journal(folder).paths.items():
        with path.open("rb") as file:
            for text in file:
                yield _line(text).custom_id, name, text.removesuffix(b"\n")


def file_of(line: OutputLine) -> str:
    """The file that a result belongs into."""
    response: BatchResponse | None = line.response
    return OUTPUT if response is not None and response.status_code == 200 else ERRORS
