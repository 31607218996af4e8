"""Finite automata over tokens: masks are looked up, and the distance of an answer from its end is known
exactly.

Each state has its distance: the fewest tokens to a state in which an answer may end. So an answer closes
within its budget without a search. Near the end, a mask has exactly the tokens after which the remaining
budget is enough.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from personae.grammar.backend import BackendMatcher, BoundGrammar
from personae.grammar.bitmask import Bitmask, allow_only, mask_of
from personae.grammar.vocabulary import Vocabulary

Transitions = Mapping[int, Mapping[int, int]]
"""The next state, by state and token."""

_BYTES_PER_TRANSITION = 120  # in a dict, and in the arrays of a state


class AutomatonGrammar(BoundGrammar):
    """A grammar whose answers close, shared by all of them. Thread-safe.

    It begins in `start` and may end in `finals`; every state leads to one of these.
    """

    grows = False

    def __init__(
        self, transitions: Transitions, start: int, finals: Set[int], vocabulary: Vocabulary
    ) -> None:
        self._transitions = transitions
        self.start = start
        self.finals = finals
        self.vocabulary = vocabulary
        self._distances = _distances(transitions, finals)
        self._rows: dict[int, Bitmask] = {}  # by state, filled as needed
        self._forced: dict[int, bytes] = {}
        self._tokens: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    @property
    def nbytes(self) -> int:
        """An upper limit of the bytes held."""
        row = 4 * (-(-self.vocabulary.size // 32))
        return len(self._transitions) * row + _BYTES_PER_TRANSITION * sum(
            map(len, self._transitions.values())
        )

    @property
    def shortest(self) -> int:
        """The fewest tokens of an answer, without the stop token."""
        return max(1, self._distances[self.start])

    def matcher(self, budget: int | None = None) -> "AutomatonMatcher":
        """A new matcher at the start of an answer that is complete within `budget` tokens. A budget below
        `shortest` cannot be kept."""
        return AutomatonMatcher(self, None if budget is None or budget < self.shortest else budget)

    def after(self, state: int, token: int, left: int | None) -> int | None:
        """The state after `token`, if `left` more tokens are enough from there. None if the token is not
        allowed."""
        found = self._transitions[state].get(token)
        return None if found is None or (left is not None and self._distances[found] > left) else found

    def row(self, state: int, left: int | None) -> Bitmask:
        """The tokens that may come next, [words], if `left` more tokens are enough after them."""
        if state not in self._tokens:
            following = self._transitions[state]
            tokens = np.fromiter(following, np.int64, len(following))
            self._tokens[state] = (
                tokens,
                np.array([self._distances[one] for one in following.values()], np.int64),
            )
        tokens, distances = self._tokens[state]
        if left is not None and len(distances) and left < distances.max():
            return self._of(state, tokens[distances <= left])
        if state not in self._rows:
            self._rows[state] = self._of(state, tokens)
        return self._rows[state]

    def forced(self, state: int) -> bytes:
        """The only text that may follow."""
        if state not in self._forced:
            text, at = b"", state
            while at not in self.finals:
                following = {self.vocabulary.tokens[one]: to for one, to in self._transitions[at].items()}
                first, last = min(following), max(following)  # what these two share, all between them share
                pairs = enumerate(zip(first, last, strict=False))
                shared = first[: next((count for count, (a, b) in pairs if a != b), len(first))]
                text += shared
                if shared not in following:
                    break
                at = following[shared]
            self._forced[state] = text
        return self._forced[state]

    def _of(self, state: int, tokens: NDArray[np.int64]) -> Bitmask:
        allowed = np.zeros(self.vocabulary.size, np.bool_)
        allowed[tokens] = True
        if state in self.finals:
            allowed[list(self.vocabulary.stop_ids)] = True
        return mask_of(allowed)


def _distances(transitions: Transitions, finals: Set[int]) -> dict[int, int]:
    """The fewest tokens from each state to an end, computed backwards from the ends."""
    before: defaultdict[int, list[int]] = defaultdict(list)
    for state, following in transitions.items():
        for after in {*following.values()}:
            before[after].append(state)
    distances = dict.fromkeys(finals, 0)
    reached = list(finals)
    for state in reached:
        for one in before[state]:
            if one not in distances:
                distances[one] = distances[state] + 1
                reached.append(one)
    return distances


class AutomatonMatcher(BackendMatcher):
    """The state of one answer: the automaton's states that it has passed through."""

    def __init__(self, automaton: AutomatonGrammar, budget: int | None) -> None:
        self._automaton = automaton
        self._budget = budget
        self._states = [automaton.start]
        self._ended = False

    @property
    def _left(self) -> int | None:
        """The number of tokens that may come after the next one."""
        return None if self._budget is None else self._budget - len(self._states)

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens allowed next to `bitmask[row]`; after the end, the stop tokens."""
        if self._ended:
            allow_only(bitmask[row], self._automaton.vocabulary.stop_ids)
        else:
            bitmask[row] = self._automaton.row(self._states[-1], self._left)

    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False, and changes nothing, if it is not allowed."""
        if self._ended:
            return False
        if token in self._automaton.vocabulary.stop_ids:
            self._ended = self._states[-1] in self._automaton.finals
            return self._ended
        after = self._automaton.after(self._states[-1], token, self._left)
        if after is not None:
            self._states.append(after)
        return after is not None

    def feed(self, tokens: Sequence[int]) -> int:
        """Accept tokens until one is not allowed. Returns how many were accepted."""
        return next((n for n, token in enumerate(tokens) if not self.accept(token)), len(tokens))

    def follows(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` would be accepted; a stop token may be the last."""
        return self.fork().feed(tokens)

    def snapshot(self) -> int:
        """How many tokens have been accepted."""
        return len(self._states) - 1 + self._ended

    def restore(self, snapshot: int) -> None:
        """Undo what was accepted since."""
        self._ended = self._ended and snapshot >= len(self._states)
        del self._states[snapshot + 1 :]

    def forced(self) -> bytes:
        """The only text that may follow, regardless of the budget."""
        return b"" if self._ended else self._automaton.forced(self._states[-1])

    def fork(self) -> "AutomatonMatcher":
        """A second matcher in the same state."""
        other = AutomatonMatcher(self._automaton, self._budget)
        other._states, other._ended = self._states.copy(), self._ended
        return other

    def unbudgeted(self) -> "AutomatonMatcher | None":
        """A second matcher in the same state, whose answer may be longer. None at the end."""
        if self._ended:
            return None
        other = self.fork()
        other._budget = None
        return other

    @property
    def failed(self) -> bool:
        """Never: everything is computed in advance."""
        return False

    @property
    def terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._ended
