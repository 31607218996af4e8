#!/usr/bin/env bash
# transformers 5.23.0: `add_bos_token` in a folder's tokenizer_config.json changes nothing when the folder has a
# tokenizer.json, whatever the tokenizer's class. transformers 4 obeyed it for LlamaTokenizerFast. What stands around
# a text is only what tokenizer.json's post-processor says.
#
# Seen on 2026-11-28 with transformers 5.23.0 and tokenizers 0.23.2, eight classes, the flag absent, true and false.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.2 jinja2
cat > "$folder/try.py" <<'PY'
import json
import pathlib
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

folder = pathlib.Path(sys.argv[1])
classes = ("LlamaTokenizerFast", "LlamaTokenizer", "GPT2TokenizerFast", "Qwen2TokenizerFast",
           "Qwen2Tokenizer", "PreTrainedTokenizerFast", "GemmaTokenizerFast", "TokenizersBackend")
wrong = []
for begins in (False, True):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>", "<unk>"], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(["hello world"], trainer)
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in classes:
        for flag in (None, True, False):
            config = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
            if flag is not None:
                config["add_bos_token"] = flag
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            ids = AutoTokenizer.from_pretrained(folder)("hello")["input_ids"]
            print(f"tokenizer.json adds BOS: {begins!s:5} {name:24} add_bos_token {flag!s:5} -> BOS {ids[0] == 0}")
            if (ids[0] == 0) != begins:
                wrong.append((begins, name, flag))
if wrong:
    sys.exit(f"this has changed: {wrong}")
print("as described: the flag changed nothing")
PY
mkdir "$folder/model"
"$folder/venv/bin/python" "$folder/try.py" "$folder/model" 2>/dev/null
