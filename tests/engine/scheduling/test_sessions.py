"""What a session keeps, and for how long."""

import random
from collections.abc import Sequence

import pytest
from fake_executor import Bench, FakeExecutor, make_log

from personae.engine.plan import ForgetSession, MemoryLayout, Move, PageOwner, StepPlan, StorePage
from personae.engine.scheduling import sessions
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.page_names import session_digest, tenant_digest
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.tiers.tier import TierCounts

LAYOUT = MemoryLayout(24, 4, 2, 64, 64)
TURN = range(100, 140)


class RecordingTier:
    """A `TierIndex` that takes everything and has nothing: the owners of the pages that it was given, and the
    sessions that it was to forget."""

    pages, room, stores = 0, 100, True

    def __init__(self) -> None:
        self.stored: list[PageOwner] = []
        self.forgotten: list[tuple[bytes, bytes]] = []

    def has(self, name: bytes, source: str | None = None) -> bool:
        return False

    def wants(self, name: bytes) -> bool:
        return True

    def seconds(self, pages: int) -> float | None:
        return None

    def reserve(self, pages: int) -> int:
        raise AssertionError("it has nothing")

    def discard(self, ticket: int) -> None:
        pass

    def counts(self) -> TierCounts:
        return TierCounts()

    def move(self, moves: Sequence[Move]) -> None:
        self.stored += (move.owner for move in moves if isinstance(move, StorePage))
        self.forgotten += ((move.tenant, move.session) for move in moves if isinstance(move, ForgetSession))


class MovingExecutor(FakeExecutor):
    """Carries out the moves of plans, too."""

    def __init__(self, tier: RecordingTier) -> None:
        super().__init__(LAYOUT)
        self.tier = tier

    def submit(self, plan: StepPlan) -> None:
        self.tier.move(plan.moves)
        super().submit(plan)


class Server:
    """Requests come one after the other."""

    def __init__(self, tier: RecordingTier | None = None) -> None:
        self.scheduler = Scheduler(LAYOUT, VirtualTokenCounters(), tier=tier)
        self.bench = Bench(self.scheduler, FakeExecutor(LAYOUT) if tier is None else MovingExecutor(tier))
        self.count = 0

    def ask(self, prompt, **more) -> int:  # type: ignore[no-untyped-def]  # as make_log
        """How many tokens of the prompt were cached."""
        self.count += 1
        before = self.scheduler.counters.prefix_hits
        self.bench.add(make_log(f"{self.count}", prompt, max_tokens=2, **more))
        self.bench.run()
        self.scheduler.check_integrity()
        return self.scheduler.counters.prefix_hits - before

    def flood(self, tenant: str = "ann") -> None:
        for number in range(8):
            self.ask(range(1000 * self.count, 1000 * self.count + 20 + number % 2), tenant=tenant)


def test_the_next_turn_finds_what_its_tenants_other_requests_would_have_evicted() -> None:
    for session, found in ((None, 0), ("s", 39)):
        server = Server()
        server.ask(TURN, tenant="ann", session=session, session_seconds=60.0)
        server.flood()
        assert server.ask(TURN, tenant="ann", session=session, session_seconds=60.0) == found


def test_a_session_keeps_nothing_after_its_time() -> None:
    server = Server()
    server.ask(TURN, tenant="ann", session="s", session_seconds=60.0)
    assert (server.scheduler.sessions, server.scheduler.pages_kept) == (1, 10)
    server.scheduler.tick(59.0)
    assert server.scheduler.sessions == 1
    server.scheduler.tick(60.0)
    assert (server.scheduler.sessions, server.scheduler.pages_kept) == (0, 0)
    server.flood()
    assert server.ask(TURN, tenant="ann") == 0


def test_a_session_is_kept_longer_or_released_as_its_client_asks() -> None:
    server = Server()
    server.ask(TURN, tenant="ann", session="s", session_seconds=60.0)
    server.scheduler.keep_session("ann", "s", 600.0)
    server.scheduler.tick(500.0)
    assert server.scheduler.sessions == 1
    server.scheduler.keep_session("bob", "s", 0.0)
    server.scheduler.tick(501.0)
    assert server.scheduler.sessions == 1, "another tenant's session of that name is not there"
    server.scheduler.keep_session("ann", "s", 0.0)
    server.scheduler.tick(502.0)
    assert server.scheduler.pages_kept == 0


def test_a_session_takes_no_page_from_another_tenant() -> None:
    server = Server()
    server.ask(TURN, tenant="bob")
    for number in range(20):
        at = 1000 + 100 * number
        server.ask(range(at, at + 40), tenant="ann", session=f"{number}", session_seconds=60.0)
    assert server.ask(TURN, tenant="bob") == 39


def test_a_session_that_is_forgotten_leaves_the_cache_but_for_pages_that_others_use() -> None:
    server = Server()
    server.ask(TURN, tenant="ann", session="s", session_seconds=60.0)
    server.ask([*TURN[:20], *range(200, 208)], tenant="ann", session="other", session_seconds=60.0)
    server.scheduler.forget_session("bob", "s")
    assert server.scheduler.sessions == 2
    server.scheduler.forget_session("ann", "s")
    server.scheduler.check_integrity()
    assert (server.scheduler.sessions, server.scheduler.pages_kept) == (1, 7)
    assert server.ask(TURN, tenant="ann") == 20, "the pages that the other session keeps"


def test_a_session_that_is_forgotten_or_released_while_its_first_request_runs_keeps_nothing_of_it() -> None:
    for forget, found in ((True, 0), (False, 39)):
        server = Server()
        server.bench.add(make_log("s", TURN, tenant="ann", session="s", session_seconds=60.0, max_tokens=4))
        for _ in range(2):
            server.bench.step()
        if forget:
            server.scheduler.forget_session("ann", "s")
        else:
            server.scheduler.keep_session("ann", "s", 0.0)
        server.bench.run()
        assert (server.scheduler.sessions, server.scheduler.pages_kept) == (0, 0)
        assert server.ask(TURN, tenant="ann") == found


def test_nothing_of_a_session_that_is_forgotten_while_it_runs_goes_to_the_tier() -> None:
    tier = RecordingTier()
    server = Server(tier)
    server.bench.add(make_log("s", TURN[:32], tenant="ann", session="s", session_seconds=60.0, max_tokens=4))
    server.bench.step()
    server.scheduler.forget_session("ann", "s")
    server.bench.run()
    assert tier.stored == []


def test_a_session_that_is_forgotten_is_deleted_from_the_tier_and_shared_pages_are_stored_again() -> None:
    tier = RecordingTier()
    server = Server(tier)
    server.ask(TURN[:32], tenant="ann", session="s", session_seconds=60.0)
    server.ask([*TURN[:8], *range(200, 208)], tenant="ann", session="other", session_seconds=60.0)
    session = tenant_digest("ann"), session_digest("s")
    assert len(tier.stored) == 10
    assert sum(owner.session == session[1] for owner in tier.stored) == 8
    server.scheduler.forget_session("ann", "s")
    server.bench.run()
    assert tier.forgotten == [session]
    assert [owner.session for owner in tier.stored[10:]] == [b"", b""], "those of the other session"


@pytest.mark.parametrize("seed", range(10))
def test_sessions_that_are_forgotten_at_any_time_leave_the_cache_consistent(seed: int) -> None:
    dice, server = random.Random(seed), Server(RecordingTier())
    for number in range(60):
        tenant, session = dice.choice(("ann", "bob")), dice.choice((None, "one", "two"))
        start = dice.choice((0, 100))
        prompt = [*range(start, start + dice.randrange(4, 30)), *dice.choices(range(50, 52), k=2)]
        log = make_log(f"{number}", prompt, tenant=tenant, session=session, session_seconds=60.0)
        server.bench.add(log)
        for _ in range(dice.randrange(3)):
            server.bench.step()
        if dice.random() < 0.3:
            server.scheduler.forget_session(dice.choice(("ann", "bob")), dice.choice(("one", "two")))
        server.scheduler.check_integrity()
    server.bench.run()
    for tenant in ("ann", "bob"):
        for session in ("one", "two"):
            server.scheduler.forget_session(tenant, session)
    assert (server.scheduler.sessions, server.scheduler.pages_kept) == (0, 0)
    server.scheduler.check_integrity()


def test_a_tenant_has_a_bounded_number_of_sessions(monkeypatch) -> None:  # type: ignore[no-untyped-def]  # pytest's
    monkeypatch.setattr(sessions, "SESSIONS_OF_A_TENANT", 2)
    server = Server()
    for number in range(4):
        server.ask(
            range(10 * number, 10 * number + 8), tenant="ann", session=f"{number}", session_seconds=9.0
        )
    server.ask(range(50, 58), tenant="bob", session="0", session_seconds=9.0)
    assert server.scheduler.sessions == 3
    assert server.scheduler.pages_kept == 6
