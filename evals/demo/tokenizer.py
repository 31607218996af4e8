"""A byte-level BPE tokenizer made for copying.

A value must have the same tokens in the user's words and in the model's JSON. So a space never joins the next
word, digits are separate, words are split at case borders, and all other characters form their own pieces
(`": "`, `"}, "`), whatever their neighbours are.
"""

import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from personae.evals.demo.data import ADAPTER_TASKS, mixture, samples
from personae.evals.demo.sample import TEMPLATE

VOCABULARY = 2048
CORPUS = 30_000  # conversations of the base's mixture
ADAPTER_CORPUS = 1_000  # and of each adapter's task
PIECES = r"\p{Lu}?[\p{Ll}\p{Lo}\p{M}]+|\p{Lu}+(?!\p{Ll})|\p{Lu}|\p{N}|\n+|[^\p{L}\p{N}\n]+"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # special: skipped when text is decoded
MARKERS = (
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
# JSON Schema and tool-call boilerplate, one token each: prompts are half as long.
JSON_TYPES = ("string", "integer", "number", "boolean")
REQUIRED = '}, "required": ["'
PHRASES = (
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    ', "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '{"type": "object", "properties": {"',
    REQUIRED,
    ', "enum": ["',
    '{"name": "',
    '", "arguments": {"',
    *(f'": {{"type": "{name}"' for name in JSON_TYPES),
    *(f'": {{"type": "{name}"}}, "' for name in JSON_TYPES),
)


def train_tokenizer(corpus: int = CORPUS) -> Tokenizer:
    """Learns the merges from the training split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKERS) - len(PHRASES),
        min_frequency=20,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    drawn = [itertools.islice(mixture("tokenizer", 0.0), corpus)]
    drawn += [
        itertools.islice(samples(task, "train", "tokenizer"), ADAPTER_CORPUS)
        for task in ADAPTER_TASKS.values()
    ]
    texts = (sample.prompt + sample.completion for sample in itertools.chain(*drawn))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in (*MARKERS, *PHRASES)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer's files as transformers expects them, chat template included."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config = special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE.read_text(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    named = {name: token for name, token in special.items() if token}
    (folder / "special_tokens_map.json").write_text(json.dumps(named, indent=2, sort_keys=True) + "\n")
