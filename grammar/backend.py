"""The plug-in point for grammar engines. All of them fill the same bitmask (bitmask.py)."""

from collections.abc import Sequence
from typing import Any, Protocol

from personae.grammar.bitmask import Bitmask
from personae.grammar.spec import GrammarSpec

Snapshot = Any
"""A point in one matcher's answer; only that matcher can read it."""

MOST_RESTORED = 64
"""A matcher can be restored to a snapshot for at least this many tokens after it."""


class Binding(Protocol):
    """Says, token by token, which tokens may come next in one sequence's answer. Not thread-safe; it has one
    owner at a time."""

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens allowed next to `bitmask[row]`. After the end, these are the stop tokens."""

    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False, and changes nothing, if it is not allowed."""

    @property
    def terminated(self) -> bool:
        """Whether a stop token has been accepted."""


class Matcher(Binding, Protocol):
    """The state of one sequence's answer within a grammar.

    In a state beyond its library's limits it allows and accepts nothing, and the answer fails.
    """

    def feed(self, tokens: Sequence[int]) -> int:
        """Accept tokens until one is not allowed. Returns how many were accepted."""

    def follows(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` would be accepted, one after the other; a stop token may be the last."""

    def snapshot(self) -> Snapshot:
        """The answer's current point. Takes constant time."""

    def restore(self, snapshot: Snapshot) -> None:
        """Undo what was accepted since `snapshot` was made. The time depends on that alone.

        Snapshots that were made since are void; `snapshot` and older ones can be restored again. A matcher
        that has failed stays failed.
        """

    def forced(self) -> bytes:
        """Text that has to follow, as far as it is known. Empty where tokens are verified."""

    def fork(self) -> "Matcher":
        """A second matcher in the same state."""

    @property
    def failed(self) -> bool:
        """Whether it is beyond its library's limits."""


class BackendMatcher(Matcher, Protocol):
    """A matcher of a backend itself. Its snapshots are numbers of accepted tokens."""

    def snapshot(self) -> int:
        """How many tokens have been accepted, including the stop token."""


class CompiledGrammar(Protocol):
    """A grammar ready for use, shared by all sequences that are bound by it. Thread-safe."""

    @property
    def nbytes(self) -> int:
        """Bytes held, for the cache's bound."""

    def matcher(self) -> BackendMatcher:
        """A new matcher at the grammar's start."""


class BoundGrammar(Protocol):
    """A compiled grammar whose answers close within their budgets. Shared by all of them; thread-safe."""

    @property
    def nbytes(self) -> int:
        """Bytes held, for the cache's bound."""

    @property
    def shortest(self) -> int:
        """The number of tokens of an answer that is certain to be complete, without the stop token."""

    def matcher(self, budget: int | None = None) -> Matcher:
        """A new matcher at the start of an answer that is complete within `budget` tokens."""


class GrammarBackend(Protocol):
    """Turns a spec into a compiled grammar for one tokenizer."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a spec. This is slow (milliseconds to seconds), and without the GIL where the library
        allows.

        Raises GrammarError if the spec is malformed or cannot be enforced.
        """
