"""What a grammar backend must know of a tokenizer: the bytes of each id, and which ids end an answer.

It is read from the text of a `tokenizer.json` alone (Hugging Face's format), so grammar/ needs neither the
tokenizer nor the model. Token text is bytes, because a token may hold half a character.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from personae.errors import ModelLoadError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of one model.

    `tokens[id]` is the text of a token. It is b"" for tokens that a grammar never writes: special tokens,
    stop tokens, and ids past the tokenizer's, up to the padded size of the model's logits. `stop_ids` end an
    answer. `special` maps the names of special tokens to their ids.
    """

    tokens: tuple[bytes, ...]
    stop_ids: tuple[int, ...]
    special: Mapping[str, int]

    @property
    def size(self) -> int:
        """The number of logits, padding included."""
        return len(self.tokens)

    @classmethod
    def from_tokenizer_json(cls, text: str | bytes, size: int, stop_ids: Sequence[int]) -> "Vocabulary":
        """Read a `tokenizer.json` for a model with `size` logits whose answers end with one of `stop_ids`.

        Ids past `size` are dropped, because the model cannot choose them. Raises ModelLoadError if the tokens
        cannot be written as bytes, or if no stop id is within `size`.
        """
        document = msgspec.json.decode(text)
        spell, stops = _speller(document.get("decoder")), _stops_within(size, stop_ids)
        tokens = [b""] * size
        for token, piece in _pieces(document["model"]):
            if piece < size:
                tokens[piece] = spell(token)
        special: dict[str, int] = {}
        for added in document.get("added_tokens") or ():
            if added["id"] >= size:
                continue
            if added["special"]:
                special[added["content"]] = added["id"]
            tokens[added["id"]] = b"" if added["special"] else added["content"].encode()
        for stop in stops:
            tokens[stop] = b""
        return cls(tuple(tokens), stops, special)


def check_vocabulary(decoder: dict[str, Any] | None, size: int, stop_ids: Sequence[int]) -> None:
    """Raises ModelLoadError for what `Vocabulary.from_tokenizer_json` refuses, without the vocabulary.
    `decoder`: that field of a `tokenizer.json`."""
    _speller(decoder)
    _stops_within(size, stop_ids)


def _stops_within(size: int, stop_ids: Sequence[int]) -> tuple[int, ...]:
    """The stop ids that a model with `size` logits can choose. Raises ModelLoadError if there are none."""
    stops = tuple(sorted({stop for stop in stop_ids if 0 <= stop < size}))
    if not stops:
        raise ModelLoadError(f"None of the stop token ids {list(stop_ids)} lies within the {size} logits.")
    return stops


def _pieces(model: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """(text, id) of each piece. BPE has a mapping, Unigram a list of pairs with scores."""
    vocab = model["vocab"]
    if isinstance(vocab, list):
        for index, (token, _score) in enumerate(vocab):
            yield token, index
    else:
        yield from vocab.items()


class _ByteLevel:
    """Byte-level BPE writes each byte as one printable character (GPT-2's table)."""

    def __init__(self) -> None:
        kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        shifted = [byte for byte in range(256) if byte not in set(kept)]
        self._bytes = {chr(byte): byte for byte in kept}
        self._bytes |= {chr(256 + index): byte for index, byte in enumerate(shifted)}

    def __call__(self, token: str) -> bytes:
        try:
            return bytes([self._bytes[character] for character in token])
        except KeyError:  # an added token that some files repeat in the vocabulary, as plain text
            return token.encode()


class _Pieces:
    """SentencePiece-like vocabularies: a mark in the text stands for a space, and `<0x0A>` for a byte."""

    def __init__(self, replacements: list[tuple[str, str]], byte_fallback: bool) -> None:
        self._replacements = replacements
        self._byte_fallback = byte_fallback

    def __call__(self, token: str) -> bytes:
        if self._byte_fallback and (piece := _BYTE_PIECE.fullmatch(token)):
            return bytes([int(piece[1], 16)])
        for mark, text in self._replacements:
            token = token.replace(mark, text)
        return token.encode()


def _speller(decoder: dict[str, Any] | None) -> "_ByteLevel | _Pieces":
    """How this decoder turns a piece into bytes. Raises ModelLoadError if it does not work piece by piece."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] if step else "none" for step in steps]
    if "ByteLevel" in kinds:
        return _ByteLevel()
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise ModelLoadError(
            f"tokenizer.json has the decoder {' + '.join(kinds)}; answers can be bound to a grammar with "
            "byte-level and SentencePiece-like tokenizers only."
        )
    replacements = []
    for step in steps:
        if step and step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
        elif step and step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise ModelLoadError("tokenizer.json has a decoder that replaces by a regular expression.")
            replacements.append((step["pattern"]["String"], step["content"]))
    return _Pieces(replacements, "ByteFallback" in kinds)
