#!/usr/bin/env bash
# jsonschema-rs 0.60.3: `.` in `pattern` matches U+2028, U+2029 and a carriage return. ECMA-262, whose regular
# expressions JSON Schema recommends, excludes all four line terminators: line feed, carriage return, U+2028 and
# U+2029. Only the line feed is excluded here. jsonschema 4.26.0 does the same, because Python's `.` excludes the line
# feed alone. So two validators agree with each other, and not with ECMA-262.
#
# Seen on 2026-11-28 with jsonschema-rs 0.60.3 and jsonschema 4.26.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jsonschema-rs==0.60.3 jsonschema==4.26.0 2>/dev/null
cat > "$folder/try.py" <<'PY'
import sys

import jsonschema
import jsonschema_rs

schema = {"type": "string", "pattern": "^.$"}
texts = {"line feed": "\n", "carriage return": "\r", "U+2028": "\u2028", "U+2029": "\u2029"}
seen = {
    name: (jsonschema_rs.is_valid(schema, text), jsonschema.Draft202012Validator(schema).is_valid(text))
    for name, text in texts.items()
}
for name, (rust, python) in seen.items():
    print(f"^.$ and a {name}: jsonschema-rs {rust}, jsonschema {python}")
if [one for one, _ in seen.values()] != [False, True, True, True]:
    sys.exit("this has changed")
print("as described")
PY
"$folder/venv/bin/python" "$folder/try.py"
