"""Jump-forward: text that a grammar forces is appended at once, without a forward pass for each token.

Where the grammar allows only one text (the rest of a property's name, or of a member of an enum), the model
has nothing to choose. Only the tokens of the text must be found, because a grammar allows every tokenization
of an allowed text. The tokenizer's own tokens are used, which are mostly the model's too. The last ones are
left to the model if its next text could form one token with them. Text that begins within a token is also
left, until the model has completed that token.

The step that computes the token before is planned before the forced text is known. So a run of k tokens saves
k - 1 steps, and a single token is left to the model.

Forced tokens depend on the log alone, and are not appended twice. A sequence that comes back from a
preemption, or in another epoch of the engine core, goes on with the same tokens.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from personae.engine.sequence import SequenceLog
from personae.engine.tokens import Tokenizer
from personae.grammar.bitmask import Bitmask, allow_only, allows, words_of
from personae.grammar.matcher import Binding, Matcher

CONTEXT = 8  # tokens before a text; more than a tokenizer looks back
LEAST = 2  # the shortest run of tokens that saves a step


def jumps(log: SequenceLog) -> bool:
    """Whether forced tokens may be appended: the request needs neither their log-probabilities nor
    penalties."""
    params = log.params
    counts = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)
    return params.jump_forward and log.grammar is not None and params.logprobs is None and not counts


class KnownToken(Binding):
    """Binds a row to its known token, so that only one of its logits is needed."""

    is_known = True

    def __init__(self, token: int) -> None:
        self._token = token

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Allow only the token."""
        allow_only(bitmask[row], [self._token])

    def accept(self, token: int) -> bool:
        """Whether it is the known token."""
        return token == self._token


class Retokenizer:
    """Finds the tokens of text that follows other text. All sequences share it.

    `tokens[id]` is the text of a token, b"" for special ones (`Vocabulary.tokens`).
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes]) -> None:
        self.vocab_size = len(tokens)
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._sorted = sorted(filter(None, tokens))
        self._longest = max(map(len, self._sorted))
        ids = {text: token for token, text in enumerate(tokens) if text}
        self.byte_tokens = {text[0]: token for text, token in ids.items() if len(text) == 1}
        """By byte: the token that is only this byte."""
        self.spaceless = [ids.get(text[1:], at) if text[:1] == b" " else at for at, text in enumerate(tokens)]
        """For each token, the one with the same text without a space in front; itself if there is none."""

    def __call__(self, before: Iterable[int], text: bytes) -> list[int]:
        """The tokens of `text` after the tokens `before`, without the last ones that the following text could
        change. Empty if `text` begins within a token."""
        text, found = self._split(self.text(before), text)
        at, end = 0, len(text) - self._ambiguous_suffix(text)
        for count, token in enumerate(found):
            at += len(self._tokens[token])
            if at > end:
                return found[:count]
        return found

    def likely(self, before: Iterable[int], text: bytes) -> list[int]:
        """All tokens of `text` as it is likely to be written after the tokens `before`."""
        return self._split(self.text(before), text)[1] or self._split(b"", text)[1]

    def text(self, tokens: Iterable[int]) -> bytes:
        """The text of tokens."""
        return b"".join([self._tokens[token] for token in tokens])

    def _split(self, before: bytes, text: bytes) -> tuple[bytes, list[int]]:
        """`text` without a cut character at its end, and its tokens after `before`; none if it begins within
        a token."""
        whole = text.decode(errors="ignore")
        text = text[: len(whole.encode())]
        found: list[int] = []
        at = len(text)
        said = before.decode(errors="ignore")
        for token in reversed(self._tokenizer.encode(said + whole, add_special_tokens=False)):
            if at <= 0:
                break
            found.append(token)
            at -= len(self._tokens[token])
        found.reverse()
        return text, found if self.text(found) == text else []

    def _ambiguous_suffix(self, text: bytes) -> int:
        """How many bytes at the end may be the beginning of a longer token."""
        ends = range(min(len(text), self._longest - 1), 0, -1)
        return next((length for length in ends if self._begins(text[-length:])), 0)

    def _begins(self, text: bytes) -> bool:
        """Whether a longer token begins with the text."""
        place = bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


class JumpForward:
    """Advances the matcher of one sequence by its tokens, and by the tokens that the grammar forces after
    them.

    `limit` is the log's length at which the sequence ends. `pending` are the tokens forced right after the
    log.
    """

    def __init__(self, matcher: Matcher, log: SequenceLog, limit: int, retokenizer: Retokenizer) -> None:
        self.matcher = matcher
        self._retokenizer = retokenizer
        self._stops = frozenset(log.params.stop_token_ids)
        self._limit = limit
        self._length = len(log.tokens)
        self._before = deque(log.tokens[log.prompt_length :], CONTEXT)
        ended = len(log.tokens) > log.prompt_length and log.tokens[-1] in self._stops
        self.pending = () if ended else self._take_forced()

    def take(self, token: int) -> tuple[int, ...] | None:
        """The chosen `token` and the tokens forced after it; None if the grammar does not allow it."""
        if not self.matcher.terminated and not self.matcher.accept(token):
            return None
        self._append(token)
        return token, *(() if token in self._stops else self._take_forced())

    def _append(self, token: int) -> None:
        self._length += 1
        self._before.append(token)

    def _take_forced(self) -> tuple[int, ...]:
        """All forced tokens. The matcher takes them."""
        ahead: list[int] = []
        while run := self._take_run():
            ahead += run
        return tuple(ahead)

    def _take_run(self) -> list[int]:
        """One run of forced tokens, as far as they are allowed. The matcher takes them."""
        text = self.matcher.forced()
        tokens = self._retokenizer(self._before, text) if len(text) >= LEAST else []
        if len(tokens) < LEAST:
            return []
        mask = np.empty((1, words_of(self._retokenizer.vocab_size)), np.int32)
        for count, token in enumerate(tokens):
            if not self._allows(token, mask):
                return tokens[:count]
            self.matcher.accept(token)
            self._append(token)
        return tokens

    def _allows(self, token: int, mask: Bitmask) -> bool:
        """The same checks as for a chosen token. Nothing is forced once a plan is kept that closes the
        answer."""
        if self._length >= self._limit or token in self._stops or not self.matcher.forced():
            return False
        self.matcher.fill(mask, 0)
        return allows(mask[0], token)
