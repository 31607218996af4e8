"""What `personae serve --dry-run` says is what the engine has once the model is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_harness import comms_of
from family_models import make_family_folder
from tiny_adapters import make_adapter_folder
from tiny_models import FAMILIES, make_model_folder
from typer.testing import CliRunner

from personae.actors.assembly import assemble
from personae.actors.footprint import footprint
from personae.actors.options import EngineOptions
from personae.api.cli import app
from personae.engine.loader import load_model
from personae.engine.lora_shapes import pool_rows, rank_shapes
from personae.errors import LoadError
from personae.lora.pool import LoraPool

CPU = torch.device("cpu")
OPTIONS = EngineOptions(Path(), kv_memory=2**24, device="cpu")


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_sizes_are_those_of_the_engine(quantize: str | None, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "llama")
    make_adapter_folder(tmp_path / "adapters" / "a", folder, rank=24)
    options = replace(OPTIONS, model=folder, adapters=(tmp_path / "adapters",), quantize=quantize)
    found, engine = footprint(options, CPU), assemble(options)
    layout = engine.engine_spec.layout
    builder = engine.engine_spec.build_step_engine.__self__  # type: ignore[attr-defined]  # a bound method
    assert found.weight_bytes == builder.model.weight_bytes
    assert found.adapter_ranks == builder.sizes.ranks
    assert found.adapter_bytes == builder.sizes.pool_bytes
    assert found.kv_tokens == layout.num_pages * layout.page_size
    assert (found.max_model_len, found.max_seqs) == (layout.max_model_len, layout.max_seqs)
    assert found.adapters == 1
    assert found.kv_bytes <= 2**24
    assert found.format == (quantize or "float32")


@pytest.mark.parametrize("case", ["glm4_moe", "deepseek_v3", "lfm2", "qwen3_next"])
def test_blocks_of_every_kind_are_counted_as_they_are_loaded(case: str, tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, case)
    found = footprint(replace(OPTIONS, model=folder, kv_memory=2**28), CPU)
    model = load_model(folder, device=CPU)
    assert found.weight_bytes == model.weight_bytes
    assert found.parameters * 4 == pytest.approx(model.weight_bytes, rel=0.01)  # float32


def test_a_token_reads_the_experts_that_it_uses(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "qwen3_moe")
    shape = FAMILIES["qwen3_moe"]
    found = footprint(replace(OPTIONS, model=folder), CPU)
    model = load_model(folder, device=CPU)
    experts = sum(tensor.nbytes for name, tensor in model.tensors() if ".experts." in name)
    unused = experts - experts * shape["num_experts_per_tok"] // shape["num_experts"]
    embedding = 0 if model.config.tie else model.embedding.nbytes
    assert found.read_bytes == model.weight_bytes - unused - embedding


def test_ranks_are_counted_together(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "llama")
    one, two, stages = (
        footprint(
            replace(OPTIONS, model=folder, tensor_parallel_size=ranks, pipeline_parallel_size=count), CPU
        )
        for ranks, count in ((1, 1), (2, 1), (1, 3))
    )
    assert one.weight_bytes < two.weight_bytes < 1.1 * one.weight_bytes  # both have the norms
    assert two.token_bytes == one.token_bytes
    for name in ("weight_bytes", "read_bytes", "token_bytes", "kv_tokens", "parameters", "adapter_bytes"):
        assert getattr(stages, name) == getattr(one, name), name
    assert (one.ranks, two.ranks, stages.ranks) == (1, 2, 3)


@pytest.mark.parametrize(("size", "attention"), [(3, 1), (4, 2)])
def test_ranks_without_attention_are_counted_with_the_adapters_that_they_have(
    size: int, attention: int, tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path, "qwen3_moe", num_experts=8)
    found = footprint(
        replace(
            OPTIONS,
            model=folder,
            tensor_parallel_size=size,
            enable_dp_attention=True,
            attention_ranks=attention,
        ),
        CPU,
    )
    models = [load_model(folder, device=CPU, comm=comm) for comm in comms_of(size, attention_ranks=attention)]
    pools = [
        LoraPool(
            rank_shapes(model),
            capacity_rows=pool_rows(model, found.adapter_ranks),
            max_adapters=1,
            dtype=model.dtype,
            device=CPU,
        )
        for model in models
    ]
    assert found.adapter_bytes == sum(pool.budget for pool in pools)


def test_the_command_says_by_its_exit_code_whether_the_model_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path, "llama")
    command = ["serve", str(folder), "--kv-memory", "64MiB", "--dry-run"]
    for free, code in ((None, 0), (2**30, 0), (2**25, 1)):
        monkeypatch.setattr("personae.actors.footprint.free_memory", lambda free=free: free)
        result = CliRunner().invoke(app, command)
        assert result.exit_code == code, result.output
        assert ("does not fit" in result.output) == bool(code)
        assert "LlamaForCausalLM" in result.output


@pytest.mark.parametrize(
    ("size", "stages", "said"),
    [
        (1, 1, None),
        (2, 1, None),
        (1, 3, "the model's 3 ranks share 2 processor cores: rank 2 has none of its own"),
        (2, 2, "the model's 4 ranks share 2 processor cores: ranks 2 to 3 have none of their own"),
    ],
)
def test_more_ranks_than_cores_are_named_by_a_dry_run_and_at_the_start(
    size: int,
    stages: int,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("personae.actors.rank_cores.usable_cores", lambda: 2.5)

    def no_ranks(*given: object, **named: object) -> None:
        raise LoadError("the ranks are not started here")

    monkeypatch.setattr("personae.actors.assembly.Ranks", no_ranks)
    folder = make_model_folder(tmp_path, "llama", num_hidden_layers=3)
    command = ["serve", str(folder), "--kv-memory", "64MiB", "--dry-run"]
    sizes = ["--tensor-parallel-size", str(size), "--pipeline-parallel-size", str(stages)]
    result = CliRunner().invoke(app, [*command, *sizes])
    assert result.exit_code == 0, result.output
    assert ("warning" in result.output) == (said is not None)
    options = replace(OPTIONS, model=folder, tensor_parallel_size=size, pipeline_parallel_size=stages)
    if size * stages > 1:
        with pytest.raises(LoadError):
            assemble(options)
    found = "\n".join(caplog.messages)
    if said is None:
        assert "ranks" not in found
    else:
        assert said in result.output
        assert said in found


def test_what_serve_refuses_a_dry_run_refuses_too(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "llama")
    (folder / "model.safetensors").write_bytes(b"")
    result = CliRunner().invoke(app, ["serve", str(folder), "--dry-run"])
    assert result.exit_code == 2
    assert "model.safetensors" in result.output
