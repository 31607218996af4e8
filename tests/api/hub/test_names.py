"""What a text on the command line means: a path, or a name on the Hub."""

from pathlib import Path

import pytest

from personae.api.hub.files import adapter_files, model_files
from personae.api.hub.names import HubName, NamedSource, adapter_source, hub_name
from personae.errors import LoadError

MODEL = [
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
]
OTHER = [
    ".gitattributes",
    "README.md",
    "modeling_evil.py",
    "setup.sh",
    "pytorch_model.bin",
    "consolidated.safetensors",
    "original/model.safetensors",
    "original/consolidated.00.pth",
    "onnx/config.json",
]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubName("Qwen/Qwen3-0.6B", None, "v1.0")),
        ("a/b@refs/pr/3", HubName("a/b", None, "refs/pr/3")),
        ("a/b-GGUF:Q4_K_M", HubName("a/b-GGUF", "Q4_K_M")),
        ("a/b-GGUF:Q4_K_M@main", HubName("a/b-GGUF", "Q4_K_M", "main")),
        ("Qwen3", None),
        ("/models/qwen", None),
        ("./models/qwen", HubName("models/qwen")),  # a Path has no leading dot
        ("../models", None),
        ("a/b/c", None),
        ("a/b..c/../d", None),
    ],
)
def test_a_name_of_the_hub_is_an_owner_and_a_repository(
    text: str, meant: HubName | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name(Path(text)) == meant
    if meant is not None and not text.startswith("."):
        assert str(meant) == text


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Qwen/Qwen3-0.6B").mkdir(parents=True)
    assert hub_name(Path("Qwen/Qwen3-0.6B")) is None


def test_adapters_are_folders_or_names_with_or_without_a_name_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loras").mkdir()
    Path("a=b").mkdir()
    assert adapter_source(Path("loras")) == NamedSource(None, Path("loras"))
    assert adapter_source(Path("a=b")) == NamedSource(None, Path("a=b"))
    assert adapter_source(Path("sql=loras")) == NamedSource("sql", Path("loras"))
    assert adapter_source(Path("sql=org/name@v2")) == NamedSource("sql", HubName("org/name", None, "v2"))
    assert adapter_source(Path("org/name")) == NamedSource(None, HubName("org/name"))
    for wrong in ("nowhere", "sql=nowhere", "org/name:Q4", "s q l=loras", "=loras"):
        with pytest.raises(ValueError, match=r"does not exist|cannot be an adapter's name"):
            adapter_source(Path(wrong))


def test_only_weights_configuration_tokenizer_and_templates_are_chosen() -> None:
    assert model_files(HubName("a/b"), OTHER + MODEL) == MODEL
    files = ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", *OTHER]
    assert adapter_files(HubName("a/b"), files) == files[:2]


GGUF = [
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m-UD-Q4_K_M.gguf",
    "mmproj-F16.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
    "config.json",
]


@pytest.mark.parametrize(
    ("part", "chosen"),
    [
        ("m-Q4_K_M.gguf", GGUF[:1]),
        ("m-q4_k_m", GGUF[:1]),
        ("Q4_K_S", GGUF[1:2]),
        ("UD-Q4_K_M", GGUF[2:3]),
        ("BF16", GGUF[4:6]),
    ],
)
def test_a_gguf_file_is_named_by_a_part_of_its_name(part: str, chosen: list[str]) -> None:
    assert model_files(HubName("a/b", part), GGUF) == chosen


def test_a_lone_gguf_file_needs_no_name() -> None:
    assert model_files(HubName("a/b"), ["config.json", "m.gguf"]) == ["m.gguf"]


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        (
            "a/b",
            GGUF,
            "several GGUF files. Name one by a part of its name, as in a/b:Q4_K_M; there are BF16/",
        ),
        ("a/b:Q4_K", GGUF, "several GGUF files"),
        ("a/b:Q4_K_M", GGUF, "several GGUF files"),
        ("a/b:Q2", GGUF, "no GGUF file with 'Q2' in its name; it has "),
        ("a/b:Q2", MODEL, "a/b has no GGUF files"),
        ("a/b", ["config.json", "pytorch_model.bin"], "Its weights are pickles"),
        ("a/b", ["README.md"], "no model in safetensors or GGUF."),
        ("a/b", ["adapter_config.json", "adapter_model.safetensors"], "a/b is an adapter. Serve its base"),
    ],
)
def test_a_repository_without_one_model_is_refused_with_what_it_has(
    name: str, files: list[str], said: str
) -> None:
    meant = hub_name(Path(name))
    assert meant is not None
    with pytest.raises(LoadError, match=said):
        model_files(meant, files)


def test_an_adapter_in_pickles_is_refused() -> None:
    with pytest.raises(LoadError, match=r"not an adapter with .* Its weights are pickles"):
        adapter_files(HubName("a/b"), ["adapter_config.json", "adapter_model.bin"])
