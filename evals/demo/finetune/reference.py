"""The same questions through plain transformers and PEFT, free and greedy, to compare with the server.

python -m personae.evals.demo.finetune.reference tools --model DIR --adapter …/tools --count 20 --out results
"""

import argparse
import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from personae.evals.demo.finetune.encode import Encoder
from personae.evals.demo.finetune.score import LIMIT, Question, grade, held_out, read_rows
from personae.evals.demo.finetune.tasks import GENERATORS

VARIANT = "PEFT free"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=sorted(GENERATORS))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    encoder = Encoder(given.model)
    base = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, str(given.adapter), autocast_adapter_dtype=False).eval()
    path = given.out / f"{given.task}.jsonl"
    done = {row["id"] for row in read_rows(path) if row["variant"] == VARIANT}
    with path.open("a", encoding="utf-8") as out:
        for question in held_out(given.task, given.count):
            if question.id in done:
                continue
            text = _answer(model, encoder, question)
            scores = grade(question, {"content": text})
            row = {
                "id": question.id,
                "part": question.part,
                "variant": VARIANT,
                "scores": scores,
                "answer": text,
            }
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            out.flush()


def _answer(model: PeftModel, encoder: Encoder, question: Question) -> str:
    prompt = encoder.render(question.messages, question.tools)
    ids = torch.tensor([encoder.ids(prompt)])
    with torch.inference_mode():
        made = model.generate(
            input_ids=ids, max_new_tokens=LIMIT, do_sample=False, eos_token_id=2, pad_token_id=2
        )
    return encoder.tokenizer.decode(made[0, ids.shape[1] :].tolist(), skip_special_tokens=True)


if __name__ == "__main__":
    main()
