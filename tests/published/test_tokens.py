"""Tokens and logprobs of published models, held against transformers'."""

from itertools import takewhile
from pathlib import Path

import pytest
import torch
from published.conftest import NAMES
from torch import Tensor
from transformers import AutoModelForCausalLM

from localllm import LLM, SamplingParams

PROMPT_TOKENS = (5, 60, 400, 1500)
ANSWER = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
TEXT = "".join(
    f"Day {day}: the wind came from the {wind}, and {count} ships lay in the harbour.\n"
    for day, (wind, count) in enumerate(
        [("north", 3), ("south-west", 41), ("east", 7), ("sea", 12), ("hills", 9)] * 30
    )
)


# Sums of the same products in another order, in 24 bits.
FLOAT32_NATS = 5e-4


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_transformers(models: Path, name: str) -> None:
    prompts, answers = _answers(models / name, "float32")
    texts = [prompt + said for prompt, (said, _) in zip(prompts, answers, strict=True)]
    exact = _reference(models / name, torch.float32, texts)
    for prompt, (said, logprobs), expected in zip(prompts, answers, exact, strict=True):
        assert expected.argmax(-1).tolist() == said, f"after {len(prompt)} tokens"
        torch.testing.assert_close(logprobs, _at(expected, said), rtol=0, atol=FLOAT32_NATS)

    # In bfloat16 both round; ours may be as far from exact arithmetic as theirs.
    rounded = _reference(models / name, torch.bfloat16, texts)
    ours, theirs = [], []
    for (said, _), (said_16, logprobs), true, other in zip(
        answers, _answers(models / name, "bfloat16")[1], exact, rounded, strict=True
    ):
        same = _same_at_first(said, said_16)
        ours.append((logprobs[:same] - _at(true, said)[:same]).abs())
        theirs.append((_at(other, said) - _at(true, said)).abs())
        if same < len(said):
            lost = true[same, said[same]] - true[same, said_16[same]]
            assert lost < 2 * torch.cat(theirs).max()
    assert torch.cat(ours).mean() < 1.2 * torch.cat(theirs).mean()
    assert sum(map(len, ours)) > sum(map(len, theirs)) / 2


def _answers(folder: Path, dtype: str) -> tuple[list[list[int]], list[tuple[list[int], Tensor]]]:
    """Prompts, and for each the tokens of its answer with their logprobs, all from one batch."""
    with LLM(folder, dtype=dtype, max_model_len=2048) as llm:
        ids = llm.model.tokenizer.encode(TEXT, add_special_tokens=True)
        prompts = [ids[:length] for length in PROMPT_TOKENS]
        found = []
        for completion in llm.generate(prompts, ANSWER):
            tokens = completion.samples[0].tokens
            logprobs = [token.logprobs.logprob for token in tokens if token.logprobs]
            found.append(([token.token_id for token in tokens], torch.tensor(logprobs)))
        return prompts, found


@torch.no_grad()
def _reference(folder: Path, dtype: torch.dtype, texts: list[list[int]]) -> list[Tensor]:
    """Transformers' logprobs before each token of an answer, [answer tokens, vocab_size]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    num_rows = (ANSWER.max_tokens or 0) + 1
    return [
        model(torch.tensor([ids]), logits_to_keep=num_rows).logits[0, :-1].float().log_softmax(-1)
        for ids in texts
    ]


def _at(logprobs: Tensor, ids: list[int]) -> Tensor:
    return logprobs[range(len(ids)), ids]


def _same_at_first(one: list[int], other: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))))
