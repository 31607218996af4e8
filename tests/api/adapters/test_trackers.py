"""Adapters from Weights & Biases and from MLflow, through their own clients."""

import inspect
import secrets
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_trackers import (
    AuthenticationError,
    CommError,
    Entry,
    FakeMlflow,
    FakeWandb,
    MlflowException,
    UsageError,
)
from uploads import TENSORS, whole

from personae.api.adapters.sources import url
from personae.api.adapters.sources.fetch import Fetched, FetchFailed, FetchJob
from personae.api.adapters.sources.fetching import fetched
from personae.api.adapters.sources.url import SourceUrl, allowed_prefix, check_prefixes, parse_source
from personae.errors import Forbidden, RequestError

RUN = "6f71b010cfae4d898989ac5578f88c69"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder with an adapter in it and in its folder `peft`."""
    for folder in (tmp_path / "adapter", tmp_path / "adapter" / "peft"):
        folder.mkdir()
        for name, data in whole(1).items():
            (folder / name).write_bytes(data)
    return tmp_path / "adapter"


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, adapter: Path) -> FakeWandb:
    fake = FakeWandb()
    fake.install(monkeypatch)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_DIR"):
        monkeypatch.setenv(name, "")
    fake.add("team/lab/poet:latest", "v3", adapter)
    fake.add("team/lab/poet:prod", "v2", adapter)
    return fake


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch, adapter: Path) -> FakeMlflow:
    fake = FakeMlflow()
    fake.install(monkeypatch)
    fake.versions["poet", "3"] = fake.runs[RUN] = adapter
    fake.aliases["poet", "prod"] = 3
    return fake


def outcome(tmp_path: Path, source: str) -> tuple[Fetched | FetchFailed, Path]:
    """What a fetch answers, and the folder that it fetched into."""
    (into := tmp_path / secrets.token_hex(4)).mkdir()
    asked = parse_source(source)
    answer = fetched(FetchJob(asked, SourceUrl(asked.scheme, ()), str(into), 20_000, 60.0))
    return answer, into


def arrives(tmp_path: Path, source: str, exact: str) -> None:
    answer, into = outcome(tmp_path, source)
    assert answer == Fetched(exact)
    assert {path.name: path.read_bytes() for path in into.iterdir()} == whole(1)


def refused(tmp_path: Path, source: str) -> tuple[str, str]:
    answer, _ = outcome(tmp_path, source)
    assert isinstance(answer, FetchFailed)
    assert "\n" not in answer.message
    return answer.kind, answer.message


def test_an_artifact_comes_by_alias_with_its_version(tmp_path: Path, wandb: FakeWandb) -> None:
    arrives(tmp_path, "wandb://team/lab/poet", "wandb://team/lab/poet@v3")
    arrives(tmp_path, "wandb://team/lab/poet@prod/peft", "wandb://team/lab/poet@v2/peft")
    assert wandb.asked == ["team/lab/poet:latest", "team/lab/poet:prod"]


def test_what_an_artifact_lacks_or_leads_to_is_one_sentence(
    tmp_path: Path, wandb: FakeWandb, adapter: Path
) -> None:
    assert refused(tmp_path, "wandb://team/lab/none") == (
        "not_found",
        "There is no artifact `wandb://team/lab/none`, or the server may not read it.",
    )
    assert refused(tmp_path, "wandb://team/lab/poet/none")[0] == "not_found"
    wandb.add("team/lab/linked:latest", "v0", adapter, adapter_model="file:///etc/passwd")
    assert refused(tmp_path, "wandb://team/lab/linked") == (
        "forbidden",
        f"`{TENSORS}` of `wandb://team/lab/linked` is a reference to another place, which is not followed.",
    )
    (adapter / TENSORS).write_bytes(bytes(20_001))
    wandb.add("team/lab/large:latest", "v0", adapter)
    assert refused(tmp_path, "wandb://team/lab/large")[0] == "too_large"
    wandb.artifacts["team/lab/large:latest"].manifest.entries[TENSORS].size = None  # as some old ones have it
    assert refused(tmp_path, "wandb://team/lab/large")[0] == "too_large"


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            UsageError("No API key configured.\nMore."),
            "does not accept the server's WANDB_API_KEY: No API",
        ),
        (AuthenticationError("Failed to verify credentials"), "does not accept the server's WANDB_API_KEY"),
        (CommError("The server hung up"), "Weights & Biases failed: The server hung up."),
    ],
)
def test_a_wandb_that_fails_is_said(failure: Exception, said: str, tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.failure = failure
    kind, message = refused(tmp_path, "wandb://team/lab/poet")
    assert kind == "failed"
    assert said in message


def test_a_model_comes_by_version_or_alias_and_a_run_by_its_folder(
    tmp_path: Path, mlflow: FakeMlflow
) -> None:
    arrives(tmp_path, "mlflow://models/poet@3", "mlflow://models/poet@3")
    arrives(tmp_path, "mlflow://models/poet@prod/peft", "mlflow://models/poet@3/peft")
    arrives(tmp_path, f"mlflow://runs/{RUN}/peft", f"mlflow://runs/{RUN}/peft")


def test_what_mlflow_lacks_or_refuses_is_one_sentence(
    tmp_path: Path, mlflow: FakeMlflow, adapter: Path
) -> None:
    assert refused(tmp_path, "mlflow://models/poet@9") == (
        "not_found",
        "MLflow has no `mlflow://models/poet@9`: Model Version (name=poet, version=9) not found.",
    )
    for source in ("models/none@1", "models/poet@none", "models/poet@3/none", "runs/0", f"runs/{RUN}/none"):
        assert refused(tmp_path, f"mlflow://{source}")[0] == "not_found", source
    (adapter / TENSORS).unlink()
    (adapter / "adapter_model.bin").write_bytes(b"x")
    kind, message = refused(tmp_path, "mlflow://models/poet@3")
    assert (kind, "pickles" in message) == ("not_found", True)
    (adapter / TENSORS).write_bytes(bytes(20_001))
    assert refused(tmp_path, "mlflow://models/poet@3")[0] == "too_large"
    mlflow.failure = MlflowException("no", "PERMISSION_DENIED")
    assert refused(tmp_path, f"mlflow://runs/{RUN}") == (
        "forbidden",
        f"The server may not read `mlflow://runs/{RUN}`.",
    )
    mlflow.failure = MlflowException("API request to x failed with exception " + "long " * 500)
    assert refused(tmp_path, f"mlflow://runs/{RUN}") == ("failed", "MLflow failed: API request to x failed.")


@pytest.mark.parametrize(
    "text",
    [
        "wandb://team",
        "wandb://team/lab",
        "wandb://team/lab/poet@",
        "wandb://team/lab@v1/poet",
        "wandb://team/../etc",
        "mlflow://models",
        "mlflow://models/poet",
        "mlflow://poet/3",
        "mlflow://runs",
        f"mlflow://runs/{RUN}@1",
        "mlflow:///models/poet@1",
    ],
)
def test_what_is_no_source_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_source(text)
    assert caught.value.param == "source"


def test_prefixes_need_the_client_and_compare_whole_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ("wandb://team/lab", "mlflow://models")
    monkeypatch.setattr(url, "find_spec", lambda name: None)
    for prefix, package in zip(listed, ("wandb", "mlflow"), strict=True):
        with pytest.raises(ValueError, match=rf"needs {package} \(pip install {package}\)"):
            check_prefixes((prefix,))
    monkeypatch.setattr(url, "find_spec", lambda name: object())
    for wrong in ("wandb://", "mlflow://other", "wandb://team/lab/poet@v1", "mlflow://models/poet@1"):
        with pytest.raises(ValueError, match=r"\S"):
            check_prefixes((wrong,))
    prefixes = check_prefixes(listed)
    assert allowed_prefix(parse_source("mlflow://models/poet@1"), prefixes).parts == ("models",)
    for outside in ("wandb://team/laboratory/x", f"mlflow://runs/{RUN}"):
        with pytest.raises(Forbidden):
            allowed_prefix(parse_source(outside), prefixes)


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]  # of a class, too


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_the_fake_wandb_takes_what_the_package_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    api, errors = import_module("wandb.apis.public").Api, import_module("wandb.errors")
    artifact = import_module("wandb.sdk.artifacts.artifact").Artifact
    entry = import_module("wandb.sdk.artifacts.artifact_manifest_entry").ArtifactManifestEntry
    assert issubclass(errors.AuthenticationError, errors.CommError)
    assert issubclass(errors.UsageError, errors.Error)
    with monkeypatch.context() as context:
        FakeWandb().install(context)
        fake = sys.modules["wandb"]
        assert parameters(fake.Api) == parameters(api)
        assert parameters(fake.Api.artifact) == parameters(api.artifact)
        assert parameters(Entry.download) == parameters(entry.download)
    assert {"path", "size", "ref"} <= set(entry.model_fields)
    assert {"manifest", "version"} <= set(dir(artifact))


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_the_fake_mlflow_takes_what_the_package_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    real, artifacts = import_module("mlflow"), import_module("mlflow.artifacts")
    with monkeypatch.context() as context:
        FakeMlflow().install(context)
        fake = sys.modules["mlflow"]
        for name in ("__init__", "get_model_version_by_alias", "get_model_version_download_uri"):
            assert parameters(getattr(fake.MlflowClient, name)) == parameters(
                getattr(real.MlflowClient, name)
            )
        for name in ("list_artifacts", "download_artifacts"):
            assert parameters(getattr(fake.artifacts, name)) == parameters(getattr(artifacts, name))
