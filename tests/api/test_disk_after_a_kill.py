"""`personae serve --kv-disk` finds its pages again, whatever ended the server."""

import re
from functools import partial
from pathlib import Path

import httpx
from patience import PATIENCE, eventually

from personae.api.bundled import NAMED
from personae.evals.served import Served

PAGES = 12  # full ones of 200 tokens


def test_a_server_without_a_data_directory_finds_the_pages_of_its_disk_after_it_was_killed(
    tmp_path: Path,
) -> None:
    arguments = [str(NAMED), "--device", "cpu", "--kv-disk", str(tmp_path / "disk")]
    with Served(arguments) as served:
        assert cached(served) == 0
        eventually(partial(has_stored, served), "the pages are stored")
        served.kill()
    with Served(arguments) as served:
        assert cached(served) == 16 * PAGES


def cached(served: Served, count: int = 200) -> int:
    """How many tokens of a prompt of `count` the server need not compute."""
    model = httpx.get(f"{served.url}/v1/models", timeout=PATIENCE).json()["data"][0]["id"]
    body = {"model": model, "prompt": list(range(4, 4 + count)), "max_tokens": 1}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE).json()
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def has_stored(served: Served) -> bool:
    """Whether the disk has the prompt's pages, as the next step reports."""
    cached(served, count=2)
    metrics = httpx.get(f"{served.url}/metrics", timeout=PATIENCE).text
    found = re.search(r"^personae:kv_tier_stored_total\S* (\S+)$", metrics, re.MULTILINE)
    return found is not None and float(found[1]) >= PAGES
