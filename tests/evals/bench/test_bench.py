"""The load generator against servers whose answers are known."""

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import anyio
import pytest
from fake_engine import FakeEngine
from live_server import serving
from typer.testing import CliRunner
from uploads import open_fixture

from personae.api.app import create_app
from personae.api.cli import app as cli
from personae.errors import RequestError
from personae.evals.bench.arrivals import Bursts, Closed, Poisson, Trace
from personae.evals.bench.cells import CELLS
from personae.evals.bench.client import Answer, Request, ask
from personae.evals.bench.figures import Goals, Spread, figures, jain, ratio
from personae.evals.bench.plots import rounded
from personae.evals.bench.session import calibrate, subject
from personae.evals.bench.workload import Maker, Workload, length

Serve = Callable[..., Any]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(FakeEngine("x" * 400, max_model_len=4096))) as url:
        yield url


def run(work: Callable[..., Any], *arguments: Any) -> Any:
    return anyio.run(work, *arguments)


async def scripted(pieces: list[bytes], request: Request) -> Answer:
    """What the client makes of a server that sends these pieces."""

    async def serve(stream: Any) -> None:
        async with stream:
            await stream.receive()
            for piece in pieces:
                await stream.send(piece)
                await anyio.sleep(0.01)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, serve)
            answer = await ask(f"http://127.0.0.1:{port}", request)
            tasks.cancel_scope.cancel()
    return answer


REQUEST = Request("/v1/chat/completions", {"model": "m"})
EVENTS = (
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    b'data: {"choices": [{"delta": {"content": "b"}}]}\r\n\r\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}\n\ndata: [DONE]\n\n'
)


def chunked(size: int) -> list[bytes]:
    parts = [EVENTS[at : at + size] for at in range(0, len(EVENTS), size)]
    return [*(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


@pytest.mark.parametrize("size", [1000, 50, 7])
def test_events_may_come_in_chunks_of_any_size(size: int) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = run(scripted, [head + b"".join(chunked(size))], REQUEST)
    assert (answer.error, answer.tokens, answer.prompt_tokens, len(answer.gaps)) == (None, 5, 7, 1)
    assert 0 < answer.first <= answer.seconds


def test_a_server_without_chunks_is_understood() -> None:
    answer = run(
        scripted, [b"HTTP/1.1 200 OK\r\n\r\n", *(EVENTS[i : i + 90] for i in range(0, 500, 90))], REQUEST
    )
    assert (answer.error, answer.tokens, len(answer.gaps)) == (None, 5, 1)


ERRORS = {
    "status 503": [b"HTTP/1.1 503 Full\r\ncontent-length: 2\r\n\r\n{}"],
    "status 404 (model_not_found)": [b'HTTP/1.1 404 Not Found\r\n\r\n{"error": {"code": "model_not_found"}}'],
    "stream: overloaded": [b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"code": "overloaded"}}\n\n'],
    "stream: nothing came": [b"HTTP/1.1 200 OK\r\n\r\n"],
    "connection: EOFError": [],
    "connection: IncompleteReadError": [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\nda"],
}


@pytest.mark.parametrize("error", ERRORS)
def test_what_went_wrong_is_counted_by_kind(error: str) -> None:
    assert run(scripted, ERRORS[error], REQUEST).error == error


def test_nobody_there_is_an_error_too() -> None:
    assert run(ask, "http://127.0.0.1:9", REQUEST).error == "connection: ConnectionRefusedError"


def test_a_client_that_goes_away_leaves_after_so_many_events(url: str) -> None:
    body = {"model": "base", "messages": [{"role": "user", "content": "x"}], "max_tokens": 50}
    answer = run(ask, url, Request("/v1/chat/completions", body, leave_after=3))
    assert (answer.left, answer.complete, len(answer.gaps)) == (True, False, 2)


@pytest.mark.parametrize(
    ("text", "least", "most", "mean"),
    [
        ("128", 128, 128, 128),
        ("uniform:10,20", 10, 20, 15),
        ("normal:50,5", 20, 80, 50),
        ("lognormal:100,0.5", 5, 1500, 113),
    ],
)
def test_lengths_follow_their_distribution(text: str, least: int, most: int, mean: float) -> None:
    draw, rng = length(text), random.Random(0)
    found = [draw(rng) for _ in range(4000)]
    assert least <= min(found) <= max(found) <= most
    assert sum(found) / len(found) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize("text", ["", "x", "12,3", "uniform:5", "gamma:1,2"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is no length"):
        length(text)


def chosen(count: int = 3000, **fields: Any) -> Counter[str]:
    maker = Maker(Workload(prompt="1", **fields), ["a", "b", "c", "d"])
    return Counter(maker.make(number).body["model"] for number in range(count))


def test_models_are_as_popular_as_asked() -> None:
    assert chosen(popularity="identical") == {"a": 3000}
    assert chosen(popularity="distinct") == dict.fromkeys("abcd", 750)
    assert min(chosen(popularity="uniform").values()) > 650
    zipf = chosen(popularity="zipf")
    for place, name in enumerate("abcd", 1):
        assert zipf[name] / 3000 == pytest.approx(1 / place / (25 / 12), abs=0.03)


def test_shares_are_kept_and_the_seed_decides() -> None:
    load = Workload(schema=0.3, tools=0.2, disconnect=0.1, prefix=20, prefixes=2, prompt="10")
    made = [Maker(load, ["m"]).make(number) for number in range(2000)]
    kinds = Counter(request.kind for request in made)
    assert kinds["schema"] / 2000 == pytest.approx(0.3, abs=0.04)
    assert kinds["tools"] / 2000 == pytest.approx(0.2, abs=0.04)
    assert sum(r.leave_after is not None for r in made) / 2000 == pytest.approx(0.1, abs=0.03)
    assert all(("response_format" in r.body) == (r.kind == "schema") for r in made)
    assert all(("tools" in r.body) == (r.kind == "tools") for r in made)
    texts = [request.body["messages"][0]["content"].split() for request in made]
    assert {len(text) for text in texts} == {30}
    assert len({tuple(text[:20]) for text in texts}) == 2
    assert len({tuple(text[20:]) for text in texts}) == 2000
    assert made == [Maker(load, ["m"]).make(number) for number in range(2000)]
    other = {Maker(load, ["m"], occasion="other").make(n).body["messages"][0]["content"] for n in range(99)}
    assert not other & {" ".join(text) for text in texts}, "no cache knows what another load asked"


def test_keys_take_turns_as_tenants() -> None:
    maker = Maker(Workload(), ["m"], ["k1", "k2"])
    assert [(r.key, r.tenant) for r in map(maker.make, range(3))] == [
        ("k1", "tenant 1"),
        ("k2", "tenant 2"),
        ("k1", "tenant 1"),
    ]


def test_open_loops_send_when_they_should(tmp_path: Path) -> None:
    times = [arrival.at for arrival in Poisson(5.0, seed=3).times(5000)]
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)
    assert [arrival.at for arrival in Bursts(2, 3.0).times(5)] == [0, 0, 3, 3, 6]
    (tmp_path / "trace").write_text("".join(f'{{"at": {at}}}\n' for at in times[:10]))
    assert [a.at for a in Trace(str(tmp_path / "trace"), 2.0).times(5)] == [at / 2 for at in times[:5]]
    (tmp_path / "bad").write_text('{"at": 1}\n{"at": "x"}\n')
    with pytest.raises(RequestError, match="line 2"):
        list(Trace(str(tmp_path / "bad")).times(5))


@pytest.mark.parametrize("arrivals", [Closed(3), Bursts(4, 0.05), Poisson(200.0)])
def test_every_request_is_sent_once(url: str, arrivals: Any) -> None:
    answers: list[Answer] = []
    sent: list[int] = []

    def make(number: int, prompt: int | None, output: int | None) -> Request:
        sent.append(number)
        return Maker(Workload(output="5"), ["base"]).make(number)

    run(arrivals.run, url, make, 10, answers.append)
    assert sorted(sent) == list(range(10))
    assert [(answer.error, answer.tokens) for answer in answers] == [(None, 5)] * 10


def test_a_server_is_asked_how_long_its_words_are(url: str) -> None:
    one = run(subject, url)
    assert one.models == ("base", "team/pirate")
    assert run(subject, f"{url}/v1#team/pirate,base").models == ("team/pirate", "base")
    scale = run(calibrate, one, Workload())
    assert 0.1 < scale < 0.2, "a token is a byte here, a word has 6 or so"


def answer(tenant: str, sent: float, first: float, gaps: list[float], tokens: int, **fields: Any) -> Answer:
    request = Request("/", {}, tenant=tenant)
    return Answer(request, sent, tokens, 10, 4, first=first, seconds=first + sum(gaps), gaps=gaps, **fields)


def test_figures_are_what_they_say() -> None:
    answers = [
        answer("a", 0.0, 0.5, [0.1, 0.3], 30),
        answer("a", 1.0, 2.0, [0.1], 10),
        answer("b", 2.0, 0.1, [0.5, 0.5], 20),
        answer("b", 2.0, 0.1, [], 0, left=True),
        answer("b", 3.0, 0.1, [], 0, error="status 503"),
    ]
    found = figures(answers, Goals(first=1.0, gap=0.25))
    assert (found.requests, found.completed, found.left, found.errors) == (5, 3, 1, {"status 503": 1})
    assert found.seconds == pytest.approx(3.1)
    assert found.output_rate == pytest.approx(60 / 3.1)
    assert found.prompt_tokens == 30
    assert found.goodput == pytest.approx(1 / 3.1), "only the first is good: a late token, long gaps"
    assert found.fairness == pytest.approx((40 + 20) ** 2 / (2 * (40**2 + 20**2)))
    assert found.gap.most == 0.5
    assert found.cached_tokens == 12


def test_quantiles_and_fairness() -> None:
    spread = Spread.of(range(1, 101))
    assert (spread.p50, spread.p90, spread.p99, spread.most) == (50, 90, 99, 100)
    assert math.isnan(Spread.of([]).p50)
    assert jain([5, 5, 5]) == 1
    assert jain([7, 0, 0, 0]) == 0.25
    assert math.isnan(jain([0]))


def test_an_axis_ends_at_a_short_number_that_nothing_exceeds() -> None:
    for most in (0.003, 0.9, 1.0, 37, 148, 1037, 16_910):
        end = rounded(most)
        assert most <= end <= 2 * most
        assert len(f"{end / 4:g}") <= 6
    assert rounded(0) == 1


def test_ratios_are_of_rounds_that_belong_together() -> None:
    def of(tokens: int) -> Any:
        return figures([answer("a", 0.0, 1.0, [], tokens)], Goals())

    found = ratio([of(20), of(90), of(10)], [of(10), of(30), of(20)], "tokens/s")
    assert (found.median, found.least, found.most) == (2, 0.5, 3)


def test_a_server_with_keys_is_asked_with_that_of_the_environment(tmp_path: Path) -> None:
    engine = FakeEngine(max_model_len=100_000)
    with open_fixture(tmp_path / "data", engine) as fixture, serving(fixture.app) as url:
        env, line = {"PERSONAE_API_KEY": fixture.key("ann")}, ["bench", "--url", url, "--out", str(tmp_path)]
        load = ["--requests", "2", "--output", "4", "--prompt", "4"]
        refused = CliRunner().invoke(cli, line + load)
        assert (refused.exit_code, "PERSONAE_API_KEY" in refused.stderr) == (1, True)
        done = CliRunner().invoke(cli, line + load, env=env)
        assert done.exit_code == 0, done.output


def test_the_command_compares_servers_and_writes_a_page(url: str, tmp_path: Path) -> None:
    options = ["bench", "--url", f"ours={url}", "--compare", f"theirs={url}", "--out", str(tmp_path)]
    load = ["--concurrency", "4", "--requests", "12", "--rounds", "2", "--output", "8", "--prompt", "20"]
    more = ["--popularity", "distinct", "--disconnect", "0.2", "--prefix", "10"]
    done = CliRunner().invoke(cli, [*options, *load, *more])
    assert done.exit_code == 0, done.output
    assert "ours over theirs, round by round" in done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(one["server"], one["round"]) for one in report["played"]] == [
        ("ours", 0),
        ("theirs", 0),
        ("theirs", 1),
        ("ours", 1),
    ]
    assert all(one["figures"]["requests"] == 12 for one in report["played"])
    assert {one["figures"]["left"] for one in report["played"]} != {0}
    assert [one["figures"]["left"] for one in report["played"][:2]] == [
        report["played"][0]["figures"]["left"]
    ] * 2, "both got the same requests"
    page = (tmp_path / "report.html").read_text()
    assert "ours" in page
    assert "http" not in re.sub(r"http://127\.0\.0\.1:\d+", "", page), "nothing is fetched"
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 4
    for picture in pictures:
        assert ElementTree.fromstring(picture).findall("polyline")


WRONG = {
    "two arrivals": (["--rate", "1", "--concurrency", "2"], "Take one of"),
    "cell": (["--cell", "nothing"], "There is no load"),
    "both": (["--cell", "one", "--prompt", "5"], "names a whole load"),
    "burst": (["--burst", "many"], "N,SECONDS"),
    "length": (["--prompt", "long"], "is no length"),
    "nobody": ([], "There is no server"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_option_is_named(what: str) -> None:
    options, message = WRONG[what]
    done = CliRunner().invoke(cli, ["bench", "--url", "http://127.0.0.1:9", *options])
    assert done.exit_code == (1 if what == "nobody" else 2)
    assert message in done.output


def test_the_default_loads_have_names_of_their_own_and_differ() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    for cell in CELLS:
        maker = Maker(cell.workload, ["a", "b"])
        assert len({json.dumps(maker.make(number).body) for number in islice(range(50), 50)}) == 50
