"""Sockets between machines: their settings, and identities. Each process has a key and a certificate of its
own.

They are made at the start, and keys never leave their process; only certificates are sent. Each side trusts
exactly the certificates that it was given.

The engines of a server that give pages to one another have one more identity, which is the same for all of
them; so have the ranks of an engine. It is made for them and sent to each, key and all, over the sockets
above or by Ray.
"""

import socket
import ssl
from datetime import UTC, datetime, timedelta

import msgspec

from personae.errors import LoadError
from personae.kernels.memory_file import memory_file

FRONTEND = "frontend.personae"  # the name in the frontend's certificate
ENGINE = "engine.personae"
_SKEW = timedelta(days=1)  # the machines' clocks may differ
_VALIDITY = timedelta(days=3650)


class TlsIdentity(msgspec.Struct, frozen=True):
    """A certificate, and its key, which only the owner has; both in PEM."""

    certificate: str
    key: str


def new_identity(name: str) -> TlsIdentity:
    """Make a key with a self-signed certificate. Raises LoadError if `cryptography` is not installed."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError:
        raise LoadError("Engines on other machines need TLS: pip install cryptography.") from None
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _VALIDITY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return TlsIdentity(certificate.public_bytes(pem).decode(), private.decode())


def server_context(identity: TlsIdentity) -> ssl.SSLContext:
    """Make the frontend's context. It trusts no certificate until `trust` is called."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_identity(context, identity)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def trust(context: ssl.SSLContext, certificate: str) -> None:
    """Accept connections from the owner of this certificate's key. Raises LoadError if it is not a
    certificate."""
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError) as error:
        raise LoadError(f"A node sent an invalid certificate: {error}") from None


def client_context(identity: TlsIdentity, frontend: str) -> ssl.SSLContext:
    """Make an engine's context, which trusts only the frontend's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_identity(context, identity)
    trust(context, frontend)
    return context


def tune(connection: socket.socket) -> None:
    """Send data at once, and detect a dead machine within half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if (option := getattr(socket, name, None)) is not None:  # Linux has these options
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _load_identity(context: ssl.SSLContext, identity: TlsIdentity) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with memory_file(f"{identity.key}{identity.certificate}".encode()) as path:  # ssl reads files only
        context.load_cert_chain(path)
