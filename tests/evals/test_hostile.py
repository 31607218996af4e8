"""What the eval of hostile schemas makes of what it has seen."""

import msgspec
import pytest

from personae.evals.hostile import SCHEMAS, HostileFindings, Rounds, new_body


def test_a_wait_is_within_a_step_if_the_medians_of_the_longest_are() -> None:
    seen = Rounds(["200"] * 3, [0.1] * 3, attacked=[0.030, 0.500, 0.031], calm=[0.020, 0.021, 0.019])
    assert seen.row(step=0.012) == ["200", "0.10", "31", "20", "yes"]
    assert seen.row(step=0.010)[-1] == "no"


def test_an_outcome_is_named_once_and_another_beside_it() -> None:
    seen = Rounds(["400 a", "503 b", "400 a"], [0.1] * 3, [0.1] * 3, [0.1] * 3)
    assert seen.row(1.0)[0] == "400 a, 503 b"


def test_no_round_finds_what_another_has_compiled() -> None:
    first, second = (msgspec.json.decode(new_body("m", "deep", number)) for number in (0, 1))
    assert first != second
    for body in (first, second):
        schema = body["response_format"]["json_schema"]["schema"]
        assert {name: schema[name] for name in SCHEMAS["deep"]} == SCHEMAS["deep"]


def test_the_table_has_every_schema_and_the_step_is_the_calms_median(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = Rounds(["200"], [0.1], attacked=[0.03], calm=[0.02])
    HostileFindings({"deep": seen}, calm=[0.009, 0.011, 0.02], attacked=[0.03]).print()
    delivered = capsys.readouterr().out
    assert "deep" in delivered
    assert "yes" in delivered
    assert "calm: p50 11.0 ms" in delivered
