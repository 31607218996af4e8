"""What fetches artifacts in the clients of Weights & Biases (0.31) and MLflow (3.17), over folders.

`tests/api/adapters/test_trackers.py` compares the signatures with the packages', where those are installed.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Error(Exception):
    """wandb.errors.Error."""


class CommError(Error):
    """wandb.errors.CommError."""


class AuthenticationError(CommError):
    """wandb.errors.AuthenticationError."""


class UsageError(Error):
    """wandb.errors.UsageError."""


@dataclass
class Entry:
    """wandb's ArtifactManifestEntry."""

    path: str
    folder: Path
    size: int | None
    ref: str | None = None

    def download(self, root: str | None = None, skip_cache: bool | None = None, executor: Any = None) -> str:
        assert root is not None
        target = Path(root, self.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.folder / self.path, target)
        return str(target)


class Artifact:
    """wandb.Artifact."""

    def __init__(self, version: str, entries: dict[str, Entry]) -> None:
        self.version = version
        self.manifest = SimpleNamespace(entries=entries)


class FakeWandb:
    """What the server has: artifacts by `entity/project/name:alias`. `failure` is raised instead."""

    def __init__(self) -> None:
        self.artifacts: dict[str, Artifact] = {}
        self.failure: Exception | None = None
        self.asked: list[str] = []

    def add(self, name: str, version: str, folder: Path, **refs: str) -> None:
        """An artifact with the files of a folder; those in `refs` are references."""
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        entries = {
            (inner := str(path.relative_to(folder))): Entry(
                inner, folder, path.stat().st_size, refs.get(path.stem)
            )
            for path in paths
        }
        self.artifacts[name] = Artifact(version, entries)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be what is imported as wandb."""
        server = self

        class Api:
            def __init__(
                self,
                overrides: dict[str, Any] | None = None,
                timeout: int | None = None,
                api_key: str | None = None,
            ) -> None:
                if isinstance(server.failure, UsageError):
                    raise server.failure

            def artifact(self, name: str, type: str | None = None) -> Artifact:
                server.asked.append(name)
                if server.failure is not None:
                    raise server.failure
                if name not in server.artifacts:
                    raise ValueError(f"artifact membership {name!r} not found in 'team/lab'")
                return server.artifacts[name]

        package, errors = ModuleType("wandb"), ModuleType("wandb.errors")
        package.Api, package.errors = Api, errors  # type: ignore[attr-defined]  # a module is made here
        for each in (Error, CommError, AuthenticationError, UsageError):
            setattr(errors, each.__name__, each)
        _import_as(monkeypatch, package, errors)


class MlflowException(Exception):
    """mlflow.exceptions.MlflowException."""

    def __init__(self, message: str, error_code: str = "INTERNAL_ERROR") -> None:
        super().__init__(message)
        self.error_code = error_code


@dataclass
class FileInfo:
    """mlflow.entities.FileInfo."""

    path: str
    is_dir: bool
    file_size: int | None


class FakeMlflow:
    """What the server has: folders of model versions and of runs, and aliases of versions."""

    def __init__(self) -> None:
        self.versions: dict[tuple[str, str], Path] = {}
        self.aliases: dict[tuple[str, str], int] = {}
        self.runs: dict[str, Path] = {}
        self.failure: Exception | None = None

    def _folder(self, uri: str) -> Path:
        if self.failure is not None:
            raise self.failure
        scheme, _, rest = uri.partition(":/")
        run, _, inner = rest.partition("/")
        if scheme != "runs":
            return Path("/", rest.lstrip("/"))
        if run not in self.runs:
            raise MlflowException(f"Run '{run}' not found", "RESOURCE_DOES_NOT_EXIST")
        return self.runs[run] / inner

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be what is imported as mlflow."""
        server = self

        class MlflowClient:
            def __init__(
                self,
                tracking_uri: str | None = None,
                registry_uri: str | None = None,
                workspace_store_uri: str | None = None,
            ) -> None: ...

            def get_model_version_by_alias(self, name: str, alias: str) -> Any:
                if (name, alias) not in server.aliases:
                    code = "INVALID_PARAMETER_VALUE"
                    raise MlflowException(f"Registered model alias {alias} not found.", code)
                return SimpleNamespace(version=server.aliases[name, alias])

            def get_model_version_download_uri(self, name: str, version: str) -> str:
                if (name, version) not in server.versions:
                    text = f"Model Version (name={name}, version={version}) not found"
                    raise MlflowException(text, "RESOURCE_DOES_NOT_EXIST")
                return f"file://{server.versions[name, version]}"

        def list_artifacts(
            artifact_uri: str | None = None,
            run_id: str | None = None,
            artifact_path: str | None = None,
            tracking_uri: str | None = None,
        ) -> list[FileInfo]:
            assert artifact_uri is not None
            folder = server._folder(artifact_uri)
            found = sorted(folder.iterdir()) if folder.is_dir() else []
            return [
                FileInfo(
                    f"{folder.name}/{path.name}",
                    path.is_dir(),
                    None if path.is_dir() else path.stat().st_size,
                )
                for path in found
            ]

        def download_artifacts(
            artifact_uri: str | None = None,
            run_id: str | None = None,
            artifact_path: str | None = None,
            dst_path: str | None = None,
            tracking_uri: str | None = None,
            registry_uri: str | None = None,
        ) -> str:
            assert artifact_uri is not None
            assert dst_path is not None
            source = server._folder(artifact_uri)
            return shutil.copyfile(source, Path(dst_path, source.name)).as_posix()

        package, exceptions = ModuleType("mlflow"), ModuleType("mlflow.exceptions")
        artifacts = ModuleType("mlflow.artifacts")
        artifacts.list_artifacts = list_artifacts  # type: ignore[attr-defined]  # a module is made here
        artifacts.download_artifacts = download_artifacts  # type: ignore[attr-defined]  # as above
        exceptions.MlflowException = MlflowException  # type: ignore[attr-defined]  # as above
        package.MlflowClient, package.artifacts = MlflowClient, artifacts  # type: ignore[attr-defined]  # as above
        _import_as(monkeypatch, package, exceptions, artifacts)


def _import_as(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
