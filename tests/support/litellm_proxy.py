"""LiteLLM's proxy in a process of its own, in front of a server."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from patience import eventually

KEY = "sk-of-the-tests"


@contextmanager
def proxying(binaries: Path, address: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Run the proxy while the block runs. Yields its address with `/v1`, and its key. `binaries` is the
    folder of `litellm`."""
    (folder / "proxy.yaml").write_text(
        "model_list:\n"
        "  - model_name: base\n"
        f"    litellm_params: {{model: hosted_vllm/base, api_base: '{address}', api_key: none}}\n"
    )
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (folder / "proxy.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(str(binaries / "litellm"), "--config", str(folder / "proxy.yaml")),
                *("--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
        )
    try:
        eventually(lambda: process.poll() is not None or alive(url), "the proxy starts")
        assert process.poll() is None, (folder / "proxy.log").read_text()
        yield f"{url}/v1", KEY
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def alive(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/liveliness", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    """A free port. The proxy takes only a number, not a socket or 0."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
