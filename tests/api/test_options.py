import pytest

from personae.api.commands.remote import server_root
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


@pytest.mark.parametrize("given", ["h:1", "http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_servers_address_may_be_that_of_openais_clients(given: str) -> None:
    assert server_root(given) == "http://h:1"
