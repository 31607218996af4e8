"""A server of S3's API (moto) with the bucket `personae`. It checks signatures. Run by `s3.py`.

The first line that it prints is JSON: its URL, and a key that may do all. `POST /-/fault` with a status
and a count makes the next answers fail. `POST /-/revoke` revokes the key.
"""

import json
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

from moto import settings
from moto.iam import iam_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.s3 import s3_backends
from werkzeug.serving import make_server

ACCOUNT, REGION, BUCKET, USER = "123456789012", "eu-west-1", "personae", "server"
ALLOWED = {"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}}
SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
)


class Faulty:
    """The app, some of whose answers fail."""

    def __init__(self, app: Callable[..., Iterable[bytes]], key: str) -> None:
        self._app = app
        self._key = key
        self._lock = Lock()
        self._status, self._left = 503, 0

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Serve one request."""
        if environ["PATH_INFO"].startswith("/-/"):
            body = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            self._control(environ["PATH_INFO"], body)
            start("204 No Content", [])
            return []
        with self._lock:
            fails = self._left > 0
            self._left -= fails
        if not fails:
            return self._app(environ, start)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(f"{self._status} Fault", [("Content-Type", "application/xml")])
        return [SLOW_DOWN]

    def _control(self, path: str, body: dict[str, Any]) -> None:
        if path == "/-/fault":
            with self._lock:
                self._status, self._left = body["status"], body["times"]
        else:
            iam_backends[ACCOUNT]["aws"].delete_access_key(self._key, USER)


def main() -> None:
    """Serve until the process is ended."""
    iam = iam_backends[ACCOUNT]["aws"]
    iam.create_user(REGION, USER)
    iam.put_user_policy(USER, "everything", json.dumps(ALLOWED))
    key = iam.create_access_key(USER)
    s3_backends[ACCOUNT]["aws"].create_bucket(BUCKET, REGION)
    settings.INITIAL_NO_AUTH_ACTION_COUNT = 0  # check every request
    app = Faulty(DomainDispatcherApplication(create_backend_app), key.access_key_id)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    found = {
        "url": f"http://127.0.0.1:{server.server_port}",
        "key": key.access_key_id,
        "secret": key.secret_access_key,
    }
    print(json.dumps(found), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
