"""Trains the demo model: `python -m personae.evals.demo.train [tokenizer|base|adapters|all]`.

Resumable (a checkpoint every hundred steps) and deterministic for a seed and a number of workers: each worker
process draws its own batches and the gradients are averaged.
"""

import argparse
import copy
import itertools
import json
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import Qwen3Config, Qwen3ForCausalLM

from personae.evals.demo import data, fused
from personae.evals.demo.adapters import RECIPES, train_adapter
from personae.evals.demo.batches import TrainingBatch, chunk
from personae.evals.demo.learn import exact, loss_of
from personae.evals.demo.pieces import drilled
from personae.evals.demo.tokenizer import VOCABULARY, save, train_tokenizer
from personae.evals.demo.wiring import wire

HERE = Path(__file__).parent
MODEL = HERE / "model"
CHUNK = 16  # batches drawn together: enough to sort by length


def config() -> Qwen3Config:
    """The architecture: small in everything except attention, because what it does is copy."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=384,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def learning_rate(step: int, steps: int) -> float:
    """Warm-up, plateau, and a linear descent over the last 40 % (its plateau fits any longer plan)."""
    return min(1.0, (step + 1) / 50, max(0.0, (steps - step) / (0.4 * steps)) + 0.005)


def optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; Adam for embeddings and gains."""
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and "embed" not in name
    ]
    rest = [
        parameter for name, parameter in model.named_parameters() if parameter.ndim != 2 or "embed" in name
    ]
    muon = torch.optim.Muon(
        matrices, lr=0.02, weight_decay=0.01, momentum=0.95, ns_steps=4, adjust_lr_fn="original"
    )
    return [muon, torch.optim.Adam(rest, lr=2e-3, betas=(0.9, 0.98))]


class Trainer:
    """One worker's share of the base model's training."""

    def __init__(self, options: argparse.Namespace, worker: int) -> None:
        self.options, self.worker = options, worker
        fused.install()
        torch.manual_seed(options.seed)
        torch.set_num_threads(options.threads)
        self.tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self.model = Qwen3ForCausalLM(config()).to(options.device)
        wire(self.model)
        if options.warm:
            self.model.load_state_dict(load_file(MODEL / "model.safetensors"), strict=False)
        self.model.set_attn_implementation(fused.ATTENTION)
        self.worn = copy.deepcopy(self.model).bfloat16()  # computes; `model` keeps the exact weights
        self.optimizers = optimizers(self.model)
        self.rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.step = 0
        self.checkpoint = options.runs / "base.pt"
        if self.checkpoint.exists():
            self._load()
        self._dress()

    @torch.no_grad()
    def _dress(self) -> None:
        for rounded, exactly in zip(self.worn.parameters(), self.model.parameters(), strict=True):
            rounded.copy_(exactly)

    def _load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]

    def save(self) -> None:
        """Writes the checkpoint that a later run goes on from."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
        }
        torch.save(state, self.checkpoint.with_suffix(".new"))
        self.checkpoint.with_suffix(".new").replace(self.checkpoint)

    def _batches(self) -> Iterator[TrainingBatch]:
        """This worker's batches from the current step on."""
        for index in itertools.count(self.step // CHUNK):
            key = f"{self.options.seed} {index} {self.worker}"
            drilling = max(0.0, 0.9 - index * CHUNK / (0.05 * self.options.steps))
            drilling *= not self.options.warm
            stream = drilled(data.mixture(key, drilling), self.tokenizer, Random(f"pieces {key}"))
            batches = chunk(stream, self.tokenizer, Random(key), CHUNK, self.options.tokens)
            yield from batches[self.step % CHUNK if index == self.step // CHUNK else 0 :]

    def _update(self, batch: TrainingBatch) -> Tensor:
        """One optimiser step on the mean of the workers' gradients; the loss."""
        factor = learning_rate(self.step, self.options.steps)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        batch = TrainingBatch(
            *(part.to(self.options.device) for part in (batch.tokens, batch.targets, batch.positions))
        )
        loss, _ = loss_of(self.worn, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        gradients = []
        for parameter, rounded in zip(self.model.parameters(), self.worn.parameters(), strict=True):
            assert rounded.grad is not None
            parameter.grad = rounded.grad.float()
            gradients.append(parameter.grad)
            rounded.grad = None
        if self.options.workers > 1:
            mean = parameters_to_vector(gradients) / self.options.workers
            dist.all_reduce(mean)
            vector_to_parameters(mean, gradients)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._dress()
        return loss.detach()

    def train_until(self, stop: int) -> Iterator[float]:
        """Trains up to a step and yields each step's loss."""
        batches = self._batches()
        while self.step < stop:
            loss = self._update(next(batches)).item()
            self.step += 1
            yield loss

    def run(self) -> None:
        """Trains to the last step; worker 0 reports, measures and saves."""
        look = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        steps, first, began, mean = self.options.steps, self.step, time.monotonic(), math.nan
        with Progress(*look, TimeRemainingColumn(), disable=self.worker > 0) as progress:
            bar = progress.add_task("base", total=steps, completed=first)
            for loss in self.train_until(steps):
                mean = loss if math.isnan(mean) else 0.95 * mean + 0.05 * loss
                progress.update(bar, completed=self.step, description=f"base, loss {mean:.3f}")
                if self.worker > 0:
                    continue
                if self.step % 20 == 0:
                    rate = (time.monotonic() - began) / (self.step - first)
                    self._log(loss=round(mean, 4), seconds_a_step=round(rate, 2))
                if self.step % 100 == 0 or self.step == steps:
                    self.save()
                if self.step % self.options.measure == 0 or self.step == steps:
                    self._log(exact=self._scores())

    def _scores(self) -> dict[str, float]:
        tasks = data.TASKS | data.DRILLS
        return {name: round(exact(self.model, self.tokenizer, tasks[name], "curve", 96), 2) for name in tasks}

    def _log(self, **record: Any) -> None:
        with (self.options.runs / "base.jsonl").open("a") as log:
            log.write(json.dumps({"step": self.step} | record) + "\n")


def export(trainer: Trainer) -> None:
    """Writes config and bf16 weights next to the tokenizer."""
    trainer.model.to(torch.bfloat16).save_pretrained(MODEL)


def _work(worker: int, options: argparse.Namespace, port: int) -> None:
    if options.workers > 1:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=worker, world_size=options.workers)
    trainer = Trainer(options, worker)
    trainer.run()
    if worker == 0:
        export(trainer)
    if options.workers > 1:
        dist.destroy_process_group()


def train_base(options: argparse.Namespace) -> None:
    """Trains the base model in `options.workers` processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(_work, (options, port), nprocs=options.workers)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def main() -> None:
    """Reads the command line and runs the stages that it names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", nargs="?", default="all", choices=("tokenizer", "base", "adapters", "all"))
    parser.add_argument("--steps", type=int, default=3000, help="optimiser steps of the base model")
    parser.add_argument("--tokens", type=int, default=4096, help="padded tokens a batch and worker")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads a worker")
    parser.add_argument(
        "--only", nargs="*", choices=tuple(RECIPES), help="train these adapters instead of all"
    )
    parser.add_argument("--warm", action="store_true", help="start from the bundled weights")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument(
        "--measure", type=int, default=250, help="steps between measurements of the learning curve"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where checkpoints and logs go")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    if options.stage in ("tokenizer", "all"):
        save(train_tokenizer(), MODEL)
    if options.stage in ("base", "all"):
        train_base(options)
    if options.stage in ("adapters", "all"):
        for name in options.only or RECIPES:
            train_adapter(name, seed=options.seed, tokens=options.tokens, runs=options.runs)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
