import shutil
from pathlib import Path

import pytest
from corrupt_adapters import BASE
from tiny_adapters import make_adapter_folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter_folder(
        tmp_path_factory.mktemp("adapters") / "plain", BASE, rank=4, targets=("q_proj", "v_proj")
    )


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A fresh copy of the plain adapter (rank 4, q and v), to be corrupted."""
    return Path(shutil.copytree(saved, tmp_path / "plain"))
