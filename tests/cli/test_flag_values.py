"""What flags' words are turned into."""

import pytest

from localllm.cli.flags.sampling_flags import SamplingFlags
from localllm.cli.flags.values import parse_context, parse_size
from localllm.errors import RequestError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2g", 2 << 30),
        ("1.5 GB", 1_500_000_000),
        ("4096", 4096),
        ("300b", 300),
        ("1TiB", 1 << 40),
        (" 7k ", 7168),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text, "reserve") == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5", "2 gigs", "1e9", "9" * 40, "٣k"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(RequestError, match="--reserve must be a size"):
        parse_size(text, "reserve")


def test_what_other_programs_write_for_no_limit_is_none() -> None:
    assert parse_context("0") is None
    assert SamplingFlags(seed=-1, max_tokens=-1).given() == {}
    assert SamplingFlags(seed=-2, max_tokens=5, top_k=-1).given() == {
        "seed": -2,
        "max_tokens": 5,
        "top_k": 0,
    }
