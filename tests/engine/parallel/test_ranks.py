"""The processes of ranks, as the first rank starts them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_model_folder

from personae.engine.parallel import ranks as ranks_module
from personae.engine.parallel.pipeline import Pipeline
from personae.engine.parallel.ranks import RankEnded, Ranks
from personae.errors import LoadError


def ranks_of(model: Path, size: int, stages: int) -> Ranks:
    return Ranks(model, size, stages, dtype="float32", quantize=None, max_position=64, threads=1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("weights_digest", "It sees other weights than the first rank"),
        ("personae", "It has Personae .*, and the first rank has 0.0.0"),
    ],
)
def test_a_rank_that_has_other_weights_or_another_version_says_so_with_its_number(
    changed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path / "model", "llama")
    other = {
        "weights_digest": lambda model: "of other files",
        "personae": SimpleNamespace(__version__="0.0.0"),
    }
    monkeypatch.setattr(ranks_module, changed, other[changed])
    ranks = ranks_of(folder, 1, 2)
    try:
        with pytest.raises(LoadError, match=f"rank 1: {said}"):
            ranks.loaded()
    finally:
        ranks.end()


def test_the_first_rank_notices_that_a_stage_has_ended(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "llama")
    ranks = ranks_of(folder, 1, 2)
    try:
        ranks.loaded()
        [process] = ranks._processes
        process.kill()
        process.wait()
        assert isinstance(ranks.comm, Pipeline)
        with pytest.raises(RankEnded, match="rank 1 of the model ended with exit code -9"):
            ranks.comm.begin_receive(torch.empty(1, 64)).result()
    finally:
        ranks.end()
