"""Which sequences are resubmitted after the engine core has died."""

from collections import deque
from types import SimpleNamespace

import pytest

from personae.actors.enginecore.step_recorder import LastStep
from personae.actors.frontend.frontend import Frontend
from personae.actors.frontend.probation import CLEARED, CrashRecord, Probation
from personae.actors.messages import EngineDied, Message


class Case:
    """A few sequences. Those in `poison` crash every epoch that they run in."""

    def __init__(self, ids: str, poison: str, outside: bool = False) -> None:
        self.records = {id: CrashRecord() for id in ids}
        self.poison = poison
        self.outside = outside
        self.probation = Probation()
        self.on_device: list[str] = list(ids)
        self.quarantined: list[str] = []
        self.deaths = 0

    def run(self) -> None:
        """Run until no epoch crashes any more."""
        while self.deaths < 50:
            if set(self.poison) & set(self.on_device):
                self.deaths += 1
                guilty = self.probation.judge(self.records, self.on_device, self.outside)
                self.quarantined += guilty
                for id in guilty:
                    del self.records[id]
                self.on_device = []
            else:
                for id in self.on_device:
                    self.records[id].brought += 1
                if self.probation.over:
                    return
            self.on_device += self.probation.next(self.records) or []


@pytest.mark.parametrize("poison", "abcdef")
def test_only_the_guilty_sequence_is_found_among_many_and_at_its_second_crash(poison) -> None:
    case = Case("abcdef", poison)
    case.run()
    assert case.quarantined == [poison]
    assert case.deaths == 2
    assert sorted(case.on_device) == sorted(set("abcdef") - {poison})


def test_several_guilty_sequences_are_found_one_after_the_other() -> None:
    case = Case("abcdefgh", "cfg")
    case.run()
    assert sorted(case.quarantined) == ["c", "f", "g"]
    assert sorted(case.on_device) == list("abdeh")


def test_a_waiting_sequence_is_never_suspect_however_often_the_engine_core_dies() -> None:
    records = {id: CrashRecord() for id in "ab"}
    probation = Probation()
    for _ in range(9):
        assert probation.judge(records, "a", outside=True) == []
        assert not records["b"].suspect
        records["a"].brought = CLEARED


def test_no_other_sequence_is_resubmitted_while_suspects_are_tried() -> None:
    records = {id: CrashRecord() for id in "abc"}
    probation = Probation()
    assert probation.judge(records, "ab") == []
    assert probation.next(records) == ["a"]
    assert probation.next(records) is None
    records["a"].brought = 1
    assert probation.next(records) is None
    records["a"].brought = CLEARED
    assert probation.next(records) == ["b"]
    assert probation.next(records) is None
    assert not probation.over
    del records["b"]  # it has ended
    assert probation.next(records) == ["c"]
    assert probation.over


def test_a_sequence_on_trial_that_was_not_on_the_device_yet_is_not_guilty() -> None:
    records = {"a": CrashRecord()}
    probation = Probation()
    probation.judge(records, "a")
    assert probation.next(records) == ["a"]
    assert probation.judge(records, "") == []
    assert probation.next(records) == ["a"]


def test_one_death_from_outside_makes_no_suspects_and_two_in_a_row_do() -> None:
    records = {id: CrashRecord() for id in "ab"}
    probation = Probation()
    probation.judge(records, "a", outside=True)
    assert probation.next(records) == ["a", "b"]
    probation.judge(records, "a", outside=True)
    assert probation.next(records) == ["a"]
    assert not probation.over


def test_tokens_between_deaths_clear_a_sequence() -> None:
    records = {"a": CrashRecord()}
    probation = Probation()
    for _ in range(10):
        assert probation.judge(records, "a") == []
        assert records["a"].deaths == 1
        assert probation.next(records) == ["a"]
        records["a"].brought = CLEARED


def test_a_sequence_that_is_killed_from_outside_again_and_again_ends_at_last() -> None:
    case = Case("a", "a", outside=True)
    case.run()
    assert (case.quarantined, case.deaths) == (["a"], 4)


def test_a_sequence_that_crashes_the_engine_at_its_tenth_token_is_found_too() -> None:
    # A replayed log continues where it was, so it crashes the engine at its next token.
    records = {id: CrashRecord() for id in "ab"}
    probation = Probation()
    records["a"].brought = records["b"].brought = 9
    assert probation.judge(records, "ab") == []
    assert probation.next(records) == ["a"]
    records["a"].brought = 2
    assert probation.next(records) == ["b"]
    assert probation.judge(records, "ab") == ["b"]
    assert probation.next(records) == ["a"]
    assert probation.over


def test_a_death_during_a_start_does_not_hide_the_death_before_it() -> None:
    delivered: deque[Message] = deque()
    frontend = SimpleNamespace(streamer=SimpleNamespace(tell=delivered.append))
    Frontend.note_engine_death(frontend, LastStep(7, 1, 1, ("a", "b")), outside=False)
    Frontend.note_engine_death(frontend, None, outside=True)
    assert [*delivered] == [EngineDied(("a", "b"), outside=False)]
