"""Sampling: from logits to tokens, for a batch in which each row has its own parameters.

A token is a function of (logits, log, parameters, seed, position). It is the same alone or in a batch, before
or after a preemption. A row's logits pass these steps in order:

    1. repetition, frequency and presence penalties     4. temperature
    2. logit_bias                                       5. top_k, then top_p of what top_k left, then min_p
    3. the row's bitmask; min_tokens                    6. one uniform number, inverse CDF in vocabulary order

    7. if the grammar vetoes the token (`grammar/budget`): 3 to 6 again without it, with a new number

A bitmask comes from a grammar, or from the request's exclusions (exclusion.py). Before min_tokens, EOS and
stop ids are excluded, unless the grammar allows nothing else: then it has ended. Temperature 0 (anything
under GREEDY_BELOW) and top_k 1 are greedy: after step 3 the largest logit wins, and the lowest id among
equals. min_p keeps tokens with at least min_p times the likeliest token's probability. Steps that no row
requests do not run.

The host keeps the parameters and decides which steps run; the device keeps what depends on sampled tokens.
`sample` does not wait for a GPU. `SampledTokens.read` does, and `SampledTokens.settle` does if a token needs
host verification.

The verification of some rows does not delay the others for long. Once it has taken `ASK_PATIENCE` in a step,
the remaining rows are undecided. They have no token in this step, are verified first in their next one, and
choose the same token then.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from math import isfinite
from time import thread_time
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from personae.engine.logprobs import LogprobRows, logprob_rows
from personae.engine.params import GREEDY_BELOW
from personae.engine.penalties import Additions, IntArray, Penalties
from personae.engine.sampled_tokens import SampledTokens, TokenChoices, VerifiedTokens
from personae.engine.sequence import SequenceLog
from personae.grammar.bitmask import allow_only, words_of
from personae.grammar.masks import allocate_bitmask
from personae.grammar.matcher import UNDECIDED, Binding, Words
from personae.kernels.counter_rng import stream
from personae.kernels.masks import Scratch
from personae.kernels.operators import choose
from personae.kernels.sampling import SamplingRows, overwrites
from personae.kernels.upload import upload, uploads

ASK_PATIENCE = 0.004
"""Seconds of this thread's processor time that one step spends on host verification."""

Commit = Callable[[Tensor, Tensor], None]
"""Gets slots and their tokens, both [n] int64 on the device; see `Worker.commit`."""


def _ignore_tokens(slots: Tensor, tokens: Tensor) -> None:
    """A Commit for a sampler without further steps."""


class _Early(NamedTuple):
    """What min_tokens excludes: EOS and stop ids as a bitmask, at positions before `end`."""

    end: int
    stops: Words


NO_VERIFICATION: Mapping[int, Binding] = MappingProxyType({})


class Sampler:
    """Chooses tokens for up to `max_slots` sequences at a time. One thread owns it.

    `commit` gets the tokens, which are the next step's input. If some need verification, it gets them again
    when they are final.
    """

    def __init__(
        self, max_slots: int, vocab_size: int, device: torch.device | str, commit: Commit = _ignore_tokens
    ) -> None:
        self._device = torch.device(device)
        self._vocab_size = vocab_size
        self._commit = commit
        self._newest = torch.zeros(max_slots, dtype=torch.int64, device=self._device)  # the last final tokens
        self._penalties = Penalties(max_slots, self._device)
        self._biases = Additions(max_slots, self._device)
        self._scratch = Scratch(self._device)
        self._choose, self._overwrites = choose.on(self._device, torch.float32), overwrites(self._device)
        # Per slot, on the host.
        self._streams = np.zeros(max_slots, np.uint64)
        self._temperature = np.zeros(max_slots, np.float32)  # 0 = greedy
        self._top_k = np.zeros(max_slots, np.int64)  # 0 = off
        self._top_p = np.zeros(max_slots, np.float64)  # infinity = off
        self._min_p = np.zeros(max_slots, np.float32)
        self._factors = np.zeros((3, max_slots), np.float32)
        self._top = [0] * max_slots
        self._admitted: set[int] = set()
        self._penalised: set[int] = set()
        self._biased: set[int] = set()
        self._early: dict[int, _Early] = {}  # those with min_tokens
        self._wanting: set[int] = set()  # slots that request logprobs
        self._named: dict[int, tuple[int, ...]] = {}  # `logprob_tokens`
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch
        self.ask_patience = ASK_PATIENCE
        self._overdue: set[int] = set()  # slots that were not verified for lack of time

    def admit(self, slot: int, log: SequenceLog) -> None:
        """Admit a sequence to a slot. The slot's state then depends on the log alone, whatever happened
        before.

        Raises ValueError if `logit_bias` has a token outside the vocabulary.
        """
        assert slot not in self._admitted, f"slot {slot} is taken"
        params = log.params
        if params.logit_bias and not all(0 <= token < self._vocab_size for token in params.logit_bias):
            raise ValueError(f"logit_bias of {log.id} names a token outside the vocabulary")
        self._admitted.add(slot)
        self._streams[slot] = stream(params.seed)
        greedy = params.temperature < GREEDY_BELOW or params.top_k == 1
        self._temperature[slot] = 0 if greedy else params.temperature
        self._top_k[slot] = params.top_k if params.top_k < self._vocab_size else 0
        self._top_p[slot] = params.top_p if params.top_p < 1 else np.inf
        self._min_p[slot] = params.min_p
        self._factors[:, slot] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        if tuple(self._factors[:, slot]) != (1, 0, 0):
            self._penalised.add(slot)
            self._penalties.admit(slot, log.tokens, log.prompt_length)
        if params.logit_bias:
            self._biased.add(slot)
            self._biases.admit(slot, params.logit_bias)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else log.eos)}
        if ends and log.prompt_length + params.min_tokens > len(log.tokens):
            stops = np.zeros(words_of(self._vocab_size), np.int32)
            allow_only(stops, [token for token in ends if 0 <= token < self._vocab_size])
            self._early[slot] = _Early(log.prompt_length + params.min_tokens, stops.view(np.uint32))
        if params.logprobs is not None:
            self._wanting.add(slot)
        self._top[slot] = 0 if params.logprob_tokens else params.logprobs or 0
        if params.logprob_tokens:
            self._named[slot] = params.logprob_tokens

    def release(self, slot: int) -> None:
        """The slot's sequence has left. The slot may be admitted again."""
        assert slot in self._admitted, f"slot {slot} is free"
        for members in (self._admitted, self._penalised, self._biased, self._wanting, self._overdue):
            members.discard(slot)
        self._early.pop(slot, None)
        self._named.pop(slot, None)

    def has_penalties(self, slot: int) -> bool:
        """Whether the slot's choices depend on the tokens chosen before them, grammars aside."""
        return slot in self._penalised

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        bitmask: Tensor | None = None,
        verifications: Mapping[int, Binding] = NO_VERIFICATION,
        *,
        commits: bool = True,
    ) -> SampledTokens:
        """Choose a token for each row. If it `commits`, these are the last ones of their slots.

        logits: [S, V] float32 on the sampler's device; may be overwritten. Row i belongs to `slots[i]`
        (distinct, admitted) and chooses the token at absolute position `positions[i]`. bitmask: int32 CPU [S,
        ceil(V / 32)], all ones in rows without a binding. `verifications`: the rows with a grammar that
        verifies tokens; then call `settle` on the result before a slot changes hands, and before `bitmask` or
        the memory of `logits` is used again.

        A row fails if an allowed logit is a NaN or plus infinity, or if nothing is allowed. It has no token,
        and the other rows are not affected. (If a word of the bitmask forbids all of its 32 tokens, their
        logits may have any value.)
        """
        assert self._admitted.issuperset(slots), "a row's slot is free"
        slot = np.asarray(slots, np.int64)
        wanting, tops, named, raw = list[int](), list[int](), None, None
        if self._wanting and (wanting := _rows_of(slots, self._wanting)):
            raw = torch.log_softmax(_take(logits, wanting, self._device), 1)
            tops = [self._top[slots[row]] for row in wanting]
            named = [self._named.get(slots[row], ()) for row in wanting] if self._named else None
        penalised = _rows_of(slots, self._penalised) if self._penalised else []
        if penalised:
            factors = self._factors[:, slot[penalised]]
            self._penalties.apply(logits, np.array(penalised), slot[penalised], factors)
        if self._biased and (biased := _rows_of(slots, self._biased)):
            self._biases.apply(logits, np.array(biased), slot[biased])
        kept = logits.clone() if verifications and self._overwrites else logits
        rows = SamplingRows(  # of steps 3 to 6
            self._temperature[slot],
            self._top_k[slot],
            self._top_p[slot],
            self._min_p[slot],
            self._streams[slot],
            np.asarray(positions, np.int64),
        )
        stops: dict[int, Words] = {}
        early: list[int] = []
        if self._early:
            early = [i for i in _rows_of(slots, self._early) if positions[i] < self._early[slots[i]].end]
        if early:
            if bitmask is None:
                bitmask = allocate_bitmask(len(slot), self._vocab_size)
            stops = self._exclude_stops(bitmask, early, slots)
        tokens, best = self._choose(logits, rows, bitmask, self._scratch)
        device_slots = upload(slot, self._device) if commits else None

        def conclude(undecided: frozenset[int]) -> LogprobRows | None:
            counted, newest = penalised, tokens
            if undecided:  # these rows are computed again from the token before
                counted = [row for row in penalised if row not in undecided]
            if device_slots is not None:
                if undecided:
                    without = upload(np.array(sorted(undecided), np.int64), self._device)
                    newest = tokens.index_copy(0, without, before[without])
                self._newest[device_slots] = newest
                self._commit(device_slots, newest)
            if counted:
                self._penalties.record(slot[counted], _take(tokens, counted, self._device))
            if raw is None:
                return None
            found = logprob_rows(raw, _take(tokens, wanting, self._device), max(tops))
            return found if named is None else found.naming(raw, named)

        def ask(chosen: list[int], most: list[float]) -> VerifiedTokens:
            assert bitmask is not None
            asked = {row: asks for row, asks in verifications.items() if isfinite(most[row])}
            with self._on_side_stream():
                return self._verify(asked, kept, slot, rows, bitmask, stops, tokens, best, chosen)

        asked = ask if verifications and bitmask is not None else None
        before = tokens
        if asked is not None and device_slots is not None:
            # A step that is launched before the verification begins with the first choice.
            before = self._newest[device_slots]
            self._commit(device_slots, tokens)
        return SampledTokens(tokens, best, wanting, tops, conclude, asked)

    def choose(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        bitmask: Tensor | None = None,
        verifications: Mapping[int, Binding] = NO_VERIFICATION,
    ) -> TokenChoices:
        """As `sample`, but waits for the tokens, and commits none of them. Slots with neither penalties nor a
        verification may have several rows."""
        return self.sample(logits, slots, positions, bitmask, verifications, commits=False).read()

    def commit(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """These tokens are the last ones of their slots."""
        device_slots, newest = uploads((np.array(slots), np.array(tokens)), self._device)
        self._newest[device_slots] = newest
        self._commit(device_slots, newest)

    def _exclude_stops(self, bitmask: Tensor, early: list[int], slots: Sequence[int]) -> dict[int, Words]:
        """Excludes EOS and stop ids in `bitmask` for rows before their min_tokens, unless the grammar allows
        nothing else. Returns the excluded ids, by row."""
        words = bitmask.numpy().view(np.uint32)
        left_out: dict[int, Words] = {}
        for row in early:
            stops = words[row] & self._early[slots[row]].stops
            words[row] ^= stops
            if words[row].any():
                left_out[row] = stops
            else:
                words[row] = stops
        return left_out

    def _verify(
        self,
        verifications: Mapping[int, Binding],
        logits: Tensor,
        slot: IntArray,
        rows: SamplingRows,
        bitmask: Tensor,
        stops: dict[int, Words],
        tokens: Tensor,
        best: Tensor,
        chosen: list[int],
    ) -> VerifiedTokens:
        """Step 7, in place in `bitmask`, `tokens` and `best`. logits: after step 2. stops: what min_tokens
        excluded, by row. chosen: the tokens. Rows that fail have none to verify.

        A new choice from the remaining tokens, with a new number, has the distribution of a choice from the
        tokens that are not vetoed.
        """
        words = bitmask.numpy().view(np.uint32)
        overdue, self._overdue = self._overdue, set()
        order = sorted(verifications, key=lambda row: (int(slot[row]) not in overdue, row))
        asking = [(row, chosen[row]) for row in order]
        undecided: set[int] = set()
        replaced: frozenset[int] = frozenset()
        spent = 0.0
        for attempt in count(1):
            refused = []
            for row, token in asking:
                asked, begun = verifications[row], thread_time()
                is_here = not asked.remote  # it verifies on this thread
                if is_here and spent > self.ask_patience:
                    undecided.add(row)
                    self._overdue.add(int(slot[row]))
                    continue
                left_out = asked.veto(token)
                spent += is_here * (thread_time() - begun)
                if left_out is UNDECIDED:
                    undecided.add(row)
                elif left_out is not None:
                    words[row] &= ~left_out
                    if row in stops and not words[row].any():
                        words[row] = stops.pop(row)
                    refused.append(row)
            if not refused:
                return VerifiedTokens(frozenset(undecided), replaced)
            replaced |= {*refused}
            index = upload(np.array(refused), self._device)
            again = rows.again(np.array(refused), attempt)
            found, most = self._choose(logits[index], again, bitmask[refused], self._scratch)
            tokens[index], best[index] = found, most
            answers = zip(refused, found.tolist(), most.tolist(), strict=True)
            asking = [(row, token) for row, token, largest in answers if isfinite(largest)]
        raise AssertionError("unreachable")

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Lets a GPU choose again at once instead of after the forward pass that has been launched since."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _rows_of(slots: Sequence[int], members: Collection[int]) -> list[int]:
    """The rows whose slots are among `members`."""
    return [row for row, slot in enumerate(slots) if slot in members]


def _take(x: Tensor, rows: list[int], device: torch.device) -> Tensor:
    """`x[rows]`, or `x` itself if that is all of it. rows: ascending and distinct."""
    return x if len(rows) == len(x) else x[upload(np.array(rows), device)]
