"""Greedy answers of PEFT, in a trainer's environment: `peft_answers.py MODEL QUESTION TOKENS [FOLDER]...`.

Prints lines of JSON: the tokens of the question as a chat, then the answer's text for the base and for each
folder.
"""

import json
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(base: str, question: str, count: int, *folders: str) -> None:
    """Answer."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
    print(json.dumps(ids[0].tolist()), flush=True)
    for folder in ("", *folders):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, folder) if folder else model
        with torch.no_grad():
            all_ids = model.eval().generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=0,
            )
        print(json.dumps(tokenizer.decode(all_ids[0, ids.shape[1] :], skip_special_tokens=True)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
