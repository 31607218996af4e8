"""What binds an answer, as those who write it see it. This module is all that they need of grammars.

A `Binding` says which tokens may come next in one sequence's answer. Most are `Matcher`s: the state of the
answer within a grammar, in this process. Others are made in another process and arrive late
(`sandbox/masks.py`), or catch up with an answer that began earlier (`replay.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any, ClassVar, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from personae.grammar.bitmask import Bitmask

Words = NDArray[np.uint32]
"""A row of a bitmask."""

Snapshot = Any
"""A point in one matcher's answer; only that matcher can read it."""

MOST_RESTORED = 64
"""A matcher can be restored to a snapshot for at least this many tokens after it."""


class _Pending(Enum):
    """The type of UNDECIDED, for the type checker."""

    UNDECIDED = "undecided"


UNDECIDED: Final = _Pending.UNDECIDED
Undecided = Literal[_Pending.UNDECIDED]


class Binding(ABC):
    """Says, token by token, which tokens may come next in one sequence's answer. Not thread-safe; it has one
    owner at a time.

    `remote`: its masks and vetoes are made in another process. `is_known`: it allows one token, which its
    owner knows.
    """

    remote: ClassVar[bool] = False
    is_known: ClassVar[bool] = False

    @abstractmethod
    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens allowed next to `bitmask[row]`. After the end, these are the stop tokens."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False, and changes nothing, if it is not allowed."""

    @property
    def terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return False

    @property
    def ready(self) -> bool:
        """Whether it is known what may come next, or that nothing may."""
        return True

    def wait(self, deadline: float) -> bool:
        """As `ready`, but may wait a little, at most until `deadline` (`time.monotonic`)."""
        return self.ready

    @property
    def verifies(self) -> bool:
        """Whether a chosen token has to be verified before it is accepted."""
        return False

    def veto(self, token: int) -> Words | Undecided | None:
        """The tokens to exclude instead of accepting `token`; None to accept it. It is called again with the
        next choice, and accepts one in the end. UNDECIDED: that is not known yet."""
        return None

    @property
    def failure(self) -> tuple[str, str | None] | None:
        """Why the answer cannot go on, and the error's code; None if it can."""
        return None

    def replayed(self, seconds: float) -> "Matcher | None":
        """The matcher that takes the place of a replay, once that has caught up, after at most about so many
        seconds of processor time. None before, and for all others."""
        return None

    def end(self) -> None:
        """Its sequence has left."""
        return


class Lookahead(Protocol):
    """A second state of an answer, to see what may follow."""

    def feed(self, tokens: Sequence[int]) -> int:
        """See Matcher."""

    def follows(self, tokens: Sequence[int]) -> int:
        """See Matcher."""

    def forced(self) -> bytes:
        """See Matcher."""


class Matcher(Binding):
    """The state of one sequence's answer within a grammar.

    In a state beyond its library's limits it allows and accepts nothing, and the answer fails.
    """

    @abstractmethod
    def feed(self, tokens: Sequence[int]) -> int:
        """Accept tokens until one is not allowed. Returns how many were accepted."""

    @abstractmethod
    def follows(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` would be accepted, one after the other; a stop token may be the last."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """The answer's current point. Takes constant time."""

    @abstractmethod
    def restore(self, snapshot: Snapshot) -> None:
        """Undo what was accepted since `snapshot` was made. The time depends on that alone.

        Snapshots that were made since are void; `snapshot` and older ones can be restored again. A matcher
        that has failed stays failed.
        """

    @abstractmethod
    def forced(self) -> bytes:
        """Text that has to follow, as far as it is known. Empty where tokens are verified."""

    @abstractmethod
    def fork(self) -> "Matcher":
        """A second matcher in the same state."""

    @abstractmethod
    def unbudgeted(self) -> Lookahead | None:
        """The answer's state in the grammar alone, without what its budget and other limits demand. None in
        texts that can go on in any way, at the end, and if the library has given up."""

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether it is beyond its library's limits."""


class Grammar(Protocol):
    """A compiled grammar that binds answers. Shared by all of them; thread-safe."""

    remote: ClassVar[bool]
    """Whether masks are made in another process."""

    grows: ClassVar[bool]
    """Whether its bytes in this process become more while answers are read."""

    @property
    def ended(self) -> bool:
        """Whether its process has ended and is not being replaced. Any thread may ask."""

    @property
    def idle(self) -> bool:
        """Whether it has a process and binds no answer. Any thread may ask."""

    @property
    def nbytes(self) -> int:
        """Bytes held, for the cache's bound."""

    @property
    def shortest(self) -> int:
        """The number of tokens of an answer that is certain to be complete, without the stop token."""

    def begin(self, budget: int, tokens: Sequence[int] = ()) -> Binding:
        """What binds an answer that is complete within `budget` tokens, and of which `tokens` are written."""
