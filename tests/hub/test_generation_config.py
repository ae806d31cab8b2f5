"""What makers recommend is used as far as it can be; the rest is named and keeps no model back."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import CheckpointError
from localllm.hub.generation_config import FALLBACK_TEMPERATURE, read_generation_config


def read(folder: Path, told: Any) -> Any:
    (folder / "generation_config.json").write_text(json.dumps(told))
    return read_generation_config(folder)


@pytest.mark.parametrize(
    ("told", "sampling"),
    [
        ({"top_k": 40, "top_p": 0.9, "min_p": 0.05}, {"top_k": 40, "top_p": 0.9, "min_p": 0.05}),
        (
            {"temperature": 1, "repetition_penalty": 1.1},
            {"temperature": 1, "repetition_penalty": 1.1},
        ),
        (
            {"do_sample": False, "temperature": 0.6, "top_p": 0.95},
            {"temperature": 0.0, "top_p": 0.95},
        ),
        ({"max_new_tokens": 5, "max_length": 4096}, {"max_tokens": 5}),
        ({"stop_strings": ["\n\n", "END"]}, {"stop": ["\n\n", "END"]}),
        ({"temperature": None, "top_k": None, "eos_token_id": None}, {}),
        ({"num_beams": 1, "typical_p": 1.0, "bad_words_ids": [], "min_length": 0}, {}),
        ({"use_cache": True, "cache_implementation": "hybrid", "pad_token_id": -1}, {}),
    ],
)
def test_what_can_be_used_is_used_without_a_word(
    told: Any, sampling: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = {"temperature": FALLBACK_TEMPERATURE, **sampling}
    assert read(tmp_path, told).sampling == expected
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("top_k", -1), ("top_k", "50"), ("top_k", 50.5), ("top_k", True)),
        *(("top_p", 0), ("top_p", 0.0), ("top_p", 1.5), ("top_p", [0.9])),
        *(("temperature", "0.3"), ("temperature", -1), ("temperature", float("nan"))),
        *(("temperature", {"__float__": "Infinity"}), ("min_p", -0.1), ("min_p", "auto")),
        *(("repetition_penalty", 0), ("repetition_penalty", -1.0)),
        *(("max_new_tokens", 0), ("max_new_tokens", -1), ("max_new_tokens", "256")),
        *(("stop_strings", [""]), ("stop_strings", 7)),
    ],
)
def test_a_value_that_nobody_can_sample_with_is_dropped_with_a_warning(
    name: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = read(tmp_path, {name: value, "min_p" if name != "min_p" else "top_p": 0.5})
    kept = "min_p" if name != "min_p" else "top_p"
    assert found.sampling == {"temperature": FALLBACK_TEMPERATURE, kept: 0.5}
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"generation_config.json: {name}")
    assert record.getMessage().endswith("it is ignored")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("suppress_tokens", [5]), ("bad_words_ids", [[5]]), ("forced_eos_token_id", 2)),
        *(("num_beams", 4), ("no_repeat_ngram_size", 3), ("min_new_tokens", 10)),
        *(("sequence_bias", [[[5], -1.0]]), ("typical_p", 0.9), ("penalty_alpha", 0.6)),
    ],
)
def test_a_field_that_would_change_the_text_and_has_no_counterpart_is_named(
    name: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(tmp_path, {name: value}).sampling == {"temperature": FALLBACK_TEMPERATURE}
    [record] = caplog.records
    assert record.getMessage() == f"generation_config.json: {name} has no effect here"


@pytest.mark.parametrize(
    ("told", "ids", "named"),
    [
        (5, (5,), []),
        ([5, 6], (5, 6), []),
        ([[5], [6, 7]], (5, 6, 7), []),
        ([5, None], (5,), []),
        ("5", (), ["'5'"]),
        ([5, -1, True, 1 << 40], (5,), ["-1", "True", "1099511627776"]),
        ({"id": 5}, (), ["{'id': 5}"]),
    ],
)
def test_end_tokens_are_taken_from_any_nesting_and_others_are_named(
    told: Any, ids: Any, named: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(tmp_path, {"eos_token_id": told}).eos_token_ids == ids
    expected = [f"generation_config.json: {each} is no token id; it is ignored" for each in named]
    assert [record.getMessage() for record in caplog.records] == expected


def test_a_file_that_is_no_object_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must hold an object"):
        read(tmp_path, [1])
