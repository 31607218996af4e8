"""A tenant's compiles wait for each other; those of others do not."""

from personae.actors.enginecore.compile_turns import MOST_LONG, MOST_QUICK, CompileTurns, Turn


class Queue:
    """Turns whose begin is recorded."""

    def __init__(self) -> None:
        self.turns = CompileTurns()
        self.begun: list[str] = []

    def wait(self, tenant: str, now: float = 0.0) -> Turn:
        turn = Turn(tenant, lambda: self.begun.append(tenant))
        self.turns.wait(turn, now)
        return turn


def test_a_tenant_compiles_one_at_a_time_and_another_does_not_wait_for_its_queue() -> None:
    queue = Queue()
    greedy = [queue.wait("greedy") for _ in range(20)]
    assert queue.begun == ["greedy"]
    queue.wait("modest")
    assert queue.begun == ["greedy", "modest"]
    queue.turns.leave(greedy[0], 1.0)
    assert queue.begun == ["greedy", "modest", "greedy"]


def test_the_tenant_that_was_served_least_goes_next() -> None:
    queue = Queue()
    first = [queue.wait(f"busy {n}") for n in range(MOST_QUICK)]
    for tenant in ("a", "a", "a", "b"):
        queue.wait(tenant)
    del queue.begun[:]
    queue.turns.leave(first[0], 1.0)
    assert queue.begun == ["a"], "who came first"
    queue.turns.leave(first[1], 1.0)
    assert queue.begun == ["a", "b"], "it has one at a time"


def test_service_is_measured_in_time() -> None:
    queue = Queue()
    blocked = [queue.wait("other") for _ in range(1)]
    now, seconds = 0.0, {"slow": 0.2, "quick": 0.05}
    spent = dict.fromkeys(seconds, 0.0)
    running = {tenant: queue.wait(tenant, now) for tenant in seconds}
    waiting = {tenant: [queue.wait(tenant, now) for _ in range(40)] for tenant in seconds}
    for _ in range(40):
        [(tenant, turn)] = [(tenant, turn) for tenant, turn in running.items() if turn.begun is not None][:1]
        now += seconds[tenant]
        spent[tenant] += seconds[tenant]
        running[tenant] = waiting[tenant].pop(0)
        queue.turns.leave(turn, now)
    assert blocked[0].begun == 0.0
    assert abs(spent["slow"] - spent["quick"]) <= 2 * seconds["slow"]


def test_a_long_compile_gives_its_turn_back_and_a_tenant_has_a_bounded_number_of_these() -> None:
    queue = Queue()
    turns = [queue.wait("greedy") for _ in range(10)]
    for number in range(MOST_LONG):
        assert len(queue.begun) == number + 1
        queue.turns.lengthen(turns[number], 0.3)
    assert len(queue.begun) == MOST_LONG
    queue.wait("modest")
    assert queue.begun[-1] == "modest"
    queue.turns.leave(turns[0], 5.0)
    assert len(queue.begun) == MOST_LONG + 2


def test_a_turn_that_is_not_wanted_any_more_is_not_given() -> None:
    queue = Queue()
    first, second, third = (queue.wait("a") for _ in range(3))
    queue.turns.leave(second, 1.0)
    queue.turns.leave(first, 1.0)
    assert second.begun is None
    assert third.begun == 1.0
    queue.turns.leave(third, 2.0)
    assert queue.turns._tenants == {}, "nothing is kept of a tenant that is gone"


def test_a_compile_that_ends_in_the_moment_in_which_it_would_become_long_leaves_no_turn_behind() -> None:
    queue = Queue()
    queue.turns.leave(turn := queue.wait("alone"), 0.25)
    queue.turns.lengthen(turn, 0.25)
    turns = [queue.wait("busy") for _ in range(2 * MOST_LONG)]
    for turn in turns:
        queue.turns.leave(turn, 0.25)
        queue.turns.lengthen(turn, 0.25)
    assert queue.begun == ["alone", *["busy"] * len(turns)]
