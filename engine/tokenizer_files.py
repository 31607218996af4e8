"""Reads the tokenizer's files of a Hugging Face model folder."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import tokenizers

from personae.errors import ModelLoadError, as_json

logger = logging.getLogger(__name__)

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
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
    _add_tokens(backend, folder, config, settings, _rows(generation))

    def token_id(name: str) -> int | None:
        id: int | None = backend.token_to_id(special_tokens[name]) if name in special_tokens else None
        return id if id is not None else next(iter(_ids(generation.get(f"{name}_id"))), None)

    eos = token_id("eos_token")
    return TokenizerFiles(
        backend=backend,
        bos_id=token_id("bos_token"),
        pad_id=token_id("pad_token"),
        eos_ids=(*_ids(generation.get("eos_token_id")), *(() if eos is None else (eos,))),
        special_tokens=special_tokens,
        chat_templates=_chat_templates(folder, settings.get("chat_template")),
        response_template=settings.get("response_template"),
    )


def _rows(config: dict[str, Any]) -> int | None:
    """The rows of the model's embedding, None if config.json does not say."""
    text = config.get("text_config")
    rows = (text if isinstance(text, dict) and "vocab_size" in text else config).get("vocab_size")
    return rows if isinstance(rows, int) else None


def _add_tokens(
    backend: tokenizers.Tokenizer,
    folder: Path,
    config: dict[str, Any],
    settings: dict[str, Any],
    rows: int | None,
) -> None:
    """Registers the tokens that tokenizer.json does not list but transformers registers: those of
    tokenizer_config.json's `added_tokens_decoder` or else of added_tokens.json, with their flags; and the
    special ones of the `settings`.

    A token for which the embedding has no row is left out, with a warning. Raises ModelLoadError if a token
    would have another id than the file says.
    """
    specials = {_content(entry): entry for entry in _special_entries(settings)}
    path, listed = folder / "tokenizer_config.json", config.get("added_tokens_decoder")
    legacy = listed is None
    if legacy:
        path = folder / "added_tokens.json"
        listed = {id: {"content": token} for token, id in _read_json(path).items()}
    if not isinstance(listed, dict):
        raise ModelLoadError(f"{path}: added_tokens_decoder must be an object")
    known = {id: repr(token) for id, token in backend.get_added_tokens_decoder().items()}
    for id, entry in sorted(
        ((_token_id(path, id), entry) for id, entry in listed.items()), key=itemgetter(0)
    ):
        named = _content(entry) in specials
        token = _added_token(path, entry, named, {"normalized": not named} if legacy else {})
        if known.get(id) == repr(token) or (rows is not None and id >= rows and _left_out(token.content)):
            continue
        backend.add_tokens([token])
        if (found := backend.token_to_id(token.content)) != id:
            raise ModelLoadError(
                f"{path}: the token {as_json(token.content)} would have the id {found}, not {id}"
            )
    texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    for text, entry in specials.items():
        if text and text not in texts:
            full = rows is not None and backend.get_vocab_size() >= rows
            if backend.token_to_id(text) is None and full and _left_out(text):
                continue
            backend.add_tokens([_added_token(path, entry, True, {"normalized": False})])


def _left_out(text: str) -> bool:
    logger.warning("the token %r is left out: the model's embedding has no row for it", text)
    return True


def _special_entries(settings: dict[str, Any]) -> Iterator[Any]:
    """The special tokens of the settings: the named ones, then those without a name of their own, which were
    `additional_special_tokens` before transformers 5."""
    for name, entry in settings.items():
        if name.endswith("_token"):
            yield entry
    for name in ("extra_special_tokens", "additional_special_tokens"):
        entries = settings.get(name) or []
        yield from entries.values() if isinstance(entries, dict) else entries


def _content(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _token_id(path: Path, id: Any) -> int:
    if isinstance(id, bool) or not str(id).isdecimal():
        raise ModelLoadError(f"{path}: {as_json(id)} is not the id of a token")
    return int(id)


def _added_token(path: Path, entry: Any, special: bool, defaults: dict[str, bool]) -> tokenizers.AddedToken:
    """A token with the file's flags, or else these. It is `special`, or as the file says."""
    content = _content(entry)
    if not content:
        raise ModelLoadError(f"{path}: {as_json(entry)} is not a token")
    given = entry if isinstance(entry, dict) else {}
    flags = defaults | {name: given[name] for name in FLAGS if name in given}
    if any(type(flag) is not bool for flag in flags.values()):
        raise ModelLoadError(f"{path}: the flags of the token {as_json(content)} must be true or false")
    return tokenizers.AddedToken(content, **{**flags, "special": special or flags.get("special", False)})


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
