"""The sampling defaults that a model folder recommends: `generation_config.json`, read strictly."""

from dataclasses import dataclass
from pathlib import Path

from personae.engine.fields import Fields, read_fields
from personae.errors import as_json


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling defaults that the model's makers recommend, None where they give none. `eos` ids end an
    answer. `plain_repetition_penalty` is used instead of `repetition_penalty`, if that is None, for the plain
    answers of the base in a conversation. Adapters, bound answers and completions copy what is there."""

    eos: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    plain_repetition_penalty: float | None = None


def read_generation_defaults(folder: Path, vocab_size: int) -> GenerationDefaults:
    """Reads `generation_config.json`, which may be absent. Its EOS ids fall back to those of `config.json`.

    Raises:
        ModelLoadError: a field is malformed, or an EOS id is outside the vocabulary.
    """
    path = folder / "generation_config.json"
    fields = read_fields(path) if path.exists() else Fields({}, path.name)
    source = fields if "eos_token_id" in fields else read_fields(folder / "config.json")
    return GenerationDefaults(
        eos=_token_ids(source, "eos_token_id", vocab_size),
        temperature=fields.optional_number("temperature", zero=True),
        top_p=fields.optional_number("top_p", high=1.0),
        top_k=fields.size("top_k", zero=True) if "top_k" in fields else None,
        min_p=fields.optional_number("min_p", zero=True, high=1.0),
        repetition_penalty=fields.optional_number("repetition_penalty"),
    )


def _token_ids(fields: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    value = fields.raw(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise fields.error(name, f"{as_json(token)} is outside the vocabulary of {vocab_size} tokens")
    return tuple(ids)
