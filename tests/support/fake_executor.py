"""An executor without a model: a small real program that carries out plans exactly as engine/plan.py defines.

A page is `page_size` cells. The "KV" of a position is a number made from its token and from *all* cells
before it, read through the slot's page table. A sampled token is made from the cells up to its position, the
seed and the position. So a wrong page, a stale write, a wrong copy or a missing token anywhere changes
tokens, as it would with attention. The cells also depend on tenant salt and adapter, so KV that leaks between
them changes tokens, too.

`solo` computes a sequence's tokens without pages, slots or batches.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from zlib import crc32

import msgspec

from personae.engine.params import SamplingParams
from personae.engine.plan import Drafted, MemoryLayout, Row, StepPlan, StepResult
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import Delta, SequenceLog, TokenLogprobs
from personae.evals.tenants.fcfs import FirstComeFirstServed

VOCAB = 101
EOS = (0, 1, 2)


def make_log(
    id: str,
    prompt: Iterable[int],
    *,
    max_tokens: int = 8,
    emitted: tuple[int, ...] = (),
    adapter: str | None = None,
    tenant: str = "default",
    after: str | None = None,
    eos: tuple[int, ...] = EOS,
    background: bool = False,
    adapter_start: int = 0,
    priority: int = 0,
    weight: float = 1.0,
    session: str | None = None,
    session_seconds: float = 0.0,
    in_memory: bool = False,
    **params: object,
) -> SequenceLog:
    """Make a log. The tenant's name is its salt."""
    prompt = tuple(prompt)
    return SequenceLog(
        id,
        prompt + emitted,
        len(prompt),
        SamplingParams(max_tokens=max_tokens, **{"seed": 1, **params}),  # type: ignore[arg-type]  # test data
        eos=eos,
        adapter=adapter,
        tenant=tenant,
        salt=tenant.encode(),
        after=after,
        background=background,
        adapter_start=adapter_start,
        priority=priority,
        weight=weight,
        session=session,
        session_seconds=session_seconds,
        in_memory=in_memory,
    )


def _cell(log: SequenceLog, token: int, before: list[int]) -> int:
    active = log.adapter is not None and len(before) >= log.adapter_start
    owner = crc32(log.salt + (log.adapter if active else "base").encode())  # type: ignore[union-attr]  # active
    return hash((owner, token, len(before), *before))


def _sample(log: SequenceLog, cells: list[int]) -> int:
    return hash((log.params.seed, len(cells), *cells)) % VOCAB


def _logprob(token: int, cells: list[int]) -> TokenLogprobs:
    return TokenLogprobs(token, -float(hash((token, *cells)) % 1009), 1)


@dataclass
class Brought:
    """What a sequence has produced: its deltas combined."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: str | None = None
    stop_token: int | None = None
    error: str | None = None
    cached: int | None = None
    cancelled: bool = False

    @property
    def ended(self) -> bool:
        return self.cancelled or self.finish is not None

    def take(self, delta: Delta) -> None:
        assert not self.ended, f"{delta.id} goes on after its end"
        assert delta.tokens or delta.prompt_logprobs or delta.finish, (
            f"{delta.id} has a delta that says nothing"
        )
        first = not (self.tokens or self.prompt_logprobs)
        assert (delta.cached is not None) == first, (
            f"{delta.id}: cached comes with the first delta, and only then"
        )
        self.cached = delta.cached if first else self.cached
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish, self.stop_token, self.error = delta.finish, delta.stop_token, delta.error


def solo(log: SequenceLog, max_model_len: int) -> Brought:
    """The sequence's tokens, computed from its log alone."""
    brought = Brought()
    tokens, cells, params = list(log.tokens), list[int](), log.params
    while brought.finish is None:
        for position in range(len(cells), len(tokens)):
            if params.prompt_logprobs is not None and position < log.prompt_length:
                brought.prompt_logprobs.append(_logprob(tokens[position], cells) if position else None)
            cells.append(_cell(log, tokens[position], cells))
        token = _sample(log, cells)
        if params.logprobs is not None:
            brought.logprobs.append(_logprob(token, cells))
        tokens.append(token)
        brought.tokens.append(token)
        emitted = len(tokens) - log.prompt_length
        stops = (*params.stop_token_ids, *(() if params.ignore_eos else log.eos))
        if token in stops and emitted > params.min_tokens:
            brought.finish, brought.stop_token = "stop", token
        elif emitted == params.max_tokens or len(tokens) == max_model_len:
            brought.finish = "length"
    return brought


@dataclass
class _Slot:
    log: SequenceLog
    pages: list[int] = field(default_factory=list)
    sampled: dict[int, int] = field(default_factory=dict)
    computed: int = 0
    parked: int | None = None  # the position whose token could not be chosen yet


class FakeExecutor:
    """`submit` queues plans, `execute` runs the oldest: the caller's lookahead decides how many are queued.

    `defers(log, position)` says how often a row that samples the token at `position` is deferred first.
    `deferred` has the ids of rows that may be resumed. `fails(log, position)` returns why sampling after
    `position` fails; None if it does not. Raises AssertionError when a plan breaks the contract: a slot used
    while taken or empty, a page beyond the table, an unknown token, a cell never written, a write into a page
    that another slot can read.
    """

    def __init__(
        self,
        layout: MemoryLayout,
        fails: Callable[[SequenceLog, int], str | None] = lambda log, position: None,
        defers: Callable[[SequenceLog, int], int] = lambda log, position: 0,
        *,
        speculates: bool = False,
    ) -> None:
        self._speculates = speculates
        self.layout = layout
        self._fails = fails
        self._defers = defers
        self._sat_out: dict[tuple[str, int], int] = {}
        self.deferred: list[str] = []
        self._cells: list[list[int | None]] = [[None] * layout.page_size for _ in range(layout.num_pages)]
        self._slots: dict[int, _Slot] = {}
        self._plans: deque[StepPlan] = deque()
        self._loans: deque[tuple[int, tuple[int, ...]]] = deque()
        self._submitted = self._executed = 0
        self.copied = 0
        self.computed = 0

    def inherit(self, died: "FakeExecutor") -> None:
        """Have the memory of pages of an executor that has died."""
        self._cells = died._cells

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def taken(self) -> list[int]:
        """The slots that hold a sequence."""
        return list(self._slots)

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._submitted += 1

    def submit_again(self, plan: StepPlan) -> None:
        """The last plan, made again."""
        assert self._plans[-1].step == plan.step
        self._plans[-1] = plan

    @property
    def lent_last(self) -> bool:
        """Whether memory was lent after the last plan, so that it is used only behind that."""
        return bool(self._loans) and self._loans[-1][0] == self._submitted

    def lend(self, pages: tuple[int, ...]) -> None:
        """Lend the memory of these pages to adapters, after the plans so far: their content is lost."""
        self._loans.append((self._submitted, pages))

    def execute(self) -> StepResult:
        while self._loans and self._loans[0][0] <= self._executed:
            for page in self._loans.popleft()[1]:
                self._cells[page] = [None] * self.layout.page_size
        plan = self._plans.popleft()
        self._executed += 1
        for slot in plan.reclaimed:
            self._slots[slot].pages.pop()
        for slot in plan.releases:
            assert slot in self._slots, f"slot {slot} is released and is empty"
            del self._slots[slot]
        for admission in plan.admissions:
            assert admission.slot not in self._slots, f"slot {admission.slot} is given out and is taken"
            assert 0 <= admission.slot < self.layout.max_seqs
            self._slots[admission.slot] = _Slot(admission.log)
        sources, targets = {s for s, _ in plan.copies}, {t for _, t in plan.copies}
        assert not sources & targets, "copies of one plan depend on their order"
        assert len(targets) == len(plan.copies), "two copies into one page"
        for source, target in plan.copies:
            self._cells[target] = list(self._cells[source])
            self.copied += 1
        for row in plan.rows:
            self._slots[row.slot].pages += row.pages
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows of one slot"
        total = sum(row.count + row.drafts for row in plan.rows)
        assert total <= self.layout.max_batch_tokens, "over the token budget"
        self._check_writes(plan)
        tokens: list[tuple[int, ...]] = []
        deferred: set[int] = set()
        result = StepResult(plan.step, (), {}, {}, {})
        for index, row in enumerate(plan.rows):
            slot = self._slots[row.slot]
            log = slot.log
            row = self._resolved(slot, row)
            cells = self._read(slot, row.start)
            for position in range(row.start, row.start + row.count):
                token = self._token(slot, position)
                cells.append(_cell(log, token, cells))
                page, offset = divmod(position, self.layout.page_size)
                self._cells[slot.pages[page]][offset] = cells[-1]
                self.computed += 1
            if log.params.prompt_logprobs is not None and row.start < log.prompt_length:
                ends = range(row.start + 1, min(row.start + row.count + 1, log.prompt_length))
                entries = [_logprob(log.tokens[end], cells[:end]) for end in ends]
                result.prompt_logprobs[index] = (*(() if row.start else (None,)), *entries)
            tokens.append(())
            end = row.start + row.count
            slot.computed = end
            if row.samples and end in slot.sampled:
                pass  # it is known, and reported
            elif row.samples and self._is_deferred(slot, end):
                deferred.add(index)
            elif row.samples:
                why = self._fails(log, end)
                if why is not None:
                    result.failures[index] = why
                    continue
                tokens[-1] = self._choose(slot, end, cells)
                if log.params.logprobs is not None:
                    result.logprobs[index] = (_logprob(slot.sampled[end], cells),)
                if row.drafts:
                    right = self._verify(slot, row.drafts, cells, tokens, result.logprobs.get(index, ()))
                    result.drafted[index] = Drafted(row.drafts, right[0])
                    if right[1]:
                        result.logprobs[index] = right[1]
        resting = plan.step // 4 % 3 == 0  # as if drafts did not pay now and then
        return msgspec.structs.replace(
            result, tokens=tuple(tokens), deferred=frozenset(deferred), resting=resting
        )

    def _choose(self, slot: _Slot, end: int, cells: list[int]) -> tuple[int, ...]:
        """The token at `end`, and the forced tokens after it."""
        slot.sampled[end] = _sample(slot.log, cells)
        forced = slot.log.params.jump_forward and slot.log.params.logprobs is None
        return self._forced(slot, end, cells) if forced else (slot.sampled[end],)

    def _resolved(self, slot: _Slot, row: Row) -> Row:
        """Resolve a row of a sequence that speculates: it begins where the sequence is, with as many drafts
        as its seed says."""
        if not (self._speculates and slot.log.params.speculate) or slot.computed < len(slot.log.tokens):
            return msgspec.structs.replace(row, drafts=0)
        start = slot.computed
        assert start <= row.start, f"{slot.log.id} is at {start} and is planned from {row.start}"
        end = start + row.count
        samples = row.samples and end not in slot.sampled
        drafts = hash((slot.log.params.seed, start)) % (row.drafts + 1) if samples else 0
        return msgspec.structs.replace(row, start=start, samples=samples, drafts=drafts)

    def _verify(
        self,
        slot: _Slot,
        drafts: int,
        cells: list[int],
        tokens: list[tuple[int, ...]],
        logprobs: tuple[TokenLogprobs, ...],
    ) -> tuple[int, tuple[TokenLogprobs, ...]]:
        """Verify drafts, of which one in three is wrong and leaves its cell behind. Returns how many are
        right."""
        log, right = slot.log, 0
        for place in range(drafts):
            position = slot.computed
            page, offset = divmod(position, self.layout.page_size)
            token = slot.sampled[position]
            if hash((log.params.seed, position, "draft")) % 3 == 0:
                self._cells[slot.pages[page]][offset] = -1 - place
                break
            if token in {*log.eos, *log.params.stop_token_ids} or self._fails(log, position + 1):
                break
            cells.append(_cell(log, token, cells))
            self._cells[slot.pages[page]][offset] = cells[-1]
            slot.computed, right = position + 1, right + 1
            if slot.computed not in slot.sampled:
                tokens[-1] += self._choose(slot, slot.computed, cells)
                if log.params.logprobs is not None:
                    logprobs += (_logprob(slot.sampled[slot.computed], cells),)
        return right, logprobs

    def _is_deferred(self, slot: _Slot, end: int) -> bool:
        id = slot.log.id
        if slot.parked is not None and end > slot.parked:
            return True  # planned before it was deferred
        assert slot.parked in (None, end), f"{id} continues at {end} and is deferred at {slot.parked}"
        times = self._sat_out.get((id, end), 0)
        if times < self._defers(slot.log, end):
            self._sat_out[id, end] = times + 1
            slot.parked = end
            self.deferred.append(id)
            return True
        slot.parked = None
        return False

    def _forced(self, slot: _Slot, position: int, cells: list[int]) -> tuple[int, ...]:
        """The token at `position`, and the forced tokens after it: every second one is forced."""
        log, brought, cells = slot.log, [slot.sampled[position]], cells.copy()
        ends = {*log.eos, *log.params.stop_token_ids}
        limit = log.prompt_length + log.budget(self.layout.max_model_len)
        while brought[-1] not in ends:
            cells.append(_cell(log, brought[-1], cells))
            position += 1
            token = _sample(log, cells)
            if position >= limit or hash((log.params.seed, position)) % 2 or self._fails(log, position):
                break
            if token in ends:
                break
            slot.sampled[position] = token
            brought.append(token)
        return tuple(brought)

    def _token(self, slot: _Slot, position: int) -> int:
        if position < len(slot.log.tokens):
            return slot.log.tokens[position]
        # After a failure nothing was sampled. Rows planned before it still come; their results are dropped.
        waits = slot.parked is not None and position >= slot.parked
        unknown = waits or self._fails(slot.log, position)
        return slot.sampled.get(position, 0) if unknown else slot.sampled[position]

    def _read(self, slot: _Slot, end: int) -> list[int]:
        cells = []
        for position in range(end):
            page, offset = divmod(position, self.layout.page_size)
            cell = self._cells[slot.pages[page]][offset]
            assert cell is not None, f"{slot.log.id} reads position {position}, which was never computed"
            cells.append(cell)
        return cells

    def _check_writes(self, plan: StepPlan) -> None:
        readers: dict[int, set[int]] = {}
        for number, slot in self._slots.items():
            for page in slot.pages:
                readers.setdefault(page, set()).add(number)
        for row in plan.rows:
            pages = self._slots[row.slot].pages
            size = self.layout.page_size
            assert row.count > 0
            assert row.start + row.count + row.drafts <= self.layout.max_model_len, "beyond the context"
            for page in range(row.start // size, (row.start + row.count + row.drafts - 1) // size + 1):
                assert page < len(pages), f"slot {row.slot} writes beyond its page table"
                assert readers[pages[page]] == {row.slot}, f"slot {row.slot} writes a page that others read"


class Bench:
    """Scheduler and fake executor in one loop, with `depth` plans in flight. Combines the deltas by id."""

    def __init__(self, scheduler: Scheduler, executor: FakeExecutor, depth: int = 2) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.brought: dict[str, Brought] = {}
        self.ended: list[str] = []

    def add(self, *logs: SequenceLog) -> None:
        for log in logs:
            self.brought[log.id] = Brought()
            self.scheduler.add(log, speculates=log.params.speculate)

    def cancel(self, id: str) -> bool:
        done = self.scheduler.cancel(id)
        assert done != self.brought[id].ended, "cancel says whether the sequence was still there"
        self.brought[id].cancelled |= done
        return done

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.executor.submit(plan)
        return plan

    def replan(self) -> StepPlan | None:
        plan = self.scheduler.replan() if len(self.executor) else None
        if plan is not None:
            self.executor.submit_again(plan)
        return plan

    def commit(self, seconds: float = 0.0) -> tuple[Delta, ...]:
        deltas = self.scheduler.commit(self.executor.execute(), seconds)
        for delta in deltas:
            self.brought[delta.id].take(delta)
            if delta.finish is not None:
                self.ended.append(delta.id)
        return deltas

    def step(self) -> bool:
        """Fill the executor, then take one result. Returns False when there is nothing to do."""
        while len(self.executor) < self.depth and self.plan() is not None:
            pass
        if not len(self.executor):
            return self.resume()
        self.commit()
        return True

    def resume(self, most: int = 1000) -> bool:
        """Resume up to so many of the deferred rows. Returns False if there are none."""
        ids = self.executor.deferred[:most]
        del self.executor.deferred[:most]
        for id in ids:
            self.scheduler.resume(id)
        return bool(ids)

    def run(self, limit: int = 10_000) -> dict[str, Brought]:
        """Run all sequences to their end."""
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError(f"not done after {limit} steps")
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.executor.taken, "a slot outlives its sequence"
        self.scheduler.check_integrity()
        unfinished = [id for id, brought in self.brought.items() if not brought.ended]
        assert not unfinished, f"never ended: {unfinished}"
        return self.brought


def bench(
    num_pages: int = 64,
    page_size: int = 4,
    max_seqs: int = 8,
    max_model_len: int = 128,
    max_batch_tokens: int = 64,
    *,
    depth: int = 2,
    fails: Callable[[SequenceLog, int], str | None] = lambda log, position: None,
) -> Bench:
    """A bench that serves in order of arrival."""
    layout = MemoryLayout(num_pages, page_size, max_seqs, max_model_len, max_batch_tokens)
    return Bench(Scheduler(layout, FirstComeFirstServed()), FakeExecutor(layout, fails), depth)
