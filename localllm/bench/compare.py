"""The same weights and prompts in transformers, alternating with our engine."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from localllm.bench.results import Result, Suite, of_pairs
from localllm.bench.speed import SpeedTests, run_decode, run_prefill
from localllm.bench.subject import Subject
from localllm.cost.rates import synchronize
from localllm.errors import RequestError
from localllm.hub.checkpoint import Checkpoint
from localllm.model.architecture import HEAD
from localllm.model.weight_check import check_weights
from localllm.model.weight_files import find_weight_files
from localllm.model.weights import WeightSource, dense_weight, open_source

# Fields of config.json that say how the weights are stored, not what the model is.
_NOT_THEIRS = ("quantization_config", "model_type", "torch_dtype", "dtype", "architectures")


class CompareSuite(Suite):
    """Prefill of one prompt, and decode in batches; transformers always runs in bfloat16.

    Its loop is minimal: forward passes with a cache and the most likely token, without the
    overhead of `generate`.
    """

    def __init__(self, subject: Subject, tests: SpeedTests) -> None:
        self._subject, self._tests = subject, tests
        self._tokens = partial(subject.random_tokens, random.Random(tests.seed))
        # (ours, theirs) in tokens a second, by test and batch
        self._found: dict[tuple[str, int], list[tuple[float, float]]] = {}

    def run(self, progress: Callable[[str], None]) -> None:
        """Load transformers' model beside ours and alternate. Raises: RequestError without it."""
        progress("loading transformers")
        theirs = TheirModel(self._subject)
        for repeat in range(self._tests.repeats + 1):  # the first warms up
            if self._tests.num_prompt:
                progress(f"prefill of {self._tests.num_prompt}")
                ids = self._tokens(self._tests.num_prompt)
                ours = run_prefill(self._subject.engine, ids)
                pair = (
                    self._tests.num_prompt / ours.seconds,
                    self._tests.num_prompt / theirs.prefill(ids),
                )
                self._book(repeat, f"pp{self._tests.num_prompt}", 1, pair)
            for batch in self._tests.batches if self._tests.num_decode else ():
                progress(f"decode, batch {batch}")
                prompts = [[token] for token in self._tokens(batch)]
                own_s = statistics.mean(
                    run_decode(self._subject.engine, prompts, self._tests.num_decode)
                )
                their_s = theirs.decode(prompts, self._tests.num_decode)
                self._book(
                    repeat, f"tg{self._tests.num_decode}", batch, (batch / own_s, batch / their_s)
                )

    def results(self) -> list[Result]:
        return [
            ratio_row(test, batch, pairs, "transformers bf16")
            for (test, batch), pairs in self._found.items()
        ]

    def _book(self, repeat: int, test: str, batch: int, pair: tuple[float, float]) -> None:
        if repeat:
            self._found.setdefault((test, batch), []).append(pair)


def ratio_row(test: str, batch: int, pairs: Sequence[tuple[float, float]], other: str) -> Result:
    """A row from pairs of tokens a second: ours and the other's in the same round."""
    found = of_pairs(pairs, "tokens_per_s", "their_tokens_per_s", "times")
    verdict = f"{found['times'].median:.2f} times {other}"
    return Result("compare", f"{test} against {other}", {"batch": batch}, found, verdict)


class TheirModel:
    """A transformers model with a subject's weights, dequantized if they are quantized."""

    def __init__(self, subject: Subject) -> None:
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise RequestError(
                "transformers is not installed", hint="pip install transformers"
            ) from error
        architecture = subject.architecture
        with _reference_weights(subject) as source:
            raw = {k: v for k, v in subject.config_json.items() if k not in _NOT_THEIRS}
            raw["tie_word_embeddings"] = (
                architecture.tie_word_embeddings and not source.has_quantized(HEAD)
            )
            names = dict.fromkeys(architecture.tensors())
            if not raw["tie_word_embeddings"]:
                names[f"{HEAD}.weight"] = None
            state = {name: dense_weight(source, name, torch.bfloat16) for name in names}
        kind = architecture.name.removesuffix("ForCausalLM").lower()
        with torch.device(subject.device):
            make: Any = AutoModelForCausalLM.from_config  # untyped
            self._model = make(AutoConfig.for_model(kind, **raw), dtype=torch.bfloat16)
        self._model.load_state_dict(state, strict=False)
        self._model.eval()
        self._device = subject.device

    @torch.inference_mode()
    def prefill(self, token_ids: list[int]) -> float:
        """Seconds to compute a prompt and its most likely next token."""
        ids = torch.tensor([token_ids], device=self._device)
        started = time.perf_counter()
        self._model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax().item()
        return time.perf_counter() - started

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Average seconds of a decode step; the prefill is not timed."""
        ids = torch.tensor(prompts, device=self._device)
        found = self._model(ids, use_cache=True, logits_to_keep=1)
        synchronize(self._device)
        started = time.perf_counter()
        for _ in range(num_tokens):
            ids = found.logits[:, -1].argmax(-1, keepdim=True)
            found = self._model(
                ids, past_key_values=found.past_key_values, use_cache=True, logits_to_keep=1
            )
        synchronize(self._device)
        return (time.perf_counter() - started) / num_tokens

    def generate_batch(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds to add `num_tokens` tokens to every prompt, with transformers' own batching."""
        import transformers

        make: Any = transformers.GenerationConfig  # untyped
        config = make(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1)
        started = time.perf_counter()
        # One manager for all calls, so that it captures only once, in the first call.
        found = self._model.generate_batch(
            inputs=prompts, generation_config=config, persistent_manager=True
        )
        synchronize(self._device)
        seconds = time.perf_counter() - started
        lengths = {len(each.generated_tokens) for each in found.values()}
        if len(found) != len(prompts) or lengths != {num_tokens}:
            raise RequestError(f"transformers returned answers of {sorted(lengths)} tokens")
        return seconds


@contextmanager
def _reference_weights(subject: Subject) -> Iterator[WeightSource]:
    source = subject.source
    if not isinstance(source, Checkpoint):
        yield source
        return
    weights = check_weights(find_weight_files(source.folder), subject.architecture)
    with open_source(weights) as opened:
        yield opened
