import pytest
from hypothesis import given
from hypothesis import strategies as st

from personae.engine.scheduling.pages import PagePool


def test_allocated_pages_are_distinct_and_counted():
    pool = PagePool(4)
    pages = pool.allocate(3)
    assert len(set(pages)) == 3
    assert pool.free == 1
    assert pool.can_allocate(1)
    assert not pool.can_allocate(2)
    pool.check_integrity(pages)


def test_allocating_no_pages_takes_none():
    pool = PagePool(2)
    assert pool.allocate(0) == []
    assert pool.free == 2


def test_a_page_is_free_when_its_last_holder_lets_go():
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    pool.share(page)
    pool.release(page)
    assert not pool.can_allocate(1)
    pool.release(page)
    assert pool.allocate(1) == [page]


def test_more_pages_than_there_are_is_refused_before_anything_changes():
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="3 pages are needed, 2 are free"):
        pool.allocate(3)
    pool.check_integrity([])


def test_releasing_a_free_page_is_caught():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.release(page)
    with pytest.raises(AssertionError, match=f"page {page} is released more often"):
        pool.release(page)


def test_sharing_a_free_page_is_caught():
    with pytest.raises(AssertionError, match="page 0 is free"):
        PagePool(2).share(0)


def test_integrity_names_a_page_whose_holder_is_gone():
    pool = PagePool(3)
    first, second = pool.allocate(2)
    with pytest.raises(AssertionError, match=f"page {second}: 1 references, 0 holders"):
        pool.check_integrity([first])


def test_integrity_names_a_page_held_more_often_than_counted():
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    with pytest.raises(AssertionError, match=f"page {page}: 1 references, 2 holders"):
        pool.check_integrity([page, page])


@given(
    st.integers(1, 8), st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 7)))
)
def test_the_counts_agree_whatever_is_taken_shared_and_released(size: int, moves: list[tuple[str, int]]):
    pool = PagePool(size)
    held: list[int] = []
    for verb, number in moves:
        if verb == "take" and pool.can_allocate(number):
            held += pool.allocate(number)
        elif held and verb == "share":
            page = held[number % len(held)]
            pool.share(page)
            held.append(page)
        elif held and verb == "release":
            pool.release(held.pop(number % len(held)))
        pool.check_integrity(held)
        assert pool.free == size - len(set(held))


def test_the_lowest_free_pages_are_given_out_so_that_runs_at_the_end_stay_free() -> None:
    pool = PagePool(8)
    assert pool.allocate(5) == [0, 1, 2, 3, 4]
    for page in (3, 1):
        pool.release(page)
    assert pool.allocate(1) == [1]
    assert pool.free_by_run(2) == {1: 1, 2: 1, 3: 2}
    pool.take([6, 7])
    assert pool.allocate(2) == [3, 5]
    pool.check_integrity(range(8))


def test_to_take_a_page_that_is_held_is_caught() -> None:
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="not free"):
        pool.take([1, 2])
