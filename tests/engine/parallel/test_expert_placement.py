"""Where experts are computed most evenly, as a pure function of their loads."""

import random
from itertools import product

import pytest
import torch

from personae.engine.layers.expert_slots import ExpertSlots
from personae.engine.parallel.expert_placement import (
    EMPTY,
    ExpertGroups,
    Placement,
    balanced,
    first_placement,
    group_loads,
    imbalance,
    moves,
)


def skewed(experts: int, seed: int, exponent: float = 1.0) -> list[int]:
    """Loads as of a router that has favourites, in any order."""
    loads = [int(100_000 / (rank + 1) ** exponent) for rank in range(experts)]
    random.Random(seed).shuffle(loads)
    return loads


def check(placement: Placement, experts: int) -> None:
    """Every expert is somewhere, and no group has one twice."""
    for own in placement:
        there = [expert for expert in own if expert != EMPTY]
        assert len({*there}) == len(there)
    assert {expert for own in placement for expert in own} - {EMPTY} == {*range(experts)}


@pytest.mark.parametrize(
    ("experts", "groups", "spare"),
    [(8, 2, 1), (8, 4, 1), (64, 8, 2), (128, 8, 2), (256, 32, 2)],
)
def test_skewed_loads_become_even_and_every_expert_stays_somewhere(
    experts: int, groups: int, spare: int
) -> None:
    first = first_placement(experts, ExpertGroups(groups, spare))
    check(first, experts)
    for seed in range(10):
        loads = skewed(experts, seed)
        found = balanced(loads, first)
        check(found, experts)
        assert [len(own) for own in found] == [len(own) for own in first]
        assert imbalance(loads, found) <= 1.1 < imbalance(loads, first)
        assert sum(group_loads(loads, found)) == pytest.approx(sum(loads))
        assert balanced(loads, first) == found


def test_without_spare_slots_experts_only_change_places() -> None:
    first = first_placement(16, ExpertGroups(4, 0))
    loads = skewed(16, 1, exponent=0.5)
    found = balanced(loads, first)
    assert sorted(expert for own in found for expert in own) == [*range(16)]
    assert imbalance(loads, found) < imbalance(loads, first)


def test_an_even_placement_stays_as_it_is_and_a_small_change_moves_few() -> None:
    first = first_placement(32, ExpertGroups(4, 1))
    loads = skewed(32, 2)
    found = balanced(loads, first)
    assert moves(found, balanced(loads, found)) == 0
    changed = [int(load * random.Random(number).uniform(0.99, 1.01)) for number, load in enumerate(loads)]
    assert moves(found, balanced(changed, found)) < moves(first, found)


@pytest.mark.parametrize("loads", [[0] * 8, [5] + [0] * 7, [1, 0, 0, 0, 0, 0, 0, 1]])
def test_loads_of_few_experts_or_none_are_placed_too(loads: list[int]) -> None:
    for groups, spare in product((2, 4), (0, 1, 4)):
        check(balanced(loads, first_placement(8, ExpertGroups(groups, spare))), 8)


def test_each_row_is_computed_by_exactly_one_group_whatever_the_other_rows_are() -> None:
    placement = balanced(skewed(8, 3), first_placement(8, ExpertGroups(4, 2)))
    assert len({expert for own in placement for expert in own if expert != EMPTY}) == 8
    assert sum(expert != EMPTY for own in placement for expert in own) > 8
    groups = [ExpertSlots(8, group, placement, torch.device("cpu")) for group in range(4)]
    chosen = torch.randint(8, (500, 2), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(500)
    slots = torch.stack([own.of(chosen, positions) for own in groups])
    own = slots < torch.tensor([group.count for group in groups]).view(-1, 1, 1)
    assert torch.equal(own.sum(0), torch.ones_like(chosen))
    for number, group in enumerate(groups):
        there = torch.tensor(placement[number])[slots[number][own[number]]]
        assert torch.equal(there, chosen[own[number]])
        alone = torch.cat([group.of(chosen[t : t + 1], positions[t : t + 1]) for t in range(0, 500, 7)])
        assert torch.equal(alone, slots[number][::7])


def test_an_expert_that_several_groups_have_is_computed_by_each_of_them_equally_often() -> None:
    placement = ((0, 1), (0, 2))
    groups = [ExpertSlots(3, group, placement, torch.device("cpu")) for group in range(2)]
    counts = [
        int((own.of(torch.zeros(1000, 1, dtype=torch.int64), torch.arange(1000)) == 0).sum())
        for own in groups
    ]
    assert counts == [500, 500]
