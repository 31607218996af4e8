#!/usr/bin/env bash
# The second of two calls on a machine with a GPU: the whole engine, served loads, memcheck. At most 460 s.
#
#     bash evals/bench/gpu/day2.sh OUT        after day1.sh, in the same checkout
#
# It installs the wheels that `make gpu-day` has put into build/gpu/wheels. Each step has a time limit of its own, and
# what it finds is in OUT as soon as it is there. A step whose findings are in KEPT is not run again. MODEL and ADAPTERS
# are folders to serve, the bundled ones by default. The exit status is 0; 1 if a step failed, 2 without a GPU.
set -u
OUT=${1:?where the findings go}
PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-evals/demo/model}
ADAPTERS=${ADAPTERS:-evals/demo/adapters}
KEPT=${KEPT:-/tmp/personae-gpu}
MOST=${MOST:-450} # seconds for all steps
cd "$(dirname "$0")/../../.." || exit
mkdir -p "$OUT" "$KEPT/done"
export PYTHONPATH="$PWD/.pkg:$KEPT/packages" PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="$KEPT/triton" HF_HUB_OFFLINE=1
failed=0
# step NAME SECONDS COMMAND...: the output is OUT/NAME.log, and is kept.
step() {
    local name=$1 most=$2 left=$((MOST - SECONDS))
    shift 2
    if [ -e "$KEPT/done/$name.log" ]; then
        cp "$KEPT/done/$name.log" "$OUT/"
        echo "== $SECONDS s: $name was done before"
        return
    fi
    [ "$left" -lt "$most" ] && most=$left
    if [ "$most" -lt 10 ]; then
        echo "== $SECONDS s: $name is left out, no time left"
        return
    fi
    echo "== $SECONDS s: $name, at most $most s"
    timeout -k 5 "$most" "$@" > "$OUT/$name.log" 2>&1
    local status=$?
    tail -n 12 "$OUT/$name.log"
    if [ "$status" = 0 ]; then cp "$OUT/$name.log" "$KEPT/done/"; else failed=1 && echo "$name: exit status $status"; fi
}

"$PYTHON" -c "import torch; raise SystemExit(0 if torch.cuda.is_available() else 2)" || { echo "there is no GPU"; exit 2; }
step packages 60 "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$KEPT/packages" \
    build/gpu/wheels/*.whl
step bundled 110 "$PYTHON" -m personae.evals.bench.gpu --only "bundled model" --seconds 100 --out "$OUT/bundled"
for quantize in int8 int4 fp8; do
    step "steps-$quantize" 40 "$PYTHON" -m personae bench steps --model "$MODEL" --rows 1 --prompt 128 --quantize "$quantize"
done
# Another seed for each load: with one seed most prompts would come from the prefix cache.
seed=100
for clients in 1 16 64 256; do
    for rows in identical distinct; do
        seed=$((seed + 1))
        step "load-$rows-$clients" 45 "$PYTHON" -m personae bench --model "$MODEL" --adapters "$ADAPTERS" --prompt 512 --output 128 \
            --popularity "$rows" --concurrency "$clients" --requests $((clients < 4 ? 4 : 2 * clients)) --seed "$seed"
    done
done
# Without torch's cache, whose large blocks would hide what stays inside them; and our kernels alone, which are few.
export PATH="$PATH:/usr/local/cuda/bin" PYTORCH_NO_CUDA_MEMORY_CACHING=1
kernels=()
for name in attention merge shrink expand plan append_kv expert_linear int8_linear int4_linear greatest weigh gather draw; do
    kernels+=(--kernel-name "kns=${name}_kernel")
done
step memcheck 90 compute-sanitizer --error-exitcode 9 --print-limit 20 "${kernels[@]}" --tool memcheck \
    "$PYTHON" -m personae.evals.bench.gpu --only "torch.bfloat16" --seconds 1 --out "$OUT/memcheck"
exit "$failed"
