"""How byte-level BPE splits a text into words before it merges, by GGUF's names for the ways."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHES}"
_O200K = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTED}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTED}?"
    rf"|\p{{N}}{{1,3}}|{_SLASHES}"
)
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN35 = (
    rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_EXAONE = (
    rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_RUNS = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS = _CL100K.removesuffix(r"\s+(?!\S)|\s+") + _RUNS + r"|\s{1,2}(?!\S)|\s{1}"
_EAST_ASIAN = r"[一-龥\x{3040}-ゟ゠-ヿ]+"
_SIGNS = r"!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _EAST_ASIAN,
    rf"[{_SIGNS}][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_WIDE = r"[一-龥\x{0800}-一가-\x{D7FF}]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
    r"\s+$",
    _WIDE,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _WIDE, r"\p{N}")
_YOUTU = (
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\x{303F}︰-﹏]+|[ㄅ-ㄯ]+|" + _EAST_ASIAN,
    _O200K.replace(r"\p{N}{1,3}", r"\p{N}"),
)
_UPPER_K2, _LOWER_K2 = (f"[{letters}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|{_BEFORE}{_UPPER_K2}*{_LOWER_K2}+{_CONTRACTED}?|{_BEFORE}{_UPPER_K2}+{_LOWER_K2}*{_CONTRACTED}?"
    rf"|\p{{N}}{{1,3}}|{_REST}"
)
# By `tokenizer.ggml.pre`: the expressions that split text before merging, applied one after the other.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4", "a.x-4.0", "mellum"),
        (_GPT2,),
    ),
    "granite-docling": (_GPT2,),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"), (_CL100K,)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), (_CL100K,)),
    **dict.fromkeys(
        ("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "solar-open", "kormo"), (_QWEN2,)
    ),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    "mellum2": (r"\p{N}", _GPT2),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_O200K,)),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", _O200K),
    "exaone-moe": (_EXAONE,),
    "jais-2": (_JAIS,),
    "seed-coder": (_SEED,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "youtu": _YOUTU,
    "kimi-k2": (_KIMI,),
}
# Text begins with BOS, unless the file says otherwise.
BEGINS = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "lfm2",
    "midm-2.0",
    "tekken",
)
# A word that is in the vocabulary becomes one token, without merges.
WHOLE_FIRST = (*BEGINS, "glm4", "glm5", "youtu")
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # text is normalised to NFC
