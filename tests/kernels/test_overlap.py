"""What the thread that asks for a forward pass does while the others have begun it."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from paged import PagedSequences, layer_by_layer
from patience import PATIENCE
from tiny_models import model_folder

from personae.engine.loader import load_model
from personae.engine.models.decoder import Decoder
from personae.kernels.cpu import operators

PROMPT = list(range(3, 43))


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield load_model(model_folder("llama", torch_dtype="bfloat16", head_dim=32), device=torch.device("cpu"))
    torch.set_num_threads(before)


@pytest.mark.skipif("fuse" not in operators(), reason="no compiler, or no AVX-512 on this machine")
def test_others_compute_meanwhile_and_the_result_is_the_same(decoder: Decoder) -> None:
    sequences = PagedSequences(decoder)
    begun = []

    def overlap() -> None:
        until = time.monotonic() + PATIENCE
        while not begun and time.monotonic() < until:
            begun.extend([True] * (not sequences.kv.data.isnan().all()))

    hidden, _ = sequences.forward({"a": PROMPT}, overlap=overlap)
    assert begun, "no other thread has written a key"
    assert torch.equal(hidden, PagedSequences(decoder).forward({"a": PROMPT})[0])


@pytest.mark.parametrize("in_turn", [False, True])
def test_it_is_done_once_and_what_it_raises_is_raised(decoder: Decoder, in_turn: bool) -> None:
    done = []

    def fails() -> None:
        raise LookupError("a grammar has a fault")

    def forward(overlap: object) -> None:
        PagedSequences(decoder).forward({"a": PROMPT}, overlap=overlap)

    with layer_by_layer(decoder) if in_turn else nullcontext():
        forward(lambda: done.append(True))
        assert done == [True]
        with pytest.raises(LookupError, match="a grammar has a fault"):
            forward(fails)
        forward(lambda: done.append(True))
    assert done == [True, True]


def cores_of_threads() -> list[set[int]]:
    """Of all threads of this process that have not ended meanwhile."""
    found = []
    for path in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            found.append(os.sched_getaffinity(int(path.name)))
    return found


@pytest.mark.skipif("fuse" not in operators(), reason="no compiler, or no AVX-512 on this machine")
@pytest.mark.skipif(sys.platform != "linux", reason="threads have cores of their own on Linux")
def test_others_leave_the_core_free_on_which_the_asking_thread_runs(decoder: Decoder) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("there is one core")
    PagedSequences(decoder).forward({"a": PROMPT})
    try:
        for core in sorted(cores)[:2]:
            os.sched_setaffinity(0, {core})
            PagedSequences(decoder).forward({"a": PROMPT})
            assert cores - {core} in cores_of_threads()
    finally:
        os.sched_setaffinity(0, cores)
