from hypothesis import given
from hypothesis import strategies as st

from personae.actors.options import parse_size
from personae.kernels.sizes import size_text


def test_sizes_have_two_or_three_digits() -> None:
    sizes = [5, 2**10, 2**20 + 1, 3 * 2**29, 300 * 2**30 + 5]
    assert [size_text(size) for size in sizes] == ["5 bytes", "1KiB", "1MiB", "1.5GiB", "300GiB"]
    assert size_text(2**20 + 1, needed=True) == "1.1MiB"
    assert size_text(300 * 2**30 + 5, needed=True) == "301GiB"


@given(st.integers(2**10, 2**50))
def test_an_option_takes_the_text_of_what_is_needed_and_it_is_enough(size: int) -> None:
    assert size <= parse_size(size_text(size, needed=True)) <= 1.11 * size + 2**10
    assert parse_size(size_text(size)) <= size
