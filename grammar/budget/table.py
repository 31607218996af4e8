"""The tokens of one model in the form that closing answers needs: as bytes, by their brackets, in classes.

A *piece* is a text that may contain special tokens: a tuple of ints, below 256 a byte, above `STOP` the
special tokens in the order of their ids. They are the token ids of `bytewise`, the vocabulary in which
completions are searched. With one token for every byte, a mask takes a microsecond.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from personae.grammar.budget.fillers import BLANKS, Filler, is_plain, is_text, stays_in_text
from personae.grammar.budget.string_masks import StringMasks, Words
from personae.grammar.vocabulary import Vocabulary

Piece = tuple[int, ...]
# From a place in a text to its end: the fewest tokens, the first of them, and its length.
Step = tuple[int, int, int]
END: Step = (0, 0, 0)

STOP = 256
LONG = 4096
_REMEMBERED = 10_000
_LONGEST = 16  # bytes of the tokens with which completions are written

_NUMERIC = re.compile(rb"[0-9.eE+-]+")
_PRINTABLE = sorted({*range(0x20, 0x7F)} - {*b'"\\'})


class TokenTable:
    """Built once for each vocabulary, which takes some tenths of a second for a large one. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        stops = set(vocabulary.stop_ids)
        special = sorted(set(vocabulary.special.values()) - stops)
        self._special = {token: STOP + 1 + index for index, token in enumerate(special)}
        self._special_ids = special
        names = sorted(filter(None, vocabulary.special), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.words = -(-vocabulary.size // 32)
        self._ids: dict[bytes, int] = {}
        self._longest: dict[bytes, int] = {}  # the longest token, by its first two bytes
        opens = np.zeros(self.words * 32, np.int64)
        for token, text in enumerate(vocabulary.tokens):
            if text and len(text) <= _LONGEST:
                self._ids.setdefault(text, token)
                start = text[:2]
                self._longest[start] = max(self._longest.get(start, 0), len(text))
            opens[token] = text.count(b"{") + text.count(b"[")
        self.opens: list[int] = opens.tolist()
        self.most_opens = int(opens.max())
        self._at_most = [self._bits(np.flatnonzero(opens <= most)) for most in range(self.most_opens + 1)]
        self.stops = self._bits(np.array(sorted(stops)))
        self.stop = vocabulary.stop_ids[0]
        self._measured: dict[bytes, int] = {}
        numeric = [token for token, text in enumerate(vocabulary.tokens) if _NUMERIC.fullmatch(text)]
        self.numeric = self._bits(np.array(numeric, np.int64))
        self.not_numeric = ~self.numeric
        self._numeric = [(token, len(vocabulary.tokens[token])) for token in numeric]
        self._numeric_over: dict[int, Words] = {}
        longer = [token for token in numeric if len(vocabulary.tokens[token]) > 1]
        self.numeric_longer = self._bits(np.array(longer, np.int64))
        self.letters = self._named(b"ghxz")
        self.line_break = self._ids.get(b"\n", 0)
        self.quote, self.named = self._ids.get(b'"'), self._ids.get(b'":')
        # A state that allows all of these is within free text.
        self.characters = self._named(bytes(_PRINTABLE))
        self._where = np.flatnonzero(self.characters)
        self._letter = self._ids.get(b"x", 0)
        self._has_characters = all(bytes((byte,)) in self._ids for byte in _PRINTABLE)
        self._plain: dict[bytes, Words] = {}
        self.texts = StringMasks(self)
        blank = [token for token, text in enumerate(vocabulary.tokens) if text and not text.strip(BLANKS)]
        self.blanks = Filler(vocabulary.tokens, *[self._bits(np.array(blank, np.int64))] * 2, blanks=True)
        within = [token for token, text in enumerate(vocabulary.tokens) if text and stays_in_text(text)]
        whole = [token for token in within if is_text(vocabulary.tokens[token])]
        self.text = Filler(
            vocabulary.tokens, *(self._bits(np.array(found, np.int64)) for found in (whole, within))
        )

    def bytewise(self) -> Vocabulary:
        """The vocabulary of pieces."""
        names = {token: name for name, token in self.vocabulary.special.items()}
        special = {names[token]: self._special[token] for token in self._special_ids}
        tokens = [bytes([byte]) for byte in range(256)] + [b""] * (1 + len(special))
        return Vocabulary(tuple(tokens), (STOP,), special)

    @property
    def bytewise_size(self) -> int:
        """The number of ids of `bytewise`."""
        return STOP + 1 + len(self._special_ids)

    def piece(self, token: int) -> Piece:
        """The piece that a token writes."""
        special = self._special.get(token)
        return tuple(self.vocabulary.tokens[token]) if special is None else (special,)

    def numeric_over(self, most: int) -> Words:
        """The numeric tokens of more than `most` characters."""
        if most not in self._numeric_over:
            found = [token for token, length in self._numeric if length > most]
            self._numeric_over[most] = self._bits(np.array(found, np.int64))
        return self._numeric_over[most]

    def number_ends(self, texts: Iterable[str]) -> Words:
        """The tokens of at most one character that may follow a number: in JSON, and those that begin
        `texts`."""
        firsts = [piece[0] for text in texts if (piece := self.piece_of(text))]
        special = [self._special_ids[first - STOP - 1] for first in firsts if first > STOP]
        named = self._named(bytes(sorted({*b",}]", *(first for first in firsts if first < STOP)})))
        return named | self.stops | self.only(*special)

    def special_piece(self, token: int | None) -> int | None:
        """The element of a piece for a special token. None for any other token."""
        return None if token is None else self._special.get(token)

    def piece_of(self, text: str) -> Piece:
        """A text as a piece. The names of special tokens in it stand for these tokens, as in structures."""
        piece: list[int] = []
        at = 0
        for found in self._names.finditer(text):
            piece += text[at : found.start()].encode()
            piece.append(self._special.get(self.vocabulary.special[found[0]], STOP))
            at = found.end()
        return (*piece, *text[at:].encode())

    def spell(self, piece: Sequence[int]) -> list[int] | None:
        """Tokens that write `piece`, the longest first. None if there are none."""
        return follow(self.steps_of_longest(piece))

    def steps_of_longest(
        self, piece: Sequence[int], known: Sequence[Step | None] = (END,)
    ) -> list[Step | None]:
        """The steps of that tokenization; None from where there is none. `known` are those of the end of
        `piece` in such a tokenization of another piece, which are the same from the first place of both."""
        found = []
        at, text, shared = 0, _text(piece), len(piece) + 1 - len(known)
        while at < shared or (step := known[at - shared]) is None:
            first = next(self._from(piece, text, at), None)
            if first is None:
                return [None] * (len(piece) + 1)
            found.append((at, *first))
            at += first[1]
        steps: list[Step | None] = [*[None] * len(piece), END]
        for count, (place, token, length) in enumerate(reversed(found), step[0] + 1):
            steps[place] = (count, token, length)
        while step is not None and step is not END:
            steps[at] = step
            at += step[2]
            step = known[at - shared]
        return steps

    def token(self, text: bytes) -> int | None:
        """The token with which plans write `text`."""
        return self._ids.get(text)

    def measure(self, text: bytes) -> int:
        """The number of tokens that is enough to write the rest of `text`, from any place in it."""
        if len(text) > LONG:
            return len(text)
        if text not in self._measured:
            if len(self._measured) > _REMEMBERED:
                self._measured.clear()
            self._measured[text] = self._measure(text)
        return self._measured[text]

    def _measure(self, text: bytes) -> int:
        """As `_best`, for bytes and for the numbers alone, because all names of a schema are measured."""
        ids, longest, length = self._ids, self._longest, len(text)
        fewest = [0] * (length + 1)
        for at in range(length - 1, -1, -1):
            least = length
            for end in range(min(at + longest.get(text[at : at + 2], 1), length), at, -1):
                if fewest[end] < least and text[at:end] in ids:
                    least = fewest[end]
            fewest[at] = min(least + 1, length)
        return max(fewest)

    def spell_shortest(self, piece: Sequence[int]) -> list[int] | None:
        """The fewest tokens that write `piece`. None if there are none. For a very long piece there may be
        more than the fewest."""
        if len(piece) > LONG:
            return self.spell(piece)
        return follow(self._best(piece))

    def _best(self, piece: Sequence[int]) -> list[Step | None]:
        return self.steps(piece, piece, [END])

    def steps(self, head: Sequence[int], piece: Sequence[int], known: list[Step | None]) -> list[Step | None]:
        """The steps from each place in `piece`. `known` are those from where its beginning `head` ends."""
        best: list[Step | None] = [*[None] * len(head), *known]
        text = _text(piece)
        for at in range(len(head) - 1, -1, -1):
            fewest: Step | None = None
            for token, length in self._from(piece, text, at):
                rest = best[at + length]
                if rest is not None and (fewest is None or rest[0] + 1 < fewest[0]):
                    fewest = (rest[0] + 1, token, length)
            best[at] = fewest
        return best

    def _from(self, piece: Sequence[int], text: bytes, at: int) -> Iterator[tuple[int, int]]:
        """(token, its length) for the tokens with which `piece`, whose text is `text`, may continue, the
        longest first."""
        if piece[at] > STOP:
            yield self._special_ids[piece[at] - STOP - 1], 1
            return
        ids = self._ids
        for end in range(min(at + self._longest.get(text[at : at + 2], 1), len(text)), at, -1):
            token = ids.get(text[at:end])
            if token is not None:
                yield token, end - at

    def at_most(self, opens: int) -> Words:
        """The tokens with at most so many opening brackets."""
        return self._at_most[min(opens, self.most_opens)]

    def plain(self, barred: bytes) -> Words:
        """The tokens that are plain text and contain none of the bytes `barred`."""
        if barred not in self._plain:
            found = []
            for token, text in enumerate(self.vocabulary.tokens):
                if is_plain(text) and not any(byte in text for byte in barred):
                    found.append(token)
            self._plain[barred] = self._bits(np.array(found, np.int64))
        return self._plain[barred]

    def only(self, *tokens: int) -> Words:
        """A row of a bitmask with only these bits."""
        words = np.zeros(self.words, np.uint32)
        for token in tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def is_free(self, words: Words) -> bool:
        """Whether a row of a bitmask is that of a state within free text."""
        if not self._has_characters or not self.holds(words, self._letter):
            return False
        at = self._where
        return not (self.characters[at] & ~words[at]).any()

    @staticmethod
    def holds(words: Words, token: int) -> bool:
        """Whether a row of a bitmask has the bit of `token`."""
        return words.item(token // 32) >> token % 32 & 1 == 1

    def _named(self, text: bytes) -> Words:
        """The tokens of single characters."""
        found = [self._ids[text[i : i + 1]] for i in range(len(text)) if text[i : i + 1] in self._ids]
        return self._bits(np.array(found, np.int64))

    def _bits(self, ids: NDArray[np.int64]) -> Words:
        bits = np.zeros(self.words * 32, np.uint8)
        bits[ids] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)


def follow(steps: list[Step | None], at: int = 0) -> list[int] | None:
    """The tokens from a place to the end; None if there are none."""
    tokens = []
    while (step := steps[at]) is not None and step is not END:
        tokens.append(step[1])
        at += step[2]
    return None if step is None else tokens


def _text(piece: Sequence[int]) -> bytes:
    """The text of a piece, with a byte that no text has in place of each special token."""
    try:
        return bytes(piece)
    except ValueError:
        return bytes([byte if byte < STOP else 0xFF for byte in piece])
