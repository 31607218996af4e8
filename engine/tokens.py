"""Text to tokens, and tokens to text as they arrive.

Any number of threads may use a `Tokenizer`; encoding and decoding release the GIL. A `Detokenizer` belongs to
one sequence.

Streaming is not `decode(all)[already_sent:]`, for two reasons. That costs more with every token. And decoded
text may not be final: a character may span several tokens, and the first token of a text is decoded
differently (SentencePiece tokenizers drop its leading space). Instead, two facts are used here:

- Byte-level tokenizers: the text is the tokens' bytes in order, read as UTF-8. An incremental UTF-8 decoder
  gives the same characters, including U+FFFD for invalid bytes.
- Others: once a token is not a byte-fallback token, the text up to it is final. The text of the next few
  tokens is what they add to the text of the few before them. (A run of byte-fallback tokens is valid or
  invalid as a whole, so it is held back until it ends.)

The concatenated pieces and the flush equal `Tokenizer.decode` of all ids at once.
"""

import codecs
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import filterfalse
from pathlib import Path
from typing import Any

import tokenizers

from personae.engine.bytelevel import BYTE_OF_CHAR
from personae.engine.checkpoints import tokenizer_files
from personae.engine.prompt_length import (
    PART,
    TooManyTokens,
    bytes_of_token,
    heads,
    is_long_for,
    parts,
    tails,
)
from personae.engine.stops import StopFinder
from personae.engine.tokenizer_files import TokenizerFiles
from personae.errors import RequestError

# The library's threads would take cores from the steps.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_CUT = 64  # tokens that may change when a text is cut


class Tokenizer:
    """A `tokenizers.Tokenizer` with the settings of a model folder. Load it with `Tokenizer.load`.

    `eos_ids` are those of generation_config (or config) and of the tokenizer. `bos_id` and `pad_id` may be
    None. `special_tokens` maps the names that templates use, such as "bos_token", to the tokens' texts.
    `chat_templates` maps names to Jinja sources; `chat_template` is the one named "default", if there is one.
    `response_template` is that field of tokenizer_config.json, which describes how to parse answers,
    unchecked. `decoder` is that field of tokenizer.json. `vocab_size` is one more than the highest id.
    `longest_token` is the most bytes of text that one token stands for, None if there is no limit.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        pad_id: int | None = None,
        eos_ids: Sequence[int] = (),
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
        response_template: Any = None,
    ) -> None:
        backend.no_truncation()  # some folders truncate or pad, which would change prompts silently
        backend.no_padding()
        self.backend = backend
        self.bos_id = bos_id
        self.pad_id = pad_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.special_tokens = special_tokens or {}
        self.chat_templates = chat_templates or {}
        self.chat_template = self.chat_templates.get("default")
        self.response_template = response_template
        added = backend.get_added_tokens_decoder()
        self.vocab_size: int = max([backend.get_vocab_size(with_added_tokens=True) - 1, *added]) + 1
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self.decoder: dict[str, Any] | None = (
            json.loads(backend.decoder.__getstate__()) if backend.decoder else None
        )
        decoders = _decoders(self.decoder)
        self.byte_level = "ByteLevel" in decoders and decoders <= {"ByteLevel", "Fuse"}
        self._byte_fallback = "ByteFallback" in decoders
        self._bytes = _BytesOf(self._find_bytes)
        self.token_bytes = self._bytes.__getitem__
        """The bytes that this token adds to a running text; empty for an unknown id."""
        self._anchor = next((id for id in range(self.vocab_size) if self._is_plain_word(id)), None)
        self.longest_token = bytes_of_token(backend, self.byte_level)

    @staticmethod
    def load(path: Path) -> "Tokenizer":
        """Reads a model's tokenizer: from a folder's tokenizer.json and, if they exist,
        tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json,
        chat_template.jinja and additional_chat_templates/; or from a GGUF file's metadata.

        Raises ModelLoadError, which names the file, if one is missing or malformed.
        """
        return Tokenizer.of(tokenizer_files(path))

    @staticmethod
    def of(files: TokenizerFiles) -> "Tokenizer":
        """A model's tokenizer from its files."""
        return Tokenizer(
            files.backend,
            bos_id=files.bos_id,
            pad_id=files.pad_id,
            eos_ids=files.eos_ids,
            special_tokens=files.special_tokens,
            chat_templates=files.chat_templates,
            response_template=files.response_template,
        )

    def json(self) -> bytes:
        """The content of a tokenizer.json."""
        return str(self.backend.to_str()).encode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`, by default with the special tokens that the model expects around a prompt.

        Raises RequestError if `text` is not Unicode (a lone surrogate).
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        add_special_tokens: bool = True,
        most: int | None = None,
        first: bool = False,
        limit: int | None = None,
    ) -> list[list[int]]:
        """`encode` for many texts. It uses one core, and other threads keep running.

        If a text has more than `most` tokens, the last ones are kept, or the `first`, between the special
        tokens around a prompt, as transformers truncates on the left or on the right. Without `most`, a text
        that has far more than `limit` tokens raises TooManyTokens before all of it is encoded. A text with a
        few more is encoded.
        """
        if most is not None:
            return [self._encode_end(text, add_special_tokens, most, first) for text in texts]
        if limit is not None:
            for index, text in enumerate(texts):
                if self._too_long(text, limit):
                    raise TooManyTokens(limit, index)
        lists: list[list[int]] = []
        for batch in _batches(texts):  # a batch's encodings are large, and freed before the next batch
            lists += self._encode(batch, add_special_tokens)
        return lists

    def longest_text(self, tokens: int) -> int | None:
        """The most characters that this many tokens can have; None if unknown."""
        return None if self.longest_token is None else self.longest_token * tokens

    def _encode_end(self, text: str, add_special_tokens: bool, most: int, first: bool) -> list[int]:
        for end in heads(text, most) if first else tails(text, most):
            (ids,) = self._encode([end], add_special_tokens)
            if len(end) == len(text) and len(ids) <= most:
                return ids
            (plain,) = self._encode([end], False)
            if len(end) == len(text) or len(plain) > most + _CUT:
                return _truncated(ids, plain, most, first)
        raise AssertionError("the last head or tail is the whole text")

    def _too_long(self, text: str, limit: int) -> bool:
        """Whether a text certainly has more tokens than `limit`."""
        if self.longest_token is not None and len(text) > limit * self.longest_token:
            return True
        if not is_long_for(text, limit):
            return False
        found = 0
        for part in parts(text):
            found += len(self._encode([part], False)[0])
            if found > 2 * limit + _CUT:
                return True
        return False

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise RequestError("The text has a lone surrogate, which is not a character.") from None
        # Unlike `encode` and `decode`, the library's batch calls release the GIL.
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Invalid UTF-8 becomes U+FFFD; unknown ids become nothing."""
        return self.decode_batch([ids], skip_special_tokens)[0]

    def decode_batch(self, lists: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """`decode` for many lists. It uses one core, and other threads keep running."""
        texts: list[str] = self.backend.decode_batch(lists, skip_special_tokens=skip_special_tokens)
        return texts

    def token_text(self, id: int) -> str:
        """`token_bytes` as text, with U+FFFD for a part of a character."""
        return self.token_bytes(id).decode(errors="replace")

    def is_byte(self, id: int) -> bool:
        """Whether this is a byte-fallback token, such as <0xE2>, which is decoded together with its
        neighbours."""
        return self._byte_fallback and _fallback_byte(self.backend.id_to_token(id)) is not None

    def visible(self, ids: Iterable[int], skip_special_tokens: bool) -> list[int]:
        """`ids` without those that `decode` skips."""
        return [
            id
            for id in ids
            if not (skip_special_tokens and id in self.special_ids)
            and (self._bytes.get(id) or self.backend.id_to_token(id) is not None)
        ]

    def _find_bytes(self, id: int) -> bytes:
        token: str | None = self.backend.id_to_token(id)
        if token is None:
            return b""
        if self.byte_level:
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token, which is plain text
                return token.encode()
        byte = _fallback_byte(token) if self._byte_fallback else None
        if byte is not None:
            return bytes([byte])
        if id in self._added_ids or self._anchor is None:
            return token.encode()
        # A decoder treats the first token differently (it drops a leading space), so another token goes
        # first.
        before = self.decode([self._anchor], False)
        return self.decode([self._anchor, id], False)[len(before) :].encode()

    def _is_plain_word(self, id: int) -> bool:
        token: str | None = self.backend.id_to_token(id)
        return token is not None and id not in self._added_ids and token.isascii() and token.isalpha()


class _BytesOf(dict[int, bytes]):
    """The bytes of tokens, each found when it is first asked for."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        self._find = find

    def __missing__(self, id: int) -> bytes:
        self[id] = found = self._find(id)
        return found


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order, in batches that need little memory to encode."""
    batch: list[str] = []
    length = 0
    for text in texts:
        if batch and length + len(text) > PART:
            yield batch
            batch, length = [], 0
        batch.append(text)
        length += len(text)
    if batch:
        yield batch


def _truncated(ids: list[int], plain: list[int], most: int, first: bool) -> list[int]:
    """The last `most` of `ids`, or the `first`. `ids` are `plain` with special tokens around it, which are
    kept if there is room."""
    around = len(ids) - len(plain)
    start = next((n for n in range(around + 1) if ids[n : n + len(plain)] == plain), None)
    if start is None or around >= most:
        return ids[:most] if first else ids[-most:]
    inner = plain[: most - around] if first else plain[around - most :]
    return [*ids[:start], *inner, *ids[start + len(plain) :]]


def _decoders(decoder: dict[str, Any] | None) -> set[str]:
    """The names of the steps in tokenizer.json's decoder."""
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*(_decoders(step) for step in decoder["decoders"]))
    return {decoder["type"]}


def _fallback_byte(token: str | None) -> int | None:
    if token is None or len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


_CONTEXT = 8
"""How many tokens before a text may affect how it begins."""


class Detokenizer:
    """The text of one sequence. It ends before the first stop string of `stop` that is complete.

    `after` has the tokens before the sequence (its prompt), which are not part of the text: a tokenizer that
    drops the leading space of a text must not drop it from a continuation. `include_stop` keeps the stop
    string in the text. Of two that are complete at the same character, the longer one counts. The cost of a
    token does not depend on how many came before it.
    """

    __slots__ = ("_stop", "_text")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Iterable[str] = (),
        include_stop: bool = False,
        after: Sequence[int] = (),
    ) -> None:
        text = _ByteText if tokenizer.byte_level else _WindowText
        self._text: _ByteText | _WindowText = text(tokenizer, skip_special_tokens, after[-_CONTEXT:])
        self._stop = StopFinder(stop, include_stop)

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""
        return self._stop.found

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens. Returns the text that has become final; after a stop it is always empty."""
        stop = self._stop
        return stop.push(self._text.push(ids)) if stop.found is None else ""

    def flush(self) -> str:
        """The sequence has ended: returns the text that was held back. It may still contain a stop string;
        see `stopped`."""
        if self.stopped is not None:
            return ""
        return self._stop.push(self._text.flush()) + self._stop.flush()


class _ByteText:
    """Byte-level tokenizers: the bytes of a character that is not complete wait for the next token."""

    __slots__ = ("_bytes_of", "_is_hidden", "_rest")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, after: Sequence[int]) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._is_hidden = (tokenizer.special_ids if skip_special_tokens else frozenset()).__contains__
        self._rest = b""

    def push(self, ids: Iterable[int]) -> str:
        more = self._rest + b"".join(map(self._bytes_of, filterfalse(self._is_hidden, ids)))
        text, used = codecs.utf_8_decode(more, "replace")
        self._rest = more[used:]
        return text

    def flush(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


class _WindowText:
    """Other tokenizers: the last final tokens, whose text is known, and the tokens since then."""

    __slots__ = ("_final", "_pending", "_skip_special_tokens", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._final = tokenizer.visible(after, skip_special_tokens)
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        more = self._tokenizer.visible(ids, self._skip_special_tokens)
        self._pending += more
        if not more or self._tokenizer.is_byte(more[-1]):
            return ""
        return self.flush()

    def flush(self) -> str:
        before = self._decode(self._final)
        after = self._decode(self._final + self._pending)
        # Before the text has begun, its first characters may still be dropped.
        self._final = self._pending if after else self._final + self._pending
        self._pending = []
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
