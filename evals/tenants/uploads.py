"""Thousands of corrupted uploads to a real server: each must get a 4xx with a reason and leave nothing
behind.

    python -m personae.evals.tenants.uploads --count 10000

Serves the bundled model with its own data directory and sends uploads that are corrupted in the ways of
`corruption.py`. Checks each answer, and the disk after every hundred. At the end the server must still be the
same process, and must accept and serve a valid upload. Exit code 1 if anything was wrong. Each upload has a
number, from which it can be made again with the seed.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import httpx
import typer

from personae.api.bundled import DEMO, NAMED
from personae.engine.config_file import read_config
from personae.evals.served import Served, exit_on_sigterm
from personae.evals.tenants.corruption import SPOILERS, Upload, is_whole, whole

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


class UploadStress:
    """One run against one server. `wrong` lists the errors."""

    def __init__(self, client: httpx.Client, data: Path, seed: int) -> None:
        self.client = client
        self.data = data
        self.seed = seed
        site = read_config(DEMO / "model").lora_sites["q"]
        self.good = whole(site.inputs, site.outputs)
        self.wrong: list[str] = []
        self.statuses: Counter[int] = Counter()

    def corrupted(self, number: int) -> tuple[str, Upload]:
        """The upload with that number, and how it is corrupted."""
        names = list(SPOILERS)
        how = names[number % len(names)]
        return how, SPOILERS[how](random.Random(f"{self.seed}/{number}"), self.good)

    def send(self, upload: Upload) -> httpx.Response:
        """Send it as any client would."""
        files = {
            name: ("x", content, "application/octet-stream")
            for name, content in ((CONFIG, upload.config), (TENSORS, upload.tensors))
        }
        return self.client.post("/v1/adapters", data={"name": upload.name, **upload.fields}, files=files)

    def attack(self, number: int) -> None:
        """Send one and check the answer."""
        how, upload = self.corrupted(number)
        where = f"{number} ({how})"
        try:
            response = self.send(upload)
        except httpx.HTTPError as error:
            self.wrong.append(f"{where}: no answer: {error!r}")
            return
        self.statuses[response.status_code] += 1
        if response.status_code == 201:
            if not (upload.judged and is_whole(upload, self.good)):
                self.wrong.append(f"{where}: accepted")
            self.client.delete("/v1/adapters/x")
            return
        reason = response.json().get("error", {}).get("message")
        if not 400 <= response.status_code < 500 or not reason:
            self.wrong.append(f"{where}: {response.status_code} {response.text[:200]}")
        if str(self.data) in response.text:
            self.wrong.append(f"{where}: tells a path of the server: {response.text[:200]}")

    def look_around(self, number: int) -> None:
        """Nothing may be left on disk or registered, and the server must be healthy."""
        adapters = self.data / "adapters"
        for _ in range(50):  # rejected files are deleted in parallel with the answers
            left = [path.name for path in adapters.iterdir() if path.name != "staging"]
            left += [path.name for path in (adapters / "staging").iterdir()]
            if not left:
                break
            time.sleep(0.1)
        else:
            self.wrong.append(f"by {number}: files are left: {left[:5]}")
        if self.client.get("/v1/adapters").json()["data"]:
            self.wrong.append(f"by {number}: an adapter is registered")
        if self.client.get("/ready").status_code != 200:
            self.wrong.append(f"by {number}: the server is not ready")

    def end_well(self) -> None:
        """A valid upload is accepted, answers requests, and is deleted."""
        created = self.send(self.good)
        answer = self.client.post("/v1/completions", json={"model": "x", "prompt": "Hello", "max_tokens": 4})
        removed = self.client.delete("/v1/adapters/x")
        codes = [response.status_code for response in (created, answer, removed)]
        if codes != [201, 200, 200]:
            self.wrong.append(f"a good upload in the end: {codes}")
        restarts = next(
            line
            for line in self.client.get("/metrics").text.splitlines()
            if line.startswith("personae:engine_restarts_total")
        )
        if float(restarts.split()[-1]):
            self.wrong.append(restarts)


def main(
    count: Annotated[int, typer.Option(help="How many uploads.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of what is corrupted, and how.")] = 0,
    first: Annotated[int, typer.Option(help="The number of the first, to repeat some.")] = 0,
) -> None:
    """Besiege a server."""
    with exit_on_sigterm(), tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        with (
            Served([str(NAMED), "--data-dir", str(data)], Path(folder) / "log") as served,
            httpx.Client(base_url=served.url, timeout=60) as client,
        ):
            stress = UploadStress(client, data, seed)
            begun = time.monotonic()
            for number in range(first, first + count):
                stress.attack(number)
                if number % 100 == 99 or number == first + count - 1:
                    stress.look_around(number)
                if number % 1000 == 999:
                    print(number + 1, dict(stress.statuses), f"{len(stress.wrong)} wrong", flush=True)
            stress.end_well()
            seconds = time.monotonic() - begun
    print(f"{count} uploads in {seconds:.0f} s: {dict(sorted(stress.statuses.items()))}")
    for line in stress.wrong[:50]:
        print("WRONG", line)
    sys.exit(bool(stress.wrong))


if __name__ == "__main__":
    typer.run(main)
