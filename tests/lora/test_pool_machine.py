"""Any order of calls keeps the pool whole, whatever its memory comes in."""

from collections import Counter
from contextlib import suppress

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from small_pools import SHAPES, Granules, adapter_of, assert_holds, make_pool

from personae.errors import AdapterError, Overloaded
from personae.lora.adapter import Adapter
from personae.lora.weight_pools import pool_bytes

CAST = [
    adapter_of(10, {"q": 1}),
    adapter_of(11, {"q": 8, "k": 8, "v": 8, "o": 8}),
    adapter_of(12, {"gate": 16, "up": 16, "down": 16}),
    adapter_of(13, dict.fromkeys(SHAPES.modules, 13)),
    adapter_of(14, {"q": (4, 20), "down": (0, 9)}),
    adapter_of(15, dict.fromkeys(SHAPES.modules, 32)),
    adapter_of(16, {"v": 40}),  # never fits
]


class PoolMachine(RuleBasedStateMachine):
    """Any order of loads, unloads, pins and unpins, against a model that knows who is held."""

    granule = 0

    def __init__(self) -> None:
        super().__init__()
        own = pool_bytes(SHAPES, 32, torch.float32, self.granule)
        self.memory = Granules(self.granule, own // self.granule) if self.granule else None
        self.pool = make_pool(capacity_rows=32, max_adapters=3, spare_rows=32, memory=self.memory)
        self.held: Counter[str] = Counter()
        self.own = self.pool.budget

    @rule(adapter=st.sampled_from(CAST))
    def load(self, adapter: Adapter) -> None:
        before = self.pool.residents
        try:
            slot = self.pool.load(adapter)
        except AdapterError:
            assert adapter is CAST[-1]
            assert self.pool.residents == before
        except Overloaded:
            assert any(self.held.values()), "whoever nobody holds makes room"
            assert self.pool.residents == before
        else:
            assert self.pool.slot(adapter.digest) == slot
            assert self.pool.residents[-1] == adapter.digest
            left = [digest for digest in before if digest not in self.pool.residents]
            assert not any(self.held[digest] for digest in left)

    @precondition(lambda self: self.pool.residents)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(self.pool.residents))
        assert self.pool.pin(digest) == self.pool.slot(digest)
        self.held[digest] += 1

    @precondition(lambda self: self.pool.residents)
    @rule(data=st.data())
    def unpin_or_unload(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(self.pool.residents))
        if self.held[digest]:
            with pytest.raises(ValueError, match="pinned"):
                self.pool.unload(digest)
            self.pool.unpin(digest)
            self.held[digest] -= 1
        else:
            self.pool.unload(digest)
            assert digest not in self.pool.residents

    @precondition(lambda self: self.pool.budget == self.own)
    @rule(size=st.integers(1, 4 * 10**4))
    def borrow(self, size: int) -> None:
        self.lent(-(-size // self.granule) * self.granule if self.granule else size)

    def lent(self, size: int) -> None:
        self.pool.budget += size
        if self.memory is not None:
            self.memory.free += size // self.granule

    def paid(self, size: int) -> None:
        """As far as whole granules go."""
        self.pool.budget -= size // self.granule * self.granule if self.granule else size
        for _ in self.pool.unmapping():
            pass
        if self.memory is not None:
            self.memory.free -= size // self.granule
            assert self.memory.free >= 0, "what is repaid is there"

    @precondition(lambda self: self.pool.budget > self.own)
    @rule()
    def recall(self) -> None:
        before = self.pool.residents
        freed = self.pool.evict(self.pool.budget - self.own)
        assert freed <= self.pool.budget - self.own
        left = [digest for digest in before if digest not in self.pool.residents]
        assert not any(self.held[digest] for digest in left), "pins are honoured"
        if freed < self.pool.budget - self.own:
            assert all(self.held[digest] for digest in self.pool.residents), "whoever could leave has left"
        self.paid(freed)

    @rule(adapter=st.sampled_from(CAST))
    def fits_if_what_is_missing_is_lent(self, adapter: Adapter) -> None:
        if (missing := self.pool.short_of(adapter)) == 0:
            return
        before = self.pool.residents
        self.lent(missing)
        with suppress(Overloaded, AdapterError):
            self.pool.load(adapter)
            if len(before) < 3 and all(self.pool._pages.free[m] for m in SHAPES.modules):
                assert set(before) < set(self.pool.residents), "nobody had to leave"
        self.paid(self.pool.evict(missing))

    @invariant()
    def all_adds_up(self) -> None:
        self.pool.check_integrity()
        if self.memory is not None:
            assert len(self.memory.backed) + self.memory.free == self.pool.budget // self.granule
            for stack in self.pool.stacks.values():  # or a GPU's launcher would refuse them
                for layer in (*stack.a, *stack.b):
                    assert layer.data_ptr() // self.granule * self.granule in self.memory.backed
        for adapter in CAST:
            assert self.pool.pins(adapter.digest) == self.held[adapter.digest]
            if adapter.digest in self.pool.residents:
                assert_holds(self.pool, adapter)


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
test_any_order_of_calls_keeps_the_pool_whole = PoolMachine.TestCase


class GranuleMachine(PoolMachine):
    """The same in memory that comes in granules, in which pages lie across borders: none is lost or used
    twice."""

    granule = 256


GranuleMachine.TestCase.settings = PoolMachine.TestCase.settings
test_any_order_of_calls_loses_no_granule = GranuleMachine.TestCase
