"""Downloads a repository's files into the cache of `huggingface_hub`, and explains failures in one sentence.

The cache is that of transformers and `hf download` (`HF_HOME`, `HF_HUB_CACHE`). A token comes from `hf auth
login` or `HF_TOKEN`, the address of the Hub from `HF_ENDPOINT`.
"""

import io
import logging
import sys
from collections.abc import Callable, Sequence
from glob import escape
from pathlib import Path
from time import monotonic
from typing import Any

from personae.api.hub.files import CONFIGS
from personae.api.hub.names import HubName
from personae.errors import LoadError

logger = logging.getLogger(__name__)

Choose = Callable[[HubName, Sequence[str]], list[str]]

_SECONDS_BETWEEN_LINES = 10.0


def fetched(name: HubName, choose: Choose) -> tuple[Path, list[str]]:
    """The folder with the chosen files of a repository, and their names. The files are downloaded unless they
    are cached.

    Blocks as long as that takes. Raises LoadError.
    """
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return _fetched(name, choose)
    except LoadError:
        raise
    except HfHubHTTPError as error:
        raise LoadError(_refusal(name, error)) from error
    except Exception as error:  # the library has no narrower base class for errors of a network or a disk
        raise LoadError(_failure(name, error)) from error


def _fetched(name: HubName, choose: Choose) -> tuple[Path, list[str]]:
    from huggingface_hub import constants, resolve_revision, snapshot_download

    if constants.HF_HUB_OFFLINE:
        logger.info("HF_HUB_OFFLINE is set: %s is taken from %s", name, constants.HF_HUB_CACHE)
    revision = resolve_revision(name.repo, revision=name.revision)
    chosen = choose(name, _listing(name, revision))
    bar = None if sys.stderr.isatty() else _lines(name)
    folder = snapshot_download(
        name.repo, revision=revision, allow_patterns=[escape(file) for file in chosen], tqdm_class=bar
    )
    missing = [file for file in chosen if not (Path(folder) / file).is_file()]
    if missing:
        raise LoadError(f"{name}: {missing[0]} is not in the cache, and the Hub does not give it.")
    logger.info("%s is at commit %s", name.repo, getattr(revision, "resolved", revision))
    return Path(folder), chosen


def _listing(name: HubName, revision: str) -> list[str]:
    """The paths of all files of a repository at a commit."""
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    folder = ""
    for _ in range(2):
        try:
            return [file.path for file in get_cached_repo_tree(name.repo, revision=revision)]
        except CachedRepoTreeNotFoundError:
            # Requesting a small file also brings the list of all files.
            folder = folder or snapshot_download(
                name.repo, revision=revision, allow_patterns=list(CONFIGS), tqdm_class=_silent()
            )
    # There is no network, and an older release of the library, which stored no lists, filled the cache.
    return [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()]


def _refusal(name: HubName, error: Any) -> str:
    """What the Hub answered, in a sentence that says what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return (
            f"{name.repo} is gated: ask for access at {hub}/{name.repo}, then log in with `hf auth login` or "
            "set HF_TOKEN."
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repo} has no branch, tag or commit '{name.revision}'."
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"There is no repository {name.repo} at {hub}, and no such file or folder here. If it is "
            "private, log in with `hf auth login` or set HF_TOKEN."
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    return f"{hub} refused {name.repo} with status {status}. {_first_line(error)}"


def _failure(name: HubName, error: Exception) -> str:
    """Why files could not be downloaded, if the Hub did not refuse."""
    from huggingface_hub import constants

    cache = constants.HF_HUB_CACHE
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set, and {name} is not complete in the cache at {cache}."
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ in _UNREACHABLE:
            return (
                f"The Hub at {constants.ENDPOINT} does not answer ({_first_line(seen)}), and {name} is not "
                f"complete in the cache at {cache}. Try again with a network: complete files stay there. "
                "Or copy the model here, and serve its folder."
            )
        seen = seen.__cause__ or seen.__context__
    return f"{name} could not be downloaded into {cache}: {_first_line(error)}"


_UNREACHABLE = frozenset(
    {
        "ConnectError",
        "ConnectTimeout",
        "ReadError",
        "ReadTimeout",
        "RemoteProtocolError",
        "PoolTimeout",
        "ProxyError",
    }
)


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    return line or type(error).__name__


def _lines(name: HubName) -> Any:
    """A progress bar for output that is not a terminal: a line of the log from time to time."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # documented, not in __all__

    class Lines(tqdm):
        """Writes a line when bytes arrive, at most every few seconds."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._written = monotonic()
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})  # type: ignore[no-untyped-call]

        def display(self, *args: Any, **kwargs: Any) -> bool:
            now = monotonic()
            if self.unit == "B" and self.total and now - self._written >= _SECONDS_BETWEEN_LINES:
                self._written = now
                logger.info("downloading %s: %.0f of %.0f MiB", name.repo, self.n / 2**20, self.total / 2**20)
            return True

    return Lines


def _silent() -> Any:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # documented, not in __all__

    class Silent(tqdm):
        """Draws nothing."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    return Silent
