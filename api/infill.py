"""Fill in the middle: prompts of a text before and a text after the answer.

A model whose tokenizer has all tokens of a form is taken to be trained on it. Sources of the forms: the model
cards of Qwen2.5-Coder, CodeGemma, StarCoder 2 and DeepSeek-Coder; Meta's `infilling_prompt_tokens` for Code
Llama; mistral-common's `encode_fim` for Codestral; llama.cpp's list of tokens for GLM-4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from personae.engine.tokens import Tokenizer

_ANCHOR = "☺"  # of no text: what follows it begins no text, so it gets no blank of SentencePiece's


@dataclass(frozen=True, slots=True)
class InfillForm:
    """The tokens of a form. `before` stands in front of the text before the answer, `after` in front of the
    text after it. `middle` ends the prompt; None if nothing does. `after_first`: the text after the answer
    comes first. `ends`: an answer stops at these, besides the model's own."""

    before: str
    after: str
    middle: str | None
    after_first: bool = False
    ends: tuple[str, ...] = ()


_FORMS = (
    # Qwen2.5-Coder, CodeGemma, Granite 4
    InfillForm(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>"),
    ),
    # StarCoder, StarCoder 2, Granite Code
    InfillForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<fim_pad>", "<file_sep>")),
    InfillForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    InfillForm("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # Code Llama
    InfillForm("[PREFIX]", "[SUFFIX]", None, after_first=True),  # Codestral
    InfillForm("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
)


@dataclass(frozen=True, slots=True)
class Infill:
    """A model's form, in its tokens."""

    before: int
    after: int
    middle: tuple[int, ...]
    after_first: bool
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Infill | None":
        """The form of a tokenizer's model; None if it has none."""
        find = tokenizer.backend.token_to_id
        for form in _FORMS:
            needed = [find(token) for token in (form.before, form.after, form.middle) if token is not None]
            ids = [id for id in needed if id is not None]
            if len(ids) == len(needed):
                ends = [id for token in form.ends if (id := find(token)) is not None]
                return cls(ids[0], ids[1], tuple(ids[2:]), form.after_first, tuple(ends))
        return None

    def prompt(self, begin: Sequence[int], before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The tokens of the whole prompt. `begin`: the tokens with which each prompt of the model begins."""
        texts = [[self.before, *before], [self.after, *after]]
        first, second = reversed(texts) if self.after_first else texts
        return [*begin, *first, *second, *self.middle]


def infix_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that stands behind other text. Raises RequestError if it is not Unicode."""
    if tokenizer.byte_level:
        return tokenizer.encode(text, False)
    plain, anchor, anchored = tokenizer.encode_batch([text, _ANCHOR, _ANCHOR + text], False)
    return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else plain
