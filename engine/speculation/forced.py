"""Jump-forward: text that a grammar forces is appended at once, without a forward pass for each token.

Where one text alone may come next (the rest of a property's name, of a member of an enum) nobody has to be
asked what it is. What has to be decided is which tokens write it, since a grammar allows every way to cut an
allowed text: they are those of the tokenizer, which are mostly the model's own. The last ones are left to the
model, where what it writes next could be one token with them; and so is a text that begins within a token,
until the model has ended that.

The step that computes the token before is planned by the time that this is known. So a run of k tokens saves
k - 1 steps, and one token alone is left to the model.

What follows a log by itself depends on the log alone, and nothing follows it twice: a sequence that comes
back from a preemption, or in another epoch of the engine core, goes on with the same tokens.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from personae.engine.sequence import SequenceLog
from personae.engine.speculation.proposer import Draft
from personae.engine.tokens import Tokenizer
from personae.grammar.backend import Matcher
from personae.grammar.bitmask import Bitmask, allow_only, allows, words_of

CONTEXT = 8  # tokens before a text: more than a tokenizer looks back
LEAST = 2  # tokens of a run that saves a step


def jumps(log: SequenceLog) -> bool:
    """Whether its forced tokens may be appended: nobody asks what the model thinks of each, nor counts."""
    params = log.params
    counts = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)
    return params.jump_forward and log.grammar is not None and params.logprobs is None and not counts


class KnownToken:
    """Binds a row whose token is known to that: of its logits one alone is needed."""

    terminated = False

    def __init__(self, token: int) -> None:
        self._token = token

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Allow the token."""
        allow_only(bitmask[row], [self._token])

    def accept(self, token: int) -> bool:
        """Whether it is the one."""
        return token == self._token


class Retokenizer:
    """How a tokenizer writes text behind other text; shared by all sequences.

    `tokens[id]` is the text of a token, b"" for special ones (`Vocabulary.tokens`).
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes]) -> None:
        self.vocab_size = len(tokens)
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._sorted = sorted(filter(None, tokens))
        self._longest = max(map(len, self._sorted))

    def __call__(self, before: Iterable[int], text: bytes) -> list[int]:
        """The tokens of `text` behind the tokens `before`, but for the last ones that what follows could
        change. None of them if `text` begins within one."""
        whole = text.decode(errors="ignore")  # a character that is cut off at the end comes later
        text = text[: len(whole.encode())]
        said = b"".join([self._tokens[token] for token in before]).decode(errors="ignore")
        found: list[int] = []
        at = len(text)
        for token in reversed(self._tokenizer.encode(said + whole, add_special_tokens=False)):
            if at <= 0:
                break
            found.append(token)
            at -= len(self._tokens[token])
        found.reverse()
        if b"".join([self._tokens[token] for token in found]) != text:
            return []
        end = len(text) - self._unsure(text)
        for count, token in enumerate(found):
            at += len(self._tokens[token])
            if at > end:
                return found[:count]
        return found

    def _unsure(self, text: bytes) -> int:
        """How many bytes at the end may be the beginning of a longer token."""
        ends = range(min(len(text), self._longest - 1), 0, -1)
        return next((length for length in ends if self._begins(text[-length:])), 0)

    def _begins(self, text: bytes) -> bool:
        """Whether a longer token begins with it."""
        place = bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


class JumpForward:
    """Has the matcher of one sequence take its tokens, and those that follow by themselves.

    `limit` is the length of the log at which the sequence ends. `pending` are tokens that follow its log
    itself.
    """

    def __init__(self, matcher: Matcher, log: SequenceLog, limit: int, retokenizer: Retokenizer) -> None:
        self.matcher = matcher
        self._retokenizer = retokenizer
        self._stops = frozenset(log.params.stop_token_ids)
        self._limit = limit
        self._length = len(log.tokens)
        self._before = deque(log.tokens[log.prompt_length :], CONTEXT)
        ended = len(log.tokens) > log.prompt_length and log.tokens[-1] in self._stops
        self.pending = () if ended else self._ahead()

    def take(self, token: int) -> tuple[int, ...] | None:
        """`token`, which was chosen, and what follows; None if the grammar does not allow it."""
        if not self.matcher.terminated and not self.matcher.accept(token):
            return None
        self._append(token)
        return token, *(() if token in self._stops else self._ahead())

    def _append(self, token: int) -> None:
        self._length += 1
        self._before.append(token)

    def _ahead(self) -> tuple[int, ...]:
        """All that follows by itself, taken."""
        ahead: list[int] = []
        while run := self._run():
            ahead += run
        return tuple(ahead)

    def _run(self) -> list[int]:
        """What is forced here, taken as far as it is allowed."""
        text = self.matcher.forced()
        tokens = self._retokenizer(self._before, text) if len(text) >= LEAST else []
        if len(tokens) < LEAST:
            return []
        mask = np.empty((1, words_of(self._retokenizer.vocab_size)), np.int32)
        for count, token in enumerate(tokens):
            if not self._may(token, mask):
                return tokens[:count]
            self.matcher.accept(token)
            self._append(token)
        return tokens

    def _may(self, token: int, mask: Bitmask) -> bool:
        """As for a token that is chosen; and nothing is forced once a plan is kept that closes the answer."""
        if self._length >= self._limit or token in self._stops or not self.matcher.forced():
            return False
        self.matcher.fill(mask, 0)
        return allows(mask[0], token)


class ForcedProposer:
    """Guesses what a grammar forces, for answers whose tokens are the model's own: which tokens write the
    text the grammar leaves open, and the model may know better."""

    def __init__(self, matcher: Matcher, retokenizer: Retokenizer, log: SequenceLog) -> None:
        self._matcher = matcher
        self._retokenizer = retokenizer
        self._before = deque(log.tokens[log.prompt_length :], CONTEXT)

    def extend(self, tokens: Sequence[int]) -> None:
        """See Proposer. The matcher has taken them."""
        self._before.extend(tokens)

    def propose(self, most: int) -> Draft | None:
        """See Proposer."""
        text = self._matcher.forced()
        tokens = self._retokenizer(self._before, text) if text else []
        return Draft(tuple(tokens[:most]), "forced") if tokens else None
