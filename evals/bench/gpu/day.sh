#!/usr/bin/env bash
# All that a GPU is asked, in one call of at most ten minutes, in a checkout:
#
#     bash evals/bench/gpu/day.sh OUT [--only NAME] [--seconds 330] ...
#
# The machine needs torch with CUDA, triton, numpy, a C compiler and Python's headers. msgspec is installed from the
# wheels that `make gpu-wheels` has put into build/gpu/wheels, without a network. gpu.json, gpu.md and the log are in
# OUT after each part. The exit status is 0; 1 if a check failed, 2 without a GPU, 124 if it took longer than MOST.
set -u
OUT=${1:?where the findings go}
shift
PYTHON=${PYTHON:-python3}
MOST=${MOST:-570} # seconds
cd "$(dirname "$0")/../../.." || exit
mkdir -p "$OUT"
export PYTHONPATH="$PWD/.pkg:$PWD/build/gpu/packages"
if ! "$PYTHON" -c "import msgspec" 2>/dev/null; then
    "$PYTHON" -m pip install --quiet --no-index --find-links build/gpu/wheels --target build/gpu/packages msgspec || exit
fi
KEPT=/tmp/personae-gpu # OUT is emptied before each command
for file in gpu.json gpu.md; do [ -e "$OUT/$file" ] || cp "$KEPT/$file" "$OUT/" 2>/dev/null; done
timeout -k 5 "$MOST" "$PYTHON" -m personae.evals.bench.gpu --seconds 330 --out "$OUT" "$@" 2>&1 | tee "$OUT/log.txt"
status=${PIPESTATUS[0]}
mkdir -p "$KEPT" && cp "$OUT"/gpu.* "$KEPT/"
exit "$status"
