"""Drafts from earlier answers of the same tenant with the same adapter.

Answers of one application resemble each other: the same keys, phrases and code. The last answers of each
(salt, tenant, adapter) are kept as tokens, and an answer's last tokens are looked up among them as
`ngram.py` looks them up in the answer itself. The salt is the prefix cache's: nothing is looked up among
answers of another tenant, of another `cache_salt`, or of another adapter.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from personae.engine.sequence import SequenceLog
from personae.engine.speculation.ngram import LONGEST
from personae.engine.speculation.proposer import Draft

SIZES = (8, 4)  # the lengths of n-grams, longest first
SOURCE = "tenant"
KEPT = 16_384  # tokens of one tenant and adapter
ALL = 131_072  # tokens of all; about 30 MB
PART = 4  # an answer adds at most a fourth of what is kept, its last tokens: 5 ms when it ends
_END = -1  # between two answers

Key = tuple[bytes, str, str | None]


class AnswerIndex:
    """Answers as tokens, and where their n-grams occurred last. Beyond `most` tokens only the newer half is
    kept."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._tokens: list[int] = []
        self._places: dict[int, int] = {}  # by the hash of an n-gram: the position after it

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, before: Sequence[int], answer: Sequence[int]) -> None:
        """Add an answer, and the tokens before it, which are not guessed."""
        if len(self._tokens) + len(before) + len(answer) >= self._most:
            kept, self._tokens, self._places = self._tokens[-self._most // 2 :], [], {}
            self._append(kept, 0)
        self._append((*before, *answer, _END), len(before))

    def _append(self, tokens: Sequence[int], first: int) -> None:
        """Append tokens, and index the n-grams that end at `first` of these or later."""
        own, begin = self._tokens, len(self._tokens)
        own += tokens
        for end in range(begin + max(first, 1), len(own)):
            if own[end] == _END:
                continue
            for size in SIZES:
                if end - begin >= size:
                    self._places[hash(tuple(own[end - size : end]))] = end

    def find(self, tail: Sequence[int], most: int) -> Draft | None:
        """What followed the last tokens of `tail`, up to the end of that answer."""
        own = self._tokens
        for size in SIZES:
            if len(tail) < size:
                continue
            place = self._places.get(hash(tuple(tail[-size:])))
            if place is None or own[place - size : place] != list(tail[-size:]):
                continue
            while size < min(len(tail), place) and own[place - size - 1] == tail[-size - 1]:
                size += 1
            followed = own[place : place + most]
            end = followed.index(_END) if _END in followed else len(followed)
            return Draft(tuple(followed[:end]), SOURCE, size) if end else None
        return None


class TenantAnswers:
    """The answers of all tenants, `most` tokens together. The tenant and adapter that were not used for
    longest are dropped first."""

    def __init__(self, most: int = ALL, each: int = KEPT) -> None:
        self._most, self._each = most, each
        self._total = 0
        self._indexes: OrderedDict[Key, AnswerIndex] = OrderedDict()

    def __len__(self) -> int:
        return self._total

    def add(self, log: SequenceLog, tokens: Sequence[int]) -> None:
        """A sequence has left its slot with these tokens. Its tokens at admission are not added again."""
        answer = tokens[len(log.tokens) :][-(self._each // PART) :]
        if not answer:
            return
        before = tokens[: len(tokens) - len(answer)][-SIZES[0] :]
        key = key_of(log)
        index = self._indexes.setdefault(key, AnswerIndex(self._each))
        self._indexes.move_to_end(key)
        self._total -= len(index)
        index.add(before, answer)
        self._total += len(index)
        while self._total > self._most:
            _, dropped = self._indexes.popitem(last=False)
            self._total -= len(dropped)

    def find(self, key: Key, tail: Sequence[int], most: int) -> Draft | None:
        """What followed `tail` in an earlier answer."""
        index = self._indexes.get(key)
        if index is None:
            return None
        self._indexes.move_to_end(key)
        return index.find(tail, most)


def key_of(log: SequenceLog) -> Key:
    """Whose answers a sequence may be guessed from."""
    return log.salt, log.tenant, log.adapter


class TenantProposer:
    """Looks up a sequence's last tokens among earlier answers."""

    def __init__(self, answers: TenantAnswers, log: SequenceLog) -> None:
        self._answers = answers
        self._key = key_of(log)
        self._tail = deque(log.tokens[-LONGEST:], LONGEST)

    def extend(self, tokens: Sequence[int]) -> None:
        """See Proposer."""
        self._tail.extend(tokens)

    def propose(self, most: int) -> Draft | None:
        """See Proposer."""
        return self._answers.find(self._key, tuple(self._tail), most)
