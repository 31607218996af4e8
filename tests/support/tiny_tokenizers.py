"""Small real tokenizers, trained on the fly: byte-level BPE, and SentencePiece-style with byte fallback."""

import functools
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "def main():\n    return [x for x in range(10) if x % 2 == 0]\n",
    "Grüße aus Köln, naïve café, señor. Ça va? Žluťoučký kůň.",
    "日本語のテキストと中文文本。 Привет, мир! 🙂🙃 مرحبا",
] * 4
SPECIAL = ["<|bos|>", "<|eos|>"]


@functools.cache
def _byte_level() -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return str(tokenizer.to_str())


@functools.cache
def _byte_fallback(strip: bool) -> str:
    """Like Llama 2's (strip) or Gemma's: "▁" for spaces, bytes for characters outside of the vocabulary."""
    pieces = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>"], show_progress=False)
    pieces.train_from_iterator(CORPUS[:1], trainer)
    vocab = {token: id for id, token in enumerate(["<unk>", *SPECIAL])}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁▁", "▁▁▁"]:
        vocab.setdefault(token, len(vocab))
    for token, _ in sorted(pieces.get_vocab().items(), key=lambda item: item[1]):
        vocab.setdefault(token, len(vocab))
    merges = [("▁", "▁"), ("▁▁", "▁")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    return str(tokenizer.to_str())


@functools.cache
def _unigram() -> str:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


KINDS = {
    "byte_level": _byte_level,
    "llama_fallback": functools.partial(_byte_fallback, True),
    "gemma_fallback": functools.partial(_byte_fallback, False),
    "unigram": _unigram,
}


def make(kind: str) -> tokenizers.Tokenizer:
    """A new tokenizer. Each kind is trained only once."""
    return tokenizers.Tokenizer.from_str(KINDS[kind]())


def shared_tokenizers() -> dict[str, Path]:
    """Folders of real tokenizers in a `shared/data/tokenizers` above the repository, if there is one."""
    for parent in Path(__file__).resolve().parents:
        folder = parent / "shared" / "data" / "tokenizers"
        if folder.is_dir():
            return {path.parent.name: path.parent for path in sorted(folder.glob("*/tokenizer.json"))}
    return {}
