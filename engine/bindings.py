"""The bindings of all slots: the grammars, exclusions and known tokens that decide which tokens may come
next."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from personae.engine.deferral import Deferrals
from personae.engine.exclusion import Exclusion
from personae.engine.launched import Brought, LaunchedStep
from personae.engine.plan import Row
from personae.engine.sampled_tokens import TokenChoices
from personae.engine.sequence import SequenceLog
from personae.engine.speculation.forced import JumpForward, KnownToken, Retokenizer, jumps
from personae.engine.speculation.grammar_proposer import GrammarProposer
from personae.engine.worker.known import KnownTokens
from personae.engine.worker.worker import PackedStep
from personae.grammar.matcher import Binding, Grammar, Matcher
from personae.grammar.spec import GrammarKey

REPLAY_SECONDS = 0.01
"""Processor time that replays may take before other rows get their step."""

_REFUSED = "the grammar rejects the sampled token {}"


class Bindings:
    """The matchers of all slots.

    `known` gets forced text. `retokenizer` returns what finds its tokens; without one, no text is forced.
    `matchers` are by slot. `deferrals`: the rows that wait; None while no slot has a grammar, since none can.
    """

    def __init__(
        self,
        known: KnownTokens,
        vocab_size: int,
        max_model_len: int,
        retokenizer: Callable[[], Retokenizer] | None,
    ) -> None:
        self.deferrals: Deferrals | None = None
        self._known = known
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._retokenizer = retokenizer
        self.matchers: dict[int, Binding] = {}
        self._local: dict[int, Matcher] = {}  # those of them that are states of grammars, in this process
        self._replays: dict[int, SequenceLog] = {}  # of the slots whose grammar has to catch up
        self._jumps: dict[int, JumpForward] = {}

    def admit(self, slot: int, log: SequenceLog, grammars: Mapping[GrammarKey, Grammar]) -> None:
        """A sequence whose log `is_bound` takes a slot."""
        if log.grammar is not None:
            self._bind(slot, log, grammars[log.tenant, log.grammar])
        else:
            self.matchers[slot] = Exclusion(log, self._vocab_size)

    def _bind(self, slot: int, log: SequenceLog, grammar: Grammar) -> None:
        tokens = log.tokens[log.prompt_length :]
        self.matchers[slot] = grammar.begin(log.budget(self._max_model_len), tokens)
        if self.deferrals is None:
            self.deferrals = Deferrals()
        self.deferrals.grammars.add(slot)
        self.deferrals.count += 1
        if not grammar.remote:
            self._replays[slot] = log
            self._replay(slot, self.deferrals, REPLAY_SECONDS)

    def _replay(self, slot: int, deferrals: Deferrals, seconds: float) -> None:
        """Go on with the replay of a slot. If that is done, its matcher takes its place."""
        matcher = self.matchers[slot].replayed(seconds)
        if matcher is None:
            return
        log = self._replays.pop(slot)
        deferrals.count -= 1
        self.matchers[slot] = self._local[slot] = matcher
        if self._retokenizer is not None and jumps(log):
            limit = log.prompt_length + log.budget(self._max_model_len)
            self._jumps[slot] = jump = JumpForward(matcher, log, limit, self._retokenizer())
            self._known.extend(slot, len(log.tokens), jump.pending)

    def release(self, slot: int) -> None:
        """The slot's sequence has left, which has a matcher."""
        matcher = self.matchers.pop(slot)
        matcher.end()
        if self.deferrals is not None and slot in self.deferrals.grammars:
            self.deferrals.leave(slot, matcher)
            if not self.deferrals.grammars:
                self.deferrals = None
        for kept in (self._local, self._replays, self._jumps):
            kept.pop(slot, None)

    def is_remote(self, slot: int) -> bool:
        """Whether the slot's masks come from another process."""
        matcher = self.matchers.get(slot)
        return matcher is not None and matcher.remote

    def guesses(self, slot: int, log: SequenceLog) -> GrammarProposer | None:
        """The proposer of the text that a slot's grammar leaves hardly any choice about."""
        matcher = self._local.get(slot)
        if self._retokenizer is None or matcher is None:
            return None
        return GrammarProposer(matcher, self._retokenizer(), log, self._jumps.get(slot))

    def of(self, packed: PackedStep) -> list[Binding | None]:
        """The bindings of the rows that choose a token. The token may be known, if a grammar forced it."""
        chosen: list[Binding | None] = []
        for slot, end in zip(packed.sampled_slots, packed.sampled_ends, strict=True):
            known = self._known.at(slot, end)
            chosen.append(self.matchers.get(slot) if known is None else KnownToken(known))
        return chosen

    def jumps(self, slots: Sequence[int]) -> list[JumpForward | None]:
        """What appends forced text to these slots."""
        return [self._jumps.get(slot) for slot in slots]

    def find_deferred(self, rows: Iterable[Row], packed: PackedStep) -> list[int]:
        """The indices of the samples that this step cannot choose. Waits briefly for their masks. `rows` are
        the plan's."""
        if self.deferrals is None or not self.deferrals.any:
            return []
        return self.deferrals.find_deferred(rows, packed, self.matchers)

    def resumable(self) -> list[int]:
        """The slots whose masks have arrived, each once. Replays advance."""
        if self.deferrals is None:
            return []
        replays = [*self._replays]
        for slot in replays:
            self._replay(slot, self.deferrals, REPLAY_SECONDS / len(replays))
        return self.deferrals.resumable(self.matchers)

    def fill_late(self, bitmask: torch.Tensor, matchers: Sequence[Binding | None]) -> None:
        """Fill the masks that arrived after the others were filled."""
        if self.deferrals is not None and self.deferrals.count:
            for row, matcher in enumerate(matchers):
                if matcher is not None and matcher.remote:
                    matcher.fill(bitmask.numpy(), row)

    def bring(self, launched: LaunchedStep, i: int, read: TokenChoices) -> Brought:
        """The result of a sample's row. Its grammar takes the tokens that it has not taken yet."""
        token, matcher, jump = read.tokens[i], launched.matchers[i], launched.jumps[i]
        if matcher is not None and matcher.is_known:
            assert jump is not None
            forced, jump.pending = jump.pending, ()
            return Brought(forced)
        if matcher is not None and matcher.failure is not None:
            return Brought((), *matcher.failure)
        if token is None:
            return Brought(failure=read.failures.get(i))
        drafts = launched.drafts.get(i)
        tokens = (token,) if drafts is None else (token, *drafts.tokens)
        if drafts is not None and drafts.refused is not None:
            return Brought(failure=_REFUSED.format(drafts.refused))
        slot = launched.plan.rows[launched.rows[i]].slot
        if matcher is None or self.matchers.get(slot) is not matcher or (drafts and not drafts.open):
            return Brought(tokens)
        brought = self._take(slot, launched.ends[i] + len(tokens) - 1, matcher, jump, tokens[-1])
        if brought is None:
            return Brought(failure=_REFUSED.format(tokens[-1]))
        return Brought((*tokens[:-1], *brought))

    def _take(
        self, slot: int, position: int, matcher: Binding, jump: JumpForward | None, token: int
    ) -> tuple[int, ...] | None:
        """Advance a row's grammar by its token. Returns the token and the tokens that it forces next; None if
        the grammar rejects the token."""
        if jump is None:
            accepted = matcher.terminated or matcher.accept(token)  # stop tokens follow a grammar's end
            return (token,) if accepted else None
        brought = jump.take(token)
        if brought is not None and len(brought) > 1:
            self._known.extend(slot, position, brought)
        return brought
