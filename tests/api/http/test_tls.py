"""TLS by files: what clients see of the certificate, and what operators read when a file is wrong."""

import datetime
import re
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fake_engine import FakeEngine
from live_server import serving
from patience import PATIENCE, eventually
from programs import ROOT, Program

from personae.api.app import create_app
from personae.api.http.tls import Certificate
from personae.api.settings import ApiSettings
from personae.errors import LoadError

PROGRAM = """
import sys, types
from contextlib import asynccontextmanager
from fake_engine import FakeEngine
from personae.api.opened import Opened
from personae.engine.generation_config import GenerationDefaults

@asynccontextmanager
async def open_engine(options, on_progress, **kept):
    yield Opened(FakeEngine(), GenerationDefaults(), 4)

sys.modules["personae.api.local"] = types.SimpleNamespace(open_engine=open_engine)
from personae.api.cli import main
main()
"""


def write(folder: Path, name: str, passphrase: bytes | None = None) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that `name` is the subject of, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    certfile, keyfile = folder / f"{name}.pem", folder / f"{name}.key"
    certfile.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    hidden = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    keyfile.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)
    )
    return certfile, keyfile


def trusting(certfile: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certfile)


def subject_at(port: int) -> str:
    """The subject of the certificate that is shown."""
    shown = ssl.get_server_certificate(("127.0.0.1", port), timeout=PATIENCE)
    (found,) = x509.load_pem_x509_certificate(shown.encode()).subject
    return str(found.value)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write(tmp_path_factory.mktemp("tls"), "first")


@pytest.fixture(scope="module")
def port(files: tuple[Path, Path]) -> Iterator[int]:
    hasty = ApiSettings(header_seconds=0.5)
    with serving(create_app(FakeEngine(), hasty), hasty, certificate=Certificate(*files)) as address:
        yield int(address.rpartition(":")[2])


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_that_trusts_the_certificate_is_answered_and_streamed_to(
    version: ssl.TLSVersion, port: int, files: tuple[Path, Path]
) -> None:
    context = trusting(files[0])
    context.minimum_version = context.maximum_version = version
    with httpx.Client(base_url=f"https://localhost:{port}", verify=context, timeout=PATIENCE) as client:
        body = {"model": "base", "prompt": "hi"}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "Hello, world!"
        streamed = client.post("/v1/completions", json={**body, "stream": True}).text
        assert streamed.endswith("data: [DONE]\n\n")


def test_a_client_that_still_sends_gets_the_answer_that_closes_its_connection(
    port: int, files: tuple[Path, Path]
) -> None:
    body = b" " * (ApiSettings().max_body_bytes + 2**22)
    for _ in range(3):
        url = f"https://localhost:{port}/v1/completions"
        assert httpx.post(url, content=body, verify=trusting(files[0]), timeout=PATIENCE).status_code == 413


def test_a_client_that_leaves_behind_a_request_that_waits_ends_the_one_that_runs(
    files: tuple[Path, Path],
) -> None:
    engine = FakeEngine(hold_after=1)
    body = b'{"model": "base", "prompt": "hi"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    with serving(create_app(engine), certificate=Certificate(*files)) as address:
        place = "localhost", int(address.rpartition(":")[2])
        with (
            socket.create_connection(place, timeout=PATIENCE) as plain,
            trusting(files[0]).wrap_socket(plain, server_hostname="localhost") as connected,
        ):
            connected.sendall(request)
            eventually(lambda: bool(engine.live), "it is being answered")
            connected.sendall(request)
        assert engine.left.wait(PATIENCE)


def test_a_client_that_does_not_trust_it_or_speaks_no_tls_gets_nothing_and_others_are_served(
    port: int, files: tuple[Path, Path]
) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://localhost:{port}/health", timeout=PATIENCE)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://localhost:{port}/health", timeout=PATIENCE)
    assert httpx.get(f"https://localhost:{port}/health", verify=trusting(files[0])).status_code == 200


def test_a_handshake_that_does_not_go_on_is_ended(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as silent:
        assert silent.recv(100) == b""


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda cert, key, other: (cert.with_name("none"), key),
            r"--ssl-certfile \S+none cannot be read: No such",
        ),
        (
            lambda cert, key, other: (cert, key.with_name("none")),
            r"--ssl-keyfile \S+none cannot be read: No such",
        ),
        (lambda cert, key, other: (cert.parent, key), r"--ssl-certfile \S+ cannot be read: Is a directory\."),
        (lambda cert, key, other: (key, key), r"--ssl-certfile \S+ has no certificate in PEM\."),
        (lambda cert, key, other: (cert, cert), r"\S+ has no private key in PEM\."),
        (
            lambda cert, key, other: (cert, None),
            r"no private key in PEM\. Give the key's file as --ssl-keyfile\.",
        ),
        (
            lambda cert, key, other: (cert, other[1]),
            r"The key in \S+ is not that of the certificate in \S+\.",
        ),
        (
            lambda cert, key, other: (cert, write(cert.parent, "hidden", b"secret")[1]),
            r"The key in \S+ has a passphrase; give a key without one\.",
        ),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence_that_names_it(
    spoil: Callable[..., tuple[Path, Path | None]], said: str, tmp_path: Path
) -> None:
    paths = spoil(*write(tmp_path, "first"), write(tmp_path, "second"))
    with pytest.raises(LoadError, match=said):
        Certificate(*paths)


def test_one_file_may_have_the_certificate_and_the_key(tmp_path: Path) -> None:
    certfile, keyfile = write(tmp_path, "first")
    certfile.write_bytes(certfile.read_bytes() + keyfile.read_bytes())
    assert Certificate(certfile).context.cert_store_stats()["x509"] == 0


def test_the_command_serves_over_tls_and_sighup_reads_the_certificate_again(tmp_path: Path) -> None:
    certfile, keyfile = write(tmp_path, "first")
    options = ("--port", "0", "--ssl-certfile", str(certfile), "--ssl-keyfile", str(keyfile))
    with Program("-c", PROGRAM, "serve", *options, paths=(ROOT / "tests" / "support",)) as program:
        ready = re.match(r"personae ready https://127\.0\.0\.1:(\d+) ", program.line())
        assert ready
        port = int(ready[1])
        assert subject_at(port) == "first"
        for source, target in zip(write(tmp_path, "second"), (certfile, keyfile), strict=True):
            target.write_bytes(source.read_bytes())
        program.process.send_signal(signal.SIGHUP)
        eventually(lambda: subject_at(port) == "second", "the new certificate is shown")
        keyfile.write_text("nothing")
        program.process.send_signal(signal.SIGHUP)
        eventually(lambda: "the earlier certificate stays" in program.errors, "the log says so")
        assert subject_at(port) == "second"
        program.process.send_signal(signal.SIGTERM)
        program.end(0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ssl-keyfile", "key.pem"), "error: --ssl-keyfile needs --ssl-certfile."),
        (
            ("--ssl-certfile", "none.pem"),
            "error: --ssl-certfile none.pem cannot be read: No such file or directory.",
        ),
    ],
)
def test_the_command_refuses_before_anything_loads(options: tuple[str, ...], said: str) -> None:
    with Program(
        "-c", PROGRAM, "serve", "--port", "0", *options, paths=(ROOT / "tests" / "support",)
    ) as program:
        assert program.end(2) == ""
        assert program.errors.strip().splitlines() == [said]
