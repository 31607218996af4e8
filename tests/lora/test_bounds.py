"""Does an adapter fit? What is refused says what to do."""

import re
from pathlib import Path

import pytest
import torch
from tiny_adapters import lora_shapes, make_adapter_folder, tiny_config

from personae.actors.options import parse_size
from personae.errors import AdapterError
from personae.kernels.sgmv import RANK_PAGE
from personae.lora.fit import bounds_of_pool, check_fit
from personae.lora.peft import read_adapter
from personae.lora.weight_pools import pool_bytes


def test_a_rank_that_is_too_large_says_which_memory_would_do(tmp_path: Path) -> None:
    base = tiny_config(hidden_size=512, intermediate_size=1024)
    shapes, dtype = lora_shapes(base), torch.bfloat16
    adapter = read_adapter(make_adapter_folder(tmp_path / "wide", base, rank=27), shapes)
    with pytest.raises(AdapterError, match="memory for adapters holds 16 ranks") as refusal:
        check_fit(adapter, bounds_of_pool(shapes, 16, dtype))
    (said,) = re.findall(r"--adapter-memory (\S+) or more", refusal.value.message)
    ranks = parse_size(said) // pool_bytes(shapes, RANK_PAGE, dtype) * RANK_PAGE
    assert ranks == 32
    check_fit(adapter, bounds_of_pool(shapes, ranks, dtype))


def test_a_rank_over_the_most_that_is_served_is_not_told_to_take_more_memory(tmp_path: Path) -> None:
    base = tiny_config()
    adapter = read_adapter(make_adapter_folder(tmp_path / "wide", base, rank=520), lora_shapes(base))
    with pytest.raises(AdapterError, match=r"rank 520 of \w+: the largest supported rank is 512$"):
        check_fit(adapter, bounds_of_pool(lora_shapes(base), 16, torch.float32))
