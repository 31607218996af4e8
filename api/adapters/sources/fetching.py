"""The process that fetches one adapter for a server.

    python -m personae.api.adapters.sources.fetching

is started by `fetch.py` with a `FetchJob` on its stdin, and prints `Fetched` or `FetchFailed`. The kernel
lets it write no file that is larger than the adapter's tensors may be, and ends it when its time is over,
even if the server has gone.
"""

import errno
import logging
import os
import resource
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from personae.api.adapters.sources.fetch import FailureKind, Fetched, FetchFailed, FetchJob
from personae.api.adapters.sources.url import FILE, HUB, MLFLOW, MODELS, WANDB, SourceUrl
from personae.api.adapters.upload import copy_folder
from personae.api.http.upload import sync_folder
from personae.api.object_store import RETRIES
from personae.api.storage import storage_failure
from personae.engine.object_stores import open_store
from personae.errors import PayloadTooLarge, RequestError
from personae.kernels.sizes import size_text
from personae.lora.disk import check_free
from personae.lora.peft_config import MAX_CONFIG
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE

_PICKLES = (".bin", ".pt", ".pth")
_GRACE_SECONDS = 5.0
_HUB_SECONDS = 10.0  # without an answer
_WANDB_SECONDS = 10  # without an answer
_WANDB_FOLDERS = ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_DIR")


class _Failure(Exception):
    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message = message


def main() -> None:
    """Fetch what stdin asks for."""
    out = os.dup(1)
    os.dup2(2, 1)  # a library may print
    logging.disable(logging.WARNING)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=FetchJob)
    signal.setitimer(signal.ITIMER_REAL, job.seconds + _GRACE_SECONDS)  # SIGALRM ends the process
    bound_files(max(job.max_tensor_bytes, MAX_CONFIG))
    with os.fdopen(out, "wb") as answer:
        answer.write(msgspec.json.encode(fetched(job)))


def bound_files(most: int) -> None:
    """Let this process write no file of more bytes. A write beyond that raises OSError."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def fetched(job: FetchJob) -> Fetched | FetchFailed:
    """The exact source, once the files are in the job's folder, or why they are not."""
    source = job.source
    try:
        if source.scheme == HUB:
            return Fetched(_from_hub(job))
        if source.scheme == WANDB:
            return Fetched(_from_wandb(job))
        if source.scheme == MLFLOW:
            return Fetched(_from_mlflow(job))
        if source.scheme == FILE:
            _from_folder(job)
        else:
            _from_store(job)
        return Fetched(str(source))
    except _Failure as failure:
        return FetchFailed(failure.kind, failure.message)
    except OSError as error:
        if error.errno == errno.EFBIG:
            return FetchFailed("too_large", _too_large(source, job.max_tensor_bytes))
        if (failed := storage_failure(error)) is not None:
            return FetchFailed("disk", failed.message)
        return FetchFailed("failed", f"`{source}` could not be fetched: {_first_line(error)}.")


def _from_hub(job: FetchJob) -> str:
    """Fetch from the Hub. Returns the source with its commit."""
    import httpx
    from huggingface_hub import HfApi, constants, errors, hf_hub_download

    source, hub = job.source, constants.ENDPOINT
    try:
        info = HfApi().model_info(
            source.repository, revision=source.revision, files_metadata=True, timeout=_HUB_SECONDS
        )
        found = SourceUrl(HUB, (*info.id.split("/"), *source.parts[2:]), info.sha)
        if found.parts[: len(job.prefix.parts)] != job.prefix.parts:
            raise _Failure(
                "forbidden",
                f"{source.repository} has moved to {info.id}, which is not below one of the server's "
                "--adapter-source prefixes.",
            )
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
        folder = "/".join(found.folders)
        _check_files(source, [file for file in sizes if file.rpartition("/")[0] == folder])
        download = Path(job.folder) / "download"
        for name, limit in _limits(job):
            path = f"{folder}/{name}" if folder else name
            _check_size(source, name, sizes[path] or 0, limit)
            check_free(Path(job.folder), sizes[path] or 0)
            hf_hub_download(info.id, path, revision=info.sha, local_dir=download)
            _take(source, download / path, Path(job.folder) / name, limit)
        shutil.rmtree(download)
        sync_folder(Path(job.folder))
        return str(found)
    except errors.GatedRepoError:
        why = f"{source.repository} is gated: the server's operator must ask for access at {hub}."
        raise _Failure("forbidden", why) from None
    except errors.RevisionNotFoundError:
        why = f"{source.repository} has no branch, tag or commit '{source.revision}'."
        raise _Failure("not_found", why) from None
    except errors.RepositoryNotFoundError:
        why = f"There is no repository {source.repository} at {hub}, or the server may not read it."
        raise _Failure("not_found", why) from None
    except errors.OfflineModeIsEnabled:
        raise _Failure("failed", "The server does not reach the Hub: HF_HUB_OFFLINE is set.") from None
    except (httpx.HTTPError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            raise _Failure("failed", f"{hub} refused {source.repository} with status {status}.") from None
        raise _Failure("failed", f"The Hub at {hub} does not answer, or broke off.") from None


def _from_wandb(job: FetchJob) -> str:
    """Fetch an artifact of Weights & Biases. Returns the source with its version."""
    import wandb
    from wandb.errors import AuthenticationError, UsageError
    from wandb.errors import Error as WandbError

    source, folder = job.source, Path(job.folder)
    download = folder / "download"
    os.environ.update(dict.fromkeys(_WANDB_FOLDERS, str(download / "wandb")))
    try:
        asked = f"{source.repository}:{source.revision or 'latest'}"
        artifact = wandb.Api(timeout=_WANDB_SECONDS).artifact(asked)
        entries = artifact.manifest.entries
        inner = "/".join(source.folders)
        _check_files(source, [path for path in entries if path.rpartition("/")[0] == inner])
        for name, limit in _limits(job):
            path = f"{inner}/{name}" if inner else name
            entry = entries[path]
            if entry.ref is not None:  # to any place, this machine's disk among them
                why = f"`{name}` of `{source}` is a reference to another place, which is not followed."
                raise _Failure("forbidden", why)
            _check_size(source, name, entry.size or 0, limit)
            check_free(folder, entry.size or 0)
            entry.download(root=str(download), skip_cache=True)
            _take(source, download / path, folder / name, limit)
        shutil.rmtree(download)
        sync_folder(folder)
        return str(SourceUrl(WANDB, source.parts, artifact.version))
    except (AuthenticationError, UsageError) as error:
        why = f"Weights & Biases does not accept the server's WANDB_API_KEY: {_first_line(error)}."
        raise _Failure("failed", why) from None
    except (ValueError, WandbError) as error:
        if "not found" in str(error):
            why = f"There is no artifact `{source}`, or the server may not read it."
            raise _Failure("not_found", why) from None
        raise _Failure("failed", f"Weights & Biases failed: {_first_line(error)}.") from None


def _from_mlflow(job: FetchJob) -> str:
    """Fetch from an MLflow server. Returns the source with the version of its model."""
    import mlflow
    from mlflow.exceptions import MlflowException

    source, folder = job.source, Path(job.folder)
    download = folder / "download"
    download.mkdir()
    kind, name, *_ = source.parts
    version = None
    try:
        if kind == MODELS:
            client = mlflow.MlflowClient()
            version = source.revision or ""
            if not version.isdecimal():
                version = str(client.get_model_version_by_alias(name, version).version)
            root = client.get_model_version_download_uri(name, version)
        else:
            root = f"runs:/{name}"
        place = "/".join((root.rstrip("/"), *source.folders))
        listed = mlflow.artifacts.list_artifacts(artifact_uri=place)
        sizes = {file.path.rpartition("/")[2]: file.file_size or 0 for file in listed if not file.is_dir}
        _check_files(source, list(sizes))
        for file, limit in _limits(job):
            _check_size(source, file, sizes[file], limit)
            check_free(folder, sizes[file])
            fetched_file = mlflow.artifacts.download_artifacts(
                artifact_uri=f"{place}/{file}", dst_path=str(download)
            )
            _take(source, Path(fetched_file), folder / file, limit)
        shutil.rmtree(download)
        sync_folder(folder)
        return str(SourceUrl(MLFLOW, source.parts, version))
    except MlflowException as error:
        said = _first_line(error).partition(" with exception ")[0]
        if error.error_code == "RESOURCE_DOES_NOT_EXIST" or "not found" in said:
            why = f"MLflow has no `{source}`: {said}."
            raise _Failure("not_found", why) from None
        if error.error_code in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
            raise _Failure("forbidden", f"The server may not read `{source}`.") from None
        raise _Failure("failed", f"MLflow failed: {said[:300]}.") from None


def _from_store(job: FetchJob) -> None:
    """Fetch from an object store."""
    import obstore
    from obstore import exceptions

    source, folder = job.source, Path(job.folder)
    try:
        store = open_store(f"{source.scheme}://{source.parts[0]}", RETRIES)
        for name, limit in _limits(job):
            _download(obstore, store, source, name, folder / name, limit)
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError):
        raise _Failure("forbidden", f"The server may not read `{source}`.") from None
    except exceptions.BaseError as error:
        raise _Failure("failed", f"The object store of `{source}` failed: {_first_line(error)}.") from None
    sync_folder(folder)


def _download(api: Any, store: Any, source: SourceUrl, name: str, path: Path, limit: int) -> None:
    try:
        found = api.get(store, "/".join((*source.parts[1:], name)))
    except FileNotFoundError:
        _lacks(source, name)
    _check_size(source, name, found.meta["size"], limit)
    check_free(path.parent, found.meta["size"])
    with path.open("xb") as file:
        for piece in found.stream():
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    _check_size(source, name, path.stat().st_size, limit)


def _from_folder(job: FetchJob) -> None:
    """Copy from a folder of this machine, with links followed to where it really is."""
    source, root = job.source, Path("/", *job.prefix.parts).resolve()
    folder = Path("/", *source.parts).resolve()
    if root != folder and root not in folder.parents:
        raise _Failure("forbidden", f"`{source}` is not below one of the server's --adapter-source prefixes.")
    try:
        copy_folder(folder, Path(job.folder), job.max_tensor_bytes, param="source")
    except FileNotFoundError as error:
        _lacks(source, Path(error.filename or folder).name)
    except PermissionError:
        raise _Failure("forbidden", f"The server may not read `{source}`.") from None
    except PayloadTooLarge as error:
        raise _Failure("too_large", error.message) from None
    except RequestError as error:
        raise _Failure("invalid", error.message) from None


def _limits(job: FetchJob) -> tuple[tuple[str, int], ...]:
    return (CONFIG_FILE, MAX_CONFIG), (TENSORS_FILE, job.max_tensor_bytes)


def _take(source: SourceUrl, downloaded: Path, path: Path, limit: int) -> None:
    """Move a downloaded file to its place, flushed."""
    _check_size(source, path.name, downloaded.stat().st_size, limit)
    with downloaded.open("rb") as file:
        os.fsync(file.fileno())
    downloaded.rename(path)


def _check_files(source: SourceUrl, files: Sequence[str]) -> None:
    names = {file.rpartition("/")[2] for file in files}
    for name in (CONFIG_FILE, TENSORS_FILE):
        if name not in names:
            _lacks(source, name, pickled=any(file.endswith(_PICKLES) for file in names))


def _lacks(source: SourceUrl, name: str, *, pickled: bool = False) -> NoReturn:
    hint = " Its weights are pickles, and reading a pickle can run code." if pickled else ""
    raise _Failure("not_found", f"`{source}` has no {name}.{hint}")


def _check_size(source: SourceUrl, name: str, size: int, limit: int) -> None:
    if size > limit:
        raise _Failure("too_large", f"`{name}` of `{source}` has more than {size_text(limit)}.")


def _too_large(source: SourceUrl, limit: int) -> str:
    return f"A file of `{source}` has more than {size_text(limit)}."


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


if __name__ == "__main__":
    main()
