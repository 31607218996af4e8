"""A real S3 API on this machine: moto in a process of its own."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from programs import Program

BUCKET = "personae"


class S3Server:
    """The API at `url`, with a bucket `personae`. `environment` has what a client needs."""

    def __init__(self, url: str, key: str, secret: str) -> None:
        self.url = url
        self.secret = secret
        self.environment = {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "eu-west-1",
        }

    def fail(self, status: int, times: int = 10**9) -> None:
        """Let the next answers have this status."""
        self._control("fault", {"status": status, "times": times})

    def heal(self) -> None:
        """Answer again."""
        self.fail(503, 0)

    def revoke(self) -> None:
        """Revoke the key for good."""
        self._control("revoke", {})

    def read(self, path: str) -> bytes:
        """The content of an object."""
        return bytes(self._api().get(self._store(), path).bytes())

    def write(self, path: str, content: bytes) -> None:
        """Replace the content of an object."""
        self._api().put(self._store(), path, content)

    def delete(self, path: str) -> None:
        self._api().delete(self._store(), path)

    def list(self) -> set[str]:
        """The paths of all objects."""
        return {each["path"] for page in self._api().list(self._store()) for each in page}

    def _api(self) -> Any:
        import obstore

        return obstore

    def _store(self) -> Any:
        from obstore.store import S3Store

        names = {name.lower(): value for name, value in self.environment.items()}
        return S3Store(BUCKET, config=names, client_options={"allow_http": True})

    def _control(self, what: str, body: dict[str, Any]) -> None:
        assert httpx.post(f"{self.url}/-/{what}", json=body, timeout=60).status_code == 204


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A running server. Skips the test where moto or obstore is not installed."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install obstore")
    if find_spec("moto") is None or find_spec("flask_cors") is None:
        pytest.skip("moto is not installed: pip install 'moto[s3]' flask flask-cors")
    with Program(str(Path(__file__).with_name("s3_program.py"))) as program:
        yield S3Server(**json.loads(program.line()))
        program.process.kill()
