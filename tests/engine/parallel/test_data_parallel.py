"""Ranks that have sequences of their own and share the experts (data-parallel attention) answer as one process
does."""

from pathlib import Path

import pytest
from family_models import make_family_folder
from shared_model import ON_EXPERTS, adapters_of, same_answers
from tiny_models import model_folder

# PEFT warns that rank_pattern's key for experts matches no module, and then applies it to the parameter.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")


def test_base_and_adapters_on_experts_answer_as_in_one_process(tmp_path: Path) -> None:
    base = model_folder("qwen3_moe", num_experts=8, num_key_value_heads=2)
    same_answers(
        base, 2, adapters_of(base, tmp_path, ON_EXPERTS), expert_groups=2, data_parallel=True, tokens=64
    )
