"""TLS by files: the server's certificate and its key, which can be read again while it serves."""

import ssl
from pathlib import Path

from personae.errors import LoadError


class Certificate:
    """A certificate and its key, in PEM. `context` is what connections are made with: TLS 1.2 or later.

    Raises LoadError, naming the option, if a file cannot be used.
    """

    def __init__(self, certfile: Path, keyfile: Path | None = None) -> None:
        self._certfile = certfile
        self._keyfile = keyfile
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self._load_into(self.context)

    def reload(self) -> None:
        """Read the files again, for connections that are made from now on. Raises LoadError, and then the
        earlier certificate stays."""
        self._load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        self._load_into(self.context)

    def _load_into(self, context: ssl.SSLContext) -> None:
        for option, path in (("--ssl-certfile", self._certfile), ("--ssl-keyfile", self._keyfile)):
            try:
                if path is not None:
                    path.read_bytes()
            except OSError as error:
                raise LoadError(f"{option} {path} cannot be read: {error.strerror}.") from None
        try:
            context.load_cert_chain(self._certfile, self._keyfile, _no_passphrase)
        except _Encrypted:
            raise LoadError(f"The key in {self._key} has a passphrase; give a key without one.") from None
        except ssl.SSLError as error:
            raise LoadError(self._wrong(error)) from None

    @property
    def _key(self) -> Path:
        return self._keyfile or self._certfile

    def _wrong(self, error: ssl.SSLError) -> str:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"The key in {self._key} is not that of the certificate in {self._certfile}."
        text = self._certfile.read_text(encoding="utf-8", errors="replace")
        if "-----BEGIN CERTIFICATE-----" not in text:
            return f"--ssl-certfile {self._certfile} has no certificate in PEM."
        if "PRIVATE KEY-----" not in self._key.read_text(encoding="utf-8", errors="replace"):
            missing = "" if self._keyfile else " Give the key's file as --ssl-keyfile."
            return f"{self._key} has no private key in PEM.{missing}"
        reason = (error.reason or str(error)).replace("_", " ").lower()
        return f"{self._certfile} and {self._key} cannot be used: {reason}."


class _Encrypted(Exception):
    """The key asks for a passphrase."""


def _no_passphrase() -> str:
    raise _Encrypted
