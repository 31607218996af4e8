"""The GPU kit's last part, with a CPU in the GPU's place; the engine that it starts is real."""

import os

import pytest

from personae.evals.bench.gpu import served


def test_the_bundled_model_answers_every_kind_of_sequence_and_is_compared_with_a_cpu() -> None:
    checks = list(served.served_checks("cpu", http=False))
    names = {check.name.removeprefix("the bundled model in an engine, ") for check in checks}
    assert names >= {*served.PROMPTS, "bound", "bound, adapted"}
    assert len(names) == len(served.PROMPTS) + 2 + len(os.listdir(served.DEMO / "adapters"))
    assert all(check.passed for check in checks)


@pytest.mark.parametrize(
    ("found", "share"),
    [([1, 2, 3, 4], 0.0), ([1, 2, 9, 4], 0.5), ([9, 2, 3, 4], 1.0), ([1, 2, 3], 0.25), ([], 1.0)],
)
def test_the_share_behind_the_first_wrong_token_is_the_error(found: list[int], share: float) -> None:
    assert served.difference(found, [1, 2, 3, 4]) == share


def test_packages_that_are_missing_are_named_and_the_part_is_left_out(monkeypatch, capsys) -> None:
    monkeypatch.setattr(served, "NEEDED", ("json", "no_such_package"))
    assert list(served.served_checks("cuda")) == []
    assert "for want of no_such_package" in capsys.readouterr().out
