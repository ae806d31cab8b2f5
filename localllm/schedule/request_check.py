"""The checks of a request before it is queued."""

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.errors import ContextLengthError, RequestError, brief
from localllm.schedule.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits that every request must respect."""

    vocab_size: int
    max_model_len: int
    # Positions that the model has; `max_model_len` may be less.
    num_positions: int
    eos_token_ids: frozenset[int]
    writes_text: bool = True
    num_labels: int = 0

    def way_to_longer_context(self, held_by_cache: int) -> str:
        """What a user can do to get a longer context; `held_by_cache`: the most tokens of a request
        that the cache can hold.
        """
        if held_by_cache < self.max_model_len:
            return "a larger KV cache"
        if self.max_model_len < self.num_positions:
            return "a larger --ctx"
        return f"a model with a context of more than {self.num_positions:,} tokens"

    def check(self, prompt: Sequence[int], params: SamplingParams, held_by_cache: int) -> None:
        """Check a request.

        Raises: RequestError for token ids out of range; ContextLengthError for a prompt that
        leaves no room for a new token.
        """
        pooling = params.pooling
        if pooling is None and not self.writes_text:
            raise RequestError(
                "this model writes no text: it was saved without an output head",
                param="prompt",
                hint=f"serve it, for /v1/{'rerank' if self.num_labels else 'embeddings'}",
            )
        if pooling is not None and pooling.kind == "labels" and not self.num_labels:
            raise RequestError("this model has no head that scores texts", param="pooling")
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt", hint="give it some text")
        for name, ids in (
            ("prompt", prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
            ("pooling", pooling.token_ids if pooling else ()),
        ):
            for token_id in ids:
                if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                    raise RequestError(
                        f"{name}: token id {brief(token_id)} is out of range, "
                        f"the model has 0 to {self.vocab_size - 1}",
                        param=name,
                    )
        limit = min(self.max_model_len, held_by_cache)
        if len(prompt) >= limit:
            raise ContextLengthError(
                f"the prompt has {len(prompt):,} tokens, the context {limit:,}, "
                "of which at least 1 is kept for the answer",
                param="prompt",
                where="the KV cache holds no more than that" if limit < self.max_model_len else "",
                hint=f"a shorter prompt, or {self.way_to_longer_context(held_by_cache)}",
            )
