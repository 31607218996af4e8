"""What an operator does with hundreds of tenants and adapters, with times, by the commands themselves.

    python -m personae.evals.tenants.administration --tenants 300 --adapters 300

Imports the tenants with a key for each, serves the bundled small model, pushes all adapters by one command,
pushes one of them again, rolls it back, and splits its requests 95 to 5. Exit code 1 if anything is not as it
must be.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import httpx
import typer

from personae.api.bundled import DEMO, NAMED
from personae.evals.served import Served, exit_on_sigterm
from personae.evals.tenants.making import AdapterMaker

T = TypeVar("T")
SPLIT = {"voice-0@1": 95.0, "voice-0@2": 5.0}


def command(*arguments: str) -> str:
    """What `personae` prints. Raises CalledProcessError."""
    line = [sys.executable, "-c", "from personae.api.cli import main; main()", *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout  # noqa: S603  # ourselves


def timed(what: str, work: Callable[[], T]) -> T:
    """The result of `work`, with a line about how long it took."""
    begin = time.perf_counter()
    result = work()
    print(f"{what}: {time.perf_counter() - begin:.2f} s")
    return result


def main(
    tenants: Annotated[int, typer.Option(min=1)] = 300,
    adapters: Annotated[int, typer.Option(min=1)] = 300,
    requests: Annotated[int, typer.Option(min=100)] = 400,
) -> None:
    """Run it."""
    with exit_on_sigterm(), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = str(folder / "data")
        lines = [json.dumps({"name": f"tenant-{n:03d}", "limits": {"concurrent": 8}}) for n in range(tenants)]
        (folder / "tenants.jsonl").write_text("\n".join(lines))
        command("tenants", "create", "root", "--data-dir", data)
        key = command("keys", "create", "root", "--admin", "--data-dir", data).strip()
        file = str(folder / "tenants.jsonl")
        made = timed(
            f"import of {tenants} tenants with keys",
            lambda: command("tenants", "import", file, "--keys", "--data-dir", data),
        )
        keys = [json.loads(line)["key"] for line in made.splitlines() if line.startswith("{")]
        maker = AdapterMaker(DEMO / "model")
        for number in range(adapters):
            write(folder / "adapters" / f"voice-{number}", maker.make(4, number))
        with Served([str(NAMED), "--data-dir", data], folder / "log") as served:
            at = ("--url", served.url, "--key", key)
            every = [str(path) for path in sorted((folder / "adapters").iterdir())]
            pushed = timed(
                f"push of {adapters} adapters by one command",
                lambda: command("adapters", "push", *every, "--shared", *at),
            )
            write(folder / "voice-0", maker.make(4, adapters))
            timed(
                "push of a next version",
                lambda: command("adapters", "push", str(folder / "voice-0"), "--replace", "--shared", *at),
            )
            timed("rollback", lambda: command("adapters", "rollback", "voice-0", *at))
            with httpx.Client(base_url=served.url, timeout=60) as client:
                ran = ask(client, keys[0], "voice-0")
                weights = [f"{name}={weight:g}" for name, weight in SPLIT.items()]
                command("adapters", "alias", "support", *weights, "--shared", *at)
                count = timed(
                    f"{requests} requests to an alias",
                    lambda: Counter(ask(client, keys[n % len(keys)], "support") for n in range(requests)),
                )
                for path in ("v1/tenants", "v1/adapters?tenant=*", "v1/usage?group_by=tenant", "v1/models"):
                    timed(f"GET /{path}", lambda path=path: get(client, key, path))  # type: ignore[misc]
        share = count["voice-0@2"] / requests
        print(f"after the rollback voice-0 is {ran}; the split is {dict(count)}")
        wrong = [
            text
            for text, right in (
                ("each tenant has a key", len(keys) == tenants),
                ("every adapter was pushed", len(pushed.splitlines()) == adapters),
                ("the rollback serves the first version", ran == "voice-0@1"),
                ("the split is 95 to 5", set(count) <= set(SPLIT) and 0.01 < share < 0.12),
            )
            if not right
        ]
        for text in wrong:
            print(f"NOT SO: {text}")
        raise SystemExit(bool(wrong))


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write an adapter's files."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def ask(client: httpx.Client, key: str, model: str) -> str:
    """The exact version that answers."""
    body = {"model": model, "prompt": "a", "max_tokens": 1}
    answer = client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    return answer.raise_for_status().headers["x-personae-adapter"]


def get(client: httpx.Client, key: str, path: str) -> None:
    """Ask for a list as the console does."""
    client.get(f"/{path}", headers={"authorization": f"Bearer {key}"}).raise_for_status()


if __name__ == "__main__":
    typer.run(main)
