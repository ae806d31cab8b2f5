"""Codings of keys in 4 bits are found once for a model, and again if their file is damaged."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.engine import coding_file
from localllm.engine.config import EngineConfig
from localllm.engine.key_codings import find_codings
from localllm.engine.loaded_decoder import LoadedDecoder, load_decoder
from localllm.model.families.table import read_architecture
from localllm.user.places import cache_folder


def load(folder: Path) -> LoadedDecoder:
    config = EngineConfig(dtype="float32", max_num_seqs=1, kv_cache_dtype="int4", device="cpu")
    return load_decoder(folder, read_architecture(folder), config)


def parts(loaded: LoadedDecoder) -> list[Tensor]:
    return [part for each in loaded.codings for part in (each.means, each.factors, each.feedback)]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What codings were searched for."""
    seen: list[object] = []

    def listened(model: object) -> object:
        seen.append(model)
        return find_codings(model)  # type: ignore[arg-type]

    monkeypatch.setattr(coding_file, "find_codings", listened)
    return seen


@pytest.mark.parametrize("harm", [None, b"", b"no tensors", "shorter", "not finite"])
def test_codings_are_found_once(
    make_checkpoint: Callable[..., Path], searches: list[object], harm: bytes | str | None
) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM")
    first = parts(load(folder))
    (kept,) = cache_folder(coding_file.FOLDER).iterdir()
    if isinstance(harm, bytes):
        kept.write_bytes(harm)
    elif harm == "shorter":
        kept.write_bytes(kept.read_bytes()[:-5])
    elif harm == "not finite":
        data = bytearray(kept.read_bytes())
        data[-4:] = torch.tensor(torch.nan).numpy().tobytes()
        kept.write_bytes(data)
    second = parts(load(folder))
    assert len(searches) == (1 if harm is None else 2)
    assert all(map(torch.equal, first, second))


def test_other_weights_have_other_codings(
    make_checkpoint: Callable[..., Path], searches: list[object]
) -> None:
    loaded = [load(make_checkpoint("Qwen3ForCausalLM", rms_norm_eps=eps)) for eps in (1e-6, 1e-2)]
    assert len(searches) == 2
    assert not torch.equal(*(parts(each)[0] for each in loaded))


def test_a_context_may_be_shorter_than_what_the_model_writes(
    make_checkpoint: Callable[..., Path],
) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM")
    config = EngineConfig(
        dtype="float32", max_num_seqs=1, kv_cache_dtype="int4", device="cpu", max_model_len=40
    )
    loaded = load_decoder(folder, read_architecture(folder), config)
    assert all(part.isfinite().all() for part in parts(loaded))
