"""How a byte-level vocabulary cuts text into words, by the name that a GGUF file gives it.

A file does not hold the regular expressions: `tokenizer.ggml.pre` only names a model that had them.
They are those of that model's tokenizer.json. Source: the names, flags and families are facts of
llama.cpp's `src/llama-vocab.cpp`, which itself rewrites the expressions for another engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Step = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WordSplit:
    """The steps of a pre-tokenizer, and what else the name says of a tokenizer.

    `composes`: text is put in Unicode's form NFC first; `ignores_merges`: a word that is a token is
    taken whole; `adds_bos`: a text begins with the token for it, unless the file denies it.
    """

    steps: tuple[Step, ...]
    composes: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


def _bytes(*, use_regex: bool) -> Step:
    """The step that writes text as bytes; with `use_regex` it first splits as GPT-2 does."""
    flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel", **flags}


def _split(pattern: str) -> Step:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _digits(*, individual: bool) -> Step:
    return {"type": "Digits", "individual_digits": individual}


def _regexes(*patterns: str) -> tuple[Step, ...]:
    return *map(_split, patterns), _bytes(use_regex=False)


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # as ByteLevel's
)
_PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""


def _words(digits: str, spaces: str = _SPACES) -> str:
    """The expression of cl100k, which most vocabularies vary."""
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_SIGNS}|{spaces}"


def _cased_words(
    endings: str, digits: str, without: str = "", after_signs: str = r"[\r\n/]*"
) -> str:
    """The expression of o200k: a word begins where small letters are followed by large ones."""
    large = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    small = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{large}*{small}+{endings}|{before}{large}+{small}*{endings}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{after_signs}|{_SPACES}"
    )


def _marked_words(spaces: str = _SPACES) -> str:
    """The expression of DeepSeek-V3, after its digits and Chinese runs."""
    return (
        rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{spaces}"
    )


_LLAMA_3 = _regexes(_words(r"\p{N}{1,3}"))
_QWEN_2 = _regexes(_words(r"\p{N}"))
_QWEN_35 = _regexes(
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_O200K = _cased_words(f"{_ENDINGS}?", r"\p{N}{1,3}")
_TEKKEN = _regexes(_cased_words("", r"\p{N}"))
_GPT_2 = (_bytes(use_regex=True),)
_DIGITS_FIRST = (_digits(individual=True), _bytes(use_regex=True))
_CHINESE_OR_KANA = "[\u4e00-\u9fa5\u3040-\u30ff]+"
_ASIAN = "[\u0800-\u9fa5\uac00-\ud7ff]+"
_DEEPSEEK_3 = _regexes(r"\p{N}{1,3}", _CHINESE_OR_KANA, _marked_words())
_DEEPSEEK_CODER = (
    *map(_split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN)),
    _digits(individual=True),
    _bytes(use_regex=False),
)
# Letters that have a large and a small form, in hexadecimal: first and last of each range.
_CASED = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F "
    "386 388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD "
    "1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 "
    "1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 "
    "2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 "
    "2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B A722-A76F A771-A787 "
    "A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_LETTERS = "".join(
    "-".join(chr(int(end, 16)) for end in each.split("-")) for each in _CASED.split()
)
_DEEPSEEK_LLM = (
    *map(
        _split,
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _ASIAN,
        ),
    ),
    _digits(individual=True),
    _bytes(use_regex=False),
)
_FALCON = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    _bytes(use_regex=True),
    _digits(individual=False),
    _split("[0-9][0-9][0-9]"),
)
_DEFAULT = _regexes(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_SEED_CODER = _regexes(
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_BAILING = _regexes(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_KIMI_K2 = _regexes(
    r"[\p{Han}]+|"
    + _cased_words(f"{_ENDINGS}?", r"\p{N}{1,3}", r"&&[^\p{Han}]", after_signs=r"[\r\n]*")
)
_SUPERBPE = _regexes(r"\p{N}+", r"(?=(\d{3})+(?!\d))")
_TINY_AYA = _regexes(r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)
_YOUTU = _regexes(
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_CHINESE_OR_KANA}",
    _cased_words(f"{_ENDINGS}?", r"\p{N}"),
)
_EXAONE_MOE = _regexes(
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_AFMOE = _regexes(
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # threes from the right
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _marked_words(),
)
_JAIS_2 = _regexes(
    _words(
        r"\p{N}{1,3}",
        r"\s*[\r\n]+|"
        + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"|\s{1,2}(?!\S)|\s{1}",
    )
)
_LAGUNA = _regexes(r"[^\n]+|[\n]+", _words(r"\p{N}"))


def _named(split: WordSplit, names: str) -> dict[str, WordSplit]:
    return dict.fromkeys(names.split(), split)


_WHOLE_WITH_BOS = WordSplit(_LLAMA_3, ignores_merges=True, adds_bos=True)
# By `tokenizer.ggml.pre`.
WORD_SPLITS: Mapping[str, WordSplit] = {
    **_named(WordSplit(_DEFAULT), "default"),
    **_named(_WHOLE_WITH_BOS, "llama-bpe llama3 llama-v3 lfm2 falcon3 falcon-h1 pixtral midm-2.0"),
    **_named(_WHOLE_WITH_BOS, "jina-v5-nano"),
    **_named(WordSplit(_LLAMA_3), "glm4 chatglm-bpe dbrx smaug-bpe"),
    **_named(WordSplit(_QWEN_2, composes=True), "qwen2 deepseek-r1-qwen"),
    **_named(WordSplit(_QWEN_2), "stablelm2 hunyuan megrez grok-2 solar-open kormo"),
    **_named(WordSplit(_QWEN_35, composes=True), "qwen35"),
    **_named(WordSplit(_regexes(_O200K)), "gpt-4o llama4 kanana2 minimax-m2"),
    **_named(WordSplit(_TEKKEN, ignores_merges=True, adds_bos=True), "tekken"),
    **_named(WordSplit(_DEEPSEEK_3), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    **_named(WordSplit(_DEEPSEEK_LLM), "deepseek-llm"),
    **_named(WordSplit(_DEEPSEEK_CODER), "deepseek-coder"),
    **_named(WordSplit(_GPT_2), "gpt-2 phi-2 exaone4 granite-docling mellum gigachat a.x-4.0"),
    **_named(WordSplit(_GPT_2), "jais trillion"),
    **_named(WordSplit(_GPT_2, composes=True), "olmo mpt modern-bert"),
    **_named(
        WordSplit(_DIGITS_FIRST), "starcoder refact smollm codeshell exaone minerva-7b mellum2"
    ),
    **_named(WordSplit(_DIGITS_FIRST, composes=True), "command-r"),
    **_named(WordSplit(_FALCON), "falcon"),
    **_named(WordSplit(_SUPERBPE), "superbpe"),
    **_named(WordSplit(_SEED_CODER), "seed-coder"),
    **_named(WordSplit(_BAILING), "bailingmoe bailingmoe2 llada-moe"),
    **_named(WordSplit(_KIMI_K2), "kimi-k2"),
    **_named(WordSplit(_TINY_AYA), "tiny_aya cohere2moe"),
    **_named(WordSplit(_YOUTU, ignores_merges=True), "youtu"),
    **_named(WordSplit(_EXAONE_MOE), "exaone-moe"),
    **_named(WordSplit(_AFMOE), "afmoe"),
    **_named(WordSplit(_JAIS_2), "jais-2"),
    **_named(WordSplit(_LAGUNA), "laguna"),
}
