"""`personae pull`, `list` and `rm`: the models and adapters in the cache of the Hugging Face Hub.

The cache is that of transformers and `hf download`, so these commands show and remove what those downloaded,
too.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import typer

from personae.api.commands.table import date, show, show_json
from personae.api.hub.download import fetched
from personae.api.hub.files import ADAPTER_CONFIG, CONFIG, adapter_files, model_files
from personae.api.hub.names import HubName, hub_name, pasted
from personae.errors import LoadError
from personae.grammar.fuzzy_match import nearest
from personae.kernels.sizes import size_text

Kind = Literal["model", "adapter", "other"]


class CachedModel(msgspec.Struct, frozen=True):
    """A repository in the cache. `used` is Unix time in seconds, `commits` are its versions that are
    downloaded, whole or in part."""

    name: str
    kind: Kind
    bytes: int
    used: int
    commits: list[str]


def cached_models() -> list[CachedModel]:
    """What the cache has, by name. Raises LoadError if it cannot be read."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    except OSError as error:
        raise LoadError(f"The cache cannot be read: {error.strerror}.") from None
    return sorted(
        (
            CachedModel(
                repo.repo_id,
                _kind([file.file_name for commit in repo.revisions for file in commit.files]),
                repo.size_on_disk,
                int(repo.last_accessed),
                sorted(commit.commit_hash for commit in repo.revisions),
            )
            for repo in repos
            if repo.repo_type == "model"
        ),
        key=lambda each: each.name,
    )


def _kind(files: Sequence[str]) -> Kind:
    if ADAPTER_CONFIG in files:
        return "adapter"
    return "model" if CONFIG in files or any(name.endswith(".gguf") for name in files) else "other"


def show_cached(*, json: bool) -> None:
    """Print them."""
    found = cached_models()
    if json:
        show_json(found)
        return
    rows = [(each.name, each.kind, size_text(each.bytes), date(each.used)) for each in found]
    show(rows, ("name", "kind", "size", "last used"))


def pull(given: str) -> None:
    """Download a model or an adapter, unless it is cached, and print its folder or file. Raises LoadError."""
    name = _named(given)
    folder, files = fetched(name, _files)
    whole = files[0].endswith(".gguf")
    typer.echo(folder / files[0] if whole else folder)


def _files(name: HubName, files: Sequence[str]) -> list[str]:
    """The files of a model, or of an adapter."""
    adapter = ADAPTER_CONFIG in files and CONFIG not in files
    return adapter_files(name, files) if adapter else model_files(name, files)


def remove(given: str) -> None:
    """Remove all of a repository from the cache, and print how much room that makes. Raises LoadError."""
    from huggingface_hub import scan_cache_dir

    name, found = _named(given), {each.name: each for each in cached_models()}
    if name.file is not None or name.revision is not None:
        raise LoadError(f"`rm` removes all of a repository; name it as {name.repo}.")
    if name.repo not in found:
        meant = nearest(name.repo, found)
        hint = "`personae list` shows what is." if meant is None else f"Did you mean {meant}?"
        raise LoadError(f"{name.repo} is not in the cache. {hint}")
    cache = scan_cache_dir()
    own = frozenset(each for each in cache.repos if each.repo_id == name.repo and each.repo_type == "model")
    # A copy of a repository has the same commits, and the library would delete those of one of the two.
    plan = replace(cache, repos=own).delete_revisions(*found[name.repo].commits)
    plan.execute()
    typer.echo(f"removed {name.repo}: {size_text(plan.expected_freed_size)}")


def _named(given: str) -> HubName:
    """The repository. Raises LoadError for what is no name of one."""
    name = hub_name(Path(given))
    if name is None:
        page = pasted(Path(given)) or "org/name, as in Qwen/Qwen3-0.6B"
        raise LoadError(f"'{given}' is no name on the Hub: a model there is named {page}.")
    return name
