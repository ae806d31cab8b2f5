"""Calibration text that a model writes itself: how its windows begin, and a seed repeats it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.answer.opening import open_model
from localllm.quantize.calibrate import CalibrationText, WindowCounts, write_text
from localllm.text.tokenizer import Tokenizer

COUNTS = WindowCounts(calibrating=4, held_back=2, length=24)
MakeCheckpoint = Callable[..., Path]


def written(folder: Path, seed: int = 0) -> CalibrationText:
    return write_text(open_model(str(folder)), COUNTS, seed)


def windows_of(text: CalibrationText) -> list[list[int]]:
    return [*text.windows.tolist(), *text.held_back.tolist()]


def test_every_other_window_of_a_model_that_chats_begins_with_the_turn_of_a_user(
    make_checkpoint: MakeCheckpoint,
) -> None:
    folder = make_checkpoint()
    tokenizer = Tokenizer.from_folder(folder)
    start = tokenizer.encode("<|im_start|>user\n", add_special_tokens=False, parse_special=True)
    windows = windows_of(written(folder))
    assert [len(window) for window in windows] == [24] * 6
    assert len({tuple(window) for window in windows}) == 6
    assert sum(window[: len(start)] == start for window in windows) == 3
    assert sum(window[0] in tokenizer.ordinary_token_ids for window in windows) == 3


@pytest.mark.parametrize(
    "template",
    [None, "{{ raise_exception('no') }}", "{{ messages[0].content | length }}"],
    ids=["none", "refuses", "hides the text"],
)
def test_any_other_begins_with_ordinary_tokens(
    make_checkpoint: MakeCheckpoint, edit_json: Callable[..., None], template: str | None
) -> None:
    folder = make_checkpoint()
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer.from_folder(folder)
    begun = {window[0] for window in windows_of(written(folder))}
    assert begun <= set(tokenizer.ordinary_token_ids)
    assert len(begun) > 1


def test_a_seed_repeats_the_text_and_another_does_not(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    first, again, other = (windows_of(written(folder, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
