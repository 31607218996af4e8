"""The worker of one device: keeps state per slot, packs the rows of a plan and runs the forward pass.

All state here is a cache of the token logs. Rows are packed without padding and ordered by adapter. So the
tokens of one adapter are neighbours, and one work list serves every layer. State per slot lies in arrays
indexed by slot, so a step of decode rows takes a handful of vector operations, whatever the number of rows.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from operator import attrgetter

import numpy as np
import torch

from personae.engine.device_event import DeviceToHostEvent, to_host
from personae.engine.kv import KVCache
from personae.engine.layers.step import RankShare, StepHalf, StepPart
from personae.engine.models.decoder import Decoder
from personae.engine.parallel.experts import RankExperts
from personae.engine.plan import FetchPage, ForgetSession, MemoryLayout, Move, Row, StepPlan, StorePage
from personae.engine.tiers.tier import PageBytes, Tier
from personae.engine.worker.adapters import DeviceAdapters, ReadAdapter
from personae.engine.worker.graphs import DecodeGraphs
from personae.engine.worker.known import Ints, KnownTokens
from personae.engine.worker.page_tables import PageTables
from personae.engine.worker.prefill_graphs import PrefillGraphs
from personae.engine.worker.worker import Drafts, Forward, HiddenStates, PackedStep
from personae.kernels.attention import AttentionBatch
from personae.kernels.side_stream import SideStream
from personae.kernels.upload import uploads
from personae.lora.context import LoraOutput
from personae.lora.pool import LoraPool
from personae.lora.segments import LoraBatch, lora_batch, segments_of

PARTS = 2  # for each stage: with more, stages wait less for the first part and the last
PART_TOKENS = 32  # at least

_slot, _start, _count, _samples = map(attrgetter, ("slot", "start", "count", "samples"))


class Runner(DeviceAdapters):
    """The worker of one device. One thread owns it.

    `last_tokens` ([max_seqs] int64, on the device) has the newest token of each slot. `graphs` and
    `prefill_graphs` run the steps that can be captured. `read_adapter` reads adapters into host memory.
    """

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        layout: MemoryLayout,
        adapters: LoraPool,
        read_adapter: ReadAdapter,
        graphs: DecodeGraphs | None = None,
        prefill_graphs: PrefillGraphs | None = None,
        tier: Tier | None = None,
    ) -> None:
        super().__init__(adapters, kv, layout, read_adapter)
        self.model = model
        self.experts = None if model.files is None else RankExperts(model, model.files)
        self.expert_balance = None
        self._stages, self._two_batches = model.comm.stages, model.comm.two_batches
        self._region = model.comm.rank if model.comm.attention_ranks else None
        self._tier = tier
        self._side_stream = SideStream() if tier is not None and model.device.type == "cuda" else None
        self.graphs, self.prefill_graphs = graphs, prefill_graphs
        self.device = model.device
        self.vocab_size = model.config.vocab_size
        self.last_tokens = torch.zeros(layout.max_seqs, dtype=torch.int64, device=model.device)
        self._tables = PageTables(layout)
        # By slot, for sequences with an adapter: the adapter's slot, and the first position at which the
        # adapter is active, if that is not 0.
        self._adapter_slot: dict[int, int] = {}
        self._adapter_start: dict[int, int] = {}
        if kv.grows:
            kv.reach(0)

    def begin(self, plan: StepPlan, known: KnownTokens) -> PackedStep | None:
        """See Worker."""
        if self.kv.grows:
            for row in plan.rows:
                if row.pages:
                    self._reach(row.pages)
        if plan.moves:
            self._move(plan.moves)
        self._tables.apply(plan)
        for slot in plan.releases:
            self._adapter_slot.pop(slot, None)
            self._adapter_start.pop(slot, None)
        for admission in plan.admissions:
            slot, log = admission.slot, admission.log
            if log.adapter is not None:
                self._adapter_slot[slot] = self._slot(log.adapter)
                if log.adapter_start:
                    self._adapter_start[slot] = log.adapter_start
        if plan.copies:
            self.kv.copy_pages(plan.copies if self._region is None else self._own_copies(plan.copies))
        return self.pack(plan.rows, known) if plan.rows else None

    def _reach(self, pages: Sequence[int]) -> None:
        """Tell the cache which of its pages are about to be used."""
        size = self.kv.num_pages
        if self._region is None or pages[0] // size == self._region:
            self.kv.reach(max(pages) - (self._region or 0) * size)

    def _move(self, moves: Sequence[Move]) -> None:
        """Give pages to the tier, have it delete those of sessions, and put fetched ones into the cache."""
        assert self._tier is not None, "the plan has moves, and there is no tier"
        stores = [move for move in moves if isinstance(move, StorePage)]
        if stores:
            content = self.kv.read_pages([move.page for move in stores])
            keys, owners = [move.key for move in stores], [move.owner for move in stores]
            self._tier.store(keys, owners, _on_host(content, self._side_stream))
        fetches: dict[int, list[FetchPage]] = {}
        for move in moves:
            if isinstance(move, ForgetSession):
                self._tier.forget(move.tenant, move.session)
            elif isinstance(move, FetchPage):
                fetches.setdefault(move.ticket, []).append(move)
        for ticket, pages in fetches.items():
            staged = torch.from_numpy(self._tier.take(ticket))
            first, count = pages[0].index, len(pages)  # a ticket's moves have consecutive pages
            self.kv.write_pages([move.page for move in pages], staged[first : first + count])
            self._tier.discard(ticket)

    def _own_copies(self, copies: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those in this rank's region."""
        size = self.kv.num_pages
        return [(old % size, new % size) for old, new in copies if old // size == self._region]

    def _slot(self, digest: str) -> int:
        slot = self.adapters.slot(digest)
        if slot is None:
            raise RuntimeError(f"adapter {digest} is not on the device; the base would answer instead")
        return slot

    def forward(
        self, packed: PackedStep, overlap: Callable[[], None] | None = None, *, captured: bool = True
    ) -> HiddenStates:
        """See Worker. `captured`: a graph may run the step."""
        tokens = self._tokens(packed)
        if self._stages > 1:
            whole = StepPart(slice(0, len(tokens)), packed.attention, packed.lora)
            parts = packed.parts or (whole,)
            states, arrival = self.model.forward_stage(tokens, packed.positions, self.kv, parts)
            if overlap is not None:
                overlap()
            return HiddenStates(packed, states, arrival)
        if packed.share is not None:
            if overlap is not None:
                overlap()
            return HiddenStates(packed, self._forward_share(packed, tokens, packed.share))
        if packed.parts:
            return HiddenStates(packed, self._forward_parts(packed, tokens, overlap))
        hidden = self._run_graph(packed, tokens) if captured else None
        if hidden is None:
            hidden = self.model.forward(
                tokens, packed.positions, self.kv, packed.attention, packed.lora, overlap
            )
        elif overlap is not None:
            overlap()
        return HiddenStates(packed, hidden)

    def _forward_share(self, packed: PackedStep, tokens: torch.Tensor, share: RankShare) -> torch.Tensor:
        """A step in which each rank has sequences of its own, or its halves in turns."""
        model, positions, kv, attention = self.model, packed.positions, self.kv, packed.attention
        if not packed.halves:
            return model.forward_share(tokens, positions, kv, attention, packed.lora, share)
        assert self._two_batches is not None
        width = model.config.hidden_size
        states = torch.empty(len(tokens), width, dtype=model.dtype, device=model.device)
        works = [
            partial(
                model.forward_share,
                tokens[half.tokens],
                positions[half.tokens],
                kv,
                attention,
                half.lora,
                half.share,
            )
            for half in packed.halves
        ]
        for half, found in zip(packed.halves, self._two_batches.run(*works), strict=True):
            states[half.tokens] = found
        return states

    def _forward_parts(
        self, packed: PackedStep, tokens: torch.Tensor, overlap: Callable[[], None] | None
    ) -> torch.Tensor:
        """The parts of a step, one after the other, or in turns."""
        if self._two_batches is not None and self._in_turns:
            if overlap is not None:
                overlap()
            works = [
                partial(
                    self.model.forward,
                    part.of(tokens),
                    part.of(packed.positions),
                    self.kv,
                    part.batch,
                    part.lora,
                )
                for part in packed.parts
            ]
            return torch.cat(self._two_batches.run(*works))
        states = []
        for part in packed.parts:
            own, there = part.of(tokens), part.of(packed.positions)
            states.append(self.model.forward(own, there, self.kv, part.batch, part.lora, overlap))
            overlap = None
        return torch.cat(states)

    def logits(self, hidden: HiddenStates, logit_mask: torch.Tensor | None = None) -> Forward:
        """See Worker."""
        packed = hidden.packed
        if hidden.arrival is not None:
            hidden.arrival.result()
        output = None
        if self._adapter_slot:
            slots = packed.sampled_slots
            for index, (drafts, _) in packed.drafts.items():
                slots = slots + [packed.sampled_slots[index]] * len(drafts)
            output = self._output_of(slots, [1] * len(slots))
        logits = self.model.logits(hidden.states[packed.sampled], output, logit_mask)
        return Forward(packed, hidden.states, logits)

    def prompt_logits(self, forward: Forward, slot: int, first: int, count: int) -> torch.Tensor:
        """See Worker."""
        hidden = forward.hidden[first : first + count]
        return self.model.logits(hidden, self._output_of([slot], [count]))

    def hidden_states(self, forward: Forward, first: int, count: int) -> torch.Tensor:
        """See Worker."""
        return self.model.hidden_states(forward.hidden[first : first + count])

    def commit(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """See Worker."""
        self.last_tokens[slots] = tokens

    def rehearse(self, spans: Sequence[tuple[int, int]], *, everybody: bool = False) -> torch.Tensor:
        """Run rows that belong to no sequence, kernel by kernel. Returns the last row's logits [1, V], with
        `everybody` those of all rows.

        spans: (first position, tokens) of each row. The rows use as many adapters as the device may hold.
        Their keys go to a page that no sequence has yet. Where ranks have sequences of their own, each has
        all rows once.
        """
        count = self.adapters.max_adapters
        self._adapter_slot = {slot: slot % count for slot in range(self.layout.max_seqs)}
        last = len(spans) - 1
        rows = tuple(
            Row(slot, start, size, samples=everybody or slot == last)
            for slot, (start, size) in enumerate(spans)
        )
        known = KnownTokens(self.layout.max_seqs, self.vocab_size)
        for region in reversed(range(self.model.comm.attention_ranks or 1)):
            self._tables.regions.fill(region)
            packed = self.pack(rows, known)
            hidden = self.forward(packed, captured=False)
        self._adapter_slot = {}
        if hidden.arrival is not None:
            hidden.arrival.result()
        return self.model.logits(hidden.states[packed.sampled])

    def _run_graph(self, packed: PackedStep, tokens: torch.Tensor) -> torch.Tensor | None:
        """The hidden rows from a graph; None if no graph can run the step: it has a long prompt, or an
        adapter that is more than its low-rank updates."""
        work = None if packed.lora is None else packed.lora.work
        if packed.lora is not None and work is None:
            return None
        for graphs in (self.graphs, self.prefill_graphs):
            if graphs is not None:
                hidden = graphs.run(tokens, packed.positions, packed.attention, work)
                if hidden is not None:
                    return hidden
        return None

    def _output_of(self, slots: list[int], counts: list[int]) -> LoraOutput | None:
        """How adapters change the logits of these slots' rows, counts[i] each; None if they do not."""
        if not self.adapters.deltas:
            return None
        return self.adapters.deltas.of_step(segments_of(list(map(self._adapter_slot.get, slots)), counts))

    def pack(self, rows: tuple[Row, ...], known: KnownTokens) -> PackedStep:
        """Lay the tokens of at least one row out one after the other, grouped by adapter, base rows last. The
        rows of each rank are together, if each has sequences of its own."""
        apart = self._needing_layers(rows)
        order = self._grouped_by_adapter(rows, apart)
        ordered, size = list(map(rows.__getitem__, order)), len(rows)
        slots = np.fromiter(map(_slot, ordered), np.int64, size)
        starts = np.fromiter(map(_start, ordered), np.int64, size)
        counts = np.fromiter(map(_count, ordered), np.int64, size)
        ends = np.cumsum(counts)
        offsets = ends - counts
        positions = np.arange(ends[-1]) + np.repeat(starts - offsets, counts)
        write_index = self._tables.places(np.repeat(slots, counts), positions)
        lengths = starts + counts
        max_kv = int(lengths.max())
        sampling = np.flatnonzero(np.fromiter(map(_samples, ordered), np.bool_, size))
        ids, newest = known.inputs(slots, starts, counts, offsets, int(ends[-1]))
        chosen, chosen_ends = ends[sampling] - 1, lengths[sampling]
        drafts: Drafts = {}
        if known.guesses:
            newest = newest[[order[i] not in known.guesses for i in newest]]
            chosen, drafts = _write_guesses(known, order, sampling.tolist(), ends, ids)
        row_starts = np.concatenate(([0], ends)).astype(np.int32)
        own = uploads(
            (
                ids,
                offsets[newest],
                slots[newest],
                positions,
                chosen,
                write_index,
                row_starts,
                lengths.astype(np.int32),
                self._tables.rows(slots, max_kv),
            ),
            self.device,
        )
        tokens, at, newest_slots, there, sampled, places, query_start, kv_length, page_table = own
        return PackedStep(
            tokens=tokens,
            newest=at,
            newest_slots=newest_slots,
            positions=there,
            attention=AttentionBatch(
                query_start,
                kv_length,
                page_table,
                places,
                max_query=int(counts.max()),
                max_kv=max_kv,
                host=(row_starts, lengths),
            ),
            lora=self._lora(slots, starts, counts) if self._adapter_slot else None,
            sampled=sampled,
            sampled_rows=list(map(order.__getitem__, sampling.tolist())),
            sampled_slots=slots[sampling].tolist(),
            sampled_ends=_sampled_ends(chosen_ends, drafts) if drafts else chosen_ends.tolist(),
            offsets=offsets.tolist(),
            order=order,
            drafts=drafts,
            parts=self._parts(slots, starts, counts, write_index, len(apart))
            if apart or self._stages > 1 or (self._in_turns and self._region is None)
            else (),
            share=None if self._region is None else self._share(slots, starts, counts, write_index),
            halves=()
            if self._region is None or not self._in_turns
            else self._halves(slots, starts, counts, write_index),
        )

    def _share(self, slots: Ints, starts: Ints, counts: Ints, places: Ints) -> RankShare:
        """The tokens of each rank, and this one's rows."""
        regions = self._tables.regions[slots]
        tokens = np.bincount(regions, counts, self.model.comm.size).astype(np.int64).tolist()
        own = regions == self._region
        if not own.any():
            return RankShare(tokens, None)
        assert self._region is not None
        first = sum(tokens[: self._region])
        there = slice(first, first + tokens[self._region])
        rows = slots[own], starts[own], counts[own]
        return RankShare(tokens, StepPart(there, self._attention(*rows, places[there]), self._lora(*rows)))

    def _halves(self, slots: Ints, starts: Ints, counts: Ints, places: Ints) -> tuple[StepHalf, ...]:
        """The halves of a step, each with half of every rank's tokens; none if the step is so small that
        reading the weights for each half would cost more."""
        ends = np.cumsum(counts)
        total = int(ends[-1])
        if total < 2 * PART_TOKENS:
            return ()
        regions = self._tables.regions[slots]
        tokens = np.bincount(regions, counts, self.model.comm.size).astype(np.int64)
        stops, odd = np.cumsum(tokens), tokens % 2
        # Of ranks with an odd number, one has a token more in the first half, the next one in the second.
        middles = stops - (tokens + odd * (np.cumsum(odd) % 2 == 0)) // 2
        halves = []
        for firsts, lasts in ((stops - tokens, middles), (middles, stops)):
            own: StepPart | None = None
            rows, at = [], 0
            for rank, (first, last) in enumerate(zip(firsts.tolist(), lasts.tolist(), strict=True)):
                if first == last:
                    continue
                found = _rows_within(first, last, slots, starts, counts)
                if rank == self._region:
                    batch = self._attention(*found, places[first:last])
                    own = StepPart(slice(at, at + last - first), batch, self._lora(*found))
                rows.append(found)
                at += last - first
            there = np.concatenate([np.arange(*bounds) for bounds in zip(firsts, lasts, strict=True)])
            lora = self._lora(*(np.concatenate(column) for column in zip(*rows, strict=True)))
            share = RankShare((lasts - firsts).tolist(), own)
            [index] = uploads((there,), self.device)
            halves.append(StepHalf(index, lora, share))
        return tuple(halves)

    @property
    def _in_turns(self) -> bool:
        """Whether the halves of a step take turns. They do not where all layers run in one call."""
        return self._two_batches is not None and not self.model.runs_in_one_call

    def _needing_layers(self, rows: tuple[Row, ...]) -> set[int]:
        """The sequences' slots in these rows whose adapters need the layers one by one, if the other rows run
        in one call. Those other rows have the same bits as without them."""
        if not self._adapter_slot or not self.model.runs_in_one_call:
            return set()
        adapters = {row.slot: self._adapter_slot.get(row.slot) for row in rows}
        apart = self.adapters.needing_layers({slot for slot in adapters.values() if slot is not None})
        return {slot for slot, adapter in adapters.items() if adapter in apart} if apart else apart

    def _parts(
        self, slots: Ints, starts: Ints, counts: Ints, places: Ints, apart: int
    ) -> tuple[StepPart, ...]:
        """The parts of a step that are computed one after the other; none if it is one. The first `apart`
        rows need the layers one by one, the others run in one call. Stages compute at the same time; a step
        so small that reading the weights for each part would cost more has no parts there."""
        ends = np.cumsum(counts)
        total = int(ends[-1])
        if apart:
            bounds = [0, int(ends[apart - 1]), total] if apart < len(ends) else []
        else:
            number = min(PARTS * self._stages, total // PART_TOKENS)
            bounds = [part * total // number for part in range(number + 1)] if number > 1 else []
        parts = []
        for first, stop in pairwise(bounds):
            rows = _rows_within(first, stop, slots, starts, counts)
            batch = self._attention(*rows, places[first:stop])
            parts.append(StepPart(slice(first, stop), batch, self._lora(*rows)))
        return tuple(parts)

    def _attention(self, slots: Ints, starts: Ints, counts: Ints, places: Ints) -> AttentionBatch:
        """The attention of packed rows; `places` is where their keys go."""
        lengths = starts + counts
        max_kv = int(lengths.max())
        row_starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        query_start, kv_length, page_table, write_index = uploads(
            (row_starts, lengths.astype(np.int32), self._tables.rows(slots, max_kv), places), self.device
        )
        return AttentionBatch(
            query_start,
            kv_length,
            page_table,
            write_index,
            max_query=int(counts.max()),
            max_kv=max_kv,
            host=(row_starts, lengths),
        )

    def _grouped_by_adapter(self, rows: tuple[Row, ...], apart: Collection[int]) -> list[int]:
        """The order in which rows are packed. Those of the slots `apart` come first."""
        base = self.adapters.max_adapters  # higher than every slot, so that base rows come last
        keys = [self._adapter_slot.get(row.slot, base) for row in rows]
        if apart:
            keys = [key - base if row.slot in apart else key for row, key in zip(rows, keys, strict=True)]
        if self._region is not None:
            regions = self._tables.regions
            keys = [int(regions[row.slot]) * (base + 1) + key for row, key in zip(rows, keys, strict=True)]
        return sorted(range(len(rows)), key=keys.__getitem__)

    def _lora(self, slots: Ints, starts: Ints, counts: Ints) -> LoraBatch | None:
        rows, lengths = slots.tolist(), counts.tolist()
        adapters = list(map(self._adapter_slot.get, rows))
        # Base rows come last, in each region: so a step without regions has no adapter.
        if not adapters or (adapters[0] is None and self._region is None):
            return None
        if self._adapter_start:
            return lora_batch(self.adapters, *self._split(rows, adapters, starts.tolist(), lengths))
        return lora_batch(self.adapters, adapters, lengths)

    def _split(
        self, slots: list[int], adapters: list[int | None], starts: list[int], counts: list[int]
    ) -> tuple[list[int | None], list[int]]:
        """Splits a row in which its adapter becomes active into the base's part and the adapter's part."""
        parts: list[tuple[int | None, int]] = []
        for slot, adapter, start, count in zip(slots, adapters, starts, counts, strict=True):
            before = min(max(self._adapter_start.get(slot, 0) - start, 0), count)
            parts += ((None, before), (adapter, count - before))
        kept = [(adapter, count) for adapter, count in parts if count]
        return [adapter for adapter, _ in kept], [count for _, count in kept]

    def _tokens(self, packed: PackedStep) -> torch.Tensor:
        """The input ids: from the logs where known, else the slots' newest tokens, read on the device."""
        if len(packed.newest) == len(packed.tokens):
            return self.last_tokens[packed.newest_slots]
        if len(packed.newest):
            packed.tokens[packed.newest] = self.last_tokens[packed.newest_slots]
        return packed.tokens


def _rows_within(first: int, stop: int, slots: Ints, starts: Ints, counts: Ints) -> tuple[Ints, Ints, Ints]:
    """Slot, start and count of the rows that have the packed tokens `first` to `stop` - 1, or of their parts
    that do."""
    ends = np.cumsum(counts)
    begins = ends - counts
    low, high = np.maximum(begins, first), np.minimum(ends, stop)
    own = low < high
    return slots[own], (starts + low - begins)[own], (high - low)[own]


def _on_host(content: torch.Tensor, side_stream: SideStream | None) -> Callable[[], PageBytes]:
    """Begin to copy pages to the host, on a GPU in parallel with its steps. The function returns them there,
    and waits until they are. It holds the content until then."""
    with nullcontext() if side_stream is None else side_stream.fork():
        host, arrival = to_host(content), DeviceToHostEvent(content.device)

    def ready(content: torch.Tensor = content) -> PageBytes:
        arrival.wait()
        return host.numpy()

    return ready


def _write_guesses(
    known: KnownTokens, order: list[int], samples: list[int], ends: Ints, ids: Ints
) -> tuple[Ints, Drafts]:
    """Writes the tokens of rows with guesses into `ids`.

    Returns the packed positions of logits, with those of drafts last, and `PackedStep.drafts`.
    """
    place = {row: i for i, row in enumerate(order)}
    for row, guess in known.guesses.items():
        end = ends[place[row]]
        ids[end - len(guess.tokens) : end] = guess.tokens
    chosen = ends[samples] - 1
    behind: list[Ints] = []
    drafts: dict[int, tuple[tuple[int, ...], int]] = {}
    first = 0
    for index, i in enumerate(samples):
        guessed = known.guesses.get(order[i])
        if guessed is not None and guessed.drafts:
            count = len(guessed.drafts)
            chosen[index] -= count
            behind.append(np.arange(ends[i] - count, ends[i]))
            drafts[index] = guessed.drafts, first
            first += count
    return np.concatenate((chosen, *behind)), drafts


def _sampled_ends(lengths: Ints, drafts: Drafts) -> list[int]:
    """The positions of the tokens that rows choose before their drafts."""
    return [
        length - (len(drafts[index][0]) if index in drafts else 0)
        for index, length in enumerate(lengths.tolist())
    ]
