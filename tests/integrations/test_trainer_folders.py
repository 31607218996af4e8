"""Folders as trainers leave them (TRL 1.16, LLaMA-Factory 0.9.5), pushed to a server.

`evals/trainers` runs the trainers themselves. They wrote these names and fields there.
"""

import json
from pathlib import Path

import pytest
from live_server import serving
from safetensors.torch import save_file
from uploads import open_fixture, tensors

from personae.api.adapters.push import upload
from personae.api.commands.remote import server
from personae.errors import RequestError

BESIDE = {
    "trl": (
        "README.md",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_args.bin",
    ),
    "llamafactory": (
        *("README.md", "all_results.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
        *("train_results.json", "trainer_log.jsonl", "trainer_state.json", "training_args.bin"),
    ),
    "checkpoint": (
        *("README.md", "chat_template.jinja", "optimizer.pt", "rng_state.pth", "scheduler.pt"),
        *("tokenizer.json", "tokenizer_config.json", "trainer_state.json", "training_args.bin"),
    ),
}
OFF = (
    *("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config"),
    *("exclude_modules", "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform"),
    *("lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config", "revision"),
    *("target_parameters", "trainable_token_indices", "use_bdlora", "velora_config"),
)
FIELDS = {
    **dict.fromkeys(OFF),
    **{name: {} for name in ("alpha_pattern", "rank_pattern", "loftq_config")},
    **dict.fromkeys(("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora"), False),
    "base_model_name_or_path": "acme/base",
    "bias": "none",
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "megatron_core": "megatron.core",
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 2,
    "target_modules": ["v_proj", "q_proj"],
    "task_type": "CAUSAL_LM",
    "use_rslora": False,
}


def write(folder: Path, beside: str) -> None:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(FIELDS, indent=2))
    save_file(tensors(), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    for name in BESIDE[beside]:
        (folder / name).write_bytes(b"\x80\x04pickle" if name.endswith((".bin", ".pt", ".pth")) else b"{}")


def test_the_adapter_is_taken_out_of_what_trainers_leave_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "trl")
    write(out / "ref", "trl")  # DPOTrainer's, where it began with an adapter
    write(out / "checkpoint-2", "checkpoint")
    write(tmp_path / "saves", "llamafactory")
    with open_fixture(tmp_path / "data") as fixture, serving(fixture.app) as url, server(url, None) as client:
        for folder in (out, out / "ref", out / "checkpoint-2", tmp_path / "saves"):
            record = upload(client, folder, {"name": folder.name})
            assert (record["ranks"], record["traits"]) == ({"q": 2, "v": 2}, [])
        digests = {record.sha256 for record in fixture.registry.own("default")}
    assert len(digests) == 1, "what is beside the adapter changes nothing"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["checkpoint-9/x", "checkpoint-10/x"], "out has no adapter_config.json."),
        (["config.json", "model.safetensors"], "a whole model and no adapter_config.json"),
        (["config.json", "model-00001-of-00002.safetensors"], "a whole model and no adapter_config.json"),
        (["adapter_config.json", "adapter_model.bin"], "is a pickle"),
        (["adapter_config.json"], "out has no adapter_model.safetensors."),
    ],
)
def test_a_folder_without_an_adapter_is_refused_with_what_it_has(
    tmp_path: Path, files: list[str], reason: str
) -> None:
    for name in files:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).touch()
    with server("http://127.0.0.1:9", None) as client, pytest.raises(RequestError, match=reason):
        upload(client, tmp_path / "out", {"name": "poet"})


def test_of_an_interrupted_training_the_newest_checkpoint_is_named(tmp_path: Path) -> None:
    for step in (9, 10):
        write(tmp_path / "out" / f"checkpoint-{step}", "checkpoint")
    with (
        server("http://127.0.0.1:9", None) as client,
        pytest.raises(RequestError, match="checkpoint-10 has an"),
    ):
        upload(client, tmp_path / "out", {"name": "poet"})
