"""How long a message between actors takes: one hop, from `tell` or `post` to the first line of `receive`.

    python -m personae.evals.bench.kit [MESSAGES]

There are three kinds of hop on each event loop, with one message in flight at a time and loop and thread
otherwise idle. That is the latency which the executor has between two steps. `burst` is the cost per message
when a mailbox is filled and emptied at once.
"""

import statistics
import sys
from time import perf_counter_ns

import anyio

from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref, Reply
from personae.actors.kit.supervisor import Supervisor
from personae.actors.kit.thread import ThreadActor

LOOPS: dict[str, tuple[str, dict[str, object]]] = {
    "asyncio": ("asyncio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}
WARM_UP = 200
BURST = 1000

Count = int | Reply[None]


class Pong(Actor[int]):
    """The loop's side: records how long the message took, and sends it back."""

    def __init__(self, serve: Ref[int], hops: list[int], rounds: int, done: anyio.Event) -> None:
        self.serve, self.hops, self.rounds, self.done = serve, hops, rounds, done

    async def receive(self, message: int) -> None:
        """`message`: when it was sent, in nanoseconds; 0 starts."""
        if message:
            self.hops.append(perf_counter_ns() - message)
        if len(self.hops) == self.rounds:
            self.done.set()
        else:
            self.serve.tell(perf_counter_ns())


class Ping(Actor[int]):
    """The other side, on the loop."""

    def __init__(self, back: list[Ref[int]], hops: list[int]) -> None:
        self.back, self.hops = back, hops

    async def receive(self, message: int) -> None:
        """As Pong."""
        self.hops.append(perf_counter_ns() - message)
        self.back[0].tell(perf_counter_ns())


class ThreadPing(ThreadActor[int]):
    """The other side, on its own thread."""

    def __init__(self, back: list[Ref[int]], hops: list[int]) -> None:
        self.back, self.hops = back, hops

    def receive(self, message: int) -> None:
        """As Pong."""
        self.hops.append(perf_counter_ns() - message)
        self.post(self.back[0], perf_counter_ns())


class Counter(Actor[Count]):
    """Counts messages, and answers when asked."""

    async def receive(self, message: Count) -> None:
        """Take a number or answer a Reply."""
        if isinstance(message, Reply):
            message.tell(None)


async def play(threaded: bool, there: list[int], home: list[int], rounds: int) -> None:
    """Send a message back and forth until `home` has the requested number of hops."""
    done = anyio.Event()
    back: list[Ref[int]] = []
    async with Supervisor("bench") as top:
        if threaded:
            ping = top.spawn_thread("ping", lambda: ThreadPing(back, there))
        else:
            ping = top.spawn("ping", lambda: Ping(back, there))
        back.append(top.spawn("pong", lambda: Pong(ping, home, rounds, done)))
        back[0].tell(0)
        await done.wait()


async def burst(costs: list[int], rounds: int) -> None:
    """Fill a mailbox, let it be emptied, and record the time per message."""
    async with Supervisor("bench") as top:
        counter = top.spawn("counter", Counter, capacity=BURST + 1)
        for _ in range(rounds):
            started = perf_counter_ns()
            for _ in range(BURST):
                counter.tell(1)
            await counter.ask(lambda reply: reply)
            costs.append((perf_counter_ns() - started) // BURST)


async def measure(rounds: int) -> dict[str, list[int]]:
    """Nanoseconds of every hop, by kind."""
    to_loop: list[int] = []
    to_thread: list[int] = []
    from_thread: list[int] = []
    costs: list[int] = []
    await play(False, [], to_loop, rounds)
    await play(True, to_thread, from_thread, rounds)
    await burst(costs, max(2, rounds // BURST))
    return {
        "loop to loop": to_loop,
        "loop to thread": to_thread,
        "thread to loop": from_thread,
        "burst": costs,
    }


def main() -> None:
    """Print a table in microseconds."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    print(f"{'':9}{'hop':16}{'p50':>8}{'p95':>8}{'p99':>8}   us, {rounds} messages")
    for loop, (backend, options) in LOOPS.items():
        hops = anyio.run(measure, rounds + WARM_UP, backend=backend, backend_options=options)
        for kind, samples in hops.items():
            cuts = statistics.quantiles(samples if kind == "burst" else samples[WARM_UP:], n=100)
            print(f"{loop:9}{kind:16}" + "".join(f"{cuts[p - 1] / 1000:8.1f}" for p in (50, 95, 99)))


if __name__ == "__main__":
    main()
