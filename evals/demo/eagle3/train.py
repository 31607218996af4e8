"""Trains an EAGLE-3 head for SmolLM2-135M-Instruct; it can be stopped and started again at any time.

    python -m personae.evals.demo.finetune.convert model
    python -m personae.evals.demo.eagle3.answers --out run --seconds 900
    python -m personae.evals.demo.eagle3.features --model model --out run
    python -m personae.evals.demo.eagle3.train --model model --out run --steps 1000

The head starts as the model's last layer: it has that layer's weights for the hidden state, and the model's
rows of the output matrix for the tokens that are most frequent in the answers. It learns the model's
distribution over these tokens. Every twentieth text is held out; of these the log has how many guesses are
right, by their place in the draft.
"""

import argparse
import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from personae.evals.demo.eagle3.features import Text, layers_read, states, texts
from personae.evals.demo.eagle3.head import Head, HeadShape

WEIGHTS, STATE, LOG = "model.safetensors", "state", "log.jsonl"  # the server reads the first
HELD = 20  # every so many texts one is held out
FADE = 0.8  # the weight of each later guess relative to the one before


def frequent(found: Sequence[Text], size: int) -> Tensor:
    """The most frequent tokens of the answers, in the order of their ids; then those with the lowest ids."""
    counts = Counter(token for text in found for token in text.ids[text.prompt :])
    chosen = [token for token, _ in counts.most_common(size)]
    chosen += [token for token in range(2 * size) if token not in counts][: size - len(chosen)]
    return torch.tensor(sorted(chosen))


def shape_of(model: LlamaForCausalLM, inner: int, draft_vocab: int) -> HeadShape:
    """A head of the model's width. Each of its query heads has keys of its own."""
    config = model.config
    heads = config.num_attention_heads
    theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    return HeadShape(
        config.hidden_size, heads, heads, config.hidden_size // heads, inner, config.vocab_size,
        draft_vocab, float(theta), config.rms_norm_eps, config.max_position_embeddings,
    )  # fmt: skip


def begin(head: Head, model: LlamaForCausalLM, tokens: Tensor) -> None:
    """Start from the model's last layer, its norm and its output matrix."""
    own, last, size = head.midlayer, model.model.layers[-1], head.shape.hidden_size
    weights = {name: value.float() for name, value in last.state_dict().items()}
    repeats = model.config.num_attention_heads // model.config.num_key_value_heads
    with torch.no_grad():
        head.fc.weight.normal_(0, 0.01)
        head.fc.weight[:, 2 * size :] += 0.5 * torch.eye(size)
        for name, parameter in own.self_attn.named_parameters():
            weight = weights[f"self_attn.{name}"]
            if name in ("k_proj.weight", "v_proj.weight"):
                weight = weight.unflatten(0, (-1, head.shape.head_dim)).repeat_interleave(repeats, 0)
                weight = weight.flatten(0, 1)
            if name == "o_proj.weight":
                parameter.copy_(weight)
            else:
                parameter.normal_(0, 0.02)
                parameter[:, size:] = weight
        inner = head.shape.intermediate_size
        own.mlp.gate_proj.weight.copy_(weights["mlp.gate_proj.weight"][:inner])
        own.mlp.up_proj.weight.copy_(weights["mlp.up_proj.weight"][:inner])
        own.mlp.down_proj.weight.copy_(weights["mlp.down_proj.weight"][:, :inner])
        own.hidden_norm.weight.copy_(weights["input_layernorm.weight"])
        own.post_attention_layernorm.weight.copy_(weights["post_attention_layernorm.weight"])
        own.input_layernorm.weight.fill_(1.0)
        head.norm.weight.copy_(model.model.norm.weight.float())
        head.lm_head.weight.copy_(model.lm_head.weight[tokens].float())


class Trainer:
    """A head, the embedding that it shares with the model, and its optimizer."""

    def __init__(self, model: LlamaForCausalLM, head: Head, tokens: Tensor, kept: Tensor) -> None:
        self.head = head
        self._kept = kept
        self._embedding = model.model.embed_tokens.weight.detach().float()
        self._output = model.lm_head.weight.detach()
        self.use(tokens)
        matrices = [parameter for parameter in head.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in head.parameters() if parameter.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
            lr=1.0,
            betas=(0.9, 0.95),
        )

    def use(self, tokens: Tensor) -> None:
        """The tokens that the head guesses."""
        self.tokens, self._wanted = tokens, self._output[tokens]

    def step(self, batch: Sequence[Text], rate: float, steps: int) -> float:
        """One step; the loss of the first guess."""
        ids, there, wanted, lengths = self._padded(batch)
        with torch.autocast("cpu", torch.bfloat16):
            found = self.head(F.embedding(ids[:, 1:], self._embedding), there[:, :-1], steps)
            with torch.no_grad():
                aims = (wanted @ self._wanted.T).float().softmax(-1)
        total = torch.zeros(())
        first = 0.0
        for step, logits in enumerate(found):
            # Place i of step k guesses the token after place i + k + 1, where the model has its own opinion.
            aim = aims[:, step + 1 :]
            counts = self._counted(batch, lengths, logits.shape[1], step)
            losses = -(aim * logits.float().log_softmax(-1)).sum(-1)
            loss = (losses * counts).sum() / counts.sum().clamp(min=1)
            total = total + FADE**step * loss
            first = first or float(loss.detach())
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(total)
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return first

    @torch.inference_mode()
    def right(self, held: Sequence[Text], steps: int) -> list[float]:
        """The share of right guesses by place, of those behind right guesses."""
        right, tried = [0] * steps, [0] * steps
        for text in held:
            ids, there, wanted, _ = self._padded([text])
            with torch.autocast("cpu", torch.bfloat16):
                found = self.head(F.embedding(ids[:, 1:], self._embedding), there[:, :-1], steps)
                chosen = (wanted[0] @ self._output.T).argmax(-1)
            said = torch.cat((ids[0], torch.tensor([-1])))
            going = torch.ones(len(text.ids), dtype=torch.bool)
            for step, logits in enumerate(found):
                count = logits.shape[1]
                guessed, aim = self.tokens[logits[0].argmax(-1)], chosen[step + 1 :]
                counted = going[:count] & (torch.arange(count) + step + 2 >= text.prompt)
                going = counted & (guessed == aim)
                right[step] += int(going.sum())
                tried[step] += int(counted.sum())
                going &= aim == said[step + 2 :]  # else the head goes on from a text that has another token
        return [round(good / max(every, 1), 4) for good, every in zip(right, tried, strict=True)]

    def _padded(self, batch: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Token ids [B, T], the states that the head reads [B, T, 3 H], the model's output [B, T, H], and the
        lengths [B]."""
        lengths = torch.tensor([len(text.ids) for text in batch])
        width = self.head.shape.hidden_size
        ids = torch.zeros(len(batch), int(lengths.max()), dtype=torch.int64)
        kept = torch.zeros(*ids.shape, self._kept.shape[1], dtype=torch.bfloat16)
        for row, text in enumerate(batch):
            ids[row, : len(text.ids)] = torch.tensor(text.ids)
            kept[row, : len(text.ids)] = self._kept[text.at : text.at + len(text.ids)]
        return ids, kept[..., : 3 * width], kept[..., 3 * width :], lengths

    @staticmethod
    def _counted(batch: Sequence[Text], lengths: Tensor, places: int, step: int) -> Tensor:
        """[B, places]: 1 where the guess is one of an answer's tokens."""
        guessed = torch.arange(places) + step + 2
        begins = torch.tensor([text.prompt for text in batch])
        return ((guessed >= begins[:, None]) & (guessed < lengths[:, None])).float()


def batch_of(found: Sequence[Text], seed: int, step: int, tokens: int) -> list[Text]:
    """The texts of a step, which the seed and the step decide: of like length, up to so many tokens."""
    draw = random.Random(f"{seed}:{step}")
    pool = sorted(draw.sample(found, min(len(found), 96)), key=lambda text: len(text.ids))
    count = max(1, tokens // len(pool[len(pool) // 2].ids))
    first = draw.randrange(max(1, len(pool) - count + 1))
    return pool[first : first + count]


def save(folder: Path, trainer: Trainer, done: int, layers: tuple[int, ...]) -> None:
    """The head in bfloat16 for use, and the state to go on from."""
    shape, tokens = trainer.head.shape, trainer.tokens
    there = torch.zeros(shape.vocab_size, dtype=torch.bool)
    there[tokens] = True
    weights = {name: value.to(torch.bfloat16) for name, value in trainer.head.state_dict().items()}
    weights |= {"d2t": tokens - torch.arange(len(tokens)), "t2d": there}
    save_file(weights, folder / (WEIGHTS + ".new"), metadata={"format": "pt"})
    os.replace(folder / (WEIGHTS + ".new"), folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(shape.config(layers), indent=1) + "\n", encoding="utf-8")
    state = {f"head.{name}": value for name, value in trainer.head.state_dict().items()}
    for place, moments in trainer.optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{place}.{name}": value for name, value in moments.items()}
    state["tokens"] = tokens
    save_file(state, folder / (STATE + ".new"), metadata={"done": str(done)})
    os.replace(folder / (STATE + ".new"), folder / STATE)


def resumed(folder: Path, trainer: Trainer) -> int:
    """Take up the state of a folder. Returns the steps done; 0 if there is nothing."""
    if not (folder / STATE).exists():
        return 0
    state = load_file(folder / STATE)
    trainer.use(state["tokens"])
    own = {name.removeprefix("head."): value for name, value in state.items() if name.startswith("head.")}
    trainer.head.load_state_dict(own)
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in state.items():
        if key.startswith("optimizer."):
            _, place, name = key.split(".")
            moments.setdefault(int(place), {})[name] = value
    trainer.optimizer.load_state_dict({**trainer.optimizer.state_dict(), "state": moments})
    with safe_open(folder / STATE, "pt") as file:
        return int(file.metadata()["done"])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of `finetune.convert`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--steps", type=int, default=1000, help="the rate falls until then")
    parser.add_argument("--until", type=int, default=0, help="stop at this step")
    parser.add_argument("--rate", type=float, default=8e-4)
    parser.add_argument("--tokens", type=int, default=2000, help="of a step")
    parser.add_argument("--guesses", type=int, default=3, help="of the head in a row, in training")
    parser.add_argument("--inner", type=int, default=1024, help="width of its MLP")
    parser.add_argument("--draft-vocab", type=int, default=4096, help="tokens that it can guess")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    folder = given.out / "head"
    folder.mkdir(parents=True, exist_ok=True)
    model = LlamaForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
    found = texts(given.out)
    held, learned = found[::HELD], [text for at, text in enumerate(found) if at % HELD]
    head = Head(shape_of(model, given.inner, given.draft_vocab))
    tokens = frequent(found, given.draft_vocab)
    begin(head, model, tokens)
    trainer = Trainer(model, head, tokens, states(given.out, head.shape.hidden_size))
    first = resumed(folder, trainer)
    last = given.until or given.steps
    layers = layers_read(model.config.num_hidden_layers)
    with (folder / LOG).open("a", encoding="utf-8") as log:
        for index in range(first, last):
            began, used = time.perf_counter(), time.process_time()
            batch = batch_of(learned, given.seed, index, given.tokens)
            rate = given.rate * min(1.0, (index + 1) / 30) * (0.05 + 0.95 * max(0.0, 1 - index / given.steps))
            loss = trainer.step(batch, rate, given.guesses)
            line: dict[str, Any] = {
                "step": index + 1,
                "loss": round(loss, 4),
                "tokens": sum(len(one.ids) for one in batch),
                "seconds": round(time.perf_counter() - began, 2),
                "cpu": round(time.process_time() - used, 2),
            }
            if (index + 1) % given.every == 0 or index + 1 == last:
                line["right"] = trainer.right(held[:24], given.guesses)
                save(folder, trainer, index + 1, layers)
            print(json.dumps(line), flush=True)
            log.write(json.dumps(line) + "\n")
            log.flush()


if __name__ == "__main__":
    main()
