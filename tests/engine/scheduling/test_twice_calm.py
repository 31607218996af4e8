"""In no flood does a neighbour's first token come more than twice as late as in calm.

A model of a server: steps take what they take on two cores with a model of 135M parameters, the next step is
planned shortly before the running one ends, and HTTP takes some milliseconds.
"""

import random
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from personae.engine.params import SamplingParams
from personae.engine.plan import MemoryLayout, StepPlan, StepResult
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import SequenceLog

FIXED, ROW, TOKEN, HTTP = 0.0052, 0.0006, 0.0008, 0.005  # seconds
CALM, LASTS = 2.0, 14.0

Logs = Iterator[list[SequenceLog]]


def log(id: str, tenant: str, prompt: int, answer: int, **options: object) -> SequenceLog:
    after = options.pop("after", None)
    text = tuple(random.Random(str(after or id)).choices(range(1000), k=prompt))
    params = SamplingParams(max_tokens=answer, temperature=0.0, seed=0, ignore_eos=True, **options)  # type: ignore[arg-type]  # test data
    return SequenceLog(id, text, prompt, params, tenant=tenant, salt=tenant.encode(), after=after)  # type: ignore[arg-type]  # as above


def requests(prompt: int, answer: int, **options: object) -> Logs:
    """One after the other, each of one sequence."""
    for number in count():
        yield [log(f"loud-{number}", "loud", prompt, answer, **options)]


def choices(answer: int) -> Logs:
    """Requests of 16 answers to the same prompt."""
    for number in count():
        first = f"loud-{number}-0"
        ids = [f"loud-{number}-{choice}" for choice in range(16)]
        yield [log(id, "loud", 1, answer, **({} if id == first else {"after": first})) for id in ids]


def batches(size: int, prompt: int) -> Logs:
    """Requests of many prompts without an answer: embeddings, scores, documents."""
    for number in count():
        ids = [f"loud-{number}-{place}" for place in range(size)]
        yield [log(id, "loud", prompt, 1, pooling="last") for id in ids]


class Server:
    """Clients of one tenant send a flood; a client of another asks for 16 tokens, again and again."""

    def __init__(self, flood: Logs, clients: int, pages: int, pauses: float) -> None:
        layout = MemoryLayout(
            num_pages=pages, page_size=16, max_seqs=64, max_model_len=2048, max_batch_tokens=512
        )
        self.scheduler = Scheduler(layout, VirtualTokenCounters(), sharing=True)
        self.flood, self.clients, self.pauses = flood, clients, pauses
        self.planned: StepPlan | None = None
        self.now = 0.0
        self.rng = random.Random(0)
        self.next: tuple[float, str] | None = (0.0, "quiet-0")
        self.asked: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.open: dict[str, int] = {}  # the sequences that have not ended of each request of the flood
        self.brought = 0  # tokens of the flood

    def ask(self) -> None:
        """A client of the flood sends its next request."""
        logs = next(self.flood)
        name = logs[0].id.rsplit("-", 1)[0] if len(logs) > 1 else logs[0].id
        self.open[name] = len(logs)
        for each in logs:
            self.scheduler.add(each)

    def arrive(self, by: float) -> bool:
        if self.next is None or self.next[0] > by:
            return False
        at, id = self.next
        self.asked[id], self.next = at, None
        self.scheduler.add(log(id, "quiet", 5, 16))
        return True

    def play(self, until: float) -> None:
        while self.now < until:
            self.arrive(self.now)
            running = self.planned or self.scheduler.plan()
            if running is None:
                assert self.next is not None
                self.now = self.next[0]
                continue
            chunks = {row.slot for row in running.rows if row.count > 1 or not row.start}
            prompts = sum(row.count for row in running.rows if row.slot in chunks)
            took = FIXED + ROW * (len(running.rows) - len(chunks)) + TOKEN * prompts if running.rows else 0.0
            self.arrive(self.now + max(took * 0.9 - 0.003, 0.0))
            self.planned = self.scheduler.plan()
            if self.arrive(self.now + took) and self.planned is not None:
                self.planned = self.scheduler.replan() or self.planned
            self.now += took
            self.end(running, took)
            self.scheduler.tick(self.now)

    def end(self, plan: StepPlan, took: float) -> None:
        tokens = tuple((7,) if row.samples else () for row in plan.rows)
        for delta in self.scheduler.commit(StepResult(plan.step, tokens), took):
            if delta.id in self.asked:
                if delta.id in self.last:
                    self.gaps.append(self.now - self.last[delta.id])
                elif delta.tokens:
                    self.first.append(self.now - self.asked[delta.id] + HTTP)
                self.last[delta.id] = self.now
                if delta.finish:
                    pause = HTTP * self.rng.uniform(0.5, 1.5) + self.pauses * self.rng.random()
                    self.next = self.now + pause, f"quiet-{len(self.asked)}"
                continue
            self.brought += len(delta.tokens)
            if delta.finish:
                assert delta.finish != "error", delta.error
                name = delta.id if delta.id in self.open else delta.id.rsplit("-", 1)[0]
                self.open[name] -= 1
                if not self.open[name]:
                    del self.open[name]
                    self.ask()


FLOODS: dict[str, tuple[int, Callable[[], Logs]]] = {
    "20 answers": (20, lambda: requests(1, 32)),
    "60 long answers": (60, lambda: requests(1, 200)),
    "a long prompt": (1, lambda: requests(2000, 1)),
    "eight long prompts": (8, lambda: requests(2000, 1)),
    "prompt logprobs": (2, lambda: requests(2000, 1, prompt_logprobs=20)),
    "prompts of a quarter of a step": (4, lambda: requests(120, 4)),
    "16 choices": (8, lambda: choices(64)),
    "embeddings of long texts": (2, lambda: batches(64, 1900)),
    "embeddings of short texts": (2, lambda: batches(200, 12)),
    "answers that hold all pages": (32, lambda: requests(1000, 900)),
}


@pytest.mark.parametrize("pauses", [0.0, 3.0], ids=["without pauses", "with pauses"])
@pytest.mark.parametrize("flood", FLOODS)
def test_a_neighbours_tokens_come_at_most_twice_as_late_as_in_calm(flood: str, pauses: float) -> None:
    clients, logs = FLOODS[flood]
    server = Server(logs(), clients, 546, pauses)
    server.play(CALM)
    first, gap = max(server.first), max(server.gaps)
    server.first.clear()
    server.gaps.clear()
    for _ in range(clients):
        server.ask()
    server.play(CALM + 1.0)
    begun = len(server.first)
    server.play(CALM + LASTS)
    assert server.brought, "the flood is served"
    waits = sorted(server.first[begun:])
    assert waits[int(0.99 * (len(waits) - 1))] <= 2 * first
    gaps = sorted(server.gaps)
    most = 2.7 if "pages" in flood else 2.3  # of rows that go on and prompts that come back by turns
    assert gaps[int(0.99 * (len(gaps) - 1))] <= most * gap
