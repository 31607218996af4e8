"""Background work leaves three quarters of its time to others."""

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from personae.lora import throttle
from personae.lora.adapter import LoraPair, make_adapter
from personae.lora.safetensors_file import SafetensorsFile
from personae.lora.throttle import Throttle


class Clock:
    """What a thread has worked, and how long it has slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worked = 0.0
        self.slept: list[float] = []
        monkeypatch.setattr(throttle, "thread_time", lambda: self.worked)
        monkeypatch.setattr(throttle, "sleep", self.slept.append)


def test_a_rest_is_three_times_as_long_as_the_work_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    paced = Throttle()
    for work in (0.25, 0.5):
        clock.worked += work
        paced.rest()
    assert clock.slept == [0.75, 1.5]


def test_crumbs_of_work_are_gathered_until_they_are_worth_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    paced = Throttle()
    for _ in range(9):
        clock.worked += 0.0005
        paced.rest()
    assert clock.slept == pytest.approx([0.003] * 4)


def test_rest_that_is_taken_elsewhere_is_counted_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    paced = Throttle()
    clock.worked += 0.25
    assert paced.due == 0.75
    clock.worked += 1.0  # others, on the same thread, while it rests
    paced.begin()
    assert paced.due == 0.0
    assert not clock.slept


def test_work_means_having_a_processor_not_waiting_for_one() -> None:
    paced = Throttle()
    time.sleep(0.05)
    assert paced.due < 0.05


def test_an_adapter_is_read_and_hashed_with_a_rest_for_each_tensor(tmp_path: Path) -> None:
    rests: list[None] = []
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.ones(3, 2)}, path)
    with SafetensorsFile(path, lambda: rests.append(None)) as file:
        a, b = file.read_finite("a"), file.read_finite("b")
    assert len(rests) == 2
    make_adapter("it", {(0, "q"): LoraPair(a, b.T.contiguous(), 1.0)}, rest=lambda: rests.append(None))
    assert len(rests) == 5
