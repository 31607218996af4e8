"""Builds a tokenizer from GGUF's metadata: byte-level BPE with a named pre-tokenizer, SentencePiece's BPE, or
Gemma 4's."""

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from personae.engine.checkpoints.gguf.metadata import Metadata
from personae.engine.checkpoints.gguf.pre_tokenizers import BEGINS, COMPOSED, PRE_TOKENIZERS, WHOLE_FIRST
from personae.engine.tokenizer_files import TokenizerFiles
from personae.errors import as_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
ENDS = (
    frozenset(  # tokens that end an answer, whatever end token the file names and of whatever type they are
        [
            "<|eot_id|>",
            "<|im_end|>",
            "<|end|>",
            "<end_of_turn>",
            "<turn|>",
            "<|endoftext|>",
            "<|eom_id|>",
            "<|end_of_text|>",
            "<end_of_utterance>",
            "<EOT>",
            "_<EOT>",
            "[EOT]",
            "[EOS]",
            "<｜end▁of▁sentence｜>",
        ]
    )
)
# Fields that change nothing in the kinds of tokenizers that are read here.
MEANINGLESS = frozenset(
    [
        "add_space_prefix",  # with byte-level BPE
        "mask_token_id",
        "merges",  # with SentencePiece, whose merges follow from the scores
        "normalizer.lowercase",  # of WordPiece
        "normalizer.strip_accents",
        "pre",  # with SentencePiece
        "precompiled_charsmap",  # of Unigram
        "remove_extra_whitespaces",  # of Unigram
        "scores",  # with byte-level BPE
        "seperator_token_id",  # used with add_sep_token
        "token_type_count",
        *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
        *(f"{name}_token_id" for name in ("prefix", "suffix", "middle", "cls")),
    ]
)
LONGEST_MERGED = 256  # characters; longer pieces are not merged from others


def read_tokenizer(metadata: Metadata) -> TokenizerFiles:
    """The tokenizer of a file. Raises ModelLoadError, which names the field."""
    kind = metadata.text("tokenizer.ggml.model")
    tokens = metadata.texts("tokenizer.ggml.tokens").read()
    types = metadata.integers("tokenizer.ggml.token_type", default=[NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise metadata.error(
            "tokenizer.ggml.token_type", f"has {len(types)} entries for {len(tokens)} tokens"
        )
    types = [CONTROL if token in ENDS else type for token, type in zip(tokens, types, strict=True)]
    if kind == "gpt2":
        pre = metadata.text("tokenizer.ggml.pre", default="default")
        backend, begins = _byte_level(metadata, tokens, pre), pre in BEGINS
    elif kind == "llama":
        backend, begins = _sentence_piece(metadata, tokens, types), True
    elif kind == "gemma4":
        backend, begins = _spaced(metadata, tokens, types), False
    else:
        raise metadata.error(
            "tokenizer.ggml.model", f"{as_json(kind)} is not supported, only gpt2, llama and gemma4"
        )
    backend.add_tokens([AddedToken(token, normalized=False) for token in _of(tokens, types, USER_DEFINED)])
    control = _of(tokens, types, CONTROL, UNKNOWN)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    ids = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "padding", "unknown")}
    ends = end_ids(metadata)
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    if metadata.flag("tokenizer.ggml.add_sep_token", default=False):
        raise metadata.error("tokenizer.ggml.add_sep_token", "is not supported")
    begins = metadata.flag("tokenizer.ggml.add_bos_token", default=begins)
    adds_end = metadata.flag("tokenizer.ggml.add_eos_token", default=False)
    backend.post_processor = _around(tokens, ids["bos"] if begins else None, ids["eos"] if adds_end else None)
    templates = dict(_chat_templates(metadata))
    metadata.refuse_unread("tokenizer.ggml.", MEANINGLESS)
    return TokenizerFiles(
        backend=backend,
        bos_id=ids["bos"],
        pad_id=ids["padding"],
        eos_ids=ends,
        special_tokens={name: tokens[id] for name, key in names.items() if (id := ids[key]) is not None},
        chat_templates=templates,
    )


def end_ids(metadata: Metadata) -> tuple[int, ...]:
    """The tokens that end an answer, read without the vocabulary. Raises ModelLoadError."""
    texts = metadata.texts("tokenizer.ggml.tokens")
    named = [_token_id(metadata, name, len(texts)) for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys([*(id for id in named if id is not None), *texts.places(ENDS)]))


def _around(tokens: list[str], first: int | None, last: int | None) -> processors.PostProcessor | None:
    """Puts these tokens before and after a text whose special tokens are asked for."""
    around = {name: id for name, id in (("first", first), ("last", last)) if id is not None}
    if not around:
        return None
    pieces = [name for name in ("first", "$A", "last") if name in around or name == "$A"]
    special = [{"id": name, "ids": [id], "tokens": [tokens[id]]} for name, id in around.items()]
    return processors.TemplateProcessing(single=pieces, special_tokens=special)


def _byte_level(metadata: Metadata, tokens: list[str], pre: str) -> Tokenizer:
    if pre not in PRE_TOKENIZERS:
        raise metadata.error(
            "tokenizer.ggml.pre",
            f"{as_json(pre)} is not supported; supported are: {', '.join(PRE_TOKENIZERS)}",
        )
    vocab = {token: id for id, token in reversed([*enumerate(tokens)])}
    backend = Tokenizer(_bpe(metadata, vocab, _own_merges(metadata), ignore_merges=pre in WHOLE_FIRST))
    cuts = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in PRE_TOKENIZERS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    backend.decoder = decoders.ByteLevel()
    if pre in COMPOSED:
        backend.normalizer = normalizers.NFC()
    return backend


def _own_merges(metadata: Metadata) -> list[tuple[str, ...]]:
    """The file's merges, the best first."""
    merges = [tuple(merge.split(" ")) for merge in metadata.texts("tokenizer.ggml.merges").read()]
    for merge in merges:
        if len(merge) != 2:
            raise metadata.error("tokenizer.ggml.merges", f"{as_json(' '.join(merge))} is not two tokens")
    return merges


def _spaced(metadata: Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    """Gemma 4's BPE: a space is a character of its own, merges are the file's, and runs of line breaks are
    words."""
    vocab = {token: id for id, token in reversed([*enumerate(tokens)])}
    unknown = next(iter(_of(tokens, types, UNKNOWN)), None)
    merges = _own_merges(metadata)
    backend = Tokenizer(_bpe(metadata, vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _sentence_piece(metadata: Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece's BPE: a merge makes the piece with the best score."""
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise metadata.error("tokenizer.ggml.scores", f"has {len(scores)} entries for {len(tokens)} tokens")
    vocab = {token: id for id, token in reversed([*enumerate(tokens)])}
    unknown = next(iter(_of(tokens, types, UNKNOWN)), None)
    merges = _merges(vocab, tokens, types, scores)
    backend = Tokenizer(_bpe(metadata, vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.flag("tokenizer.ggml.add_space_prefix", default=True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(
    vocab: Mapping[str, int], tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """All pairs of pieces that form a piece, the best first."""
    found: list[tuple[float, int, int, str, str]] = []
    for id, token in enumerate(tokens):
        if types[id] != NORMAL or len(token) > LONGEST_MERGED:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(scores[id], len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _bpe(metadata: Metadata, vocab: dict[str, int], merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:  # the library raises no narrower type
        raise metadata.error("tokenizer.ggml.merges", f"cannot be used: {error}") from None


def _of(tokens: list[str], types: list[int], *kinds: int) -> list[str]:
    return [token for token, type in zip(tokens, types, strict=True) if type in kinds and token]


def _token_id(metadata: Metadata, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return None
    id = metadata.integer(key)
    if id >= count:
        raise metadata.error(key, f"{id} is outside the vocabulary of {count} tokens")
    return id


def _chat_templates(metadata: Metadata) -> Iterator[tuple[str, str]]:
    prefix = "tokenizer.chat_template"
    for key in metadata:
        if key == prefix:
            yield "default", metadata.text(key)
        elif key.startswith(f"{prefix}."):
            yield key.removeprefix(f"{prefix}."), metadata.text(key)
