"""The default benchmark: a few loads that show what a server is good at. All of them run in a few minutes."""

import msgspec
from msgspec.structs import replace

from personae.evals.bench.arrivals import Arrivals, Bursts, Closed, Poisson
from personae.evals.bench.workload import Workload


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A named load: what is requested, when, and how often."""

    name: str
    about: str
    workload: Workload
    arrivals: Arrivals
    requests: int


_BASE = Workload(prompt="uniform:24,72", output="48")
_MIXED = replace(_BASE, popularity="distinct")

CELLS = (
    Cell(name="one", about="one client", workload=_BASE, arrivals=Closed(1), requests=12),
    Cell(name="eight", about="8 clients", workload=_BASE, arrivals=Closed(8), requests=64),
    Cell(name="many", about="32 clients", workload=_BASE, arrivals=Closed(32), requests=128),
    Cell(
        name="adapters",
        about="32 clients, all models in turn",
        workload=_MIXED,
        arrivals=Closed(32),
        requests=128,
    ),
    Cell(
        name="zipf",
        about="8 clients, models by Zipf's law",
        workload=replace(_BASE, popularity="zipf"),
        arrivals=Closed(8),
        requests=64,
    ),
    Cell(
        name="bound",
        about="8 clients, half bound by a schema, half by a tool",
        workload=replace(_BASE, schema=0.5, tools=0.5, output="96"),
        arrivals=Closed(8),
        requests=48,
    ),
    Cell(
        name="prefix",
        about="8 clients, 200 tokens shared by all",
        workload=replace(_BASE, prefix=200, prompt="16"),
        arrivals=Closed(8),
        requests=64,
    ),
    Cell(
        name="poisson",
        about="4 requests a second, Poisson",
        workload=replace(_MIXED, output="uniform:16,80"),
        arrivals=Poisson(4.0),
        requests=60,
    ),
    Cell(
        name="bursts",
        about="16 at once every 4 s, a tenth go away",
        workload=replace(_MIXED, disconnect=0.1),
        arrivals=Bursts(16, 4.0),
        requests=64,
    ),
)
