"""Trains one adapter with PEFT; it can be stopped and started again at any time.

    python -m personae.evals.demo.finetune.train tools --model DIR --out DIR --steps 400 --rank 16

The data of step n are drawn from the seed and n alone, so a run that was interrupted is the run that was not,
but for the optimizer's state if that was thrown away.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from personae.evals.demo.finetune.attention import GROUPED
from personae.evals.demo.finetune.encode import Batch, Encoder, TrainingRow
from personae.evals.demo.finetune.scene import Scene
from personae.evals.demo.finetune.tasks import TRAINED

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WEIGHTS, STATE, LOG = "adapter_model.safetensors", "state.pt", "log.jsonl"
CONFIG = "adapter_config.json"


def rows_of_step(
    make: Callable[..., Scene], encoder: Encoder, seed: int, step: int, tokens: int, longest: int
) -> list[TrainingRow]:
    """The rows of one step: scenes of training, up to so many tokens."""
    rng = random.Random(f"{seed}:{step}")
    rows: list[TrainingRow] = []
    total = 0
    while True:
        row = encoder.row(make(rng, test=False, turns=rng.choice((4, 5, 6))), longest)
        if row is None:
            continue
        if rows and total + len(row.ids) > tokens:
            return rows
        rows.append(row)
        total += len(row.ids)


class Trainer:
    """A model with one adapter. The adapter is kept in float32 and used in bfloat16."""

    def __init__(self, model: Path, rank: int, rate: float, steps: int) -> None:
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation=GROUPED)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM")
        self.peft = get_peft_model(base, config, autocast_adapter_dtype=False)
        self.config = config
        self._used = [p for p in self.peft.parameters() if p.requires_grad]
        self._kept = [p.detach().float().clone().requires_grad_() for p in self._used]
        self.optimizer = torch.optim.AdamW(self._kept, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
        self._rate, self._steps = rate, steps

    def step(self, index: int, rows: list[TrainingRow]) -> float:
        """One step of AdamW on the answers of the rows; the mean loss of their tokens."""
        total = sum(sum(label >= 0 for label in row.labels) for row in rows)
        loss = 0.0
        for part in _alike(rows):
            part_loss = self.loss(Batch.of(part, 2)) / total
            torch.autograd.backward(part_loss)
            loss += float(part_loss.detach())
        for kept, used in zip(self._kept, self._used, strict=True):
            kept.grad = used.grad.float() if used.grad is not None else None
            used.grad = None
        torch.nn.utils.clip_grad_norm_(self._kept, 1.0)
        warm = min(1.0, (index + 1) / 20)
        left = max(0.0, 1.0 - index / self._steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate * warm * (0.1 + 0.9 * left)
        self.optimizer.step()
        self._use()
        return loss

    def loss(self, batch: Batch) -> torch.Tensor:
        """The summed loss of the answers' tokens. Only these are turned into logits."""
        model = self.peft.base_model.model
        hidden = model.model(
            input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
        ).last_hidden_state
        labels = batch.labels[:, 1:]
        chosen = labels >= 0
        logits = model.lm_head(hidden[:, :-1][chosen])
        return torch.nn.functional.cross_entropy(logits.float(), labels[chosen], reduction="sum")

    def _use(self) -> None:
        with torch.no_grad():
            for kept, used in zip(self._kept, self._used, strict=True):
                used.copy_(kept)

    def save(self, folder: Path, done: int) -> None:
        """Weights in bfloat16 for use, and the state to go on from."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: value.to(torch.bfloat16).contiguous()
            for name, value in get_peft_model_state_dict(self.peft).items()
        }
        save_file(weights, folder / (WEIGHTS + ".new"), metadata={"format": "pt"})
        os.replace(folder / (WEIGHTS + ".new"), folder / WEIGHTS)
        shown: dict[str, Any] = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self.config.r, "lora_alpha": self.config.lora_alpha,
            "lora_dropout": 0.0, "bias": "none", "target_modules": TARGETS, "inference_mode": True,
            "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        }  # fmt: skip
        (folder / CONFIG).write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
        state = {f"kept.{place}": value.detach().contiguous() for place, value in enumerate(self._kept)}
        for place, moments in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{place}.{name}": value.contiguous() for name, value in moments.items()}
        save_file(state, folder / (STATE + ".new"), metadata={"done": str(done)})
        os.replace(folder / (STATE + ".new"), folder / STATE)

    def resume(self, folder: Path) -> int:
        """The steps done in a folder; 0 if there is nothing. Without a state the weights are taken alone."""
        if (folder / STATE).exists():
            state = load_file(folder / STATE)
            with torch.no_grad():
                for place, kept in enumerate(self._kept):
                    kept.copy_(state[f"kept.{place}"])
            moments: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in state.items():
                if key.startswith("optimizer."):
                    _, place, name = key.split(".")
                    moments.setdefault(int(place), {})[name] = value
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
            self._use()
            with safe_open(folder / STATE, "pt") as file:
                return int(file.metadata()["done"])
        if (folder / WEIGHTS).exists():
            # A packed adapter has another alpha: both halves then take a share of the difference.
            found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            share = (found["lora_alpha"] / found["r"] * self.config.r / self.config.lora_alpha) ** 0.5
            weights = {name: share * half.float() for name, half in load_file(folder / WEIGHTS).items()}
            set_peft_model_state_dict(self.peft, weights)
            with torch.no_grad():
                for kept, used in zip(self._kept, self._used, strict=True):
                    kept.copy_(used)
        return 0


def _alike(rows: list[TrainingRow]) -> list[list[TrainingRow]]:
    """The rows in parts of like length, so that little is padded."""
    ordered = sorted(rows, key=lambda row: len(row.ids))
    return [ordered[at : at + 1] for at in range(len(ordered))]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(TRAINED))
    parser.add_argument("--model", type=Path, required=True, help="folder of the base as safetensors")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=300, help="the rate falls until then")
    parser.add_argument("--until", type=int, default=0, help="stop at this step")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--tokens", type=int, default=1400, help="of a step")
    parser.add_argument("--longest", type=int, default=900, help="tokens of a row")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    folder, encoder = given.out / given.task, Encoder(given.model)
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(given.model, given.rank, given.rate, given.steps)
    first = trainer.resume(folder)
    last = given.until or given.steps
    for index in range(first, last):
        began, used = time.perf_counter(), time.process_time()
        rows = rows_of_step(TRAINED[given.task], encoder, given.seed, index, given.tokens, given.longest)
        loss = trainer.step(index, rows)
        answers = sum(sum(label >= 0 for label in row.labels) for row in rows)
        line = {"step": index + 1, "loss": round(loss, 4), "tokens": sum(len(row.ids) for row in rows),
                "answers": answers, "seconds": round(time.perf_counter() - began, 2),
                "cpu": round(time.process_time() - used, 2)}  # fmt: skip
        print(json.dumps(line), flush=True)
        if (index + 1) % given.every == 0 or index + 1 == last:
            trainer.save(folder, index + 1)
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
