"""Prompts with a gap, as each family writes them."""

import pytest

from localllm.text.fill_in import FillIn


def encode(text: str) -> list[int]:
    return [1000 + ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("marks", "shown"),
    [
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "0 a 1 b 2"),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "0 a 1 b 2"),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "0 a 1 b 2"),
        (["▁<PRE>", "▁<SUF>", "▁<MID>"], "0 a 1 b 2"),
        (["[SUFFIX]", "[PREFIX]"], "0 b 1 a"),
    ],
)
def test_each_family_has_its_order(marks: list[str], shown: str) -> None:
    form = FillIn.of({mark: i for i, mark in enumerate(marks)} | {"x": 9})
    assert form is not None
    written = form.write("a", "b", encode)
    assert " ".join(chr(i - 1000) if i >= 1000 else str(i) for i in written) == shown
    assert set(form.stop_ids) == set(range(len(marks)))


def test_a_vocabulary_without_the_tokens_has_no_format() -> None:
    assert FillIn.of({"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "a": 3}) is None


def test_what_else_ends_an_answer_is_known() -> None:
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>", "<|fim_pad|>")
    form = FillIn.of({name: i for i, name in enumerate(names)})
    assert form is not None
    assert set(form.stop_ids) == {0, 1, 2, 3, 4}
