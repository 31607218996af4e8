from dataclasses import fields

import options_page
import pytest

from personae.actors.options import check_kv_remote, parse_size
from personae.api.commands.remote import server_root
from personae.api.options import GROUPS, ServeOptions, options_of


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
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("lmcache://127.0.0.1", "no host and port"),
        ("lmcache://127.0.0.1:5555/x", "no host and port"),
        ("lmcache://127.0.0.1:99999", "no host and port"),
        ("lmcache://10.0.0.1:5555", "not on this machine"),
        ("mooncake://user:secret@h:1", "no credentials"),
        ("mooncake://h:1?metrics_port=x", "no host and port"),
        ("mooncake://h:1?metrics_port=0", "HTTP port of Mooncake's master"),
        ("mooncake://h:1?other=1", "HTTP port of Mooncake's master"),
        ("lmcache:/x", "is no object store"),
    ],
)
def test_a_store_of_pages_has_the_form_that_its_message_names(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        check_kv_remote(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("given", ["h:1", "http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_servers_address_may_be_that_of_openais_clients(given: str) -> None:
    assert server_root(given) == "http://h:1"


def test_the_page_of_options_is_made_from_the_options() -> None:
    assert options_page.written() == options_page.tables(), "run `make docs`"


def test_every_option_is_in_one_group_and_has_a_sentence_of_help() -> None:
    grouped = [each.name for group in GROUPS for each in options_of(group)]
    assert sorted([*grouped, "model"]) == sorted(each.name for each in options_of(ServeOptions))
    assert sorted([*grouped, "model"]) == sorted(field.name for field in fields(ServeOptions))
    assert [each.name for each in options_of(ServeOptions) if not each.info.help.endswith(".")] == []
