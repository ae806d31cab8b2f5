"""The cost of quantization: both checkpoints, read from their files, on held-back text."""

import statistics
import time
from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from localllm.answer.evaluation import Evaluation, Tally
from localllm.answer.loaded_model import LoadedModel
from localllm.answer.opening import open_model
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.config import EngineConfig
from localllm.errors import LocalLLMError
from localllm.model.rope import RopeTables
from localllm.model.weights import open_weights
from localllm.quantize.source import CheckedFolder
from localllm.quantize.stream import CalibrationStream
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Text
from localllm_kernels import Ops

LOGIT_ROWS = 128
# Tokens per round. Rounds stop after SPEED_S seconds, but there are at least LEAST_ROUNDS and at
# most MOST_ROUNDS.
WARM_UP_TOKENS, SPEED_TOKENS = 4, 16
LEAST_ROUNDS, MOST_ROUNDS, SPEED_S = 5, 25, 10.0


@torch.inference_mode()
def compare(
    result: CheckedFolder,
    source: CheckedFolder,
    windows: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
) -> Evaluation:
    """Perplexity of both on `windows`, int64 [num_windows, length], and how far apart they are.

    Only one layer of each is loaded at a time.
    """
    ropes = RopeTables(windows.shape[1], device)
    tally = Tally(2)
    with (
        open_weights(result.weights, dtype, device) as own,
        open_weights(source.weights, dtype, device) as whole,
    ):
        readers, architecture = (own, whole), source.architecture
        streams = [
            CalibrationStream.begin(reader, architecture, windows, ropes, ops) for reader in readers
        ]
        for i in range(architecture.num_layers):
            for reader, checked, stream in zip(readers, (result, source), streams, strict=True):
                stream.enter(i)
                stream.pass_through(reader.layer(checked.architecture, i, ropes))
        norms = [reader.last_norm(architecture) for reader in readers]
        heads = [reader.head(architecture, reader.embedding(architecture)) for reader in readers]
        # The last token of a window has no next one.
        targets = torch.cat([windows[:, 1:], windows.new_full((len(windows), 1), -1)], 1).flatten()
        start = 0
        for rows in zip(*(stream.rows() for stream in streams), strict=True):
            for hidden in zip(*(torch.split(each, LOGIT_ROWS) for each in rows), strict=True):
                own_targets = targets[start : start + len(hidden[0])]
                start += len(own_targets)
                scored = own_targets >= 0
                logits = [
                    head(norm(x, ops)).cpu()[scored]
                    for head, norm, x in zip(heads, norms, hidden, strict=True)
                ]
                tally.add(logits, own_targets[scored])
    return tally.result([result.folder.name, source.folder.name])


def compare_speeds(models: tuple[str, str], config: EngineConfig) -> tuple[float, float] | None:
    """Decode speed of one request without speculation, in tokens per second, of two models.

    They take turns, so that both see the same noise. None if the noise exceeds their difference, or
    if one of them cannot be loaded beside the other.
    """
    try:
        loaded = [
            open_model(model, replace(config, speculation=SpeculationConfig("off")))
            for model in models
        ]
    except LocalLLMError:
        return None
    for model in loaded:
        _decode_speed(model, WARM_UP_TOKENS)
    pairs: list[list[float]] = []
    began_s = time.monotonic()
    while len(pairs) < MOST_ROUNDS:
        pairs.append([_decode_speed(model, SPEED_TOKENS) for model in loaded])
        if len(pairs) >= LEAST_ROUNDS and time.monotonic() - began_s > SPEED_S:
            break
    for model in loaded:
        model.close()
    ratios = sorted(after / before for before, after in pairs)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    if low <= 1 <= high:
        return None
    before, after = (statistics.median(speeds) for speeds in zip(*pairs, strict=True))
    return before, after


def _decode_speed(model: LoadedModel, num_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    completion, events = model.ask(Text("Once upon a time there was"), params)
    deque(events, maxlen=0)
    return completion.decode_tokens_per_s
