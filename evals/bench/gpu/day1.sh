#!/usr/bin/env bash
# The first of two calls on a machine with a GPU: are the kernels right, and how fast are they? At most 340 s.
#
#     bash evals/bench/gpu/day1.sh OUT        in a checkout; `make gpu-day` prepares what it brings along
#
# The machine needs torch with CUDA, triton, numpy, a C compiler and Python's headers, and no network. Each step has
# a time limit of its own. What it finds is kept in KEPT/found, from where a second run goes on, wherever the first was
# cut off; it is in OUT a few seconds later. The exit status is 0; 1 if a check failed, 2 without a GPU, 3 without
# packages, 124 if the kit took longer than MOST.
set -u
OUT=${1:?where the findings go}
shift
PYTHON=${PYTHON:-python3}
MOST=${MOST:-230}               # seconds for the kit
KEPT=${KEPT:-/tmp/personae-gpu} # OUT may be emptied between two calls
cd "$(dirname "$0")/../../.." || exit
mkdir -p "$OUT" "$KEPT/found"
export PYTHONPATH="$PWD/.pkg:$KEPT/kernel-packages" PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="$KEPT/triton"
FOUND=$KEPT/found
say() { echo "== $SECONDS s: $*"; }
bring() { cp -r "$FOUND"/. "$OUT/"; }
while kill -0 $$ && sleep 5; do bring; done > /dev/null 2>&1 &
bringing=$!
trap 'kill "$bringing"; bring' EXIT

{ timeout 20 nvidia-smi; uname -r; lscpu; free -g; timeout 20 gcc --version; timeout 60 "$PYTHON" -m pip list; } \
    > "$FOUND/machine.txt" 2>&1
# install PACKAGE: from the wheels, unless it is there.
install() {
    "$PYTHON" -c "import $1" 2>/dev/null || timeout -k 5 60 "$PYTHON" -m pip install --quiet --no-index --no-deps \
        --find-links build/gpu/wheels --target "$KEPT/kernel-packages" "$1"
}
install msgspec || { echo "msgspec is missing, and build/gpu/wheels has no wheel of it for this Python"; exit 3; }
install gguf || echo "gguf is missing: weights in GGUF's blocks are left out"
say "one operator"
timeout -k 5 60 "$PYTHON" -m personae.evals.bench.gpu --only "sgmv, torch.bfloat16" --seconds 20 --out "$FOUND/first" \
    > "$FOUND/first.log" 2>&1
status=$?
tail -n 6 "$FOUND/first.log"
[ "$status" = 2 ] && exit 2
say "all checks, then tables"
resume=
[ -e "$FOUND/gpu.json" ] && resume=--resume
timeout -k 5 "$MOST" "$PYTHON" -m personae.evals.bench.gpu --seconds 170 --out "$FOUND" "$@" $resume 2>&1 \
    | tee "$FOUND/log.txt"
status=${PIPESTATUS[0]}
say "done"
exit "$status"
