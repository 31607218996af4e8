"""What a session keeps, and for how long."""

from fake_executor import Bench, FakeExecutor, make_log

from personae.engine.plan import MemoryLayout
from personae.engine.scheduling import sessions
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler

LAYOUT = MemoryLayout(24, 4, 2, 64, 64)
TURN = range(100, 140)


class Server:
    """Requests come one after the other."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(LAYOUT, VirtualTokenCounters())
        self.bench = Bench(self.scheduler, FakeExecutor(LAYOUT))
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
