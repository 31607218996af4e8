"""Chooses which files of a repository are downloaded: weights, configuration, tokenizer and templates.

No other file is, so no file that could run as a program reaches this machine.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from personae.api.hub.names import HubName
from personae.errors import LoadError

CONFIG, ADAPTER_CONFIG = CONFIGS = "config.json", "adapter_config.json"
_MODEL = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
)
_ADAPTER = (ADAPTER_CONFIG, "adapter_model.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_MOST_NAMED = 12


def model_files(name: HubName, files: Sequence[str]) -> list[str]:
    """The files of a repository that make up the model: a Hugging Face folder, or one GGUF file with its
    further parts. Raises LoadError if there is no such model, or several."""
    if name.file is None and CONFIG in files and any(map(_is_weights, files)):
        return _matching(files, _MODEL)
    if any(file.endswith(".gguf") for file in files):
        return _gguf(name, files)
    if name.file is not None:
        raise LoadError(f"{name.repo} has no GGUF files, so ':{name.file}' names none of them.")
    if ADAPTER_CONFIG in files:
        raise LoadError(f"{name} is an adapter. Serve its base model, with --adapters NAME={name}.")
    raise LoadError(f"{name} has no model in safetensors or GGUF.{_pickled(files)}")


def template_files(name: HubName, files: Sequence[str]) -> list[str]:
    """What the chat templates of a model need: its files without the weights, or its GGUF file."""
    needed = model_files(name, files)
    return needed if needed[0].endswith(".gguf") else [file for file in needed if not _is_weights(file)]


def adapter_files(name: HubName, files: Sequence[str]) -> list[str]:
    """The files of an adapter's repository. Raises LoadError if it has none that can be served."""
    found = _matching(files, _ADAPTER)
    if len(found) == len(_ADAPTER):
        return found
    raise LoadError(f"{name} is not an adapter with {' and '.join(_ADAPTER)}.{_pickled(files)}")


def _is_weights(file: str) -> bool:
    return "/" not in file and fnmatchcase(file, "model*.safetensors")


def _matching(files: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The matching files; those in folders only if the pattern has a folder."""
    return [
        file
        for file in files
        if any(file.count("/") == each.count("/") and fnmatchcase(file, each) for each in patterns)
    ]


def _gguf(name: HubName, files: Sequence[str]) -> list[str]:
    """The files of the one GGUF model that the name means, the first part first."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and not file.rpartition("/")[2].startswith("mmproj"):
            part = _PART.fullmatch(file)
            models.setdefault(part[1] if part else file.removesuffix(".gguf"), []).append(file)
    wanted = (name.file or "").removesuffix(".gguf").lower()
    found = [model for model in models if wanted in model.lower()]
    exact = [model for model in found if re.search(rf"(?:^|[-._/]){re.escape(wanted)}$", model.lower())]
    if len(found) > 1 and len(exact) == 1:
        found = exact
    if len(found) == 1:
        return models[found[0]]
    listed = ", ".join(sorted(models)[:_MOST_NAMED]) + (", …" if len(models) > _MOST_NAMED else "")
    if not found:
        raise LoadError(f"{name.repo} has no GGUF file with '{name.file}' in its name; it has {listed}.")
    raise LoadError(
        f"{name} stands for several GGUF files. Name one by a part of its name, as in {name.repo}:Q4_K_M; "
        f"there are {listed}."
    )


def _pickled(files: Sequence[str]) -> str:
    """A sentence about weights that are not read, with a leading blank."""
    if not any(file.endswith(_PICKLES) for file in files):
        return ""
    return " Its weights are pickles, and reading a pickle can run code; look for a copy in safetensors."
