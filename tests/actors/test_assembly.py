"""What stops a start, and which sizes are chosen."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_adapters import make_adapter_folder
from tiny_models import model_folder

from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.actors.sizing import PAGE_SIZE
from personae.errors import AdapterError, LoadError


def test_a_cache_of_fp8_is_refused_without_a_gpu_that_can_convert_it_before_anything_is_loaded() -> None:
    options = EngineOptions(model_folder("llama"), device="cpu", kv_cache_dtype="fp8")
    begun: list[str] = []
    with pytest.raises(LoadError, match=r"--kv-cache-dtype fp8 needs a GPU of compute capability 8\.9"):
        assemble(options, lambda phase, _done, _total: begun.append(phase))
    assert not begun


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_copy_of_the_embedding_in_an_adapter_is_recognized_in_any_dtype(dtype: str, tmp_path: Path) -> None:
    base = model_folder("llama")
    make_adapter_folder(tmp_path / "words", base, rank=2, targets=("q_proj", "embed_tokens"))
    names = load_file(tmp_path / "words" / "adapter_model.safetensors").keys()
    assert any(name.endswith("embed_tokens.base_layer.weight") for name in names)
    assemble(EngineOptions(base, (tmp_path,), device="cpu", dtype=dtype, kv_memory=2**20))  # type: ignore[arg-type]  # a str


def test_model_and_adapter_may_not_share_a_name(tmp_path: Path) -> None:
    base = model_folder("qwen3")
    make_adapter_folder(tmp_path / "same", base, rank=2)
    with pytest.raises(LoadError, match="both called 'same'"):
        assemble(EngineOptions(base, (tmp_path,), device="cpu", served_model_name="same"))


def test_two_adapters_may_not_share_a_name(tmp_path: Path) -> None:
    base = model_folder("qwen3")
    for root in "ab":
        make_adapter_folder(tmp_path / root / "poet", base, rank=2)
    with pytest.raises(LoadError, match="Two adapters are called 'poet'"):
        assemble(EngineOptions(base, (tmp_path / "a", tmp_path / "b"), device="cpu"))


def test_an_adapter_given_as_a_folder_of_adapters_is_refused_with_a_hint(tmp_path: Path) -> None:
    base = model_folder("qwen3")
    make_adapter_folder(tmp_path / "poet", base, rank=2)
    with pytest.raises(LoadError, match=f"it is an adapter itself: write .*NAME={tmp_path / 'poet'}"):
        assemble(EngineOptions(base, (tmp_path / "poet",), device="cpu"))
    make_adapter_folder(tmp_path / "poet" / "checkpoint-100", base, rank=2)
    with pytest.raises(LoadError, match="it is an adapter itself, and so are some of its sub-folders"):
        assemble(EngineOptions(base, (tmp_path / "poet",), device="cpu"))


def test_an_adapter_of_another_base_stops_the_start_with_the_tensor_named(tmp_path: Path) -> None:
    make_adapter_folder(tmp_path / "stranger", model_folder("llama", hidden_size=32), rank=2)
    with pytest.raises(AdapterError, match=r"stranger: .*layers\.0\.mlp\.down_proj\.lora_B\.weight"):
        assemble(EngineOptions(model_folder("qwen3"), (tmp_path,), device="cpu"))


def test_the_bases_card_says_how_its_weights_are_kept(tmp_path: Path) -> None:
    base = model_folder("qwen3")
    make_adapter_folder(tmp_path / "poet", base, rank=2)
    options = EngineOptions(base, (tmp_path,), device="cpu", served_model_name="base", quantize="int4")
    cards = assemble(options).engine_spec.models
    assert {name: card.quantization for name, card in cards.items()} == {"base": "int4", "poet": None}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"adapters": (Path("nowhere"),)}, "this folder does not exist"),
        ({"max_model_len": 4096}, "more than the model's own 1024"),
        ({"kv_memory": 2**17, "max_model_len": 1024}, "--kv-memory holds"),
        (
            {"kv_memory": 2**60},
            r"ask for 1073741824GiB; this machine or container has [1-9][.0-9]*GiB",
        ),
        ({"kv_memory": 1}, r"holds 0 tokens; a context of 16 \(--max-model-len\) needs [1-9][.0-9]*KiB"),
        ({"device": "cuda"}, "No CUDA device"),
    ],
)
def test_impossible_sizes_and_paths_are_refused(changes, match, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(LoadError, match=match):
        assemble(EngineOptions(model_folder("qwen3"), **{"device": "cpu", **changes}))


def test_a_container_with_little_memory_has_a_smaller_cache_and_refuses_a_larger_one(monkeypatch) -> None:
    options = EngineOptions(model_folder("qwen3"), device="cpu")
    whole = assemble(options).engine_spec.layout.num_pages
    monkeypatch.setattr("personae.kernels.cgroup.memory_limit", lambda: 2**20)
    assert assemble(options).engine_spec.layout.num_pages == pytest.approx(whole * 2**19 / (2 * 2**30), abs=1)
    with pytest.raises(LoadError, match="ask for 2MiB; this machine or container has 1MiB"):
        assemble(replace(options, kv_memory=2**20, adapter_memory=2**20))


def test_asking_for_more_memory_than_is_free_logs_a_warning(monkeypatch, caplog) -> None:
    monkeypatch.setattr("personae.actors.sizing.free_memory", lambda: 5)
    assemble(EngineOptions(model_folder("qwen3"), device="cpu"))
    assert not caplog.messages, "no size was configured"
    assemble(EngineOptions(model_folder("qwen3"), device="cpu", kv_memory=2**24))
    assert caplog.messages == ["--kv-memory and --adapter-memory ask for 16MiB; 5 bytes are free now"]


def test_a_context_is_limited_to_what_the_memory_holds_if_none_is_configured() -> None:
    assembly = assemble(EngineOptions(model_folder("qwen3"), device="cpu", dtype="float32", kv_memory=2**20))
    layout = assembly.engine_spec.layout
    assert layout.max_model_len == layout.num_pages * PAGE_SIZE < 1024


def test_halves_of_a_step_are_refused_where_all_layers_run_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2] / ".pkg"))
    folder = model_folder("llama", intermediate_size=128, head_dim=64)
    options = EngineOptions(
        folder, device="cpu", dtype="bfloat16", tensor_parallel_size=2, enable_two_batch_overlap=True
    )
    with pytest.raises(LoadError, match="all layers of this model run in one call here"):
        assemble(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_model": Path("small")}, "--tensor-parallel-size 2 and --draft-model do not work together"),
        ({"kv_disk": Path("pages")}, "--tensor-parallel-size 2 and --kv-disk do not work together"),
        ({"kv_transfer": True}, "--tensor-parallel-size 2 and --kv-transfer do not work together"),
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3: this model has 4 attention heads"),
        ({"pipeline_parallel_size": 4}, "--pipeline-parallel-size 4: this model has 3 layers"),
        (
            {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "kv_disk": Path("pages")},
            "--pipeline-parallel-size 2 and --kv-disk do not work together",
        ),
        ({"expert_parallel_size": 2}, "--expert-parallel-size 2: this model has no experts"),
        (
            {"expert_parallel_size": 3},
            "--expert-parallel-size 3: it must divide --tensor-parallel-size, which is 2",
        ),
        (
            {"tensor_parallel_size": 1, "enable_dp_attention": True},
            "--enable-dp-attention needs a --tensor-parallel-size of 2 or more",
        ),
        (
            {"pipeline_parallel_size": 2, "enable_dp_attention": True},
            "--enable-dp-attention and --pipeline-parallel-size do not work together",
        ),
        (
            {"tensor_parallel_size": 1, "enable_two_batch_overlap": True},
            "--enable-two-batch-overlap needs a --tensor-parallel-size of 2 or more",
        ),
        (
            {"pipeline_parallel_size": 2, "enable_two_batch_overlap": True},
            "--enable-two-batch-overlap and --pipeline-parallel-size do not work together",
        ),
        ({"attention_ranks": 1}, "--attention-ranks 1 needs --enable-dp-attention"),
        (
            {"attention_ranks": 2, "enable_dp_attention": True},
            "--attention-ranks 2: it must be less than --tensor-parallel-size, which is 2",
        ),
        (
            {
                "tensor_parallel_size": 4,
                "attention_ranks": 1,
                "enable_dp_attention": True,
                "expert_parallel_size": 2,
            },
            "--expert-parallel-size 2: it must divide the 3 ranks without attention",
        ),
        (
            {"tensor_parallel_size": 6, "attention_ranks": 1, "enable_dp_attention": True},
            "--attention-ranks 1 of 6: this model has an MLP with inner vectors of 96, which 5 ranks cannot",
        ),
        ({"enable_eplb": True}, "--enable-eplb needs an --expert-parallel-size of 2 or more"),
        ({"num_redundant_experts": 2}, "--num-redundant-experts 2 needs --enable-eplb"),
        (
            {"expert_parallel_size": 2, "enable_eplb": True, "num_redundant_experts": 3},
            "--num-redundant-experts 3: it must be a multiple of --expert-parallel-size, which is 2",
        ),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_they_start(options: dict[str, Any], said: str) -> None:
    asked = {"device": "cpu", "tensor_parallel_size": 2, **options}
    with pytest.raises(LoadError, match=said):
        assemble(EngineOptions(model_folder("llama"), **asked))
