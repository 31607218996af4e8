#!/usr/bin/env bash
# Mooncake 0.3.13.post1: `MooncakeDistributedStore.setup` keeps Python's lock (the GIL) while it waits for a master
# that does not answer: about four seconds for each of its 20 attempts. All threads of the process stand still,
# though `put` and `get` release the lock. MC_STORE_CLIENT_SETUP_RETRIES=1 makes it one attempt.
#
# The wheel needs libibverbs, with TCP too. If the system has none, this fetches it with apt.
#
# Seen on 2026-11-29 with mooncake-transfer-engine-non-cuda 0.3.13.post1, Python 3.11 on Debian 12.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    mooncake-transfer-engine-non-cuda==0.3.13.post1
if ! ldconfig -p | grep -q libibverbs.so.1; then
    (cd "$folder" && apt-get download -qq libibverbs1 libnl-3-200 libnl-route-3-200 2>/dev/null)
    for package in "$folder"/*.deb; do dpkg-deb -x "$package" "$folder/system"; done
    LD_LIBRARY_PATH=$(find "$folder/system" -name '*.so*' -printf '%h:' | tr -d '\n')
    export LD_LIBRARY_PATH
fi
cat > "$folder/try.py" <<'PY'
import os
import threading
import time

from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, 2**24, "tcp", "", "127.0.0.1:9")  # nobody listens there
setting_up = threading.Thread(target=store.setup, args=arguments)
begun = time.monotonic()
setting_up.start()
time.sleep(0.1)
gap = time.monotonic() - begun
print(f"a sleep of 0.1 s took {gap:.1f} s")
assert gap > 2, "it did not keep the lock"
os._exit(0)
PY
MC_STORE_CLIENT_SETUP_RETRIES=1 MC_LOG_LEVEL=ERROR "$folder/venv/bin/python" "$folder/try.py" 2>/dev/null
