r"""Module patterns, as in PEFT's `rank_pattern` and `target_modules`, matched in bounded time.

PEFT gives a module the entry whose key matches `(.*\\.)?(KEY)$` against its name. The keys are untrusted, and
Python's `re` can take years for a short one, such as `(a+)+b`. So the package `regex` matches keys, because
it stops at a deadline. A key that the two packages would interpret differently is rejected.
"""

import re
import time
import warnings
from collections.abc import Callable, Mapping

import regex

from personae.errors import AdapterError

MAX_PATTERN = 128  # characters of one key
MAX_KEYS = 4096  # each key may be matched against each module
MAX_REPEATS = 1000  # of counted repeats, so that compilation is fast
MAX_SECONDS = 1.0  # for all names together

PLAIN = re.compile(r"\^?[A-Za-z0-9_.]*(?:\\\.[A-Za-z0-9_.]*)*\$?")  # no alternatives, so `re` is linear
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")


class NamePattern:
    """A regular expression for names.

    Raises AdapterError (without the field) if PEFT could not compile it, if `regex` would interpret it
    differently, or if matching has taken more than `MAX_SECONDS` in total.
    """

    def __init__(self, pattern: str) -> None:
        _check(pattern)
        try:
            self._key = regex.compile(rf"(?:.*\.)?(?:{pattern})$")
            self._whole = regex.compile(pattern)
        except regex.error as error:
            raise AdapterError(str(error)) from None
        self._left = MAX_SECONDS

    def matches(self, name: str) -> bool:
        """Whether a key selects the module, by PEFT's rule."""
        return self._timed(self._key.match, name)

    def matches_whole(self, name: str) -> bool:
        """Whether the whole name matches."""
        return self._timed(self._whole.fullmatch, name)

    def _timed(self, match: Callable[..., object], name: str) -> bool:
        begun = time.perf_counter()
        try:
            found = match(name, timeout=max(self._left, 1e-3))
        except TimeoutError:
            raise AdapterError("it takes too long to match; write out the modules' names") from None
        self._left -= time.perf_counter() - begun
        return bool(found)


class ModulePatterns:
    """A pattern field of an adapter's config. The first key that matches a module's name gives its value."""

    def __init__(self, field: str, values: Mapping[str, float]) -> None:
        if len(values) > MAX_KEYS:
            raise AdapterError(f"{field} has more than {MAX_KEYS} keys", param=field)
        self._field = field
        self._entries: list[tuple[str, Callable[[str], object], float]] = []
        for key, value in values.items():
            if len(key) > MAX_PATTERN:
                message = f"{self._where(key)}... is longer than {MAX_PATTERN} characters"
                raise AdapterError(message, param=field)
            try:
                self._entries.append((key, _matcher(key), value))
            except AdapterError as error:
                raise AdapterError(f"{self._where(key)}: {error.message}", param=field) from None

    def get(self, name: str, default: float) -> float:
        """The value of the first key that matches `name`, otherwise `default`."""
        for key, matches, value in self._entries:
            try:
                if matches(name):
                    return value
            except AdapterError as error:
                raise AdapterError(f"{self._where(key)}: {error.message}", param=self._field) from None
        return default

    def _where(self, key: str) -> str:
        return f"{self._field}: key {key[:MAX_PATTERN]!r}"


def _matcher(key: str) -> Callable[[str], object]:
    if PLAIN.fullmatch(key):
        return re.compile(rf"(?:.*\.)?(?:{key})$").match
    return NamePattern(key).matches


def _check(pattern: str) -> None:
    """Rejects what `re` cannot compile, what `regex` interprets differently, and what takes long to
    compile."""
    if not (pattern.isascii() and pattern.isprintable()):
        raise AdapterError("it has characters that module names cannot have")
    braces = _COUNT.sub("", pattern)
    if re.search(r"[{}]", braces):
        raise AdapterError("a brace that is not a count must be written as `[{]`")
    counts = [int(number) for low, _, high in _COUNT.findall(pattern) for number in (low, high) if number]
    repeats = 1
    for count in counts:
        repeats *= max(count, 1)
    if repeats > MAX_REPEATS:
        raise AdapterError(f"its counts multiply to more than {MAX_REPEATS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # `re` warns of sets whose meaning may change
            re.compile(pattern)
    except (re.error, Warning, RecursionError, OverflowError) as error:
        raise AdapterError(str(error)) from None
