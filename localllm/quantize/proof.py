"""What quantization cost: both checkpoints, read from their files, on text held back for it."""

from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from localllm.config import EngineConfig, SamplingParams
from localllm.errors import LocalLLMError
from localllm.evaluation import Evaluation, Tally
from localllm.model.layers import RMSNorm
from localllm.model.rope import RopeTable
from localllm.model.weights import open_weights
from localllm.quantize.source import CheckedFolder
from localllm.quantize.stream import CalibrationStream
from localllm.session import open_model
from localllm.speculation_config import SpeculationConfig
from localllm_kernels import Ops

LOGIT_ROWS = 128
WARM_UP_TOKENS, SPEED_TOKENS = 4, 32


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
    """Perplexity of both on `windows`, int64 [num_windows, length], and how far they are apart.

    One layer of each is loaded at a time.
    """
    config = source.config
    rope = RopeTable.build(config.rope, config.head_dim, windows.shape[1], device)
    tally = Tally(2)
    with (
        open_weights(result.weights, dtype, device) as own,
        open_weights(source.weights, dtype, device) as whole,
    ):
        readers = (own, whole)
        specs = (result, source)
        streams = []
        for reader in readers:
            embedding = reader.read("model.embed_tokens.weight")
            streams.append(CalibrationStream(embedding[windows.to(device)].cpu(), rope, ops))
            del embedding
        for i in range(config.num_layers):
            for reader, checked, stream in zip(readers, specs, streams, strict=True):
                stream.pass_through(reader.layer(checked.config, checked.spec, i))
        norms = [
            RMSNorm(reader.read("model.norm.weight"), config.rms_norm_eps) for reader in readers
        ]
        heads = [reader.head(reader.read("model.embed_tokens.weight")) for reader in readers]
        # The last token of a window has no next one.
        targets = torch.cat([windows[:, 1:], windows.new_full((len(windows), 1), -1)], 1).flatten()
        start = 0
        for rows in zip(*(stream.rows() for stream in streams), strict=True):
            for hidden in zip(*(torch.split(each, LOGIT_ROWS) for each in rows), strict=True):
                own_targets = targets[start : start + len(hidden[0])]
                start += len(own_targets)
                scored = own_targets >= 0
                logits = [
                    head(ops.rms_norm(x, norm.weight, norm.eps)).float().cpu()[scored]
                    for head, norm, x in zip(heads, norms, hidden, strict=True)
                ]
                tally.add(logits, own_targets[scored])
    return tally.result([result.folder.name, source.folder.name])


def decode_speed(model: str, config: EngineConfig) -> float | None:
    """Tokens per second of one request after its prompt, a token a step; None where the model
    cannot be loaded.
    """
    try:
        loaded = open_model(model, replace(config, speculation=SpeculationConfig("off")))
    except LocalLLMError:
        return None
    prompt = loaded.prompts.text("Once upon a time there was")
    speed = 0.0
    for num_tokens in (WARM_UP_TOKENS, SPEED_TOKENS):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        completion, events = loaded.stream(prompt, params)
        deque(events, maxlen=0)
        speed = completion.decode_tokens_per_s
    return speed
