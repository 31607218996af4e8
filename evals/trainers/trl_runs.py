"""Trains adapters of a model with TRL, pushes each by the callback, and keeps what the trainer saves.

Runs in TRL's own environment, with Personae installed: `python trl_runs.py MODEL OUT URL`. Prints a line of
JSON for each: its name and the server's record.
"""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from personae.integrations.transformers import PushAdapter

ARGUMENTS: dict[str, Any] = {
    "max_steps": 30,
    "save_steps": 20,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.003,
    "lr_scheduler_type": "constant",
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
}


def lora(**changes: Any) -> Any:
    """A LoRA config."""
    return LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **changes)


def main(model: str, out: Path, url: str) -> None:
    """Train and push."""
    questions = [[{"role": "user", "content": f"Say {number}."}] for number in range(8)]
    answers = [[{"role": "assistant", "content": f"{number} it is."}] for number in range(8)]
    chats = Dataset.from_list([{"messages": q + a} for q, a in zip(questions, answers, strict=True)])
    worse = [{"role": "assistant", "content": "No."}]
    pairs = Dataset.from_list(
        [{"prompt": q, "chosen": a, "rejected": worse} for q, a in zip(questions, answers, strict=True)]
    )

    def run(name: str, kind: Any, arguments: Any, start: Any, rows: Any, peft: Any = None) -> None:
        push = PushAdapter(name, url)
        args = arguments(str(out / name), **ARGUMENTS)
        trainer = kind(start, args=args, train_dataset=rows, peft_config=peft, callbacks=[push])
        trainer.train()
        trainer.save_model()
        print(json.dumps({"name": name, "record": push.record}), flush=True)

    run("trl-sft", SFTTrainer, SFTConfig, model, chats, lora(target_modules="all-linear"))
    run("trl-embedding", SFTTrainer, SFTConfig, model, chats, lora(modules_to_save=["embed_tokens"]))
    run("trl-dpo", DPOTrainer, DPOConfig, model, pairs, lora())
    tuned = AutoPeftModelForCausalLM.from_pretrained(out / "trl-sft", is_trainable=True)
    run("trl-sft-dpo", DPOTrainer, DPOConfig, tuned, pairs)  # saves the adapter that it began with as `ref`


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
