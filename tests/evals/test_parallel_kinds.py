"""The table of models on ranks says where answers are others than one process's."""

import pytest
import typer

from personae.engine.parallel.comm import SharedMemory
from personae.evals import parallel_kinds
from personae.evals.parallel_kinds import Size


@pytest.mark.parametrize(("planted", "said", "code"), [(False, "equal", 0), (True, "6 of 6 DIFFER", 1)])
def test_a_sum_that_lacks_a_ranks_part_shows_in_the_table(
    planted: bool, said: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parallel_kinds, "TOKENS", 8)
    monkeypatch.setattr(parallel_kinds, "SIZES", {"TP 2": Size(2), "EP 2": Size(2, groups=2)})
    if planted:
        monkeypatch.setattr(SharedMemory, "all_reduce", lambda self, x: x)
    with pytest.raises(typer.Exit) as ended:
        parallel_kinds.main("phi3", processes=False)
    assert ended.value.exit_code == code
    printed = capsys.readouterr().out
    assert f"| phi3 | {said} | refused |" in printed
    assert "--expert-parallel-size 2: this model has no experts" in printed
