"""Samples tokens from logits, with noise that depends on the position.

After the filters, the token at position p of a request is

    argmax over ids of  logits[id] / T + g(seed, p, id)

with Gumbel noise g (see `gumbel_argmax` among the operators). Because g is a pure function of seed,
position and token id, the same request gives the same text whatever else is in its batch. For the
same reason each row is filtered on its own. Greedy is T = 0.

A draft is accepted as far as it equals the tokens sampled at its positions, and these are the
tokens of a request without a draft: so a draft changes when a token comes, never which token.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from localllm.schedule.logprobs import TokenLogprobs
from localllm.schedule.request import Request
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import SampledToken, ScheduledRequest
from localllm_kernels import Ops

_MASK64 = (1 << 64) - 1
# Dividing by a lower temperature only overflows; it counts as greedy.
MIN_TEMPERATURE = 1e-6
# Top-p looks at this many of the likeliest tokens before it sorts the whole vocabulary.
TOP_P_FIRST_LOOK = 256


def mix64(value: int) -> int:
    """A well-mixed 64-bit number from another (the finalizer of SplitMix64; Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def sample_seed(seed: int, sample: int) -> int:
    """The seed of sample `sample` of a request with `seed`."""
    return mix64(mix64(seed & _MASK64) ^ sample)


def noise_key(seed: int, position: int) -> int:
    """The key of the noise for a request's token at `position`."""
    return mix64(seed ^ mix64(position))


def filter_top_k(logits: Tensor, k: int) -> Tensor:
    """A mask of the `k` largest of `logits` [vocab]; ties with the last are kept."""
    if k >= logits.shape[0]:
        return torch.ones_like(logits, dtype=torch.bool)
    return logits >= logits.topk(k).values[-1]


def filter_top_p(logits: Tensor, p: float) -> Tensor:
    """A mask of the smallest set of `logits` [vocab] with probability at least `p`.

    Ties with the last are kept. Source: Holtzman et al. 2019, section 3.1.
    """
    probabilities = torch.softmax(logits.double(), dim=0)
    for count in (TOP_P_FIRST_LOOK, logits.shape[0]):
        likeliest = probabilities.topk(min(count, logits.shape[0])).values
        reached = (likeliest.cumsum(dim=0) >= p).nonzero()
        if len(reached):
            return probabilities >= likeliest[reached[0, 0]]
    return torch.ones_like(logits, dtype=torch.bool)


def filter_min_p(logits: Tensor, min_p: float) -> Tensor:
    """A mask of the `logits` [vocab] at least `min_p` times as likely as the likeliest."""
    return logits >= logits.max() + math.log(min_p)


def apply_penalties(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> Tensor:
    """`logits` [vocab] after penalties and bias; a new tensor.

    Sources: repetition: Keskar et al. 2019 (CTRL), section 4.1, over prompt and generated tokens;
    presence and frequency: OpenAI's API reference, over generated tokens.
    """
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *generated}), device=logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if generated and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(generated)
        ids = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * times
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        bias = torch.tensor(list(params.logit_bias.values()), device=logits.device)
        logits[ids] += bias.to(logits.dtype)
    return logits


def sample_tokens(
    logits: Tensor, scheduled: Sequence[ScheduledRequest], ops: Ops
) -> list[list[SampledToken]]:
    """The next tokens of each request in `scheduled`, which must have caught up: the accepted part
    of its draft, and one more. `logits`: float32 [rows, vocab], a row for each sampled position.

    A row that is not finite gives a token of None. Rows are sampled one by one, for a CPU; for a
    GPU see device_runner.py.
    """
    maxima, greedy_ids = ops.row_maxima(logits)
    largest, greedy = maxima.tolist(), greedy_ids.tolist()

    def sample(row: int, request: Request, drafted: Sequence[int]) -> SampledToken:
        if not math.isfinite(largest[row]):
            return SampledToken(None)
        params, matcher = request.params, request.matcher
        if matcher is None or not _has_filters(params):
            token_id = greedy[row]
            if not _is_plain_greedy(params):
                token_id = _sample_row(logits[row], request, drafted, ops)
        if matcher is not None and (_has_filters(params) or not matcher.allows(drafted, token_id)):
            # Without filters, a token that wins among all tokens also wins among the allowed ones.
            # With filters, or if the winner is forbidden, forbidden tokens are masked first.
            allowed = matcher.mask(drafted, logits.shape[1])
            if allowed is None:
                return SampledToken(None, error=matcher.error)
            forbidden = ~torch.from_numpy(allowed).to(logits.device)
            bound = logits[row].masked_fill(forbidden, float("-inf"))
            token_id = _sample_row(bound, request, drafted, ops)
        logprobs = None
        if params.logprobs is not None:
            logprobs = _token_logprobs(logits[row], token_id, params.logprobs)
        return SampledToken(token_id, logprobs)

    sampled, first = [], 0
    for entry in scheduled:
        tokens = (
            sample(first + i, entry.request, entry.draft[:i]) for i in range(entry.num_samples)
        )
        sampled.append(accept_draft(entry.draft, tokens))
        first += entry.num_samples
    return sampled


def accept_draft(draft: Sequence[int], tokens: Iterable[SampledToken]) -> list[SampledToken]:
    """The tokens that a request keeps: those of `tokens` up to the first that differs from the
    draft, this one included. `tokens` are sampled after the newest token and after each drafted
    one; later ones are not taken from the iterable.
    """
    kept = []
    for token, proposed in zip(tokens, (*draft, None), strict=False):
        kept.append(token)
        if token.token_id != proposed:
            break
    return kept


def _is_plain_greedy(params: SamplingParams) -> bool:
    return params.temperature < MIN_TEMPERATURE and not (has_penalties(params) or params.logit_bias)


def _has_filters(params: SamplingParams) -> bool:
    """Whether filters make the choice of a token depend on other tokens' logits."""
    is_filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return is_filtered and params.temperature >= MIN_TEMPERATURE


def has_penalties(params: SamplingParams) -> bool:
    """Whether a request's earlier tokens change its logits."""
    return bool(
        params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    )


def _sample_row(logits: Tensor, request: Request, drafted: Sequence[int], ops: Ops) -> int:
    """The token after those of `request` and `drafted`."""
    params = request.params
    if has_penalties(params) or params.logit_bias:
        start = request.num_prompt_tokens
        prompt, generated = request.token_ids[:start], [*request.token_ids[start:], *drafted]
        logits = apply_penalties(logits, params, prompt, generated)
    if params.temperature < MIN_TEMPERATURE:
        return int(logits.argmax())
    # Keyed by the token's position in the text, so the noise is the same whenever it is drawn.
    key = noise_key(request.seed, len(request.token_ids) + len(drafted))
    filters: list[Callable[[Tensor], Tensor]] = []
    if 0 < params.top_k < logits.shape[0]:
        filters.append(lambda values: filter_top_k(values, params.top_k))
    if params.top_p < 1.0:
        filters.append(lambda values: filter_top_p(values, params.top_p))
    if params.min_p > 0.0:
        filters.append(lambda values: filter_min_p(values, params.min_p))
    if not filters:
        return ops.gumbel_argmax(logits, params.temperature, None, key)
    values = logits / params.temperature
    ids = torch.arange(values.shape[0], device=values.device)
    # Each filter sees the tokens that the previous one kept, and renormalizes.
    for keep in filters:
        kept = keep(values)
        values, ids = values[kept], ids[kept]
    return int(ids[ops.gumbel_argmax(values, 1.0, ids, key)])


def _token_logprobs(logits: Tensor, token_id: int, count: int) -> TokenLogprobs:
    logprobs = torch.log_softmax(logits, dim=0)
    top = logprobs.topk(min(count, logprobs.shape[0]))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprobs(float(logprobs[token_id]), tuple(pairs))
