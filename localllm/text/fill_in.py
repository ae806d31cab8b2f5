"""Fill-in-the-middle: a prompt of what stands before and behind a gap, for models that know it.

A family's vocabulary shows its format. Sources: Bavarian et al. 2022, "Efficient Training of
Language Models to Fill in the Middle" (prefix, suffix, middle); the model cards of Qwen2.5-Coder,
StarCoder2, Granite Code, DeepSeek-Coder, Code Llama, Codestral and GLM-4.5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FillInFormat:
    """`before` PREFIX `between` SUFFIX `after`; with `suffix_first`, the two texts change places.

    `others`: tokens that end an answer, besides those three.
    """

    before: str
    between: str
    after: str
    suffix_first: bool = False
    others: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """The tokens that a vocabulary must have."""
        return tuple(filter(None, (self.before, self.between, self.after)))


_FILES = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>")
_FORMATS = (
    FillInFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", others=_FILES),
    FillInFormat(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        others=("<fim_pad>", "<file_sep>", "<|endoftext|>"),
    ),
    FillInFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FillInFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    FillInFormat("▁<PRE>", "▁<SUF>", "▁<MID>", others=("▁<EOT>",)),
    FillInFormat("[SUFFIX]", "[PREFIX]", "", suffix_first=True),
)


@dataclass(frozen=True, slots=True)
class FillIn:
    """The format of one vocabulary."""

    form: FillInFormat
    ids: dict[str, int]

    @classmethod
    def of(cls, vocabulary: dict[str, int]) -> "FillIn | None":
        """The format that a vocabulary shows; None if its model cannot fill in."""
        for form in _FORMATS:
            if all(mark in vocabulary for mark in form.marks):
                known = (*form.marks, *form.others)
                return cls(form, {mark: vocabulary[mark] for mark in known if mark in vocabulary})
        return None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return tuple(self.ids.values())

    def is_used_in(self, token_ids: Sequence[int]) -> bool:
        """Whether a prompt asks for something to be filled in."""
        return all(self.ids[mark] in token_ids for mark in self.form.marks)

    def write(self, prefix: str, suffix: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
        """The prompt; `encode` makes tokens of a text, without any of its own around them."""
        form = self.form
        texts = (suffix, prefix) if form.suffix_first else (prefix, suffix)
        ids: list[int] = []
        for mark, text in zip((form.before, form.between), texts, strict=True):
            ids += [self.ids[mark], *encode(text)]
        return ids + ([self.ids[form.after]] if form.after else [])
