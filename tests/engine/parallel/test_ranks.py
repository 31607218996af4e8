"""The processes of ranks, as the first rank starts them."""

from pathlib import Path

import pytest
import torch
from tiny_models import make_model_folder

from personae.engine.parallel import ranks as ranks_module
from personae.engine.parallel.pipeline import Pipeline
from personae.engine.parallel.ranks import RankEnded, Ranks
from personae.errors import LoadError


def ranks_of(model: Path, size: int, stages: int) -> Ranks:
    return Ranks(model, size, stages, dtype="float32", quantize=None, max_position=64, threads=1)


def test_a_rank_that_sees_other_weights_says_so_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path / "model", "llama")
    monkeypatch.setattr(ranks_module, "weights_digest", lambda model: "of other files")
    ranks = ranks_of(folder, 1, 2)
    try:
        with pytest.raises(LoadError, match="rank 1: It sees other weights than the first rank"):
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
