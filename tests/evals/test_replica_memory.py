"""A process's part of the weights that it has mapped."""

import mmap
import os
from pathlib import Path

from personae.evals.replica_memory import mapped_weights

SIZE = 8 * 2**20


def test_only_mapped_weights_count_and_only_what_is_in_memory(tmp_path: Path) -> None:
    places = []
    for name in ("model.weights", "other.bin"):
        with (tmp_path / name).open("w+b") as file:
            file.truncate(SIZE)
            places.append(mmap.mmap(file.fileno(), SIZE))
    weights = str(tmp_path / "model.weights")
    assert list(mapped_weights(os.getpid())) == [(0, weights)]
    for place in places:
        place[: SIZE // 2] = b"x" * (SIZE // 2)
    [(found, path)] = mapped_weights(os.getpid())
    assert (found, path) == (SIZE // 2, weights)
    for place in places:
        place.close()
    assert not list(mapped_weights(os.getpid()))
