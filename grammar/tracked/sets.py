"""Sets of strings: an item cannot end where it would equal an item that is already there.

The strings of such a set may be any text. So a string that must not end here can continue, and no answer
reaches a point where nothing may follow. A matcher reads what is written, and excludes the tokens that would
end an item as a repetition.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from personae.grammar.backend import BackendMatcher, CompiledGrammar
from personae.grammar.bitmask import Bitmask
from personae.grammar.schema.walk import SET, target
from personae.grammar.vocabulary import Vocabulary

SETS_COMMENT = "// x-personae-sets "
"""How the first line of a grammar begins that contains `Places`."""
_Nodes = tuple[dict[str, Any], ...]
_SIGNS = re.compile(rb'["{}\[\]:,]')
_OPENING = re.compile(rb"[{\[]")
_IN_STRING = re.compile(rb'["\\]')
_ESCAPED = re.compile(rb"\\.", re.DOTALL)


class _OpenValue(NamedTuple):
    """An object or array that has begun. `nodes` are the schemas that may apply to it."""

    above: "_OpenValue | None"
    is_object: bool
    nodes: _Nodes
    value: _Nodes
    seen: frozenset[bytes] | None


class _State(NamedTuple):
    """How far an answer has got. `start` is where the string begins that is being written, or -1."""

    frame: _OpenValue | None
    start: int
    is_key: bool
    escaped: bool
    length: int


class Thought(msgspec.Struct, frozen=True):
    """How an answer may begin: reasoning up to `close`. `open` opens it, unless it is empty."""

    open: str
    close: str


class Places(msgspec.Struct, frozen=True):
    """Where JSON is in an answer: after which texts, and by which schemas."""

    schemas: tuple[tuple[str, dict[str, Any]], ...]
    thought: Thought | None = None


class Reader:
    """Finds the schemas of sets. Thread-safe."""

    def __init__(self, places: Places) -> None:
        self._children: dict[tuple[tuple[int, ...], str | None], _Nodes] = {}
        self._documents: dict[int, dict[str, Any]] = {}
        self._roots = [
            (re.compile((_blanks(before) + r"\s*\Z").encode()), self._parts((document,), document))
            for before, document in places.schemas
        ]
        self._thought = places.thought

    def root(self, text: bytes) -> _Nodes:
        """The schemas that may apply to JSON that begins after `text`."""
        if self._thought is not None:
            opened = text.lstrip().startswith(self._thought.open.strip().encode())
            _, close, behind = text.partition(self._thought.close.encode())
            if opened and not close:
                return ()
            text = behind if opened else text
        return tuple(one for pattern, nodes in self._roots if pattern.search(text) for one in nodes)

    def _parts(self, nodes: Sequence[Any], document: dict[str, Any]) -> _Nodes:
        """The schemas, and those that they refer to or consist of."""
        found: dict[int, dict[str, Any]] = {}
        unseen = list(nodes)
        while unseen:
            one = unseen.pop()
            if isinstance(one, dict) and id(one) not in found:
                found[id(one)] = one
                for keyword in ("anyOf", "allOf", "oneOf"):
                    unseen += one.get(keyword, ())
                if "$ref" in one:
                    unseen.append(target(document, one["$ref"]))
        self._documents |= dict.fromkeys(found, document)
        return tuple(found.values())

    def children(self, nodes: _Nodes, key: str | None) -> _Nodes:
        """The schemas that may apply to the value of a property, or to an item if `key` is None."""
        place = tuple(map(id, nodes)), key
        if place not in self._children:
            if len(self._children) > 4096:
                self._children.clear()
            found: dict[int, dict[str, Any]] = {}
            for node in nodes:
                parts = self._parts(_within(node, key), self._documents[id(node)])
                found |= {id(one): one for one in parts}
            self._children[place] = tuple(found.values())
        return self._children[place]


def _within(node: dict[str, Any], key: str | None) -> list[Any]:
    if key is None:
        items = node.get("items", True)
        return [*node.get("prefixItems", ()), *(items if isinstance(items, list) else [items])]
    listed = node.get("properties", {})
    if key in listed:
        return [listed[key], *node.get("patternProperties", {}).values()]
    return [node.get("additionalProperties", True), *node.get("patternProperties", {}).values()]


def _blanks(text: str) -> str:
    """A pattern for a text of a structure. A blank in it stands for any blanks, or none."""
    if not text.strip():
        return r"\A"
    return r"\s*".join(map(re.escape, text.split())).replace(r"\#", r"\d*")


class _Violation(Exception):
    """An item repeats an earlier one."""


def _step(reader: Reader, state: _State, text: bytes, begun: bytearray) -> _State:
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
            if frame is not None and is_key:
                frame = frame._replace(value=reader.children(frame.nodes, json.loads(b'"' + content + b'"')))
            elif frame is not None and frame.seen is not None:
                if content in frame.seen:
                    raise _Violation
                frame = frame._replace(seen=frame.seen | {content})
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
    return _State(frame, start, is_key, escaped, length + size)


def _opened(reader: Reader, frame: _OpenValue | None, nodes: _Nodes, *, is_object: bool) -> _OpenValue:
    if is_object:
        return _OpenValue(frame, True, nodes, (), None)
    is_set = any(SET in node for node in nodes)
    return _OpenValue(frame, False, nodes, reader.children(nodes, None), frozenset() if is_set else None)


class Endings:
    """Knows which tokens of a vocabulary end strings. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = {token: name.encode() for name, token in vocabulary.special.items()}
        self.tokens = tuple(text or names.get(token, b"") for token, text in enumerate(vocabulary.tokens))
        with_quotes = [(text, token) for token, text in enumerate(self.tokens) if b'"' in text]
        with_quotes.sort()
        self._texts = [text for text, _ in with_quotes]
        self._ids = np.array([token for _, token in with_quotes], np.int64)
        words = (vocabulary.size + 31) // 32
        quotes = [_ESCAPED.sub(b"", text).count(b'"') for text in self._texts]
        self.within = self._bits([count < 3 for count in quotes], words)
        self.between = self._bits([count < 2 for count in quotes], words)
        self.anywhere = self._bits(
            [count < 4 or b"[" not in text for count, text in zip(quotes, self._texts, strict=True)], words
        )

    def _bits(self, kept: list[bool], words: int) -> "np.ndarray[Any, np.dtype[np.uint32]]":
        """A mask of all tokens except those that are not kept."""
        bits = np.full(words, 0xFFFFFFFF, np.uint32)
        for token in self._ids[~np.array(kept, bool)] if kept else ():
            bits[token // 32] &= ~np.uint32(1 << int(token) % 32)
        return bits

    def beginning(self, text: bytes) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """The tokens that begin with `text`, which ends with a quote."""
        first = bisect_left(self._texts, text)
        return self._ids[first : bisect_left(self._texts, text[:-1] + b"#", lo=first)]


class SetsCompiled:
    """A compiled grammar for answers whose sets have no item twice. `inner` knows nothing of sets."""

    def __init__(self, inner: CompiledGrammar, places: Places, endings: Endings) -> None:
        self._inner = inner
        self._reader = Reader(places)
        self._endings = endings

    @property
    def nbytes(self) -> int:
        """Bytes held, for the cache's bound."""
        return self._inner.nbytes

    def matcher(self) -> "SetsMatcher":
        """A new matcher at the grammar's start."""
        return SetsMatcher(self._inner.matcher(), self._reader, self._endings)


class SetsMatcher:
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
        if frame is None or frame.seen is None:
            words &= endings.anywhere
        elif state.start < 0:
            words &= endings.between
        else:
            words &= endings.within
            begun = bytes(self._text[state.start :])
            for item in frame.seen:
                if item.startswith(begun):
                    tokens = endings.beginning(item[len(begun) :] + b'"')
                    np.bitwise_and.at(
                        words, tokens // 32, ~np.left_shift(np.uint32(1), (tokens % 32).astype(np.uint32))
                    )

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
                state = _step(self._reader, state, written, text)
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
