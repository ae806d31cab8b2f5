"""The summary of a trace, from spans worked out by hand."""

import pytest

from tools.gpu_parts.trace import Span, summarize

STEP = [
    ("Memcpy HtoD (Pinned -> Device)", 0, 1),
    ("void at::(anonymous namespace)::norm<4, float>(float*, int)", 2, 4),
    ("product", 4, 9),
    ("product", 9.5, 12),
]


def test_launches_gaps_and_idle_time() -> None:
    spans = [
        Span(name, start + 20 * step, end + 20 * step)
        for step in range(3)
        for name, start, end in STEP
    ]
    found = summarize(spans, num_steps=3, num_layers=2)
    assert found["launches"] == 9
    assert found["launches_a_step"] == 3
    assert found["launches_a_layer"] == 1.5
    assert found["step_us"] == pytest.approx(52 / 3)
    # A microsecond and a half in each step, and eight between two.
    assert found["idle_share"] == pytest.approx((3 * 1.5 + 2 * 8) / 52)
    assert found["us_a_step"] == {
        "product": 7.5,
        "at::norm": 2.0,
        "Memcpy HtoD (Pinned -> Device)": 1.0,
    }


def test_what_overlaps_is_no_gap() -> None:
    spans = [Span("a", 0, 10), Span("b", 2, 4), Span("c", 8, 12)]
    assert summarize(spans, 1, 1)["idle_share"] == 0


def test_an_empty_trace_says_so() -> None:
    assert summarize([], 1, 1) == {"launches": 0}
