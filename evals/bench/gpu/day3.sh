#!/usr/bin/env bash
# A further call: the list that a GPU day goes on from when day1.sh and day2.sh are done. At most MOST seconds.
#
#     bash evals/bench/gpu/day3.sh OUT [NAME...]      all of the list, or these: fp8 int8 int4 kv-fp8 ngram graphs
#                                                     side-stream adapters-64 kv-disk ncu
#
# Each serves the model of day2.sh in another way and loads it; compare with day2.sh's loads of the same clients. See
# day2.sh for the rest.
set -u
OUT=${1:?where the findings go}
shift
PYTHON=${PYTHON:-python3}
SHAPE=${SHAPE:-} DEVICE=${DEVICE:-cuda}
PROMPT=${PROMPT:-512} ANSWER=${ANSWER:-128} CLIENTS=${CLIENTS:-64}
KEPT=${KEPT:-/tmp/personae-gpu}
MOST=${MOST:-560}
LIST=${*:-fp8 int8 int4 kv-fp8 ngram graphs side-stream adapters-64 kv-disk ncu}
cd "$(dirname "$0")/../../.." || exit
. evals/bench/gpu/steps.sh

# both NAME: loads of the base and of all adapters.
both() {
    for clients in $CLIENTS; do
        load "$1-base" "$clients" --models model --popularity identical
        load "$1-adapters" "$clients" --popularity distinct
    done
}

begin
step model 120 "$PYTHON" -m personae.evals.bench.gpu.model "$KEPT/8b" $SHAPE
seed=200
for name in $LIST; do
    case $name in
        fp8 | int8 | int4) serve "$name" --max-model-len 8192 --quantize "$name" && both "$name" ;;
        kv-fp8) serve "$name" --max-model-len 8192 --kv-cache-dtype fp8 && both "$name" ;;
        ngram) serve "$name" --max-model-len 8192 --speculate ngram && both "$name" ;;
        graphs) serve no-graphs --max-model-len 8192 --no-cuda-graphs && both no-graphs ;;
        side-stream) serve "$name" --max-model-len 8192 --lora-side-stream && both "$name" ;;
        kv-disk)
            serve "$name" --max-model-len 8192 --kv-memory 256MiB --kv-disk "$KEPT/pages" &&
                load "$name" 16 --models model --prefix 1024 --prefixes 32
            ;;
        adapters-64)
            step more-adapters 120 "$PYTHON" -m personae.evals.bench.gpu.model "$KEPT/64" --adapters 64 --adapters-only $SHAPE
            adapters=$KEPT/64/adapters serve "$name" --max-model-len 8192 && both "$name"
            ;;
        ncu) # the share of time in which tensor cores work, of each of our products
            step ncu 90 ncu --metrics sm__inst_executed_pipe_tensor.sum,sm__throughput.avg.pct_of_peak_sustained_elapsed \
                --kernel-name 'regex:(attention|shrink|expand|expert_linear|int8_linear|int4_linear|block_linear)_kernel' \
                --launch-count 40 "$PYTHON" -m personae.evals.bench.gpu --only "torch.bfloat16" --seconds 1 --out "$OUT/ncu"
            ;;
        *) echo "$name is not on the list" && failed=1 ;;
    esac
done
end_server
finish
