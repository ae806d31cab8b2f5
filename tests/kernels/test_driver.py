"""Where Triton cannot build its module for the driver, and what is told then."""

from typing import Any

import pytest
import torch
import triton

from localllm_kernels import TORCH_OPS, select_ops


class Broken:
    """Triton's drivers, where Python's headers are missing."""

    @property
    def active(self) -> Any:
        raise FileNotFoundError("Python.h: No such file or directory\ncompilation terminated.")


def test_torch_s_operators_are_the_way_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton.runtime, "driver", Broken())
    assert select_ops("cuda", "auto", torch.bfloat16) is TORCH_OPS
    assert "apt install gcc python3-dev" in caplog.text
    assert "Python.h: No such file" in caplog.text
    assert "terminated" not in caplog.text


def test_who_asked_for_triton_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime, "driver", Broken())
    with pytest.raises(ValueError, match="apt install gcc python3-dev"):
        select_ops("cuda", "triton", torch.bfloat16)
