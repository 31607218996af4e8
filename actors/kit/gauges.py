"""What every actor is doing now: for `/metrics`, for the dump on a signal, and for finding out why nothing
moves."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from personae.actors.kit.actor import BaseCell
from personae.actors.kit.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Gauge:
    """One actor's figures. `oldest` is how long the first message in its mailbox has waited, in seconds (0
    when empty)."""

    path: str
    state: str
    depth: int
    capacity: int
    oldest: float
    handled: int
    restarts: int


def read(root: Supervisor) -> Iterator[Gauge]:
    """Read every actor below `root`, in start order. Call it on the loop; it costs a few microseconds per
    actor."""
    for child in root.children:
        node = child.node
        if isinstance(node, Supervisor):
            yield from read(node)
        elif isinstance(node, BaseCell):
            mailbox = node.mailbox
            put = mailbox.oldest
            yield Gauge(
                path=node.path,
                state=node.state,
                depth=len(mailbox.envelopes),
                capacity=mailbox.capacity,
                oldest=0.0 if put is None else mailbox.loop.time() - put,
                handled=node.handled,
                restarts=child.restarts,
            )


def dump(gauges: Iterable[Gauge]) -> str:
    """The actors' states as a table for people."""
    rows = [("actor", "state", "mailbox", "oldest", "handled", "restarts")]
    rows += [
        (g.path, g.state, f"{g.depth}/{g.capacity}", f"{g.oldest:.3f}s", str(g.handled), str(g.restarts))
        for g in gauges
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
