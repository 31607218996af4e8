"""The folders of the adapters that a server starts with."""

from pathlib import Path

from personae.errors import LoadError


def adapter_folders(roots: tuple[Path, ...], named: tuple[tuple[str, Path], ...]) -> dict[str, Path]:
    """The folder of each adapter by its name. Raises LoadError."""
    found: dict[str, Path] = {}
    below = [(folder.name, folder) for root in roots for folder in _adapters_below(root)]
    for name, folder in [*below, *named]:
        if name in found:
            raise LoadError(f"Two adapters are called {name!r}: {found[name]} and {folder}.")
        found[name] = folder
    return found


def _adapters_below(root: Path) -> list[Path]:
    if not root.is_dir():
        raise LoadError(f"--adapters {root}: this folder does not exist.")
    folders = sorted(path for path in root.iterdir() if (path / "adapter_config.json").is_file())
    if (root / "adapter_config.json").is_file():
        below = ", and so are some of its sub-folders" if folders else ""
        raise LoadError(f"--adapters {root}: it is an adapter itself{below}: write --adapters NAME={root}.")
    if not folders:
        raise LoadError(f"--adapters {root}: no sub-folder has an adapter_config.json.")
    return folders
