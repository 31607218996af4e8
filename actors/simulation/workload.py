"""What clients do: when they arrive, what they request, and whether they stay."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from msgspec.structs import replace

from personae.actors.simulation.machine import EOS, VOCABULARY
from personae.engine.params import SamplingParams
from personae.engine.sequence import LatencyTargets, SequenceLog
from personae.grammar.spec import GrammarSpec

BROKEN = "broken"  # an adapter whose digest begins so cannot be read
BAD, PANICS, SLOW = "bad", "panics", "slow"  # grammars whose source begins so
THINKS = "thinks"  # and grammars whose masks often take long
POISON = VOCABULARY  # a prompt that begins with this token kills the engine core

BLOCK = 16  # tokens of a block of a traced prompt


class TracedPrompt(NamedTuple):
    """A prompt and its answer: so many tokens of each. Prompts whose `blocks` begin alike begin with the same
    tokens."""

    blocks: tuple[int, ...]
    tokens: int
    answer: int


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """A small model of a day's traffic.

    `rate` requests arrive per second on average: as a Poisson process, in bursts of `burst` on average, or at
    the times of `trace` (seconds from the start, one per request). `adapters` are chosen by Zipf's law with
    exponent `zipf`; one request in ten is for the base. Tenants are chosen likewise. A share `prefixed` of
    the prompts begins with one of four prefixes of `prefix` tokens that all tenants share. The other shares
    are probabilities for each request: `schemas` is bound by one of `grammars` grammars, `siblings` has two
    or three choices, `leaves` disconnects at some time, `slow` reads slowly, `sessions` belongs to a session,
    of which `deletes` (a share) are deleted by their client after a request.
    With `conversations`, so many go on at once, chosen by Zipf's law: a prompt is the conversation's last one
    and `prompt` tokens more. After one of `turns` prompts a new conversation begins in its place.
    With `prompts`, request i has the i-th of them, and its answer is as long as it says.
    `broken` of the adapters cannot be read, `bad` of the grammars cannot be compiled or take long, `thinks`
    of the others have slow masks, `poison` of the requests kill the engine. A share `targeted` has the
    latency targets `targets`, if there are any.
    """

    requests: int = 1000
    rate: float = 100.0
    burst: float = 1.0
    trace: tuple[float, ...] = ()
    adapters: int = 20
    zipf: float = 1.0
    tenants: int = 5
    prompt: tuple[int, int] = (4, 60)
    answer: tuple[int, int] = (1, 40)
    prefix: tuple[int, int] = (16, 40)
    prefixed: float = 0.3
    schemas: float = 0.2
    grammars: int = 40
    siblings: float = 0.1
    leaves: float = 0.05
    slow: float = 0.02
    broken: float = 0.0
    bad: float = 0.0
    thinks: float = 0.0
    poison: float = 0.0
    targets: LatencyTargets | None = None
    targeted: float = 1.0
    sessions: float = 0.0
    deletes: float = 0.0
    conversations: int = 0
    turns: int = 10
    prompts: tuple[TracedPrompt, ...] = ()
    speculates: bool = True  # every second unbound answer has drafts


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request: when it arrives, its sequences, after how many tokens it disconnects (None: never; 0:
    before anything), and how long it pauses between two reads."""

    at: float
    logs: tuple[SequenceLog, ...]
    leaves_after: int | None
    naps: float


def requests(load: SimulatedWorkload, seed: int) -> Iterator[SimulatedRequest]:
    """Yield the requests of a workload in the order of their arrival."""
    dice = random.Random(seed)
    random_, randrange = dice.random, dice.randrange
    noise = tuple(dice.choices(range(1, VOCABULARY), k=4096))
    longest = load.prefix[1]
    prefixes = [noise[i * longest : i * longest + randrange(*load.prefix)] for i in range(4)]
    digests = [
        f"{BROKEN if dice.random() < load.broken else 'adapter'}-{number}" for number in range(load.adapters)
    ]
    adapters = list(accumulate((rank + 1) ** -load.zipf for rank in range(load.adapters)))
    tenants = [f"tenant-{number}" for number in range(load.tenants)]
    salts = {tenant: tenant.encode() for tenant in tenants}
    shares = list(accumulate((rank + 1) ** -load.zipf for rank in range(load.tenants)))
    specs = [
        GrammarSpec("regex", f"{dice.choice((BAD, PANICS, SLOW)) if dice.random() < load.bad else 'ok'}-{i}")
        for i in range(load.grammars)
    ]
    specs = [
        replace(spec, source=f"{THINKS}-{i}")
        if spec.source == f"ok-{i}" and i < load.thinks * len(specs)
        else spec
        for i, spec in enumerate(specs)
    ]
    talks: list[tuple[int, ...]] = [()] * load.conversations  # the last prompt of each
    popular = list(accumulate((rank + 1) ** -load.zipf for rank in range(load.conversations)))
    at = 0.0
    left = 1
    for number in range(load.requests):
        if load.trace:
            at = load.trace[number % len(load.trace)]
        else:
            left -= 1
            if not left:
                at += dice.expovariate(load.rate / load.burst)
                left = 1 if load.burst == 1 else 1 + int(dice.expovariate(1 / load.burst))
        first = randrange(4096 - load.prompt[1])
        own = noise[first : first + randrange(load.prompt[0], load.prompt[1] + 1)]
        prompt = prefixes[randrange(4)] + own if random_() < load.prefixed else own
        if random_() < load.poison:
            prompt = (POISON, *prompt)
        tenant = dice.choices(tenants, cum_weights=shares)[0]
        if talks:
            talk = dice.choices(range(len(talks)), cum_weights=popular)[0]
            prompt, tenant = talks[talk] + own, tenants[talk % len(tenants)]
            talks[talk] = () if random_() * load.turns < 1 else prompt
        traced = load.prompts[number % len(load.prompts)] if load.prompts else None
        if traced is not None:
            prompt = sum(map(_block, traced.blocks), ())[: traced.tokens]
        based = not digests or random_() < 0.1
        grammar = specs[randrange(len(specs))] if specs and random_() < load.schemas else None
        log = SequenceLog(
            id=f"r{number}",
            tokens=prompt,
            prompt_length=len(prompt),
            params=SamplingParams(
                max_tokens=traced.answer if traced else randrange(load.answer[0], load.answer[1] + 1),
                seed=number,
                jump_forward=True,
                speculate=load.speculates and grammar is None and number % 2 == 0,
            ),
            eos=EOS,
            adapter=None if based else dice.choices(digests, cum_weights=adapters)[0],
            grammar=grammar,
            tenant=tenant,
            salt=salts[tenant],
        )
        if load.targets is not None and random_() < load.targeted:
            log = replace(log, targets=load.targets)
        if load.sessions and random_() < load.sessions:
            log = replace(log, session=f"{number % 60}", session_seconds=dice.choice((0.1, 5.0, 600.0)))
        logs = [log]
        if random_() < load.siblings:
            logs += [
                replace(
                    log, id=f"{log.id}.{i}", after=log.id, params=replace(log.params, seed=(number << 3) + i)
                )
                for i in range(1, randrange(2, 4))
            ]
        leaves = randrange(load.answer[1]) if random_() < load.leaves else None
        naps = 0.2 * random_() if random_() < load.slow else 0.0
        yield SimulatedRequest(at, tuple(logs), leaves, naps)


@cache
def _block(number: int) -> tuple[int, ...]:
    return tuple(random.Random(number).choices(range(1, VOCABULARY), k=BLOCK))
