"""The secret that names the pages of a server without a data directory. It is kept where the pages are."""

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from anyio import move_on_after, to_thread

from personae.engine.object_stores import open_store, reason

SECRET_BYTES = 32
STORE_SECONDS = 10.0
_NAME = "secret"

_log = logging.getLogger("personae.kv")


async def kept_secret(folder: Path | None, url: str | None) -> tuple[bytes | None, bool]:
    """The secret in the store at `url`, which servers share, or else in `folder`; None, with a warning, if
    neither can keep one. Says also whether the store keeps it."""
    if url is not None:
        with move_on_after(STORE_SECONDS):
            secret = await to_thread.run_sync(_in_store, url, abandon_on_cancel=True)
            if secret is not None:
                return secret, True
        _log.warning("--kv-remote has no secret for the names of pages; it is not used until the next start.")
    if folder is not None:
        return await to_thread.run_sync(_in_folder, folder), False
    return None, False


def _in_store(url: str) -> bytes | None:
    """The secret in an object store. The first server makes it."""
    import obstore

    try:
        store = open_store(url, retries=1)
        for _ in range(2):
            try:
                secret = bytes(obstore.get_range(store, _NAME, start=0, end=SECRET_BYTES + 1))
                break
            except FileNotFoundError:
                with suppress(FileExistsError, obstore.exceptions.AlreadyExistsError):  # another was first
                    obstore.put(store, _NAME, secrets.token_bytes(SECRET_BYTES), mode="create")
        else:
            return None
    except Exception as error:  # whatever the driver raises
        _log.warning("--kv-remote cannot be read: %s", reason(error))
        return None
    return secret if len(secret) == SECRET_BYTES else None


def _in_folder(folder: Path) -> bytes | None:
    """The secret in a folder. None, with a warning, if it cannot keep one: the pages are then not found
    again."""
    path = folder / _NAME
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            draft = path.with_name(f"secret.{secrets.token_hex(8)}")
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(file, secrets.token_bytes(SECRET_BYTES))
                with suppress(FileExistsError):  # another server was first
                    os.link(draft, path)  # so nobody sees it half written
            finally:
                os.close(file)
                draft.unlink()
        secret = path.read_bytes()
    except OSError as error:
        _log.warning("--kv-disk has no secret, so pages are not found after a restart: %s", error)
        return None
    if len(secret) != SECRET_BYTES:
        _log.warning("%s is damaged, so the pages of --kv-disk are not found after a restart.", path)
        return None
    return secret
