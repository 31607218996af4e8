"""Sets: an item cannot end where it would equal an item that is already there.

A matcher reads what is written, and excludes the tokens that would end an item as a repetition. If the items
are strings that may be any text (SET), a string that must not end here can continue, and no answer reaches a
point where nothing may follow. Of other items (DISTINCT) `distinct.py` knows which of them are left.
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
from personae.grammar.tracked.distinct import Written
from personae.grammar.tracked.endings import Endings, clear_tokens
from personae.grammar.tracked.listed_names import ListedNames
from personae.grammar.tracked.places import CompileItems, Nodes, Places, Reader
from personae.grammar.tracked.seen import NO_TEXTS, SeenItems

_SIGNS = re.compile(rb'["{}\[\]:,]')
_OPENING = re.compile(rb"[{\[]")
_IN_STRING = re.compile(rb'["\\]')
_BLANKS = b" \t\r\n"


class _OpenValue(NamedTuple):
    """An object or array that has begun. `nodes` are the schemas that may apply to it."""

    above: "_OpenValue | None"
    is_object: bool
    nodes: Nodes
    value: Nodes
    seen: SeenItems | None
    written: Written | None = None
    begin: int = 0  # where an item begins, if `written` is there
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
            _check(frame, begun, text, length, place)
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
                if frame.written is not None:
                    frame = frame._replace(begin=length + place)
            case b"}" | b"]":
                if frame is not None and frame.written is not None:
                    _ended(frame.written, _item(frame, begun, text, length, place - 1), endings)
                frame = frame and frame.above
                is_key = False
                _check(frame, begun, text, length, place)
            case b":":
                is_key = False
            case b",":
                is_key = frame is not None and frame.is_object
                if frame is not None and frame.names is not None and not frame.names.left(_seen(frame)):
                    raise _Violation
                if frame is not None and frame.written is not None:
                    written = _ended(frame.written, _item(frame, begun, text, length, place - 1), endings)
                    if written.exhausted:
                        raise _Violation
                    frame = frame._replace(written=written, begin=length + place)
    _check_begun(frame, begun, text, length)
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


def _item(frame: _OpenValue, begun: bytearray, text: bytes, length: int, place: int) -> bytes:
    """The item of a set as it has been written up to `place` in `text`."""
    before = bytes(begun[frame.begin :]) if frame.begin < length else b""
    return (before + text[max(frame.begin - length, 0) : place]).strip(_BLANKS)


def _ended(written: Written, item: bytes, endings: Endings) -> Written:
    """The items after one more. Raises _Violation."""
    if not item:
        return written
    if item in written:
        raise _Violation
    return written.with_item(item, endings)


def _check(frame: _OpenValue | None, begun: bytearray, text: bytes, length: int, place: int) -> None:
    """Raises _Violation if a string, object or array that ends here repeats an item."""
    if frame is None or frame.written is None:
        return
    if _item(frame, begun, text, length, place) in frame.written:
        raise _Violation


def _check_begun(frame: _OpenValue | None, begun: bytearray, text: bytes, length: int) -> None:
    """Raises _Violation if the begun item cannot become a new one."""
    above = frame
    while (around := _set_around(above)) is not None:
        above = around.above
        if not around.written:
            continue
        before = bytes(begun[around.begin :]) if around.begin < length else b""
        item = (before + text[max(around.begin - length, 0) :]).lstrip(_BLANKS)
        if not around.written.allows(item, len(before.lstrip(_BLANKS))):
            raise _Violation
        whole = item.rstrip(_BLANKS)
        if len(whole) < len(item) and around is frame and whole in around.written:
            raise _Violation  # a number that ends with a blank


def _set_around(frame: _OpenValue | None) -> _OpenValue | None:
    """The innermost set of values that is open."""
    while frame is not None and frame.written is None:
        frame = frame.above
    return frame


def _seen(frame: _OpenValue) -> "HashTrieSet[bytes]":
    return NO_TEXTS if frame.seen is None else frame.seen.texts


def _opened(reader: Reader, frame: _OpenValue | None, nodes: Nodes, *, is_object: bool) -> _OpenValue:
    if is_object:
        seen = SeenItems() if any(NAMES in node for node in nodes) else None
        return _OpenValue(frame, True, nodes, (), seen, names=reader.names_of(nodes))
    is_set = any(SET in node for node in nodes)
    items = reader.items(nodes) if reader.distinct else None
    written = None if items is None else items.unwritten
    seen = SeenItems() if is_set else None
    return _OpenValue(frame, False, nodes, reader.children(nodes, None), seen, written)


class SetsCompiled:
    """A compiled grammar for answers whose sets have no item twice. `inner` knows nothing of sets."""

    def __init__(
        self, inner: CompiledGrammar, places: Places, endings: Endings, compile_items: CompileItems
    ) -> None:
        self._inner = inner
        self._reader = Reader(places, compile_items)
        self._endings = endings
        if self._reader.distinct or self._reader.names:
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
        around = _set_around(frame) if self._reader.distinct else None
        if self._reader.distinct and around is None:
            words &= endings.outside
        if around is not None and not self._reader.texts:
            self._leave_out_of_all(words, frame)
            return
        self._leave_out_of_all(words, around)
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

    def _leave_out_of_all(
        self, words: "np.ndarray[Any, np.dtype[np.uint32]]", frame: _OpenValue | None
    ) -> None:
        """Exclude what would end or spoil an item of any set that is open; an item may be a set."""
        innermost = self._states[-1].frame
        while (around := _set_around(frame)) is not None:
            if around.written is not None:
                self._leave_out_items(words, around, around.written, direct=around is innermost)
            frame = around.above

    def _leave_out_items(
        self,
        words: "np.ndarray[Any, np.dtype[np.uint32]]",
        around: _OpenValue,
        written: Written,
        *,
        direct: bool,
    ) -> None:
        """Exclude the tokens after which an item would repeat another, or could not be any other."""
        endings = self._endings
        words &= endings.directly if direct else endings.deeper
        begun = bytes(self._text[around.begin :]).lstrip(_BLANKS)
        written.bar(words, begun, endings)

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
        in_set = (frame is not None and frame.seen is not None) or _set_around(frame) is not None
        return b"" if in_set else self._inner.forced()

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
