"""From a scene to token ids: what its questions share once, then each question with its answer.

The shared part, mostly the tools, is computed once for all the questions of a row; an attention mask keeps the
questions from seeing each other, and each continues at the position where the shared part ends. What a
question's tokens see is so what they would see in a conversation of their own.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer

from personae.api.templates.template import ChatTemplate
from personae.api.wire.conversation import Message
from personae.evals.demo.finetune.scene import Scene, Turn
from personae.grammar.tools.registry import GENERIC, tool_format

IGNORED = -100


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One row of a batch. `branch` is 0 for what is shared, then 1, 2, … for the questions."""

    ids: list[int]
    positions: list[int]
    branch: list[int]
    labels: list[int]


class Encoder:
    """A model's tokenizer and template, with tools as the server's generic format has them."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._source = (model / "chat_template.jinja").read_text(encoding="utf-8")

    @cached_property
    def template(self) -> ChatTemplate:
        """Its template."""
        special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        return ChatTemplate(self._source, special, tools=tool_format(GENERIC))

    def prompt(self, scene: Scene, turn: Turn) -> str:
        """The prompt as the server writes it."""
        return self.render(scene.messages(turn), scene.tools)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """The prompt of messages with tools."""
        return self.template.render(msgspec.convert(messages, list[Message]), tools=tools or None)

    def row(self, scene: Scene, longest: int) -> TrainingRow | None:
        """The scene as a row of at most so many tokens; None if not even one question fits."""
        turns = [self._conversation(scene, turn) for turn in scene.turns]
        shared = _common([ids[:first] for ids, _, first in turns])
        begin = turns[0][0][:shared]
        row = TrainingRow(begin, list(range(shared)), [0] * shared, [IGNORED] * shared)
        added = 0
        for ids, labels, _ in turns:
            own = len(ids) - shared
            if len(row.ids) + own > longest:
                continue
            added += 1
            row.ids.extend(ids[shared:])
            row.positions.extend(range(shared, len(ids)))
            row.branch.extend([added] * own)
            row.labels.extend(labels[shared:])
        return row if added else None

    def _conversation(self, scene: Scene, turn: Turn) -> tuple[list[int], list[int], int]:
        """A whole conversation's tokens, their labels, and how many stand before the first answer."""
        ids: list[int] = []
        labels: list[int] = []
        text, first = "", 0
        for messages, answer in scene.rounds(turn):
            prompt = self.render(messages, scene.tools)
            if not prompt.startswith(text):
                raise ValueError(f"The template rewrites what was said: {prompt!r} after {text!r}.")
            asked, answered = self.ids(prompt[len(text) :]), self.ids(answer + "<|im_end|>")
            first = first or len(asked)
            ids += asked + answered
            labels += [IGNORED] * len(asked) + answered
            text = prompt + answer + "<|im_end|>"
        return ids, labels, first

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def _common(prompts: list[list[int]]) -> int:
    """How many first tokens are the same in all, but for the last token of each."""
    count = min(len(prompt) for prompt in prompts) - 1
    for index in range(count):
        if len({prompt[index] for prompt in prompts}) > 1:
            return index
    return count


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded to one length. `mask` is added to the scores of attention."""

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of(cls, rows: list[TrainingRow], pad: int) -> "Batch":
        """The batch of rows."""
        longest = -(-max(len(row.ids) for row in rows) // 16) * 16

        def padded(lists: list[list[int]], value: int) -> torch.Tensor:
            return torch.tensor([one + [value] * (longest - len(one)) for one in lists])

        branch = padded([row.branch for row in rows], -1)
        causal = torch.ones(longest, longest, dtype=torch.bool).tril()
        same = branch[:, :, None] == branch[:, None, :]
        seen = causal & (same | (branch[:, None, :] == 0))
        mask = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill(
            ~seen, torch.finfo(torch.bfloat16).min
        )
        return cls(
            padded([row.ids for row in rows], pad),
            padded([row.positions for row in rows], 0),
            mask[:, None],
            padded([row.labels for row in rows], IGNORED),
        )
