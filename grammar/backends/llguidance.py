"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): a lexer of regex derivatives under an
Earley parser, both built lazily at run time.

It compiles in about a millisecond, fills a mask in tens of microseconds, and refuses what it does not support
instead of ignoring it.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from personae.errors import GrammarError
from personae.grammar.backend import BackendMatcher, CompiledGrammar
from personae.grammar.backends.llguidance_text import lark_of, schema_of, tight, tracked_text
from personae.grammar.bitmask import Bitmask, allow_only
from personae.grammar.schema.document import PARAMS, SAID
from personae.grammar.schema.walk import SET
from personae.grammar.spec import GrammarSpec
from personae.grammar.tracked.distinct import STOP
from personae.grammar.tracked.endings import Endings
from personae.grammar.tracked.items import Items
from personae.grammar.tracked.places import Places
from personae.grammar.tracked.sets import SetsCompiled
from personae.grammar.tracked.support import Untracked
from personae.grammar.vocabulary import Vocabulary

# Every tokenization of an allowed text is allowed: the model chooses among them, not the grammar.
_HEADER = '%llguidance {"no_forcing": true}\n'
# Built at import: msgspec reads a type when it is first decoded, and two threads that do so at once can
# crash.
_PLACES = msgspec.json.Decoder(Places)
_BYTES = tuple(bytes((byte,)) for byte in range(256))
# A lexer state takes about 2 kB, and the lexer lives as long as the grammar is in the cache.
_LIMITS = LLParserLimits(max_lexer_states=50_000)

# Sets of tokens that the library allows at once where a text may go on with any of them. It tries all other
# tokens one by one. They are blanks, text of JSON strings, and words, with lengths that `maxLength` leaves.
# `.` in a pattern does not match separators of lines: if these were among the characters, a mask within `.+`
# would take 30 times as long. Without words, a mask within `[\w-]+` takes 3 times as long.
_CHARACTER, _WORD = r'[^"\\\x00-\x1F\x7F\u2028\u2029]', "[a-zA-Z0-9]"
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(_CHARACTER + count for count in ("{1,10}", "{1,15}", "{1,30}", "+")),
    *(_WORD + count for count in ("{1,10}", "{1,30}")),
]

# The size of a grammar after its first mask, measured over schemas of 3 to 100 properties: bytes in all, and
# bytes for each byte of its text.
_BASE_BYTES, _BYTES_PER_CHARACTER = 70_000, 80


class LLGuidanceBackend:
    """Compiles specs for one vocabulary. `compile` is thread-safe and runs without the GIL."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # A text then has one tokenization, so it makes no difference if the library forces the one that it
        # knows.
        self._by_bytes = vocabulary.tokens[:256] == _BYTES and not any(vocabulary.tokens[256:])
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokens(vocabulary)),
            eos_token=list(vocabulary.stop_ids),
            slices=[] if self._by_bytes else _SLICES,
        )

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a spec. Raises GrammarError if it is malformed or contains something that llguidance does
        not support."""
        # Reading a Lark grammar, even of one line, takes the library longer than most schemas.
        bare = self._by_bytes and spec.kind in ("json_schema", "json_object")
        tracked = tracked_text(spec) if spec.kind == "json_schema" else None
        if tracked is not None:
            grammar = _HEADER + tracked
        elif bare:
            grammar = f'{{"grammars": [{{"json_schema": {schema_of(spec)}}}]}}'
        else:
            grammar = _HEADER + lark_of(spec)
        start = self._start(grammar)
        if start.is_error():
            reason = _reason(start.get_error())
            said = SAID.get(spec.kind, spec.kind)
            raise GrammarError(f"The {said} cannot be compiled: {reason}", param=PARAMS[spec.kind])
        compiled = LLGuidanceCompiled(start, lambda: self._start(grammar), grammar, self._vocabulary)
        if spec.kind == "json_schema" and SET in spec.source:
            places = Places((("", json.loads(spec.source)),), any_order=spec.any_order)
            return self._with_sets(compiled, places, spec)
        if spec.sets:
            return self._with_sets(compiled, _PLACES.decode(spec.sets), spec)
        return compiled

    def _with_sets(self, compiled: CompiledGrammar, places: Places, spec: GrammarSpec) -> CompiledGrammar:
        try:
            return SetsCompiled(compiled, places, self._endings, _compile_items)
        except Untracked as reason:
            raise GrammarError(f"A set cannot be followed: {reason}.", param=PARAMS[spec.kind]) from None

    @cached_property
    def _endings(self) -> Endings:
        return Endings(self._vocabulary)

    def _start(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            # The first mask is made here and not in a step: it builds what is shared, and finds grammars that
            # match no text.
            matcher.compute_bitmask()
        return matcher


_MEANINGS = {
    "NoExtensionBias": "no text matches it",
    "lexer precomputation failed": "its automaton is too large",
}
"""The library's own words, and what a caller can make of them."""


def _reason(error: str) -> str:
    """The library's message without the place in the Lark text, which the caller has not written."""
    error = error.split(" Enable '")[0]  # its options are not the caller's
    message = error.split("\n<state>")[0].split("\n   1 |")[0].split("failed to compile JSON schema: ")[-1]
    if message.startswith("at ") and "(in regex): " in message:
        message = message.split("(in regex): ")[-1]
    for words, meaning in _MEANINGS.items():
        if words in message:
            return meaning
    return " ".join(message.split())[:300]


class _Tokens:
    """The vocabulary in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Whole words of the bitmask: ids past the tokens have no text, and are never allowed.
        tokens = [*vocabulary.tokens, *[b""] * (-vocabulary.size % 32)]
        self.special_token_ids = [token for token, text in enumerate(tokens) if not text]
        # Each has a name of its own, because the library confuses tokens of equal text.
        self.tokens = [text or b"<[%d]>" % token for token, text in enumerate(tokens)]
        self.eos_token_id = vocabulary.stop_ids[0]

    def __call__(self, text: str) -> list[int]:
        """Used only for bytewise vocabularies: nothing else is forced."""
        return [*text.encode()]


@cache
def _backend_of_bytes() -> LLGuidanceBackend:
    return LLGuidanceBackend(Vocabulary((*_BYTES, b""), (STOP,), {}))


def _compile_items(document: dict[str, Any], schema: Any, any_order: bool) -> CompiledGrammar:
    """The grammar of an item of a set, over bytes. Raises Untracked."""
    rules = Items(document, tight, "item", any_order=any_order).rules(schema)
    return _backend_of_bytes().compile(GrammarSpec("lark", "\n".join(["start: item", *rules])))


class LLGuidanceCompiled:
    """A compiled grammar, shared by all answers that it binds.

    The answers also share a lexer, which grows over time. A lexer that has grown beyond the library's limit
    fails every later answer. `spoil` makes the next answer start with a new one.
    """

    def __init__(
        self, start: LLMatcher, restart: Callable[[], LLMatcher], grammar: str, vocabulary: Vocabulary
    ) -> None:
        self._start = start
        self._restart = restart
        self._length = len(grammar)
        self._names_tokens = "<[" in grammar
        self._vocabulary = vocabulary
        self._spoiled = False

    @property
    def nbytes(self) -> int:
        """Bytes held, estimated from the length of the grammar, because the library does not count them."""
        return _BASE_BYTES + _BYTES_PER_CHARACTER * self._length

    def matcher(self) -> "LLGuidanceMatcher":
        """A new matcher at the grammar's start."""
        if self._spoiled:
            self._start, self._spoiled = self._restart(), False
        matcher = self._start.deep_copy()
        return LLGuidanceMatcher(matcher, self._vocabulary, self.spoil, names_tokens=self._names_tokens)

    def spoil(self) -> None:
        """The shared lexer is beyond its limit."""
        self._spoiled = True


class LLGuidanceMatcher(BackendMatcher):
    """The state of one answer. Stop tokens are handled here; the library sees only text."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        spoil: Callable[[], None],
        ended: bool = False,
        *,
        names_tokens: bool = False,
        written: int = 0,
    ) -> None:
        self._matcher = matcher
        self._written = written  # tokens, without the stop token
        self._names_tokens = names_tokens
        self._vocabulary = vocabulary
        self._stops = frozenset(vocabulary.stop_ids)
        self._spoil = spoil
        self._ended = ended

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens allowed next to `bitmask[row]`. After the end, these are the stop tokens."""
        words = bitmask[row]
        if not self._ended:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._ended:
            allow_only(words, self._vocabulary.stop_ids)
        elif self._matcher.is_error():
            # Beyond its limits the library would let the answer stop, but an incomplete answer must fail.
            allow_only(words, ())
            self._spoil()

    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False, and changes nothing, if it is not allowed."""
        if self._ended:
            return False
        if token in self._vocabulary.stop_ids:
            self._ended = bool(self._matcher.is_accepting())
            return self._ended
        if self._matcher.try_consume_tokens([token]):
            self._written += 1
            return True
        self._matcher.compute_bitmask()  # only now does it report that it is beyond its limits
        if self._matcher.is_error():
            self._spoil()
        return False

    def feed(self, tokens: Sequence[int]) -> int:
        """Accept tokens until one is not allowed. Returns how many were accepted."""
        if self._ended or not self._stops.isdisjoint(tokens):
            return next((n for n, token in enumerate(tokens) if not self.accept(token)), len(tokens))
        taken = int(self._matcher.try_consume_tokens(list(tokens)))
        self._written += taken
        return taken

    def follows(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` would be accepted; a stop token may be the last. This takes the library a
        tenth of the time of accepting them in a copy."""
        return 0 if self._ended else int(self._matcher.validate_tokens(list(tokens)))

    def snapshot(self) -> int:
        """How many tokens have been accepted."""
        return self._written + self._ended

    def restore(self, snapshot: int) -> None:
        """Undo what was accepted since."""
        self._ended = self._ended and snapshot > self._written
        if snapshot < self._written and not self.failed:
            self._matcher.rollback(self._written - snapshot)
            self._written = snapshot

    def forced(self) -> bytes:
        """The only text that may follow. Empty if there is a choice, even only of blanks."""
        if self._ended:
            return b""
        # Asking where a special token is forced breaks a matcher (1.9.1): no mask allows anything afterwards.
        asked = self._matcher.deep_copy() if self._names_tokens else self._matcher
        # Special tokens begin with a byte that no text has.
        return bytes(asked.compute_ff_bytes()).partition(b"\xff")[0]

    def fork(self) -> "LLGuidanceMatcher":
        """A second matcher in the same state."""
        return LLGuidanceMatcher(
            self._matcher.deep_copy(),
            self._vocabulary,
            self._spoil,
            self._ended,
            names_tokens=self._names_tokens,
            written=self._written,
        )

    @property
    def failed(self) -> bool:
        """Whether the library has given up."""
        return bool(self._matcher.is_error())

    @property
    def terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._ended
