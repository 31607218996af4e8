"""In a child of the fork server: makes the masks of one grammar, for as long as answers are bound by it.

A mask of an ambiguous grammar can take a library minutes, and no call into a library can be interrupted. So
grammars that clients write are followed here. The kernel ends this process when one mask takes more than its
processor time. An answer is given up if its masks together took more than theirs.

Frames in MessagePack go both ways (`server.send_frame`). Operations arrive here, and reports leave.
"""

import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import numpy as np

from personae.grammar.backend import BoundGrammar
from personae.grammar.bitmask import words_of
from personae.grammar.matcher import MOST_RESTORED, UNDECIDED, Matcher, Snapshot
from personae.grammar.sandbox.server import SandboxLimits, frames, send_frame


class BeginAnswer(msgspec.Struct, frozen=True, tag=True):
    """A new answer of at most `budget` tokens, with `tokens` written already."""

    id: int
    budget: int
    tokens: tuple[int, ...]


class Take(msgspec.Struct, frozen=True, tag=True):
    """The answer's next token. Its next mask is wanted."""

    id: int
    token: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Asks whether a token that the mask allows is vetoed."""

    id: int
    token: int


class Keep(msgspec.Struct, frozen=True, tag=True):
    """The answer may have to return to its current point, which gets this number."""

    id: int
    number: int


class Restore(msgspec.Struct, frozen=True, tag=True):
    """The answer returns to the point with this number. `mask`: the mask at that point is wanted."""

    id: int
    number: int
    mask: bool


class End(msgspec.Struct, frozen=True, tag=True):
    """The answer has ended."""

    id: int


class GrammarReady(msgspec.Struct, frozen=True, tag=True):
    """The grammar is compiled; the number of tokens of its shortest answer."""

    shortest: int


class Mask(msgspec.Struct, frozen=True, tag=True):
    """The tokens allowed next, as a row of a bitmask. `verifies`: the chosen token must be verified."""

    id: int
    words: bytes
    verifies: bool


class Veto(msgspec.Struct, frozen=True, tag=True):
    """What to exclude instead of accepting the token, as a row of a bitmask. None if the token may be
    accepted."""

    id: int
    token: int
    words: bytes | None


class TooSlow(msgspec.Struct, frozen=True, tag=True):
    """The answer's masks have spent their time."""

    id: int


class TokenRefused(msgspec.Struct, frozen=True, tag=True):
    """The grammar does not allow a token that its mask allowed."""

    id: int
    token: int


Operation = BeginAnswer | Take | Ask | Keep | Restore | End
MaskReply = Mask | Veto | TooSlow | TokenRefused

OPERATIONS: msgspec.msgpack.Decoder[Operation] = msgspec.msgpack.Decoder(Operation)
REPLIES: msgspec.msgpack.Decoder[MaskReply] = msgspec.msgpack.Decoder(MaskReply)
_encode = msgspec.msgpack.encode


class MaskServer:
    """The answers that are bound by one grammar. It yields the reports to send."""

    def __init__(
        self,
        grammar: BoundGrammar,
        vocab_size: int,
        limits: SandboxLimits,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._grammar = grammar
        self._words = words_of(vocab_size)
        self._limits = limits
        self._clock = clock
        self._matchers: dict[int, Matcher] = {}
        self._spent: dict[int, float] = {}
        self._kept: dict[int, deque[tuple[int, Snapshot]]] = {}

    @property
    def answers(self) -> int:
        """How many answers there are."""
        return len(self._matchers)

    def left(self, operation: Operation) -> float:
        """Seconds of processor time that are left for an operation. One that replays an answer may take as
        long as all of its masks."""
        if isinstance(operation, BeginAnswer) and operation.tokens:
            return self._limits.masks
        return min(self._limits.mask, self._limits.masks - self._spent.get(operation.id, 0.0))

    def do(self, operation: Operation) -> Iterator[MaskReply]:
        """Carry out an operation."""
        if isinstance(operation, End):
            self._matchers.pop(operation.id, None)
            self._spent.pop(operation.id, None)
            self._kept.pop(operation.id, None)
            return
        if not isinstance(operation, BeginAnswer) and operation.id not in self._matchers:
            return  # the answer was given up
        if isinstance(operation, Keep):
            kept = self._kept.setdefault(operation.id, deque(maxlen=MOST_RESTORED))
            kept.append((operation.number, self._matchers[operation.id].snapshot()))
            return
        if isinstance(operation, Restore) and not operation.mask:
            self._back(operation)
            return
        begun = self._clock()
        report = self._report(operation)
        spent = self._spent[operation.id] = self._spent.get(operation.id, 0.0) + self._clock() - begun
        if spent >= self._limits.masks:
            del self._matchers[operation.id]
            report = TooSlow(operation.id)
        yield report

    def _back(self, operation: Restore) -> Matcher:
        kept, matcher = self._kept[operation.id], self._matchers[operation.id]
        while kept[-1][0] != operation.number:
            kept.pop()
        matcher.restore(kept[-1][1])
        return matcher

    def _report(self, operation: BeginAnswer | Take | Ask | Restore) -> MaskReply:
        match operation:
            case BeginAnswer(id=id, budget=budget, tokens=tokens):
                matcher = self._matchers[id] = self._grammar.matcher(budget)
                for token in tokens:
                    if not (matcher.terminated or matcher.accept(token)):
                        return TokenRefused(id, token)
                return self._mask(id, matcher)
            case Take(id=id, token=token):
                matcher = self._matchers[id]
                if not (matcher.terminated or matcher.accept(token)):
                    return TokenRefused(id, token)
                return self._mask(id, matcher)
            case Restore(id=id):
                return self._mask(id, self._back(operation))
            case Ask(id=id, token=token):
                words = self._matchers[id].veto(token)
                assert words is not UNDECIDED
                return Veto(id, token, None if words is None else words.tobytes())

    def _mask(self, id: int, matcher: Matcher) -> Mask:
        row = np.empty((1, self._words), np.int32)
        matcher.fill(row, 0)
        return Mask(id, row.tobytes(), matcher.verifies)


def serve(connection: socket.socket, grammar: BoundGrammar, vocab_size: int, limits: SandboxLimits) -> None:
    """Serve until the other end is closed, or nobody has had an answer for long. The kernel ends this process
    if it takes too long."""
    send_frame(connection, _encode(GrammarReady(grammar.shortest)))
    server = MaskServer(grammar, vocab_size, limits)
    connection.settimeout(limits.kept)
    with suppress(TimeoutError):
        for frame in frames(connection):
            operation = OPERATIONS.decode(frame)
            left = max(server.left(operation), 0.01)
            signal.setitimer(signal.ITIMER_VIRTUAL, limits.ordinary)
            signal.setitimer(signal.ITIMER_PROF, left)
            signal.setitimer(signal.ITIMER_REAL, limits.mask_wall * max(left / limits.mask, 1.0))
            reports = list(server.do(operation))
            for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF, signal.ITIMER_VIRTUAL):
                signal.setitimer(timer, 0)
            for report in reports:
                send_frame(connection, _encode(report))
            connection.settimeout(None if server.answers else limits.kept)
