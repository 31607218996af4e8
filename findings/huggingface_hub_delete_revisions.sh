#!/usr/bin/env bash
# huggingface_hub 2.4.0: `scan_cache_dir().delete_revisions(commit)` deletes the commit from one repository only, although two in the
# cache may have it: a model that was renamed on the Hub and is cached under both names, or one that was pushed to a second repository.
# Which of the two is left to the order of a set, so it changes from one process to the next. The library's documentation says that
# commits are unique across repositories. Who means one of the two must take the other out of the scanned cache first.
#
# Seen on 2026-11-29 with huggingface_hub 2.4.0: each of the two was chosen in some of 40 processes, never both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check huggingface_hub==2.4.0 2>/dev/null
cat > "$folder/try.py" <<'PY'
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

COMMIT = "1" * 40
cache = Path(sys.argv[1])
for name in ("old", "new"):
    repo = cache / f"models--org--{name}"
    for part in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (repo / part).mkdir(parents=True)
    (repo / "blobs" / "a").write_text("{}")
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots" / COMMIT / "config.json").symlink_to(repo / "blobs" / "a")
CHILD = """
import sys
from huggingface_hub import scan_cache_dir
plan = scan_cache_dir(sys.argv[1]).delete_revisions(sys.argv[2])
print(sorted(path.name for path in plan.repos))
"""
found = Counter(
    subprocess.run(
        [sys.executable, "-c", CHILD, cache, COMMIT],
        env=os.environ | {"PYTHONHASHSEED": str(seed)}, capture_output=True, text=True, check=True,
    ).stdout.strip()
    for seed in range(40)
)
print(dict(found))
if {*found} != {"['models--org--old']", "['models--org--new']"}:
    sys.exit("this has changed")
print("as described")
PY
"$folder/venv/bin/python" "$folder/try.py" "$folder/cache"
