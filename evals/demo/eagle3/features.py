"""What the model computes on its own answers, kept in files: a head trains on it for several epochs.

    python -m personae.evals.demo.eagle3.features --model DIR --out DIR

For every token of `answers.jsonl` it keeps the residual stream before three layers, and the last layer's
normalised output, from which the model's logits follow: 4.6 KB a token in bfloat16. It can be stopped and
started again, also when there are more answers by then.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from personae.evals.demo.eagle3.answers import ANSWERS
from personae.evals.demo.finetune.encode import Encoder

INDEX, STATES = "features.jsonl", "features.bfloat16"
READ = 3  # layers whose input a head reads


@dataclass(frozen=True, slots=True)
class Text:
    """One conversation: its tokens, where the answer begins, and where its states lie in the file."""

    ids: list[int]
    prompt: int
    at: int


def layers_read(layers: int) -> tuple[int, int, int]:
    """The layers whose input a head reads, as vLLM has them by default: low, middle, high."""
    return 2, layers // 2, layers - 3


def rows(model: Path, answers: Path) -> Iterator[tuple[list[int], int]]:
    """The tokens of each conversation, as the server would have them, and the length of its prompt."""
    encoder = Encoder(model)
    for line in answers.read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        prompt = encoder.ids(encoder.render([{"role": "user", "content": said["question"]}], []))
        yield prompt + encoder.ids(said["answer"] + ("<|im_end|>" if said["ended"] else "")), len(prompt)


def texts(folder: Path) -> list[Text]:
    """Those whose states are in the folder."""
    index = folder / INDEX
    lines = index.read_text(encoding="utf-8").splitlines() if index.exists() else []
    return [Text(**json.loads(line)) for line in lines]


def states(folder: Path, hidden: int) -> torch.Tensor:
    """All states: [tokens, 4 * hidden] bfloat16, read from the file as needed."""
    file = folder / STATES
    count = file.stat().st_size // (2 * (READ + 1) * hidden)
    whole = torch.from_file(str(file), size=count * (READ + 1) * hidden, dtype=torch.bfloat16)
    return whole.view(count, (READ + 1) * hidden)


@torch.inference_mode()
def states_of(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """[tokens, 4 * hidden]: see the module."""
    found = model.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    kept = [found.hidden_states[layer] for layer in layers_read(model.config.num_hidden_layers)]
    return torch.cat([*kept, found.last_hidden_state], -1)[0]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of `finetune.convert`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = LlamaForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).eval()
    done = texts(given.out)
    at = done[-1].at + len(done[-1].ids) if done else 0
    width = 2 * (READ + 1) * model.config.hidden_size
    with (given.out / STATES).open("ab") as kept, (given.out / INDEX).open("a", encoding="utf-8") as index:
        kept.truncate(at * width)
        for number, (ids, prompt) in enumerate(rows(given.model, given.out / ANSWERS)):
            if number < len(done):
                continue
            values = states_of(model, ids).contiguous()
            kept.write(values.view(torch.int16).numpy().tobytes())
            kept.flush()
            index.write(json.dumps({"ids": ids, "prompt": prompt, "at": at}) + "\n")
            index.flush()
            at += len(ids)
    print(json.dumps({"texts": len(texts(given.out)), "tokens": at}))


if __name__ == "__main__":
    main()
