"""The callback of transformers' Trainer, on models and folders as PEFT makes them."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from live_server import serving
from uploads import UploadFixture, open_fixture

from personae.integrations.transformers import PushAdapter


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[UploadFixture, str]]:
    with open_fixture(tmp_path / "data") as fixture, serving(fixture.app) as url:
        yield fixture, url


def model(*names: str) -> Any:
    """A model of the shapes of the served one, with these adapters."""
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    first, *others = names
    made = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora, adapter_name=first)
    for number, other in enumerate(others, 2):
        made.add_adapter(other, peft.LoraConfig(r=number, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return made


def end(callback: PushAdapter, folder: Path, trained: Any, **args: Any) -> None:
    """What the trainer says when the training ends."""
    state = transformers.TrainerState(global_step=5)
    control = transformers.TrainerControl()
    callback.on_train_end(SimpleNamespace(output_dir=str(folder), **args), state, control, model=trained)


def test_a_training_ends_with_a_version_on_the_server(
    site: tuple[UploadFixture, str], tmp_path: Path
) -> None:
    fixture, url = site
    key = fixture.key("ann")
    push = PushAdapter("poet", url, key=key, defaults={"temperature": 0.25})
    trained = model("default")
    args = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=2, report_to=[], use_cpu=True, per_device_train_batch_size=1
    )
    rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)} for _ in range(2)]
    transformers.Trainer(trained, args, train_dataset=rows, callbacks=[push]).train()
    (record,) = fixture.registry.own("ann")
    assert push.record is not None
    assert (record.name, record.version, record.sha256) == ("poet", 1, push.record["sha256"])
    assert push.record["defaults"] == {"temperature": 0.25}
    assert record.ranks == {"q": 2, "v": 2}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-2"], "nothing else is left"
    end(push, tmp_path / "out", trained)
    assert fixture.registry.own("ann")[0].version == 2


def test_of_several_adapters_the_active_or_the_named_one_is_pushed(
    site: tuple[UploadFixture, str], tmp_path: Path
) -> None:
    fixture, url = site
    trained = model("first", "second")
    end(PushAdapter("one", url), tmp_path, trained)
    end(PushAdapter("two", url, adapter="second"), tmp_path, trained)
    found = {record.name: record.ranks for record in fixture.registry.own("default")}
    assert found == {"one": {"q": 2, "v": 2}, "two": {"q": 2}}


def test_where_weights_are_spread_over_processes_the_last_checkpoint_is_pushed(
    site: tuple[UploadFixture, str], tmp_path: Path
) -> None:
    fixture, url = site
    trained = model("default")
    trained.save_pretrained(tmp_path / "checkpoint-5")
    end(PushAdapter("poet", url), tmp_path, None, deepspeed="zero3.json")
    assert [record.name for record in fixture.registry.own("default")] == ["poet"]
    assert (tmp_path / "checkpoint-5" / "adapter_model.safetensors").exists()


def test_a_push_that_fails_leaves_the_adapter_in_a_folder_and_the_training_whole(
    site: tuple[UploadFixture, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fixture, url = site
    fixture.key("root", "admin")
    trained = model("default")
    push = PushAdapter("poet", url, key="wrong")
    end(push, tmp_path / "out", trained)
    (kept,) = (tmp_path / "out").iterdir()
    assert json.loads((kept / "adapter_config.json").read_text())["r"] == 2
    assert push.record is None
    assert "poet was not pushed" in caplog.text
    assert str(kept) in caplog.text
    end(PushAdapter("poet", "http://127.0.0.1:9"), tmp_path / "out", trained)
    assert "does not answer" in caplog.text
    end(PushAdapter("poet", url, adapter="none"), tmp_path / "out", trained)
    assert "The model has no adapter 'none', only default." in caplog.text
    end(PushAdapter("poet", url), tmp_path / "out", trained.get_base_model())
    assert "The model has no PEFT adapter." in caplog.text
