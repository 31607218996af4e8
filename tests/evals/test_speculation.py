from collections.abc import Iterator

import pytest
from real_server import running

from personae.api.bundled import NAMED
from personae.api.options import ServeOptions
from personae.evals.speculation import LOADS, compare, metrics

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    with (
        running(ServeOptions(NAMED, max_seqs=4)) as off,
        running(ServeOptions(NAMED, max_seqs=4, speculate="ngram")) as on,
    ):
        yield {"off": off.url, "ngram": on.url}


@pytest.mark.parametrize("load", ["edit", "chat", "noise"])
async def test_a_row_compares_the_speed_of_the_same_answers(urls: dict[str, str], load: str) -> None:
    name, clients, off, on, ratio, decoding, processor, right, different = await compare(
        urls, load, clients=2, requests=2, rounds=1
    )

    assert (name, clients, different) == (load, "2", "0")
    assert float(off) > 0
    assert float(on) > 0
    assert float(ratio.split()[0]) > 0
    assert float(decoding.split()[0]) > 0
    assert processor == ""
    accepted, computed = map(int, right.split(" of "))
    assert 0 <= accepted <= computed


async def test_a_server_without_metrics_has_zeros(urls: dict[str, str]) -> None:
    assert (await metrics(urls["off"]))["vllm:generation_tokens_total"] > 0
    assert (await metrics(f"{urls['off']}/nowhere"))["vllm:generation_tokens_total"] == 0


async def test_a_third_server_has_columns_of_its_own(urls: dict[str, str]) -> None:
    three = {**urls, "again": urls["ngram"]}
    row = await compare(three, "chat", clients=1, requests=1, rounds=1)
    assert len(row) == 3 + 2 * 5 + 1
    assert row[-1] == "0"


def test_no_two_requests_of_a_load_are_the_same() -> None:
    for load, body in LOADS.items():
        count = 400 if load == "chat" else 8  # earlier answers to the same question would be guesses
        made = [str(body(index)) for index in range(count)]
        assert len(set(made)) == len(made), load
