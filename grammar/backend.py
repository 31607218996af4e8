"""The plug-in point for grammar engines. All of them fill the same bitmask (bitmask.py)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from personae.grammar.matcher import Binding, Lookahead, Matcher
from personae.grammar.replay import ReplayBinding
from personae.grammar.spec import GrammarSpec


class BackendMatcher(Matcher):
    """A matcher of a library, whose answer may have any length. Its snapshots are numbers of accepted
    tokens."""

    @abstractmethod
    def snapshot(self) -> int:
        """How many tokens have been accepted, including the stop token."""

    @abstractmethod
    def fork(self) -> "BackendMatcher":
        """A second matcher in the same state."""

    def unbudgeted(self) -> Lookahead | None:
        """See Matcher."""
        return None if self.terminated or self.failed else self.fork()


class CompiledGrammar(Protocol):
    """A grammar ready for use, shared by all sequences that are bound by it. Thread-safe."""

    @property
    def nbytes(self) -> int:
        """Bytes held, for the cache's bound."""

    def matcher(self) -> BackendMatcher:
        """A new matcher at the grammar's start."""


class BoundGrammar(ABC):
    """A `Grammar` (matcher.py) whose masks are made in this process."""

    remote: ClassVar[bool] = False
    grows: ClassVar[bool] = True
    ended: ClassVar[bool] = False
    idle: ClassVar[bool] = False

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """See Grammar."""

    @property
    @abstractmethod
    def shortest(self) -> int:
        """See Grammar."""

    @abstractmethod
    def matcher(self, budget: int | None = None) -> Matcher:
        """A new matcher at the start of an answer that is complete within `budget` tokens."""

    def begin(self, budget: int, tokens: Sequence[int] = ()) -> Binding:
        """See Grammar. It is a replay of `tokens`, which may be none."""
        return ReplayBinding(self.matcher(budget), tokens)


class GrammarBackend(Protocol):
    """Turns a spec into a compiled grammar for one tokenizer."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a spec. This is slow (milliseconds to seconds), and without the GIL where the library
        allows.

        Raises GrammarError if the spec is malformed or cannot be enforced.
        """
