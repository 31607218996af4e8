"""Sets of strings, and names of properties: a string cannot end where it would equal one that is there.

A matcher reads what is written, and excludes the tokens that would end a string as a repetition. The strings
may be any text, so one that must not end here can continue, and no answer reaches a point where nothing may
follow. Of listed names `listed_names.py` knows which are left.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rpds import HashTrieSet

from personae.grammar.backend import BackendMatcher, CompiledGrammar
from personae.grammar.bitmask import Bitmask
from personae.grammar.schema.walk import NAMES, SET
from personae.grammar.tracked.endings import Endings, clear_tokens
from personae.grammar.tracked.listed_names import ListedNames
from personae.grammar.tracked.places import Nodes, Places, Reader
from personae.grammar.tracked.seen import NO_TEXTS, SeenItems

_SIGNS = re.compile(rb'["{}\[\]:,]')
_OPENING = re.compile(rb"[{\[]")
_IN_STRING = re.compile(rb'["\\]')


class _OpenValue(NamedTuple):
    """An object or array that has begun. `nodes` are the schemas that may apply to it."""

    above: "_OpenValue | None"
    is_object: bool
    nodes: Nodes
    value: Nodes
    seen: SeenItems | None
    names: ListedNames | None = None  # if an object has no others


class _State(NamedTuple):
    """How far an answer has got. `start` is where the string begins that is being written, or -1."""

    frame: _OpenValue | None
    start: int
    is_key: bool
    escaped: bool
    length: int


class _Violation(Exception):
    """An item repeats an earlier one."""


def _step(reader: Reader, endings: Endings, state: _State, text: bytes, begun: bytearray) -> _State:
    """The state after `text`, which continues `begun`. Raises _Violation."""
    frame, start, is_key, escaped, length = state
    place, size = 0, len(text)
    while place < size:
        if start >= 0:
            if escaped:
                escaped = False
                place += 1
                continue
            found = _IN_STRING.search(text, place)
            if found is None:
                break
            place = found.end()
            if found[0] == b"\\":
                escaped = True
                continue
            content = bytes(begun[start:]) + text[max(start - length, 0) : place - 1]
            start = -1
            if frame is not None and frame.seen is not None and is_key == frame.is_object:
                if content in frame.seen.texts:
                    raise _Violation
                seen = frame.seen.having(content)
                barring = seen.barring((content + b'"',), endings.longest, endings.beginning_string)
                frame = frame._replace(seen=barring)
            if frame is not None and is_key:
                frame = frame._replace(value=reader.children(frame.nodes, _name(content)))
            continue
        found = (_OPENING if frame is None else _SIGNS).search(text, place)
        if found is None:
            break
        place = found.end()
        match found[0]:
            case b'"':
                start = length + place
            case b"{" | b"[":
                is_object = found[0] == b"{"
                if frame is None:
                    nodes = reader.root(bytes(begun) + text[: place - 1])
                    frame = _opened(reader, None, nodes, is_object=is_object) if nodes else None
                else:
                    frame = _opened(reader, frame, frame.value, is_object=is_object)
                if frame is None:
                    continue
                is_key = frame.is_object
            case b"}" | b"]":
                frame = frame and frame.above
                is_key = False
            case b":":
                is_key = False
            case b",":
                is_key = frame is not None and frame.is_object
                if frame is not None and frame.names is not None and not frame.names.left(_seen(frame)):
                    raise _Violation
    if is_key and start >= 0 and frame is not None and frame.names is not None:
        name = bytes(begun[start:]) + text[max(start - length, 0) :]
        if not frame.names.allows(name, _seen(frame)):
            raise _Violation
    return _State(frame, start, is_key, escaped, length + size)


def _name(content: bytes) -> str:
    """The name of a property. Raises _Violation if it is none: what is read may not be allowed."""
    try:
        return str(json.loads(b'"' + content + b'"'))
    except ValueError:
        raise _Violation from None


def _seen(frame: _OpenValue) -> "HashTrieSet[bytes]":
    return NO_TEXTS if frame.seen is None else frame.seen.texts


def _opened(reader: Reader, frame: _OpenValue | None, nodes: Nodes, *, is_object: bool) -> _OpenValue:
    if is_object:
        seen = SeenItems() if any(NAMES in node for node in nodes) else None
        return _OpenValue(frame, True, nodes, (), seen, names=reader.names_of(nodes))
    is_set = any(SET in node for node in nodes)
    seen = SeenItems() if is_set else None
    return _OpenValue(frame, False, nodes, reader.children(nodes, None), seen)


class SetsCompiled:
    """A compiled grammar for answers whose sets have no item twice. `inner` knows nothing of sets."""

    def __init__(self, inner: CompiledGrammar, places: Places, endings: Endings) -> None:
        self._inner = inner
        self._reader = Reader(places)
        self._endings = endings
        if self._reader.names:
            endings.prepare()

    @property
    def nbytes(self) -> int:
        """Bytes held, for the cache's bound."""
        return self._inner.nbytes

    def matcher(self) -> "SetsMatcher":
        """A new matcher at the grammar's start."""
        return SetsMatcher(self._inner.matcher(), self._reader, self._endings)


class SetsMatcher(BackendMatcher):
    """The state of one answer."""

    def __init__(self, inner: BackendMatcher, reader: Reader, endings: Endings) -> None:
        self._inner = inner
        self._reader = reader
        self._endings = endings
        self._states = [_State(None, -1, False, False, 0)]  # after each token
        self._text = bytearray()

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens allowed next, without those that end an item as a repetition."""
        self._inner.fill(bitmask, row)
        if self._inner.terminated:
            return
        words, state = bitmask[row].view(np.uint32), self._states[-1]
        frame, endings = state.frame, self._endings
        if self._reader.names:
            words &= endings.unnamed
        if self._reader.lists_names:
            self._leave_out_names(words, state)
        if frame is None or frame.seen is None:
            words &= endings.anywhere
        elif state.start < 0:
            words &= endings.between
        else:
            words &= endings.within
            begun = bytes(self._text[state.start :])
            barred = frame.seen.barred.get(begun) if state.is_key == frame.is_object else None
            if barred is not None:
                clear_tokens(words, barred)

    def _leave_out_names(self, words: "np.ndarray[Any, np.dtype[np.uint32]]", state: _State) -> None:
        """Exclude the tokens after which a name could only be one that is there, or none could follow."""
        frame, endings = state.frame, self._endings
        words &= endings.unbegun
        above = frame
        while above is not None:
            may_end_names = above is frame and state.is_key  # with the token that writes the last one
            if above.names is not None and above.names.left(_seen(above)) <= may_end_names:
                words &= endings.after(within=state.start >= 0, deeper=above is not frame)
            above = above.above
        if frame is None or frame.names is None or not state.is_key:
            return
        begun = bytes(self._text[state.start :]) if state.start >= 0 else b""
        for text in frame.names.barred(begun, _seen(frame)):
            quoted = text if state.start >= 0 else b'"' + text
            clear_tokens(words, endings.beginning(quoted, state.start < 0))

    def accept(self, token: int) -> bool:
        """Advance by one token; False, and no change, if it is not allowed."""
        after = self._after([token])
        if not after or not self._inner.accept(token):
            return False
        self._write([token], after)
        return True

    def _after(self, tokens: Sequence[int]) -> list[_State]:
        """The states after each of `tokens`, up to one that is not allowed."""
        state, found = self._states[-1], []
        text = self._text if len(tokens) == 1 else bytearray(self._text)
        for token in tokens:
            written = self._endings.tokens[token] if token < len(self._endings.tokens) else b""
            try:
                state = _step(self._reader, self._endings, state, written, text)
            except _Violation:
                break
            if len(tokens) > 1:
                text += written
            found.append(state)
        return found

    def _write(self, tokens: Sequence[int], after: list[_State]) -> None:
        for token, state in zip(tokens, after, strict=True):
            if token < len(self._endings.tokens):
                self._text += self._endings.tokens[token]
            self._states.append(state)

    def feed(self, tokens: Sequence[int]) -> int:
        """Accept tokens until one is not allowed. Returns how many were accepted."""
        after = self._after(tokens)
        taken = self._inner.feed(tokens[: len(after)])
        self._write(tokens[:taken], after[:taken])
        return taken

    def follows(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` would be accepted; a stop token may be the last."""
        return self._inner.follows(tokens[: len(self._after(tokens))])

    def snapshot(self) -> int:
        """How many tokens have been accepted."""
        return self._inner.snapshot()

    def restore(self, snapshot: int) -> None:
        """Undo what was accepted since."""
        self._inner.restore(snapshot)
        if not self._inner.failed:
            del self._states[snapshot + 1 :]
            del self._text[self._states[-1].length :]

    def forced(self) -> bytes:
        """The only text that may follow, if no item is being written."""
        frame = self._states[-1].frame
        return b"" if frame is not None and frame.seen is not None else self._inner.forced()

    def fork(self) -> "SetsMatcher":
        """A second matcher in the same state."""
        other = SetsMatcher(self._inner.fork(), self._reader, self._endings)
        other._states, other._text = self._states.copy(), self._text.copy()
        return other

    @property
    def failed(self) -> bool:
        """Whether the library has given up."""
        return self._inner.failed

    @property
    def terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._inner.terminated
