#!/bin/sh
# Trains the adapters given, one after another: sh queue.sh MODEL RUNS TASK:STEPS:RANK …
# Stop it at any time; started again it goes on from the last checkpoint (every 20 steps).
# One thread each: on a busy machine threads wait for one another. The malloc settings keep tensors' memory.
set -e
export OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_TOP_PAD_=268435456
model=$1 runs=$2
shift 2
for one in "$@"; do
    task=${one%%:*} rest=${one#*:}
    nice -n 19 "${PYTHON:-python}" -m personae.evals.demo.finetune.train "$task" --model "$model" --out "$runs" \
        --steps "${rest%%:*}" --rank "${rest#*:}" --rate 7e-4
done
