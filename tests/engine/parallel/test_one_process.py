"""What ranks cost a model that has none."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from engine_harness import EngineHarness
from tiny_models import model_folder

from personae.engine import parallel

ROOT = str(Path(parallel.__file__).parent)


@pytest.mark.parametrize(
    ("dtype", "each"), [("bfloat16", {}), ("float32", {"all_reduce": 6, "all_gather": 1})]
)
def test_a_step_calls_nothing_of_ranks_but_sums_of_one_part_if_it_runs_layer_by_layer(
    dtype: str, each: dict[str, int]
) -> None:
    made = EngineHarness(model_folder("llama", intermediate_size=128, head_dim=64), dtype=dtype)
    found: list[Counter[str]] = []
    for tokens in (2, 12):
        calls: Counter[str] = Counter()

        def count(frame: FrameType, event: str, _: Any, calls: Counter[str] = calls) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(ROOT):
                calls[frame.f_code.co_name] += 1

        sys.setprofile(count)
        made.play([made.log(f"{tokens}", range(20, 29), max_tokens=tokens)])
        sys.setprofile(None)
        found.append(calls)
    short, long = found
    assert {name: (long[name] - short[name]) / 10 for name in long} == each
