"""When an engine core is taken for hanging."""

import pytest

from personae.actors.frontend.hang_detector import HangDetector

HANG, SILENCE = 60.0, 8.0
KINDS = ("message", "progress", "step")


def detector() -> HangDetector:
    return HangDetector(0, hang_seconds=HANG, silence_seconds=SILENCE)


def found(
    watched: HangDetector, start: float, end: float, *noted: str, in_flight: bool = True
) -> float | None:
    """When a hang is found, with these messages before each check from `start` to `end`. None: never."""
    now = start
    while (now := now + watched.pause) <= end:
        for kind in noted:
            getattr(watched, f"note_{kind}")(now)
        if watched.check(now, in_flight=in_flight) is not None:
            return now
    return None


@pytest.mark.parametrize(("missing", "seconds"), [("message", SILENCE), ("progress", HANG), ("step", HANG)])
def test_what_does_not_come_for_too_long_is_a_hang(missing: str, seconds: float) -> None:
    watched = detector()
    assert found(watched, 0, 1000, *(kind for kind in KINDS if kind != missing)) == seconds + watched.pause


def test_an_engine_core_that_reports_does_not_hang() -> None:
    assert found(detector(), 0, 1000, *KINDS) is None


def test_no_step_is_missed_while_none_is_in_flight() -> None:
    assert found(detector(), 0, 1000, "message", "progress", in_flight=False) is None


def test_time_in_which_this_process_stood_still_does_not_count() -> None:
    watched = detector()
    assert found(watched, 0, 10, *KINDS) is None
    assert watched.check(1010, in_flight=True) is None
    assert found(watched, 1010, 2000, *KINDS) is None


def test_a_hang_is_found_after_this_process_stood_still() -> None:
    watched = detector()
    assert found(watched, 0, 10, *KINDS) is None
    assert watched.check(1010, in_flight=True) is None
    assert found(watched, 1010, 2000, "message") == 1010 + HANG
