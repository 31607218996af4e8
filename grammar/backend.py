"""The plug-in point for grammar engines. All of them fill the same bitmask (bitmask.py)."""

from collections.abc import Sequence
from typing import Any, Protocol

from personae.grammar.bitmask import Bitmask
from personae.grammar.spec import GrammarSpec

Snapshot = Any
"""A point in one matcher's answer; only that matcher can read it."""

MOST_RESTORED = 64
"""How many tokens after a snapshot it can be restored, at least."""


class Binding(Protocol):
    """What says, token by token, which tokens may come next in one sequence's answer. Not thread-safe; one
    owner at a time."""

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens allowed next to `bitmask[row]`; once terminated, the stop tokens."""

    def accept(self, token: int) -> bool:
        """Advance by one token. False (and no change of state) if it is not allowed."""

    @property
    def terminated(self) -> bool:
        """Whether a stop token has been accepted."""


class Matcher(Binding, Protocol):
    """The state of one sequence's answer within a grammar.

    In a state that is past its library's limits it allows and accepts nothing: that answer fails.
    """

    def feed(self, tokens: Sequence[int]) -> int:
        """Accept tokens until one is not allowed; how many were."""

    def follows(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` would be accepted, one after the other; a stop token may be the last."""

    def snapshot(self) -> Snapshot:
        """Where the answer is now. Takes constant time."""

    def restore(self, snapshot: Snapshot) -> None:
        """Take back what was accepted since `snapshot` was made; takes time with that alone.

        Snapshots that were made since are void; `snapshot` and older ones can be restored again. A matcher
        that has failed stays failed.
        """

    def forced(self) -> bytes:
        """Text that has to follow, as far as it is known; nothing where tokens are asked about."""

    def fork(self) -> "Matcher":
        """A second matcher in the same state."""

    @property
    def failed(self) -> bool:
        """Whether it is past its library's limits."""


class BackendMatcher(Matcher, Protocol):
    """A matcher of a backend's own: its snapshots are the numbers of tokens accepted."""

    def snapshot(self) -> int:
        """How many tokens have been accepted, the stop token among them."""


class CompiledGrammar(Protocol):
    """A grammar ready for use, shared by all sequences that ask for it; thread-safe."""

    @property
    def nbytes(self) -> int:
        """Bytes held, for the cache's bound."""

    def matcher(self) -> BackendMatcher:
        """A new matcher at the grammar's start."""


class BoundGrammar(Protocol):
    """A compiled grammar whose answers close within their budgets; shared by all of them, thread-safe."""

    @property
    def nbytes(self) -> int:
        """Bytes held, for the cache's bound."""

    @property
    def shortest(self) -> int:
        """How many tokens an answer needs that is sure to be complete, the stop token not counted."""

    def matcher(self, budget: int | None = None) -> Matcher:
        """A new matcher at the start, of an answer that is complete within `budget` tokens."""


class GrammarBackend(Protocol):
    """Turns a spec into a compiled grammar for one tokenizer."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile; slow (milliseconds to seconds) and free of the GIL where the library allows.

        Raises GrammarError when the spec is malformed or cannot be enforced.
        """
