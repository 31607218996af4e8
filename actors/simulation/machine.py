"""The simulated device: a small program that takes virtual time.

It carries out plans exactly as `engine/plan.py` defines, and notices a wrong plan. Memory is real: a page has
`page_size` cells. A cell is a number made from its token and the cell before it, which is read through the
slot's page table. The first cell is made from the tenant's salt and the adapter. A token is made from the
cell at its position, the seed and the position. So tokens are a pure function of the log (`Truth` computes
them without a device), and a wrong page, a stale write, a missing token or another tenant's KV changes them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from msgspec.structs import replace

from personae.actors.simulation.adapters import SimulatedAdapterMemory
from personae.actors.simulation.grammars import SimulatedGrammar
from personae.actors.simulation.loop import SimulationThreads
from personae.actors.simulation.ranks import SimulatedRanks
from personae.actors.simulation.trouble import Costs, Trouble, Wrong
from personae.engine.plan import (
    Drafted,
    FetchPage,
    ForgetSession,
    MemoryLayout,
    Move,
    Row,
    StepPlan,
    StepResult,
    StorePage,
)
from personae.engine.sequence import SequenceLog
from personae.engine.tiers.tier import Tier
from personae.errors import GRAMMAR_TOO_SLOW
from personae.grammar.matcher import Grammar
from personae.grammar.spec import GrammarKey

VOCABULARY = 64  # token 0 ends a sequence, so an answer has 64 tokens on average if nothing else ends it
EOS = (0,)
MASK_SECONDS = 0.4  # if a mask takes longer, its answer fails


def owner_cell(log: SequenceLog) -> int:
    """The cell before a sequence's first one. Only this tenant has it, with this adapter."""
    return crc32(b"%d %s %s" % (len(log.salt), log.salt, (log.adapter or "").encode()))


def next_token(log: SequenceLog, position: int, cell: int) -> int:
    """The token at `position`, chosen from the cell before it."""
    return hash((log.params.seed, position, cell)) % VOCABULARY


def is_forced(log: SequenceLog, position: int) -> bool:
    """Whether a grammar forces the token at `position`, whatever it is: every second token of bound
    answers."""
    return log.params.jump_forward and log.grammar is not None and hash((log.params.seed, position)) % 2 == 0


class Truth:
    """The tokens that a sequence must produce, computed from its log alone, one at a time."""

    __slots__ = ("_cell", "_log", "_position")

    def __init__(self, log: SequenceLog) -> None:
        cell = owner_cell(log)
        for token in log.tokens:
            cell = hash((cell, token))
        self._log, self._cell, self._position = log, cell, len(log.tokens)

    def __next__(self) -> int:
        token = next_token(self._log, self._position, self._cell)
        self._cell = hash((self._cell, token))
        self._position += 1
        return token


class Slot:
    """A sequence on the device. `tokens` are its log's and those sampled since."""

    __slots__ = ("awaited", "cell", "computed", "due", "failed", "log", "pages", "slow", "tokens")

    def __init__(self, log: SequenceLog) -> None:
        self.log = log
        self.tokens = list(log.tokens)
        self.pages: list[int] = []
        self.cell = owner_cell(log)
        self.computed = 0
        self.failed = False
        self.awaited: int | None = None  # the position whose mask is being made, until it is used
        self.due = 0.0  # when the mask is ready
        self.slow = False  # the mask takes too long and is never ready


class SimulatedStep(NamedTuple):
    """A step in flight: its result, and when it is done."""

    result: StepResult
    done: float


class SimulatedDevice:
    """Implements `actors.spec.StepRunner` without a model. It holds `adapters` adapters. A step takes `drag`
    times as long as normal, and longer if its `ranks` are slow. With several stages each takes its share of
    that, and computes one step at a time.

    Raises Wrong when a plan breaks its contract.
    """

    def __init__(
        self,
        layout: MemoryLayout,
        adapters: int,
        costs: Costs,
        threads: SimulationThreads,
        trouble: Trouble,
        drag: Callable[[], float] = lambda: 1.0,
        tier: Tier | None = None,
        ranks: SimulatedRanks | None = None,
    ) -> None:
        self.layout = layout
        self._ranks = ranks or SimulatedRanks()
        self._stage_free_at = [0.0] * (self._ranks.stages - 1)  # of the stages behind the first
        self._in_stages: dict[int, set[int]] = {}  # by step, the slots that choose a token
        self.runs_ahead = costs.runs_ahead
        self.slots: dict[int, Slot] = {}
        self.busy = 0.0  # seconds that the device has computed
        self._costs = costs
        self._threads = threads
        self._trouble = trouble
        self._drag = drag
        self._tier = tier
        self._cells: list[list[int]] = [[0] * layout.page_size for _ in range(layout.num_pages)]
        self._readers = [0] * layout.num_pages  # how many slots have the page in their table
        self.worker = SimulatedAdapterMemory(layout, adapters, costs, threads, self._overwrite)
        self._free_at = 0.0
        self._deferred_steps: dict[
            int, int | None
        ] = {}  # by slot, the step that deferred it; None: that step has finished

    @property
    def deferred(self) -> bool:
        """Whether rows are deferred."""
        return bool(self._deferred_steps)

    def resumable(self) -> tuple[str, ...]:
        """The sequences whose masks are ready now."""
        now = self._threads.time()
        ready = [n for n, step in self._deferred_steps.items() if step is None and self.slots[n].due <= now]
        for number in ready:
            del self._deferred_steps[number]
        return tuple(self.slots[number].log.id for number in ready)

    # A step

    def prepare(self, plan: StepPlan, grammars: Mapping[GrammarKey, Grammar]) -> StepPlan:
        """Apply the plan's changes."""
        self._trouble.strikes("prepare")
        self._apply(plan, grammars)
        self._threads.sleep(self._costs.host)
        return plan

    def forward(self, plan: StepPlan, overlap: Callable[[], None]) -> SimulatedStep:
        """Compute the step at once. It counts as done when its time has passed."""
        self._trouble.strikes("forward")
        tokens: list[tuple[int, ...]] = []
        failures: dict[int, str] = {}
        drafted: dict[int, Drafted] = {}
        codes: dict[int, str] = {}
        deferred: set[int] = set()
        computed = context = 0
        adapters = set()
        if len({row.slot for row in plan.rows}) != len(plan.rows):
            raise Wrong("two rows of one slot in one step")
        for index, row in enumerate(plan.rows):
            slot = self.slots.get(row.slot)
            if slot is None:
                raise Wrong(f"a row of slot {row.slot}, which is empty")
            row = self._resolved(slot, row)
            computed += row.count + row.drafts
            context += row.start
            adapters.add(slot.log.adapter)
            if row.start >= len(slot.log.tokens) and any(row.slot in at for at in self._in_stages.values()):
                raise Wrong(f"sequence {slot.log.id} goes on before the stages have computed its last token")
            known = len(slot.tokens)
            self._compute(slot, row, index, failures)
            if row.drafts and not slot.failed:
                drafted[index] = Drafted(row.drafts, self._verify(slot, row), "simulated")
            tokens.append(() if slot.failed else tuple(slot.tokens[known:]))
            if slot.awaited is not None:
                deferred.add(index)
                if row.start < slot.awaited:
                    self._deferred_steps[row.slot] = plan.step
            elif slot.slow:
                codes[index] = GRAMMAR_TOO_SLOW
        if computed > self.layout.max_batch_tokens:
            raise Wrong(f"{computed} tokens in one step of at most {self.layout.max_batch_tokens}")
        adapters.discard(None)
        if not adapters <= self.worker.held:
            raise Wrong(f"computed with adapters that are not on the device: {adapters - self.worker.held}")
        factors = self._ranks.compute(computed)
        costs = self._costs
        seconds = self._drag() * self._trouble.slowed(
            costs.step + computed * costs.token + len(plan.rows) * costs.row
            + len(adapters) * costs.adapter + context * costs.context
        )  # fmt: skip
        times = [seconds / len(factors) * factor for factor in factors]
        seconds = sum(times)
        self.busy += seconds
        if self._stage_free_at:
            self._free_at = self._through_stages(times)
            self._in_stages[plan.step] = {row.slot for row in plan.rows if row.samples}
            overlap()
        elif self.runs_ahead:
            self._free_at = max(self._free_at, self._threads.time()) + seconds
            overlap()
        else:
            overlap()
            self._threads.sleep(seconds)
            self._free_at = self._threads.time()
        result = StepResult(
            plan.step,
            tuple(tokens),
            failures=failures,
            codes=codes,
            deferred=frozenset(deferred),
            drafted=drafted,
            resting=self._costs.rests and plan.step // 8 % 3 == 0,
        )
        return SimulatedStep(result, self._free_at)

    def _through_stages(self, times: list[float]) -> float:
        """Compute the first stage. Returns when the last one will have computed the step."""
        self._threads.sleep(times[0])
        at = self._threads.time()
        for number, free_at in enumerate(self._stage_free_at):
            self._stage_free_at[number] = at = max(at, free_at) + times[number + 1]
        return at

    def fill(self, plan: StepPlan) -> None:
        """Do nothing: forced tokens are known when they are computed."""

    def sample(self, plan: StepPlan, forward: SimulatedStep) -> SimulatedStep:
        """Do nothing more."""
        self._trouble.strikes("sample")
        return forward

    def ready(self, launched: SimulatedStep) -> bool:
        """Whether the step's time has passed."""
        return launched.done <= self._threads.time()

    def finish(self, launched: SimulatedStep) -> StepResult:
        """Wait until the step's time has passed."""
        self._trouble.strikes("finish")
        left = launched.done - self._threads.time()
        if left > 0:
            self._threads.sleep(left)
        self._in_stages.pop(launched.result.step, None)
        for number, step in self._deferred_steps.items():
            if step == launched.result.step:
                self._deferred_steps[number] = None
        return launched.result

    def content(self, page: int) -> list[int]:
        """The cells of a page now."""
        return list(self._cells[page])

    def _overwrite(self, page: int) -> None:
        """Overwrite a page that is lent."""
        self._cells[page] = [-1] * self.layout.page_size

    def _move(self, moves: Sequence[Move]) -> None:
        """Give pages to the tier, have it delete those of sessions, then put fetched ones into free pages."""
        if not moves:
            return
        assert self._tier is not None
        stores = [move for move in moves if isinstance(move, StorePage)]
        contents: Any = [list(self._cells[move.page]) for move in stores]
        keys, owners = [move.key for move in stores], [move.owner for move in stores]
        if stores:
            self._tier.store(keys, owners, lambda: contents)
        for move in moves:
            if isinstance(move, ForgetSession):
                self._tier.forget(move.tenant, move.session)
        fetches = [move for move in moves if isinstance(move, FetchPage)]
        for move in fetches:
            if self._readers[move.page] or move.page in self.worker.lent:
                raise Wrong(f"page {move.page} is fetched while it is read or lent")
            self._cells[move.page] = list(self._tier.take(move.ticket)[move.index])
        for ticket in {move.ticket for move in fetches}:
            self._tier.discard(ticket)

    def _apply(self, plan: StepPlan, grammars: Mapping[GrammarKey, Grammar]) -> None:
        for number in plan.reclaimed:
            self._readers[self.slots[number].pages.pop()] -= 1
        for number in plan.releases:
            slot = self.slots.pop(number, None)
            if slot is None:
                raise Wrong(f"slot {number} is released and was empty")
            for page in slot.pages:
                self._readers[page] -= 1
            self._deferred_steps.pop(number, None)
        self._move(plan.moves)
        for admission in plan.admissions:
            log = admission.log
            if admission.slot in self.slots:
                raise Wrong(f"slot {admission.slot} is assigned but is taken")
            key = None if log.grammar is None else (log.tenant, log.grammar)
            bound = None if key is None else grammars[key]
            if bound is not None and (not isinstance(bound, SimulatedGrammar) or bound.key != key):
                raise Wrong(f"sequence {log.id} is bound by another tenant's grammar")
            self._trouble.admits(log)
            self.slots[admission.slot] = Slot(log)
        for source, target in plan.copies:
            if self._readers[target]:
                raise Wrong(f"page {target} is copied to while a sequence reads it")
            if source in self.worker.lent or target in self.worker.lent:
                raise Wrong(f"page {source} is copied to {target}, and one of them is lent")
            self._cells[target] = list(self._cells[source])

    def _resolved(self, slot: Slot, row: Row) -> Row:
        """Resolve a row that may have drafts, or follows one with drafts: it starts where the slot is, with
        as many drafts as the seed says."""
        if not slot.log.params.speculate or not row.start or not slot.computed or slot.failed:
            return replace(row, drafts=0)
        start = slot.computed
        if start > row.start:
            raise Wrong(f"sequence {slot.log.id} is at {start}, and is planned from {row.start}")
        samples = row.samples and start + row.count == len(slot.tokens)
        drafts = hash((slot.log.params.seed, start)) % (row.drafts + 1) if samples else 0
        return replace(row, start=start, samples=samples, drafts=drafts)

    def _verify(self, slot: Slot, row: Row) -> int:
        """Return how many of a row's drafts are right. The cells of wrong drafts stay in the pages."""
        log, right = slot.log, 0
        ends, size = {*log.eos, *log.params.stop_token_ids}, self.layout.page_size
        for place in range(row.drafts):
            token, position = slot.tokens[slot.computed], slot.computed
            if token in ends or self._trouble.fails(log, position + 1) is not None:
                break
            if hash((log.params.seed, position)) % 3 == 0:  # a wrong guess, and so are all behind it
                for wrong in range(position, position + row.drafts - place):
                    self._cells[slot.pages[wrong // size]][wrong % size] = -2
                break
            slot.cell = hash((slot.cell, token))
            self._cells[slot.pages[position // size]][position % size] = slot.cell
            slot.computed = position + 1
            right += 1
            if slot.computed == len(slot.tokens):
                slot.tokens.append(next_token(log, slot.computed, slot.cell))
                self._force(slot, slot.cell)
        return right

    def _compute(self, slot: Slot, row: Row, index: int, failures: dict[int, str]) -> None:
        for page in row.pages:
            if page in self.worker.lent:
                raise Wrong(f"page {page} is lent and given to sequence {slot.log.id}")
            self._readers[page] += 1
        slot.pages += row.pages
        if slot.awaited is not None and row.start >= slot.awaited:  # planned before it was deferred
            self._cells[slot.pages[row.start // self.layout.page_size]][
                row.start % self.layout.page_size
            ] = -1
            return
        if row.start and slot.computed == 0:
            self._check_cached(slot, row.start)
        elif slot.failed and row.start > slot.computed:
            return  # planned before the failure, behind another such row; discarded
        elif row.start != slot.computed:
            raise Wrong(f"sequence {slot.log.id} is computed from {row.start}, its next is {slot.computed}")
        size, cell = self.layout.page_size, slot.cell
        end = row.start + row.count
        if end > self.layout.max_model_len:
            raise Wrong(f"sequence {slot.log.id} is computed beyond the context")
        for position in range(row.start, end):
            place, offset = divmod(position, size)
            page = slot.pages[place]
            if self._readers[page] != 1:
                raise Wrong(f"sequence {slot.log.id} writes page {page}, which {self._readers[page]} read")
            if position >= len(slot.tokens):
                if not slot.failed:
                    raise Wrong(f"sequence {slot.log.id}: its token {position} is unknown")
                slot.computed = end
                return  # planned before the failure; discarded
            before = (
                self._cells[slot.pages[(position - 1) // size]][(position - 1) % size] if position else cell
            )
            if before != cell:
                raise Wrong(f"sequence {slot.log.id} finds another's KV at position {position - 1}")
            cell = hash((cell, slot.tokens[position]))
            self._cells[page][offset] = cell
        slot.cell, slot.computed = cell, end
        if not row.samples:
            return
        if len(slot.tokens) == end and self._is_deferred(slot, end):
            slot.computed = end - 1
            slot.cell = self._cell_at(slot, end - 2)
            return
        if slot.slow:
            slot.failed = True
            failures[index] = "its grammar is too slow"
            return
        why = self._trouble.fails(slot.log, end)
        if why is not None:
            slot.failed = True
            failures[index] = why
            return
        if len(slot.tokens) == end:
            slot.tokens.append(next_token(slot.log, end, cell))
            self._force(slot, cell)

    def _is_deferred(self, slot: Slot, end: int) -> bool:
        """Whether the mask of the token at `end` is not ready yet."""
        now = self._threads.time()
        if slot.awaited is None:
            seconds = self._trouble.thinks(slot.log, end)
            if not seconds:
                return False
            slot.awaited, slot.due = end, now + min(seconds, MASK_SECONDS)
            slot.slow = seconds > MASK_SECONDS
        if now < slot.due:
            return True
        slot.awaited = None
        return False

    def _cell_at(self, slot: Slot, position: int) -> int:
        if position < 0:
            return owner_cell(slot.log)
        return self._cells[slot.pages[position // self.layout.page_size]][position % self.layout.page_size]

    def _force(self, slot: Slot, cell: int) -> None:
        """Append the tokens that a grammar forces after the one behind `cell`. A token that ends an answer is
        never forced."""
        log, tokens = slot.log, slot.tokens
        limit = log.prompt_length + log.budget(self.layout.max_model_len)
        ends = {*log.eos, *log.params.stop_token_ids}
        while tokens[-1] not in ends and len(tokens) < limit and is_forced(log, len(tokens)):
            cell = hash((cell, tokens[-1]))
            token = next_token(log, len(tokens), cell)
            if token in ends:
                return
            tokens.append(token)

    def _check_cached(self, slot: Slot, start: int) -> None:
        """Check that the cells from the prefix cache are this sequence's own past."""
        size, cell = self.layout.page_size, slot.cell
        for position in range(start):
            cell = hash((cell, slot.tokens[position]))
            if self._cells[slot.pages[position // size]][position % size] != cell:
                raise Wrong(f"sequence {slot.log.id} was given another's KV for position {position}")
        slot.cell = cell
