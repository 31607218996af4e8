import pytest

from personae.api.options import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("2GiB", 2 * 2**30),
        ("2 gib", 2 * 2**30),
        ("512MB", 512_000_000),
        ("1.5k", 1500),
        ("1TiB", 2**40),
        ("100B", 100),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 apples", "1e3", "2iB", "2PiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)
