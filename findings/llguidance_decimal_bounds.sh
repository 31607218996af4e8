#!/usr/bin/env bash
# llguidance 1.9.1: with `maximum: 0.99` a JSON number 0.90 is accepted and 0.9 is not, although they are the same
# number: a text that ends where the bound's digits begin to decide is taken for incomplete (0.1 to 0.8 are accepted).
# `maximum: 0.9999999999999999`, whose text has 16 digits, accepts 1.
#
# Seen on 2026-11-28 with llguidance 1.9.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check llguidance==1.9.1 2>/dev/null
cat > "$folder/try.py" <<'PY'
import sys

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def accepts(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema({"type": "number", **schema}))
    tokens = tokenizer.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


cases = [
    ({"maximum": 0.99}, "0.8", True),
    ({"maximum": 0.99}, "0.9", False),
    ({"maximum": 0.99}, "0.90", True),
    ({"maximum": 0.99}, "1", False),
    ({"maximum": 0.9999999999999999}, "1", True),
]
seen = [accepts(schema, text) for schema, text, _ in cases]
for (schema, text, _), one in zip(cases, seen):
    print(f"{schema} and {text}: {'accepted' if one else 'refused'}")
if seen != [as_described for _, _, as_described in cases]:
    sys.exit("this has changed")
print("as described")
PY
"$folder/venv/bin/python" "$folder/try.py"
