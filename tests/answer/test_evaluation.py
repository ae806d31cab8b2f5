"""Perplexity by sliding windows equals that of transformers on the same windows."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_config, write_checkpoint
from transformers import AutoModelForCausalLM

from localllm.answer.evaluation import evaluate, plan_windows
from localllm.engine.config import EngineConfig
from localllm.errors import RequestError
from localllm.text.tokenizer import Tokenizer

TEXT = "".join(random.Random(1).choices("the quick brown fox jumps, over a lazy dog.\n", k=900))


@pytest.mark.parametrize("num_tokens", [2, 3, 16, 17, 100, 1000])
@pytest.mark.parametrize(("length", "stride"), [(16, 8), (16, 1), (16, 15), (2, 1), (64, 33)])
def test_windows_score_every_token_but_the_first_once(
    num_tokens: int, length: int, stride: int
) -> None:
    windows = plan_windows(num_tokens, length, stride)
    scored = [i for window in windows for i in range(window.first_scored, window.end)]
    assert scored == list(range(1, num_tokens))
    for window in windows:
        assert 0 <= window.start < window.first_scored
        assert window.end - window.start <= length
    for window in windows[1:]:
        assert window.first_scored - window.start >= length - stride


@pytest.mark.parametrize(("length", "stride"), [(16, 0), (16, 16), (1, 1)])
def test_windows_that_cannot_slide_are_refused(length: int, stride: int) -> None:
    with pytest.raises(RequestError, match="slide"):
        plan_windows(100, length, stride)


@pytest.mark.parametrize(
    ("architecture", "length", "stride"),
    [("Qwen3ForCausalLM", 128, 64), ("LlamaForCausalLM", 512, 300), ("Qwen2ForCausalLM", 700, 1)],
)
def test_the_loss_equals_that_of_transformers(
    make_checkpoint: Callable[..., Path], architecture: str, length: int, stride: int
) -> None:
    text = TEXT if length < 700 else TEXT[:650]
    folder = make_checkpoint(architecture, max_position_embeddings=1024)
    measured = evaluate(text, [str(folder)], EngineConfig(max_model_len=length), stride=stride)
    ids = Tokenizer.from_folder(folder).encode(text, add_special_tokens=True)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    nats, count = 0.0, 0
    for window in plan_windows(len(ids), length, stride):
        inputs = torch.tensor([ids[window.start : window.end]])
        labels = inputs.clone()
        labels[:, : window.first_scored - window.start] = -100
        with torch.no_grad():
            loss = reference(inputs, labels=labels).loss.item()
        nats += loss * (window.end - window.first_scored)
        count += window.end - window.first_scored
    assert measured.num_tokens == count == len(ids) - 1
    assert abs(math.log(measured.perplexity) - nats / count) < 1e-4


def test_a_model_against_itself_differs_in_nothing(make_checkpoint: Callable[..., Path]) -> None:
    folder = str(make_checkpoint())
    against = evaluate(TEXT, [folder, folder], EngineConfig(max_model_len=64)).against
    assert against is not None
    assert (against.kl_mean, against.kl_p99, against.same_top1) == (0.0, 0.0, 1.0)


def test_divergence_and_agreement_are_those_of_the_two_distributions(tmp_path: Path) -> None:
    folders = [
        write_checkpoint(tmp_path / name, tiny_config("LlamaForCausalLM"), seed=seed)
        for name, seed in (("a", 1), ("b", 2))
    ]
    text = TEXT[:100]
    config = EngineConfig(max_model_len=256)
    measured = evaluate(text, [str(folder) for folder in folders], config).against
    ids = torch.tensor([Tokenizer.from_folder(folders[0]).encode(text, add_special_tokens=True)])
    model, reference = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids)
        .logits[0, :-1]
        .detach()
        .log_softmax(-1)
        for folder in folders
    )
    divergence = (reference.exp() * (reference - model)).sum(-1)
    assert measured is not None
    assert measured.kl_mean == pytest.approx(divergence.mean().item(), rel=1e-4)
    assert measured.kl_p99 == pytest.approx(divergence.sort().values[98].item(), rel=1e-4)
    same = (model.argmax(-1) == reference.argmax(-1)).float().mean().item()
    assert measured.same_top1 == pytest.approx(same)


def test_models_with_other_vocabularies_are_not_compared(
    make_checkpoint: Callable[..., Path],
) -> None:
    with pytest.raises(RequestError, match="tokenize the text differently"):
        evaluate(TEXT, [str(make_checkpoint()), "pocket"], EngineConfig())


@pytest.mark.parametrize("text", ["", "a"])
def test_a_text_that_is_too_short_is_refused(text: str, make_checkpoint) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RequestError, match="fewer than two"):
        evaluate(text, [str(make_checkpoint())], EngineConfig())


def test_a_window_over_the_context_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(RequestError, match="context"):
        evaluate(TEXT, [str(make_checkpoint())], EngineConfig(max_model_len=4096))


def test_a_long_text_takes_no_more_memory_than_a_window(make_checkpoint) -> None:  # type: ignore[no-untyped-def]
    import resource

    folder = str(make_checkpoint())
    evaluate(TEXT, [folder], EngineConfig(max_model_len=128))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    evaluate(TEXT * 40, [folder], EngineConfig(max_model_len=128))
    # All logits at once would be 36,000 × 288 × 4 bytes, 41 MB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
