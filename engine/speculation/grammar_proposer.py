"""Drafts of the text that a grammar leaves hardly any choice about.

A grammar for JSON rarely forces a text, because blanks may be between any two parts: after `"city": "Oslo",`
only `"country": ` can follow, but with or without blanks. So this proposer goes on through such places with
the blanks that are likely (`json_blanks.py`), up to the next value. It also proposes text that is forced but
not appended: a grammar leaves the tokenization of a text open, and the model may prefer another.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice

from personae.engine.sequence import SequenceLog
from personae.engine.speculation.forced import CONTEXT, JumpForward, Retokenizer
from personae.engine.speculation.json_blanks import JsonBlanks
from personae.engine.speculation.proposer import Draft, Proposer
from personae.grammar.matcher import Lookahead, Matcher

FORCED, LIKELY = "forced", "grammar"
_PARTS = b'",:{}[]'
_VALUES = b"-0tfn"  # what other values begin with
_LETTER = ord("a")
_BYTES = 8  # of a token, assumed


class GrammarProposer:
    """Follows the answer of one sequence. `jump` appends its forced text, if that is done."""

    def __init__(
        self, matcher: Matcher, retokenizer: Retokenizer, log: SequenceLog, jump: JumpForward | None
    ) -> None:
        self._matcher = matcher
        self._retokenizer = retokenizer
        self._jump = jump
        self._before: deque[int] = deque(maxlen=CONTEXT)
        self._blanks = JsonBlanks()
        self.extend(log.tokens[log.prompt_length :])

    def extend(self, tokens: Sequence[int]) -> None:
        """See Proposer. The matcher has taken the tokens already."""
        self._before.extend(tokens)
        self._blanks.read(self._retokenizer.text(tokens))

    def propose(self, most: int) -> Draft | None:
        """See Proposer."""
        if self._jump is not None and self._jump.pending:
            return None  # the matcher is ahead of the sequence
        text, source = self._text(most * _BYTES)
        tokens = self._retokenizer.likely(self._before, text) if text else []
        return Draft(tuple(tokens[:most]), source) if tokens else None

    def within(self, other: Proposer) -> Proposer:
        """A proposer with the drafts of `other`, up to where the grammar refuses them."""
        return _Within(other, self._matcher)

    def _text(self, limit: int) -> tuple[bytes, str]:
        """What is likely to follow, of about `limit` bytes, and the source of the draft. Empty if there is
        nothing."""
        matcher = self._matcher.unbudgeted()
        if matcher is None:
            return b"", FORCED
        blanks, text, source = self._blanks.copy(), b"", FORCED
        while len(text) < limit:
            more = matcher.forced()
            if not more and (more := self._part(matcher, blanks)):
                source = LIKELY
            text += more
            spelled = self._spelled(more)
            if not spelled or matcher.feed(spelled) < len(spelled):
                break
            blanks.read(more)
        return text, source

    def _part(self, matcher: Lookahead, blanks: JsonBlanks) -> bytes:
        """The next part of the JSON, if it can only be one, with the likely blanks before it; only these
        before a value. Empty within strings and other text."""
        if blanks.within or self._follows(matcher, _LETTER):
            return b""
        followers = (part for part in (*_PARTS, *_VALUES) if self._follows(matcher, part))
        found = [*islice(followers, 2)]  # asking about each takes the library some microseconds
        if len(found) == 1 and found[0] in _PARTS:
            return blanks.missing(found[0]) + bytes(found)
        return blanks.missing(None) if found else b""

    def _follows(self, matcher: Lookahead, byte: int) -> bool:
        token = self._retokenizer.byte_tokens.get(byte)
        return token is not None and matcher.follows((token,)) == 1

    def _spelled(self, text: bytes) -> list[int]:
        """The text in tokens of single bytes; empty if the tokenizer lacks one."""
        found = [self._retokenizer.byte_tokens.get(byte) for byte in text]
        return [token for token in found if token is not None] if None not in found else []


class _Within:
    """The drafts of `inner`, as far as a sequence's grammar allows them."""

    def __init__(self, inner: Proposer, matcher: Matcher) -> None:
        self._inner = inner
        self._matcher = matcher

    def extend(self, tokens: Sequence[int]) -> None:
        """See Proposer."""
        self._inner.extend(tokens)

    def propose(self, most: int) -> Draft | None:
        """See Proposer."""
        draft = self._inner.propose(most)
        if draft is None:
            return None
        allowed = draft.tokens[: self._matcher.follows(draft.tokens)]
        return draft._replace(tokens=allowed) if allowed else None
