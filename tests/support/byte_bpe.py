"""Small real tokenizers, trained on the fly, and the vocabularies that grammars see of them."""

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from personae.grammar.vocabulary import Vocabulary

END = "<|end|>"
TURN = "<|turn|>"
CORPUS = [
    '{"name": "Ada", "age": 36, "tags": ["a", "b"], "ok": true, "none": null}',
    "plain words, 12.5e-3 \n\n",
]


@cache
def byte_level_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """A byte-level BPE with the two special tokens <|end|> and <|turn|> (ids 0 and 1)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


@cache
def byte_level_vocabulary(padded_size: int = 350) -> Vocabulary:
    """The vocabulary of `byte_level_tokenizer` for a model whose logits are padded to `padded_size`."""
    return Vocabulary.from_tokenizer_json(byte_level_tokenizer().to_str(), padded_size, [0])


def byte_fallback_json() -> str:
    """The tokenizer.json of a SentencePiece-like BPE: byte pieces, and a mark that stands for a space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "é"]
    special: list[dict[str, Any]] = [
        {"id": index, "content": pieces[index], "special": True} for index in range(3)
    ]
    return json.dumps(
        {
            "added_tokens": [*special, {"id": 264, "content": "<tool>", "special": False}],
            "model": {
                "type": "BPE",
                "vocab": {piece: index for index, piece in enumerate(pieces)},
                "merges": [],
            },
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            },
        }
    )
