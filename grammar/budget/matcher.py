"""A matcher that always closes: when its budget of tokens ends, the answer is complete.

While an answer has more tokens left than it can possibly need (`distance_bound.py`), this matcher is the
backend's, plus an addition for every token. Within a string that may be any text the mask does not change,
and the backend gets many tokens at once.

After that it keeps a *plan*: a completion, found by the search in `planner.py` in a grammar over bytes, and
written in no more tokens than are left. The mask is still the grammar's, so the model chooses freely. But the
chosen token is verified before it is accepted. If no plan that fits is found for it, it is vetoed and the
model chooses again. After a few vetoes in a step, only the first token of the plan and tokens that are
certainly safe are left. So there is a plan after every token, whichever the model chooses, and the last plan
is empty. Once no token can be spared, the mask excludes in advance the tokens that are known to take one more
than the plan does (`token_classifier.py`).

A backend may give up on an answer because its automaton has grown too large. The answer then follows the plan
to its end.

Whether a token is vetoed depends on the accepted tokens and the budget alone. So a matcher that replays a log
vetoes the same tokens.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from personae.grammar.backend import BackendMatcher
from personae.grammar.bitmask import Bitmask
from personae.grammar.budget.completion import CompletionPath, open_brackets, path
from personae.grammar.budget.numbers import NumberGuard
from personae.grammar.budget.planner import Planner
from personae.grammar.budget.string_masks import StringState, Words
from personae.grammar.budget.table import STOP, Piece
from personae.grammar.budget.token_classifier import TokenClassifier
from personae.grammar.matcher import Matcher, Snapshot

if TYPE_CHECKING:
    from personae.grammar.budget.grammar import BudgetGrammar

_MOST_DEFERRED = 64  # tokens that the backend gets at once
_MOST_VETOES = 8  # before a step has no choice left; each may cost a search
_RECENT = 512
_SEARCH = 16_384  # bytes of the longest plan
_STATES = 1500  # of the slower search
_LONGEST_PAUSE = 8
_JOINS = 4  # places of a plan where a token may rejoin it
_END = re.compile(rb'[",}\]]')


class NextToken(NamedTuple):
    """A token that may be accepted next, and the plan behind it."""

    token: int
    plan: CompletionPath


# What an answer's tokens change, in addition to these and the matchers. The values themselves are immutable.
_STATE = (
    *("_left", "_numbers", "_opened", "_plan", "_vetoes", "_text"),
    *("_idle", "_pauses", "_following", "_stopped"),
)


class BudgetMatcher(Matcher):
    """The state of one answer of at most `budget` tokens. A stop token after them does not count."""

    def __init__(self, inner: BackendMatcher, grammar: "BudgetGrammar", budget: int) -> None:
        self._inner = inner
        self._grammar = grammar
        self._left = budget
        self._accepted: list[int] = []
        self._numbers = NumberGuard(grammar.table, grammar.number_ends)
        self._opened = 0
        self._bytewise: BackendMatcher | None = None
        self._planner: Planner | None = None
        self._synced = 0  # accepted tokens that the bytewise matcher has seen; -1: it has lost track
        self._plan: CompletionPath | None = None
        self._verified: NextToken | None = None  # what was verified last
        self._classifier: TokenClassifier | None = None  # of this step
        self._vetoes: Mapping[int, Words] = {}  # of this step, by token
        self._text: StringState | None = None
        self._idle = 0  # tokens for which the text may continue before anything but its mask matters
        self._pauses = (0, 0)  # tokens until the next search, and how many they were the last time
        self._deferred = 0  # accepted tokens that the backend has not got yet
        self._following = False  # only the plan is left: the backend has given up
        self._stopped = False
        if self._near:
            self._plan = grammar.shortest_path

    @property
    def searched(self) -> bool:
        """Whether it has searched for completions."""
        return self._planner is not None

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens allowed next. After the end, these are the stop tokens."""
        if self._text is not None and self._idle > 0:
            bitmask[row] = self._text.words.view(np.int32)
            return
        words = bitmask[row].view(np.uint32)
        if self._text is not None:
            words[:] = self._text.words
        else:
            if not self._following:
                self._inner.fill(bitmask, row)
                self._following = self._inner.failed and self._follow()
            if self._following:
                words[:] = self._next() if not self.terminated else self._grammar.table.stops
                return
            if self._inner.terminated:
                return
            if self._grammar.bound.texts:
                self._text = self._grammar.texts.at(words, endless=self._grammar.bound.endless)
        shorter = self._numbers.narrow(words)
        if shorter is not None:
            words[:] = shorter
        plan = self._plan
        if plan is not None:
            self._classifier = TokenClassifier(self._grammar, plan, words, number=bool(self._numbers.run))
            if plan.count == self._left:
                self._classifier.narrow(words)
            if plan.first is not None:
                words[plan.first // 32] |= np.uint32(1 << plan.first % 32)
            return
        container, table = self._grammar.bound.container, self._grammar.table
        if self._left == 1:
            words &= table.stops  # the last token: an answer that is not complete has none, and fails
            return
        if self._text is not None:
            self._idle = self._left - 1 - self._bound - container * max(table.most_opens, 1)
        if container:
            opens = (self._left - 1 - self._bound) // container
            if 0 < opens < table.most_opens:
                words &= table.at_most(opens)

    @property
    def verifies(self) -> bool:
        """Whether the chosen token may be vetoed."""
        return self._plan is not None and not self._following and not self._inner.terminated

    def veto(self, token: int) -> Words | None:
        """What to exclude, as a row of a bitmask, because no completion that fits is found after `token`,
        which `fill` allowed. None if there is one. A step's last veto leaves only tokens that are certainly
        safe. If the step is computed again, the vetoes are the same."""
        plan, table = self._plan, self._grammar.table
        if token in self._vetoes:
            return self._vetoes[token]
        if plan is None or len(self._vetoes) > _MOST_VETOES or self._ends(token):
            return None
        self._verified = self._verify(token, plan)
        if self._verified is not None:
            return None
        first = self._first(plan)
        is_last = len(self._vetoes) == _MOST_VETOES
        words = ~(table.stops | first) if is_last else self._classified(plan).as_long(token) & ~first
        self._vetoes = {**self._vetoes, token: words}
        return words

    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False, and changes nothing, if the grammar does not allow it."""
        if self._text is not None and self._idle > 0 and self._accept_text(self._text, token):
            return True
        self._catch_up()
        plan, verified = self._plan, self._verified
        if self._following:
            return self._accept_next(token)
        if plan is not None and (verified is None or verified.token != token):
            verified = None if self._ends(token) else self._verify(token, plan)
        if not self._inner.accept(token):
            self._following = self._inner.failed and (verified is not None or self._follow())
            if verified is None or not self._following:
                return self._following and self._accept_next(token)
        self._advance(token, None if verified is None else verified.plan)
        return True

    def _accept_text(self, text: StringState, token: int) -> bool:
        """Accept `token` if the text continues after it: only counts change, and the backend gets it
        later."""
        grammar = self._grammar
        self._text = grammar.texts.after(text, token)
        if self._text is None:
            self._text, self._idle = text, 0
            return False
        opens = grammar.table.opens[token]
        self._accepted.append(token)
        self._left -= 1
        self._opened += opens
        self._idle -= 1 + grammar.bound.container * opens
        self._deferred += 1
        if self._deferred == _MOST_DEFERRED:
            self._catch_up()
        return True

    def _catch_up(self) -> None:
        """Give the backend the tokens that it has not got yet."""
        if not self._deferred:
            return
        deferred, self._deferred = self._accepted[-self._deferred :], 0
        if (taken := self._inner.feed(deferred)) < len(deferred):
            self._inner.accept(deferred[taken])  # it gives up for good, and that shows only now
        self._numbers = self._numbers.after(self._text_of(deferred))

    def _accept_next(self, token: int) -> bool:
        """As `accept`, when only the plan is followed. In a replay the backend may give up earlier; a plan
        then exists after each accepted token too."""
        plan = self._plan
        if plan is None or self.terminated:
            return False
        if self._grammar.table.holds(self._next(), token):
            self._stopped = not plan.count
            self._advance(token, plan.after(plan.length))
            return True
        piece = () if self._ends(token) else self._grammar.table.piece(token)
        found = self._found(piece, plan.piece, self._left - 1) if piece else None
        if found is not None:
            self._advance(token, found)
        return found is not None

    def feed(self, tokens: Sequence[int]) -> int:
        """Accept as many of `tokens` as are allowed. Returns how many these were."""
        for count, token in enumerate(tokens):
            if not self.accept(token):
                return count
        return len(tokens)

    def follows(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` the grammar would accept. A stop token may be the last."""
        self._catch_up()
        return self._inner.follows(tokens)

    def snapshot(self) -> Snapshot:
        """The state that the backend's matchers do not hold. They go back only when it is restored."""
        return len(self._accepted), self._synced, *(getattr(self, name) for name in _STATE)

    def restore(self, snapshot: Snapshot) -> None:
        """Undo what was accepted since."""
        length, synced, *state = snapshot
        if self._inner.snapshot() > length:
            self._inner.restore(length)
        self._unsync(length, synced)
        del self._accepted[length:]
        self._set(state)
        self._verified = self._classifier = None
        if self._inner.failed and not self._following:
            self._following = self._follow()
        self._deferred = 0 if self._inner.failed else length - self._inner.snapshot()

    def _set(self, state: Iterable[Any]) -> None:
        for name, value in zip(_STATE, state, strict=True):
            setattr(self, name, value)

    def _unsync(self, length: int, synced: int) -> None:
        """Let the bytewise matcher undo what it has seen since."""
        if self._synced < 0 <= synced:  # it has lost track since: another one gets all
            self._bytewise, self._synced = None, 0
        elif self._synced > length:
            assert self._bytewise is not None
            taken_back = map(self._grammar.table.piece, self._accepted[length : self._synced])
            self._bytewise.restore(self._bytewise.snapshot() - sum(map(len, taken_back)))
            self._synced = length

    def forced(self) -> bytes:
        """The only text that the grammar allows. Empty if the backend does not get each token, or if there is
        a plan."""
        return b"" if self._text is not None or self._plan is not None else self._inner.forced()

    def fork(self) -> "BudgetMatcher":
        """A second matcher in the same state."""
        self._catch_up()
        other = type(self)(self._inner.fork(), self._grammar, self._left)
        other._set(self.snapshot()[2:])
        other._accepted, other._synced = self._accepted.copy(), self._synced
        other._bytewise = self._bytewise and self._bytewise.fork()
        return other

    def unbudgeted(self) -> BackendMatcher | None:
        """A matcher of the grammar alone in the same state, whose answer may be longer. None in texts that
        can go on in any way, at the end, and if the backend has given up."""
        if self._text is not None or self._following or self.terminated or self._inner.failed:
            return None
        return self._inner.fork()

    @property
    def terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._stopped or self._inner.terminated

    @property
    def failed(self) -> bool:
        """Whether the backend has given up and there is no plan."""
        return self._inner.failed and not self._following

    def _follow(self) -> bool:
        """Get a plan for the rest of the answer. Returns whether there is one."""
        if self._plan is None:
            self._plan = self._found((), (), self._left)
        return self._plan is not None

    def _next(self) -> Words:
        """The plan's next token alone, as a row of a bitmask."""
        assert self._plan is not None
        return self._first(self._plan) if self._plan.count else self._grammar.table.stops

    def _first(self, plan: CompletionPath) -> Words:
        """The plan's first token as a row of a bitmask; empty if the plan is empty."""
        return self._grammar.table.only(*(() if plan.first is None else (plan.first,)))

    def _advance(self, token: int, plan: CompletionPath | None) -> None:
        """Update the counts after `token`, which is followed by `plan`."""
        self._accepted.append(token)
        if self.terminated:
            self._text = None
            return
        grammar = self._grammar
        self._left -= 1
        self._vetoes = {}
        self._verified = self._classifier = None
        if self._text is not None:
            self._text = grammar.texts.after(self._text, token)
        self._numbers = self._numbers.after(self._text_of((token,)))
        self._opened += grammar.table.opens[token]
        if plan is None:
            plan = self._found((), (), self._left) if self._near else None
        self._plan = plan
        if plan is not None and not self._following:
            self._relax(plan)

    def _relax(self, plan: CompletionPath) -> None:
        """Drop the plan if the answer is far from its end after all."""
        bound = self._grammar.bound
        if not bound.proven or bound.rest + bound.lexeme + bound.container > self._left - 1:
            return  # however many brackets are open
        self._opened = open_brackets(plan.piece)
        if not self._near:
            self._plan = None

    def _ends(self, token: int) -> bool:
        """Whether `token` is a stop token, or follows one."""
        return token in self._grammar.table.vocabulary.stop_ids or self.terminated

    @property
    def _bound(self) -> int:
        """An upper bound of the answer's distance from its end."""
        bound = self._grammar.bound
        return bound.rest + bound.lexeme + bound.container * max(self._opened - bound.roots, 0)

    @property
    def _near(self) -> bool:
        """Whether the budget may be too small after a token that opens one bracket."""
        bound = self._grammar.bound
        return not bound.proven or self._bound + bound.container > self._left - 1

    def _classified(self, plan: CompletionPath) -> TokenClassifier:
        """What is known of the tokens that may follow. A matcher that replays has filled no mask."""
        if self._classifier is None:
            self.fill(np.zeros((1, self._grammar.table.words), np.int32), 0)
        return self._classifier or TokenClassifier(
            self._grammar, plan, self._grammar.table.only(), number=False
        )

    def _verify(self, token: int, plan: CompletionPath) -> NextToken | None:
        """Whether `token` may be accepted: the token with a plan after it that fits, if one is found."""
        if token == plan.first:
            length: int | None = plan.length
        else:
            length = self._classified(plan).written(token)
        if length is not None:
            rest = plan.after(length) or path(self._grammar.table, plan.piece[length:], plan)
            return NextToken(token, rest) if rest is not None and rest.count < self._left else None
        for rest in self._rests(plan):
            if rest.count < self._left and self._joins(token, rest):
                return NextToken(token, rest)
        if self._leaves_none_for_more(plan):
            return None
        found = self._found(self._grammar.table.piece(token), plan.piece, self._left - 1)
        return None if found is None else NextToken(token, found)

    def _joins(self, token: int, rest: CompletionPath) -> bool:
        """Whether `rest` completes the answer after `token`."""
        stop = self._grammar.table.stop
        next_one = stop if rest.first is None else rest.first
        if self._inner.follows((token, next_one)) < 2:
            return False  # usually found this way, without writing out the whole
        return self._inner.follows((token, *rest.tokens, stop)) == rest.count + 2

    def _rests(self, plan: CompletionPath) -> Iterator[CompletionPath]:
        """Parts of a plan that might follow a token: from places where something ends, the plan without its
        first token, or all of it."""
        ends = islice(_END.finditer(plan.begins(_RECENT), 1), _JOINS)
        for length in (*(end.start() for end in ends), plan.length):
            rest = plan.after(length)
            if rest is not None:
                yield rest
        yield plan

    def _leaves_none_for_more(self, plan: CompletionPath) -> bool:
        """Whether a token could be followed by nothing but the plan, from where what it has begun ends. Any
        other way from there would be too long."""
        if not self._grammar.bound.texts:
            return False
        text = plan.begins(_RECENT)
        end = _END.search(text, 1)
        rest = plan.after(len(text) if end is None else end.start())
        return rest is not None and rest.count >= self._left - 1

    def _sync(self) -> BackendMatcher | None:
        """The bytewise matcher after what was accepted. None if it cannot follow, or could not before."""
        if self._synced < 0:
            return None
        if self._bytewise is None:
            self._bytewise = self._grammar.bytewise()
        table = self._grammar.table
        piece = [byte for token in self._accepted[self._synced :] for byte in table.piece(token)]
        follows = self._bytewise.feed(piece) == len(piece)
        self._synced = len(self._accepted) if follows else -1
        return self._bytewise if follows else None

    def _after(self, piece: Piece) -> BackendMatcher | None:
        """A bytewise matcher after `piece`. None if it cannot follow."""
        bytewise = self._sync()
        fork = None if bytewise is None else bytewise.fork()
        return None if fork is None or fork.feed(piece) < len(piece) else fork

    def _found(self, piece: Piece, old: Piece, left: int) -> CompletionPath | None:
        """A plan of at most `left` tokens after `piece`. `old` was the plan before it."""
        fork = self._after(piece)
        if fork is None:
            return None
        if self._planner is None:
            self._planner = self._grammar.planner()
        recent = self._text_of(self._accepted[-_RECENT:]) + bytes(byte for byte in piece if byte < STOP)
        limit = min(_SEARCH, 8 * left + 64)
        for found in self._searches(fork, recent[-_RECENT:], limit, old):
            plan = None if found is None else path(self._grammar.table, found, self._plan)
            if plan is not None and plan.count <= left:
                return plan
        return None

    def _searches(
        self, matcher: BackendMatcher, recent: bytes, limit: int, old: Piece
    ) -> Iterator[Piece | None]:
        """Completions. The last one comes from the slower search, if there is no plan to fall back on."""
        assert self._planner is not None
        yield self._planner.plan(matcher, recent, limit, old)
        pause, paused = self._pauses
        self._pauses = pause - 1, paused
        if self._plan is None and pause < 1:
            yield self._planner.search(matcher, limit, _STATES)
            paused = min(2 * paused + 1, _LONGEST_PAUSE)
            self._pauses = paused, paused

    def _text_of(self, tokens: Sequence[int]) -> bytes:
        """The bytes that tokens write, without special ones."""
        texts = self._grammar.table.vocabulary.tokens
        return b"".join([texts[token] for token in tokens])
