#!/usr/bin/env bash
# The second of two calls on a machine with a GPU: the whole engine, served loads, peers, memcheck. At most 460 s.
#
#     bash evals/bench/gpu/day2.sh OUT        after day1.sh, in the same checkout
#
# It installs the wheels that `make gpu-day` has put into build/gpu/wheels, and makes a model of 8B with 16 adapters in
# KEPT. Each step has a time limit of its own, and what it finds is in OUT as soon as it is there. A step whose findings
# are in KEPT is not run again. SHAPE=--tiny and DEVICE=cpu make it small. The exit status is 0; 1 if a step failed, 2
# without a GPU.
set -u
OUT=${1:?where the findings go}
PYTHON=${PYTHON:-python3}
SHAPE=${SHAPE:-} DEVICE=${DEVICE:-cuda}
PROMPT=${PROMPT:-512} ANSWER=${ANSWER:-128} CLIENTS=${CLIENTS:-1 16 64 256} BOUND=${BOUND:-64}
KEPT=${KEPT:-/tmp/personae-gpu}
MOST=${MOST:-450} # seconds for all steps
cd "$(dirname "$0")/../../.." || exit
. evals/bench/gpu/steps.sh

begin
# The model is made while the bundled one is checked.
step_beside model 120 "$PYTHON" -m personae.evals.bench.gpu.model "$KEPT/8b" $SHAPE
step bundled 110 "$PYTHON" -m personae.evals.bench.gpu --only "bundled model" --seconds 100 --out "$OUT/bundled"
wait_for model
serve 8b --max-model-len 8192
seed=100 # another for each load: with one seed most prompts would come from the prefix cache
for clients in $CLIENTS; do
    load base "$clients" --models model --popularity identical
    load adapters "$clients" --popularity distinct
    [ "$clients" = "$BOUND" ] && load bound "$clients" --popularity distinct --schema 1
done
end_server
step peer 60 "$PYTHON" -m personae.evals.bench.gpu.transformers_peer "$KEPT/8b/model" "$KEPT/8b/adapters" \
    "$OUT/transformers.json" --prompt "$PROMPT"
memcheck
finish
