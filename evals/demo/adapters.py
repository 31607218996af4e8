"""Trains the adapters on the frozen base: one LoRA each, different in rank and targets, in PEFT's format."""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from peft import LoraConfig, get_peft_model
from rich.progress import Progress
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from personae.evals.demo import data, fused
from personae.evals.demo.batches import chunk
from personae.evals.demo.learn import exact, loss_of

HERE = Path(__file__).parent
MODEL, ADAPTERS = HERE / "model", HERE / "adapters"
CHUNK = 16
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """What an adapter is made of and how long it learns."""

    rank: int
    targets: tuple[str, ...]
    steps: int
    rate: float = 8e-3


RECIPES = {
    "triage": Recipe(8, ATTENTION, 400),
    "calendar": Recipe(32, ATTENTION + FEED_FORWARD, 1200),
    "invoices": Recipe(16, ATTENTION, 600),
    "verse": Recipe(8, ("v_proj", *FEED_FORWARD), 800, 4e-3),
}


def train_adapter(name: str, *, seed: int, tokens: int, runs: Path) -> float:
    """Trains and saves one adapter; its exact match on held-out samples."""
    recipe = RECIPES[name]
    task = data.ADAPTER_TASKS[name]
    fused.install()
    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    base = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16, attn_implementation=fused.ATTENTION)
    lora = LoraConfig(
        r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=list(recipe.targets), task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, lora, autocast_adapter_dtype=False)
    model.peft_config["default"].base_model_name_or_path = "personae-demo"
    worn = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter.detach().float() for parameter in worn]  # the model computes with rounded ones
    optimizer = torch.optim.Adam(weights, lr=recipe.rate, betas=(0.9, 0.98))
    stream = data.samples(task, "train", f"adapter {seed}")
    rng = Random(f"{name} {seed}")
    log = runs / f"{name}.jsonl"
    log.unlink(missing_ok=True)
    with Progress() as progress:
        bar = progress.add_task(name, total=recipe.steps)
        for step in range(recipe.steps):
            if step % CHUNK == 0:
                batches = chunk(stream, tokenizer, rng, CHUNK, tokens)
            optimizer.param_groups[0]["lr"] = recipe.rate * min((step + 1) / 20, 1 - step / recipe.steps)
            loss, _ = loss_of(base, batches[step % CHUNK])
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for exactly, rounded in zip(weights, worn, strict=True):
                assert rounded.grad is not None
                exactly.grad, rounded.grad = rounded.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for exactly, rounded in zip(weights, worn, strict=True):
                    rounded.copy_(exactly)
            progress.update(bar, advance=1, description=f"{name}, loss {loss.item():.3f}")
            if step % 80 == 79 or step + 1 == recipe.steps:
                score = exact(base, tokenizer, task, "curve", 96)
                with log.open("a") as lines:
                    lines.write(
                        json.dumps({"step": step + 1, "loss": round(loss.item(), 4), "exact": score}) + "\n"
                    )
    model.to(torch.bfloat16).save_pretrained(ADAPTERS / name, save_embedding_layers=False)
    (ADAPTERS / name / "README.md").unlink(missing_ok=True)  # PEFT's empty card; ours is one for all
    return score
