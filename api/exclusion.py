"""What an answer may not say: `allowed_token_ids` and `bad_words`, and what they cannot be kept beside."""

from collections.abc import Sequence

from personae.api.door import Door
from personae.engine.params import SamplingParams
from personae.errors import RequestError

_MOST_WORDS = 1024
_LONGEST_WORD = 128

Sequences = tuple[tuple[int, ...], ...]


async def bad_words(door: Door, words: Sequence[str] | None) -> Sequences:
    """The token ids of each word, as it begins a text and as it comes after a space. Raises RequestError."""
    if not words:
        return ()
    if len(words) > _MOST_WORDS:
        raise RequestError(f"`bad_words` may have at most {_MOST_WORDS} words.", param="bad_words")
    spelled: list[str] = []
    for index, word in enumerate(words):
        bare = word.lstrip(" ")
        if not 0 < len(bare) <= _LONGEST_WORD:
            name = f"bad_words[{index}]"
            raise RequestError(
                f"`{name}` must have 1 to {_LONGEST_WORD} characters, spaces before it not counted.",
                param=name,
            )
        spelled += bare, f" {bare}"
    lists = await door.encode(spelled, add_special_tokens=False)
    # A tokenizer may know more ids than the model: what cannot be said need not be left out.
    return tuple(dict.fromkeys(tuple(ids) for ids in lists if ids and max(ids) < door.client.vocab_size))


def check_exclusion(params: SamplingParams, eos: Sequence[int], vocab: int, bound_by: str | None) -> None:
    """Raise RequestError where `params` may leave nothing to be said: beside `bound_by`, the field that binds
    the answer, or by themselves."""
    given = {"allowed_token_ids": params.allowed_token_ids, "bad_words": params.bad_words_token_ids}
    names = [name for name, tokens in given.items() if tokens]
    if not names:
        return
    if bound_by is not None:
        raise RequestError(
            f"`{names[0]}` beside `{bound_by}`: a bound answer may need a token that is left out, and "
            "could then not be completed. Give one of the two.",
            param=names[0],
        )
    gone = {word[-1] for word in params.bad_words_token_ids}
    if params.min_tokens:
        names.append("min_tokens")
        gone.update(params.stop_token_ids, () if params.ignore_eos else eos)
    if all(token in gone for token in params.allowed_token_ids or range(vocab)):
        fields = " and ".join(f"`{name}`" for name in names)
        raise RequestError(f"{fields} may leave no token to be said.", param=names[0])
