"""Greedy answers of PEFT, in a trainer's environment: `peft_answers.py MODEL PROMPT TOKENS [FOLDER]...`.

Prints a line of JSON for the base and for each folder: the answer's text.
"""

import json
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(base: str, prompt: str, count: int, *folders: str) -> None:
    """Answer."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    for folder in ("", *folders):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, folder) if folder else model
        with torch.no_grad():
            all_ids = model.eval().generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        print(json.dumps(tokenizer.decode(all_ids[0, ids.shape[1] :], skip_special_tokens=True)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
