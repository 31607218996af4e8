"""What travels to a machine with a GPU, in bytes: `python -m personae.evals.bench.gpu.travels [FOLDER ...]`.

The files that git tracks, without LEFT, and the folders that are carried. Prints the sizes, largest first,
and ends with 1 if they are more than MOST together.
"""

import subprocess
import sys
from pathlib import Path

MOST = 64 << 20  # bytes
LEFT = ("docs/diagrams", "docs/guide", "evals/demo/smollm2")
"""Folders of pictures and weights that no step of the kit reads."""
ROOT = Path(__file__).resolve().parents[3]


def tracked(root: Path) -> list[Path]:
    """The files that git tracks, relative to the root."""
    command = ["git", "-C", str(root), "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, check=True)  # noqa: S603  # our own arguments
    names = listed.stdout.decode().split("\0")
    return [Path(name) for name in names if name and (root / name).is_file()]


def travels(root: Path, carried: list[Path]) -> dict[str, int]:
    """Bytes by folder of what travels."""
    found: dict[str, int] = {}
    for path in tracked(root):
        if not any(path.is_relative_to(left) for left in LEFT):
            found[path.parts[0]] = found.get(path.parts[0], 0) + (root / path).stat().st_size
    for folder in carried:
        sizes = (path.stat().st_size for path in folder.rglob("*") if path.is_file())
        found[f"{folder}, carried"] = sum(sizes)
    return found


def main(folders: list[str], most: int = MOST) -> int:
    """Print the sizes. Returns the exit status."""
    found = travels(ROOT, [Path(folder) for folder in folders])
    for name, size in sorted(found.items(), key=lambda entry: -entry[1]):
        print(f"{size / 2**20:8.2f} MiB  {name}")
    total = sum(found.values())
    print(f"{total / 2**20:8.2f} MiB  in all, at most {most / 2**20:.0f}")
    return int(total > most)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
