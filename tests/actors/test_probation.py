"""Who goes back after Back has died."""

from personae.actors.probation import Probation, Record


class Case:
    """A few sequences; `poison` kills every life that it is given to."""

    def __init__(self, ids: str, poison: str) -> None:
        self.records = {id: Record() for id in ids}
        self.poison = poison
        self.probation = Probation()
        self.aboard: set[str] = set(ids)
        self.quarantined: list[str] = []
        self.deaths = 0

    def run(self) -> None:
        """Until no life ends any more."""
        while True:
            for id in self.aboard:
                self.records[id].aboard = True
            if self.poison not in self.aboard:
                for id in self.aboard:
                    self.records[id].got_on = True
                suspect = self.probation.next(self.records)
                if suspect is None:
                    return
                self.aboard.add(suspect)
                continue
            self.deaths += 1
            go, guilty = self.probation.judge(self.records)
            self.quarantined += guilty
            for id in guilty:
                del self.records[id]
            self.aboard = set(go)


def die(probation: Probation, records: dict[str, Record], aboard: str) -> tuple[list[str], list[str]]:
    for id in aboard:
        records[id].aboard = True
    return probation.judge(records)


def test_one_that_only_waits_is_never_suspect_however_often_back_dies() -> None:
    records = {id: Record() for id in "ab"}
    probation = Probation()
    for _ in range(9):
        records["a"].got_on = True
        assert die(probation, records, "a") == (["a", "b"], [])


def test_one_on_trial_that_was_not_computed_yet_is_not_guilty() -> None:
    records = {"a": Record()}
    probation = Probation()
    for _ in range(2):
        die(probation, records, "a")
    assert probation.next(records) == "a"
    assert die(probation, records, "") == ([], [])
    assert probation.next(records) == "a"


def test_the_guilty_one_is_found_among_many_by_its_third_death_and_it_alone() -> None:
    for poison in "abcdef":
        case = Case("abcdef", poison)
        case.run()
        assert (case.quarantined, case.deaths) == ([poison], 3)
        assert case.aboard == set("abcdef") - {poison}


def test_who_gets_on_between_deaths_is_never_suspect() -> None:
    records = {"a": Record()}
    probation = Probation()
    for _ in range(10):
        records["a"].aboard = records["a"].got_on = True
        assert probation.judge(records) == (["a"], [])


def test_a_suspect_that_waits_for_its_trial_is_not_counted_as_aboard() -> None:
    records = {id: Record() for id in "abc"}
    probation = Probation()
    for _ in range(2):
        die(probation, records, "abc")
    assert probation.next(records) == "a"
    assert probation.next(records) is None
    assert die(probation, records, "a") == ([], ["a"])
    assert records["b"].deaths == records["c"].deaths == 2


def test_the_next_trial_begins_when_the_one_on_trial_has_gone() -> None:
    records = {id: Record() for id in "ab"}
    probation = Probation()
    for _ in range(2):
        die(probation, records, "ab")
    assert probation.next(records) == "a"
    del records["a"]
    assert probation.next(records) == "b"
