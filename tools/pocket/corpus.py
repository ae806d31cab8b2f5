"""From the books to token rows: clean text, passages, a byte-level BPE, and a seeded order.

A passage is the text between two headings (a chapter, a tale). Headings, tables of contents and
other front matter are dropped, typographic quotes become ASCII (what a person types), and the
hard line ends of the printed page are joined, so that the model writes paragraphs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>", "<think>", "</think>")
HELD_OUT_BOOKS = ("the-wind-in-the-willows", "the-time-machine")
# Short sentences, plain words, whole stories: what a model of this size can learn to continue.
TALES = (
    "alice-s-adventures-in-wonderland",
    "andersen-s-fairy-tales",
    "grimms-fairy-tales",
    "peter-pan",
    "the-blue-fairy-book",
    "the-secret-garden",
    "the-wonderful-wizard-of-oz",
)
MIN_PASSAGE_CHARS = 1500

_TYPOGRAPHY = str.maketrans(
    {
        "“": '"',
        "”": '"',
        "‘": "'",
        "’": "'",
        "—": "--",
        "…": "...",
        "\xa0": " ",
        "_": None,
        "|": None,
    }
)
_NUMBERED_HEADING = re.compile(
    r"(chapter|book|part|volume|adventure|epilogue|prologue)\b.{0,80}"
    r"|([IVXLC]+|\d+)(\. .{0,60}|\.?)",
    re.IGNORECASE,
)
_TABLE_OF_CONTENTS = re.compile(r"\b(?:CHAPTER [IVXLC\d]+|[IVXLC]+\. [A-Z])")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids of the passages, separate for training and for measuring."""

    training: list[npt.NDArray[np.uint16]]
    tales: list[npt.NDArray[np.uint16]]
    held_out: list[npt.NDArray[np.uint16]]


def is_heading(paragraph: str) -> bool:
    """Whether a paragraph is a title or a chapter number and not a sentence."""
    if len(paragraph) > 120:
        return False
    letters = [char for char in paragraph if char.isalpha()]
    if letters and all(char.isupper() for char in letters) and not paragraph.endswith(('"', "!")):
        return True
    return _NUMBERED_HEADING.fullmatch(paragraph) is not None


def split_passages(book: str) -> list[str]:
    """Clean one book and cut it at its headings; passages under 1,500 characters are dropped."""
    text = book.replace("\r\n", "\n").translate(_TYPOGRAPHY)
    passages: list[list[str]] = [[]]
    for block in re.split(r"\n\s*\n", text):
        paragraph = " ".join(block.split())
        if set(paragraph) <= set("* .-") or len(_TABLE_OF_CONTENTS.findall(paragraph)) > 3:
            continue
        if is_heading(paragraph):
            passages.append([])
        else:
            passages[-1].append(paragraph)
    joined = ("\n\n".join(paragraphs) for paragraphs in passages)
    return [passage for passage in joined if len(passage) >= MIN_PASSAGE_CHARS]


def read_books(folder: Path) -> dict[str, list[str]]:
    """Passages of every `*.txt` in `folder`, by the book's name."""
    books = {
        path.stem: split_passages(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.txt"))
    }
    if not books:
        raise SystemExit(f"error: no books in {folder}\n  try: --books FOLDER with *.txt files")
    return books


def train_tokenizer(
    books: dict[str, list[str]], spoken: Sequence[str], vocab_size: int
) -> Tokenizer:
    """Byte-level BPE over the training books and the texts of conversations.

    Every byte has a token, so nothing is unknown.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    passages = [
        text for name, texts in books.items() if name not in HELD_OUT_BOOKS for text in texts
    ]
    tokenizer.train_from_iterator([*passages, *spoken], trainer)
    return tokenizer


def encode_books(books: dict[str, list[str]], tokenizer: Tokenizer) -> Corpus:
    """Token ids of each passage, closed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    corpus = Corpus([], [], [])
    for name, passages in books.items():
        encoded = [
            np.array([*encoding.ids, end], dtype=np.uint16)
            for encoding in tokenizer.encode_batch(passages, add_special_tokens=False)
        ]
        if name in HELD_OUT_BOOKS:
            corpus.held_out.extend(encoded)
            continue
        corpus.training.extend(encoded)
        if name in TALES:
            corpus.tales.extend(encoded)
    return corpus


def epoch_stream(corpus: Corpus, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """All passages of one epoch in a seeded order, the tales twice, as one row of token ids."""
    passages = corpus.training + corpus.tales
    order = np.random.default_rng((seed, epoch)).permutation(len(passages))
    return np.concatenate([passages[i] for i in order]).astype(np.int64)
