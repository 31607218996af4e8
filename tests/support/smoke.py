"""Starts the installed Personae with this interpreter, sends one request and stops it. Then runs a benchmark
and an evaluation of it, each as one command.

    python tests/support/smoke.py

It needs only Personae and its dependencies.
"""

import json
import re
import subprocess
import sys
from urllib.request import Request, urlopen

QUESTION = {
    "messages": [{"role": "user", "content": "Who are you?"}],
    "temperature": 0,
    "max_tokens": 16,
    "structured_outputs": {"regex": "[A-Z][a-z ,A-Z]*"},
}
COMMANDS = (
    "bench --model demo --requests 2 --prompt 8 --output 4",
    "eval run demo --serve --model demo --task triage --mode constrained --count 1",
)


def main() -> None:
    """Raises SystemExit if anything fails."""
    command = [sys.executable, "-m", "personae", "serve", "demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            ready = re.match(r"personae ready (\S+)", server.stdout.readline())
            if ready is None:
                raise SystemExit("the server did not start")
            headers = {"content-type": "application/json"}
            request = Request(f"{ready[1]}/v1/chat/completions", json.dumps(QUESTION).encode(), headers)
            with urlopen(request, timeout=120) as answer:
                text = json.load(answer)["choices"][0]["message"]["content"]
        finally:
            server.terminate()
    if server.returncode != 0 or not text.startswith("I am the Personae demo"):
        raise SystemExit(f"it answered {text!r} and ended with exit code {server.returncode}")
    for words in COMMANDS:
        subprocess.run([sys.executable, "-m", "personae", *words.split()], check=True)
    print(f"Personae runs on Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
