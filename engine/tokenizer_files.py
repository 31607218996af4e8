"""Reads the tokenizer's files of a Hugging Face model folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from personae.errors import ModelLoadError

_BAD_TEMPLATE = "{}: chat_template must be a string or a list of objects with name and template"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer and its settings from a model folder. `eos_ids` may repeat an id.

    `response_template` is that field of tokenizer_config.json, unchecked.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    pad_id: int | None
    eos_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    add_bos_token: bool | None
    response_template: Any = None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Reads tokenizer.json and the files with its settings. Raises ModelLoadError, which names the file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"{folder} has no config.json; it must be a model in Hugging Face's format.")
        raise ModelLoadError(
            f"{folder} has no tokenizer.json; it must have a tokenizer in Hugging Face's format."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise ModelLoadError(f"{path} cannot be read as a tokenizer: {error}") from error

    settings = _read_json(folder / "special_tokens_map.json")
    config = _read_json(folder / "tokenizer_config.json")
    settings |= {name: value for name, value in config.items() if value is not None}
    generation = _read_json(folder / "config.json") | _read_json(folder / "generation_config.json")

    special_tokens: dict[str, str] = {}
    for name, token in settings.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            special_tokens[name] = content

    def token_id(name: str) -> int | None:
        id: int | None = backend.token_to_id(special_tokens[name]) if name in special_tokens else None
        return id if id is not None else next(iter(_ids(generation.get(f"{name}_id"))), None)

    eos = token_id("eos_token")
    add_bos_token = settings.get("add_bos_token")
    if not isinstance(add_bos_token, bool | None):
        raise ModelLoadError(f"{folder / 'tokenizer_config.json'}: add_bos_token must be true or false")
    return TokenizerFiles(
        backend=backend,
        bos_id=token_id("bos_token"),
        pad_id=token_id("pad_token"),
        eos_ids=(*_ids(generation.get("eos_token_id")), *(() if eos is None else (eos,))),
        special_tokens=special_tokens,
        chat_templates=_chat_templates(folder, settings.get("chat_template")),
        add_bos_token=add_bos_token,
        response_template=settings.get("response_template"),
    )


def _ids(value: Any) -> list[int]:
    """A config's token id or list of them, as a list."""
    values = value if isinstance(value, list) else [value]
    return [id for id in values if isinstance(id, int)]


def _chat_templates(folder: Path, setting: Any) -> dict[str, str]:
    """Templates by name. Separate template files override tokenizer_config.json."""
    templates: dict[str, str] = {}
    if isinstance(setting, str):
        templates["default"] = setting
    elif isinstance(setting, list):
        try:
            templates |= {entry["name"]: entry["template"] for entry in setting}
        except (KeyError, TypeError):
            raise ModelLoadError(_BAD_TEMPLATE.format(folder / "tokenizer_config.json")) from None
    elif setting is not None:
        raise ModelLoadError(_BAD_TEMPLATE.format(folder / "tokenizer_config.json"))
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    files["default"] = folder / "chat_template.jinja"
    for name, path in files.items():
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ModelLoadError(f"{path} is not UTF-8: {error}") from error
    return templates


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return value
