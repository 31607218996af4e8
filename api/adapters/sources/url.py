"""What a source is: a URL, and the operator's list of prefixes that sources must begin with.

hf://org/name              hf://org/name@REVISION            hf://org/name@REVISION/folder
s3://bucket/folder         gs://bucket/folder                az://container/folder
wandb://entity/project/artifact@VERSION/folder               the version or an alias of Weights & Biases
mlflow://models/name@VERSION/folder                          a registered model, by version or alias
mlflow://runs/RUN/folder                                     the artifacts of a run
file:///folder
"""

import hashlib
import re
from collections.abc import Sequence
from importlib.util import find_spec
from urllib.parse import unquote

import msgspec

from personae.errors import Forbidden, RequestError

HUB, FILE, WANDB, MLFLOW = "hf", "file", "wandb", "mlflow"
STORES = ("s3", "gs", "az")
SCHEMES = (HUB, *STORES, WANDB, MLFLOW, FILE)
MODELS, RUNS = "models", "runs"  # the two kinds of sources in MLflow
_REPOSITORY = {HUB: 2, WANDB: 3, MLFLOW: 2}
"""How many parts name what has revisions. They may end with `@REVISION`."""
_PACKAGES = {**dict.fromkeys(STORES, "obstore"), WANDB: "wandb", MLFLOW: "mlflow"}
_LONGEST = 1024
_PART = re.compile(r"[A-Za-z0-9._~+=,-]+")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~+=,/-]*")
_FORMS = (
    "hf://org/name@REVISION, s3://bucket/folder, gs://bucket/folder, az://container/folder, "
    "wandb://entity/project/artifact@VERSION, mlflow://models/name@VERSION, mlflow://runs/RUN/folder or "
    "file:///folder"
)


class SourceUrl(msgspec.Struct, frozen=True):
    """A source. `parts` are the names between slashes: for the Hub the organization, the repository and the
    folders in it, for an object store the bucket and the folders, for W&B the entity, the project, the
    artifact and the folders, for MLflow `models` or `runs`, the name and the folders, for `file` the folders
    from the root. `revision` is a branch, a tag or a commit of the Hub, and a version or an alias of W&B's
    artifacts and MLflow's models."""

    scheme: str
    parts: tuple[str, ...]
    revision: str | None = None

    def __str__(self) -> str:
        if self.scheme == FILE:
            return f"file:///{'/'.join(self.parts)}"
        if self.revision is None:
            return f"{self.scheme}://{'/'.join(self.parts)}"
        at = self.repository + "@" + self.revision.replace("/", "%2F")
        return f"{self.scheme}://{'/'.join((at, *self.folders))}"

    @property
    def repository(self) -> str:
        """What has revisions: a repository, an artifact, a model or a run."""
        return "/".join(self.parts[: _REPOSITORY[self.scheme]])

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders in it."""
        return self.parts[_REPOSITORY[self.scheme] :]

    @property
    def name(self) -> str:
        """The name of the adapter, if the request gives none: the last part."""
        return self.parts[-1]


def parse_source(text: str) -> SourceUrl:
    """The source that a request names. Raises RequestError."""
    try:
        source = _parsed(text)
        if len(source.parts) < _REPOSITORY.get(source.scheme, 2) and source.scheme != FILE:
            raise ValueError("it names no folder with an adapter")
    except ValueError as error:
        raise RequestError(
            f"`source` cannot be read: {error}. Write it as {_FORMS}.", param="source", code="invalid_source"
        ) from None
    return source


def requested_name(source: SourceUrl) -> str:
    """The name of an adapter that was fetched because a request named its source: readable, and another for
    each source."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "-", source.name).lstrip("._-")[:40]
    return f"{readable or 'adapter'}-{hashlib.sha256(str(source).encode()).hexdigest()[:16]}"


def check_prefixes(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    """The values of `--adapter-source`. Raises ValueError."""
    for text in prefixes:
        try:
            prefix = _parsed(text, prefix=True)
        except ValueError as error:
            raise ValueError(f"'{text}' is no source: {error}.") from None
        if not prefix.parts and prefix.scheme not in (HUB, MLFLOW):
            first = {FILE: "a folder", WANDB: "an entity"}.get(prefix.scheme, "a bucket")
            raise ValueError(f"'{text}' must name {first}.")
        if prefix.revision is not None:
            raise ValueError(f"'{text}' has a revision; requests choose that.")
        package = _PACKAGES.get(prefix.scheme)
        if package is not None and find_spec(package) is None:
            raise ValueError(f"'{text}' needs {package} (pip install {package}).")
    return prefixes


def allowed_prefix(source: SourceUrl, prefixes: Sequence[str]) -> SourceUrl:
    """The first prefix that the source begins with, whole parts compared. Raises Forbidden."""
    for text in prefixes:
        prefix = _parsed(text, prefix=True)
        if prefix.scheme == source.scheme and source.parts[: len(prefix.parts)] == prefix.parts:
            return prefix
    if not prefixes:
        raise Forbidden(
            "No source may be fetched from: start the server with --adapter-source.",
            param="source",
            code="source_not_allowed",
        )
    raise Forbidden(
        f"`{source}` is not below one of the server's --adapter-source prefixes.",
        param="source",
        code="source_not_allowed",
    )


def _parsed(text: str, *, prefix: bool = False) -> SourceUrl:
    """Raises ValueError that says what is wrong, without a full stop."""
    if len(text) > _LONGEST:
        raise ValueError(f"it has more than {_LONGEST} characters")
    scheme, colon, rest = text.partition("://")
    if not colon or scheme not in SCHEMES:
        raise ValueError(f"it begins with none of {', '.join(f'{each}://' for each in SCHEMES)}")
    if scheme == FILE:
        if not rest.startswith("/"):
            raise ValueError("after file:// comes a path from the root, which begins with a slash")
        rest = rest[1:]
    rest = rest.removesuffix("/")
    parts = rest.split("/") if rest else []
    revision = None
    last = _REPOSITORY.get(scheme, 0) - 1
    if last >= 0 and len(parts) > last and "@" in parts[last]:
        parts[last], _, encoded = parts[last].partition("@")
        revision = unquote(encoded)
        if _REVISION.fullmatch(revision) is None or ".." in revision:
            raise ValueError(f"'{encoded[:80]}' is no revision")
    for part in parts:
        if _PART.fullmatch(part) is None or set(part) <= {"."}:
            raise ValueError(f"'{part[:80]}' is no name; names have letters, digits and . _ ~ + = , -")
    if not parts and not prefix:
        raise ValueError("it names nothing")
    if scheme == MLFLOW and parts and parts[0] not in (MODELS, RUNS):
        raise ValueError(f"after mlflow:// comes {MODELS}/ or {RUNS}/")
    if scheme == MLFLOW and parts and parts[0] == RUNS and revision is not None:
        raise ValueError("a run has no versions")
    if scheme == MLFLOW and parts and parts[0] == MODELS and revision is None and not prefix:
        raise ValueError(f"a model needs a version or an alias, as in mlflow://{MODELS}/name@3")
    return SourceUrl(scheme, tuple(parts), revision)
