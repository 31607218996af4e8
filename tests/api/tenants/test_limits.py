"""Limits on a clock that the test turns."""

from contextlib import ExitStack

import pytest
from msgspec import structs

from personae.api.tenants.limits import DEFAULTS, Meter, limits_of
from personae.api.tenants.store import Identity, TenantLimits
from personae.errors import RateLimited


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def who(tenant: str = "ann", **limits: int) -> Identity:
    return Identity(tenant, "tenant", TenantLimits(**limits))


def test_without_limits_nothing_but_the_defaults_refuses(clock: Clock) -> None:
    meter = Meter(clock)
    assert DEFAULTS.concurrent is not None
    with ExitStack() as stack:
        for _ in range(DEFAULTS.concurrent):
            stack.enter_context(meter.request(who()))
            meter.tokens(who(), 10**9, 10**9)
        with pytest.raises(RateLimited, match="are running"), meter.request(who()):
            pass


def test_requests_a_minute_have_a_default_too_and_a_limit_that_is_set_comes_before_it(clock: Clock) -> None:
    meter = Meter(clock)
    most = DEFAULTS.requests_per_minute
    assert most is not None
    for tenant, limits in (("ann", {}), ("bob", {"requests_per_minute": most + 1})):
        for _ in range(most):
            with meter.request(who(tenant, **limits)):
                pass
    with pytest.raises(RateLimited, match=f"{most} requests a minute"), meter.request(who()):
        pass
    with meter.request(who("bob", requests_per_minute=most + 1)):
        pass
    assert limits_of(who(concurrent=3)) == structs.replace(DEFAULTS, concurrent=3)


def test_a_minutes_requests_may_come_at_once_and_come_back_evenly(clock: Clock) -> None:
    meter, ann = Meter(clock), who(requests_per_minute=6)
    for _ in range(6):
        with meter.request(ann):
            pass
    with pytest.raises(RateLimited) as refused, meter.request(ann):
        pass
    assert refused.value.retry_after == pytest.approx(10)
    assert "come back in 1" in refused.value.message
    clock.now += 9.9
    with pytest.raises(RateLimited), meter.request(ann):
        pass
    clock.now += 0.2
    with meter.request(ann):
        pass
    clock.now += 3600
    for _ in range(6):
        with meter.request(ann):
            pass
    with pytest.raises(RateLimited), meter.request(ann):
        pass


def test_tenants_do_not_use_each_others_limits(clock: Clock) -> None:
    meter = Meter(clock)
    for tenant in ("ann", "bob"):
        with meter.request(who(tenant, requests_per_minute=1, concurrent=1)):
            pass


def test_so_many_requests_run_at_the_same_time_and_a_refused_one_counts_for_nothing(clock: Clock) -> None:
    meter, ann = Meter(clock), who(concurrent=2, requests_per_minute=3)
    with meter.request(ann), meter.request(ann):
        for _ in range(5):
            with pytest.raises(RateLimited, match="2 requests"), meter.request(ann):
                pass
    with meter.request(ann):
        pass


def test_an_answers_tokens_are_owed_before_the_next_prompt(clock: Clock) -> None:
    meter, ann = Meter(clock), who(tokens_per_minute=60)
    meter.tokens(ann, 20, 100).settle(100)
    with pytest.raises(RateLimited, match="60 tokens a minute") as refused:
        meter.tokens(ann, 10, 1)
    assert refused.value.retry_after == pytest.approx(70)
    clock.now += 70
    meter.tokens(ann, 10, 1)


def test_requests_that_come_at_once_exceed_the_limit_by_the_answers_of_one_at_most(clock: Clock) -> None:
    meter, ann = Meter(clock), who(tokens_per_minute=1000)
    begun = [meter.tokens(ann, 20, 180) for _ in range(5)]
    with pytest.raises(RateLimited, match="with 900 that the answers of its running requests may") as busy:
        meter.tokens(ann, 20, 180)
    assert busy.value.retry_after == pytest.approx(1)
    for reservation in begun:
        reservation.settle(180)
    with pytest.raises(RateLimited) as refused:
        meter.tokens(ann, 20, 180)
    assert refused.value.retry_after == pytest.approx(20 * 60 / 1000)


def test_what_an_answer_did_not_need_is_there_again_at_its_end(clock: Clock) -> None:
    meter, ann = Meter(clock), who(tokens_per_minute=1000)
    first = meter.tokens(ann, 100, 5000)
    with pytest.raises(RateLimited):
        meter.tokens(ann, 100, 10)
    for _ in range(2):
        first.settle(50)  # the second time nothing happens
    meter.tokens(ann, 850, 0)
    with pytest.raises(RateLimited):
        meter.tokens(ann, 1, 0)


def test_what_was_reserved_under_another_limit_does_not_come_back_to_the_new_one(clock: Clock) -> None:
    meter = Meter(clock)
    first = meter.tokens(who(tokens_per_minute=1000), 0, 5000)
    meter.tokens(who(tokens_per_minute=60), 60, 0)
    first.settle(0)
    with pytest.raises(RateLimited):
        meter.tokens(who(tokens_per_minute=60), 1, 0)


def test_a_prompt_longer_than_a_minutes_tokens_goes_when_nothing_is_owed(clock: Clock) -> None:
    meter, ann = Meter(clock), who(tokens_per_minute=60)
    meter.tokens(ann, 600, 0)
    with pytest.raises(RateLimited) as refused:
        meter.tokens(ann, 1, 0)
    assert refused.value.retry_after == pytest.approx(541)


def test_a_limit_of_none_at_all_refuses_everything(clock: Clock) -> None:
    meter = Meter(clock)
    with pytest.raises(RateLimited), meter.request(who(requests_per_minute=0)):
        pass
    with pytest.raises(RateLimited):
        meter.tokens(who(tokens_per_minute=0), 1, 1)


def test_a_changed_limit_holds_from_the_next_request_on(clock: Clock) -> None:
    meter = Meter(clock)
    with meter.request(who(requests_per_minute=1)):
        pass
    with meter.request(who(requests_per_minute=2)):
        pass
    with meter.request(who()):
        pass


def test_schemas_are_counted_when_they_are_new_to_the_tenant(clock: Clock) -> None:
    meter, ann = Meter(clock), who(schemas_per_minute=2)
    for _ in range(5):
        meter.schema(ann, "a")
        meter.schema(ann, "b")
    with pytest.raises(RateLimited, match="2 new schemas a minute"):
        meter.schema(ann, "c")
    meter.schema(ann, "a")
    meter.schema(who("bob"), "c")
    clock.now += 30
    meter.schema(ann, "c")
    meter.schema(ann, "c")
    with pytest.raises(RateLimited):
        meter.schema(ann, "d")
