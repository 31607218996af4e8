# What day2.sh and day3.sh share: steps with time limits, whose findings are kept. Not a command.
mkdir -p "$OUT" "$KEPT/done" "$KEPT/found"
export PYTHONPATH="$PWD/.pkg:$KEPT/packages" PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="$KEPT/triton" HF_HUB_OFFLINE=1
failed=0 server= url=
trap 'end_server; cp -r "$OUT"/. "$KEPT/found/"' EXIT

# begin: ends with 2 without a GPU, brings back what was found, and installs the wheels.
begin() {
    "$PYTHON" -c "import torch; raise SystemExit(0 if torch.cuda.is_available() else 2)" || { echo "there is no GPU"; exit 2; }
    cp -rn "$KEPT/found"/. "$OUT"/
    end_old_server
    step packages 60 "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$KEPT/packages" \
        build/gpu/wheels/*.whl
}

# is_done NAME: whether a step was run before; its output is OUT/NAME.log then.
is_done() {
    [ -e "$KEPT/done/$1.log" ] || return 1
    cp "$KEPT/done/$1.log" "$OUT/"
    echo "== $SECONDS s: $1 was done before"
}

# most_of NAME SECONDS: sets `most` to what the step may take; false if no time is left.
most_of() {
    local left=$((MOST - SECONDS))
    most=$2
    [ "$left" -lt "$most" ] && most=$left
    if [ "$most" -lt 10 ]; then
        echo "== $SECONDS s: $1 is left out, no time left"
        return 1
    fi
    echo "== $SECONDS s: $1, at most $most s"
}

# ended NAME STATUS: says how a step ended, and keeps what it found.
ended() {
    tail -n 12 "$OUT/$1.log"
    if [ "$2" = 0 ]; then cp "$OUT/$1.log" "$KEPT/done/"; else failed=1 && echo "$1: exit status $2"; fi
    cp -r "$OUT"/. "$KEPT/found/"
}

# step NAME SECONDS COMMAND...: the output is OUT/NAME.log, and is kept.
step() {
    local name=$1
    is_done "$name" && return
    most_of "$name" "$2" || return
    shift 2
    timeout -k 5 "$most" "$@" > "$OUT/$name.log" 2>&1
    ended "$name" $?
}

# step_beside NAME SECONDS COMMAND...: as step, while others run; wait_for NAME ends it.
step_beside() {
    beside=
    is_done "$1" && return
    most_of "$1" "$2" || return
    local name=$1
    shift 2
    timeout -k 5 "$most" "$@" > "$OUT/$name.log" 2>&1 &
    beside=$!
}
wait_for() {
    [ -n "$beside" ] || return
    wait "$beside"
    ended "$1" $?
}

# serve NAME OPTIONS...: starts the server that `load` asks.
serve() {
    local name=$1
    shift
    end_server
    [ $((MOST - SECONDS)) -lt 30 ] && return
    echo "== $SECONDS s: serve $name"
    "$PYTHON" -m personae serve "$KEPT/8b/model" --adapters "${adapters:-$KEPT/8b/adapters}" --device "$DEVICE" --dtype bfloat16 --port 0 \
        "$@" > "$OUT/serve-$name.log" 2>&1 &
    server=$!
    echo "$server" > "$KEPT/server"
    for _ in $(seq 240); do
        grep -q "personae ready" "$OUT/serve-$name.log" && break
        kill -0 "$server" 2>/dev/null || break
        [ "$SECONDS" -ge "$MOST" ] && break
        sleep 0.5
    done
    url=$(grep -o "personae ready http[^ ]*" "$OUT/serve-$name.log" | cut -d ' ' -f 3)
    tail -n 3 "$OUT/serve-$name.log"
    [ -n "$url" ] || { failed=1 && echo "the server of $name is not ready"; }
}
end_server() {
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null
        wait "$server" 2>/dev/null
        rm -f "$KEPT/server"
    fi
    server= url=
}
# end_old_server: the one of a call that was cut off, which would keep the device's memory.
end_old_server() {
    local old
    old=$(cat "$KEPT/server" 2>/dev/null) || return
    grep -qs "personae" "/proc/$old/cmdline" && kill "$old" && sleep 2
    rm -f "$KEPT/server"
}

# load NAME CLIENTS OPTIONS...: OUT/load-NAME-CLIENTS has the report.
load() {
    local name=load-$1-$2 clients=$2
    shift 2
    seed=$((seed + 1))
    [ -n "$url" ] || { is_done "$name" || echo "$name is left out, nothing is served"; return; }
    step "$name" 45 "$PYTHON" -m personae bench --url "$url" --prompt "$PROMPT" --output "$ANSWER" --full --seed "$seed" \
        --concurrency "$clients" --requests $((clients < 4 ? 4 : 2 * clients)) --out "$OUT/$name" "$@"
}

# Our kernels alone, which are few, and without torch's cache, whose large blocks would hide what stays inside them.
memcheck() {
    local kernels=() name
    for name in attention merge shrink expand plan append_kv expert_linear int8_linear int4_linear block_linear greatest \
        weigh gather draw; do
        kernels+=(--kernel-name "kns=${name}_kernel")
    done
    PATH="$PATH:/usr/local/cuda/bin" PYTORCH_NO_CUDA_MEMORY_CACHING=1 step memcheck 90 compute-sanitizer \
        --error-exitcode 9 --print-limit 20 "${kernels[@]}" --tool memcheck \
        "$PYTHON" -m personae.evals.bench.gpu --only "torch.bfloat16" --seconds 1 --out "$OUT/memcheck"
}

# finish: the summary, and the exit status.
finish() {
    "$PYTHON" -m personae.evals.bench.gpu.goals "$OUT"
    exit "$failed"
}
