"""From the checked files of a checkpoint to a loaded model: every tensor is streamed in."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from localllm.config import ModelConfig
from localllm.errors import CheckpointError
from localllm.model.architectures import ArchSpec, layer_windows
from localllm.model.decoder import DecoderModel
from localllm.model.layers import DecoderLayer, RMSNorm, build_layer
from localllm.model.linear import Linear, Projection, SplitLinear, fuse, quantized_linear
from localllm.model.quantized import QuantizedWeight
from localllm.model.rope import RopeTable
from localllm.model.safetensors_header import TensorInfo
from localllm.model.weight_check import WeightMap
from localllm_kernels import TORCH_OPS, Ops


def load_model(
    weights: WeightMap,
    config: ModelConfig,
    spec: ArchSpec,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
) -> DecoderModel:
    """Load the tensors that `check_weights` passed, one at a time, into fused weights.

    Raises: CheckpointError for a quantized weight whose parts make no sense.
    """
    with open_weights(weights, dtype, device, ops) as reader:
        embedding = reader.read("model.embed_tokens.weight")
        return DecoderModel(
            config=config,
            embedding=embedding,
            layers=tuple(reader.layer(config, spec, i) for i in range(config.num_layers)),
            norm=RMSNorm(reader.vector("model.norm.weight"), config.rms_norm_eps),
            lm_head=reader.head(embedding),
            rope=RopeTable.build(config.rope, config.head_dim, max_model_len, device),
            ops=ops,
        )


@contextmanager
def open_weights(
    weights: WeightMap, dtype: torch.dtype, device: torch.device, ops: Ops = TORCH_OPS
) -> Iterator["WeightReader"]:
    """A reader for the files of `weights`, open as long as the block runs.

    What is not quantized is read in `dtype`.
    """
    with ExitStack() as stack:
        handles = {
            file: stack.enter_context(safe_open(file, framework="pt")) for file in weights.files
        }
        yield WeightReader(weights, handles, dtype, device, ops)


class WeightReader:
    """Reads tensors, linears and layers by name, and the rows of several linears into one."""

    def __init__(
        self,
        weights: WeightMap,
        handles: Mapping[Path, Any],
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
    ) -> None:
        self._weights, self._handles = weights, handles
        self._dtype, self._device = dtype, device
        self._linears = ops.linears

    def read(self, *names: str) -> Tensor:
        """One plain tensor, or several stacked along their rows."""
        infos = [self._weights.plain[name] for name in names]
        shape = (sum(info.shape[0] for info in infos), *infos[0].shape[1:])
        fused = torch.empty(shape, dtype=self._dtype, device=self._device)
        start = 0
        for info in infos:
            end = start + info.shape[0]
            fused[start:end].copy_(self._tensor(info))
            start = end
        return fused

    def vector(self, *names: str) -> Tensor:
        """As `read`, for what is added or multiplied element by element: in the inputs' dtype."""
        values = self.read(*names)
        return values if self._linears is None else values.float()

    def linear(self, *names: str) -> Projection:
        """One linear, or several over the same input; those that are alike become one product."""
        quantized = [name for name in names if name in self._weights.quantized]
        if not quantized:
            biases = [f"{name}.bias" for name in names if f"{name}.bias" in self._weights.plain]
            weight = self.read(*(f"{name}.weight" for name in names))
            return self._plain(weight, self.vector(*biases) if biases else None)
        parts = [self._quantized(name) for name in quantized]
        fused = fuse(parts) if len(parts) == len(names) else None
        if fused is None:
            return SplitLinear(tuple(self.linear(name) for name in names))
        return quantized_linear(fused, self._biases(names, parts), self._dtype, self._linears)

    def head(self, embedding: Tensor) -> Projection:
        """The output head, which is the embedding table where there is no other."""
        weights = self._weights
        has_own = "lm_head" in weights.quantized or "lm_head.weight" in weights.plain
        return self.linear("lm_head") if has_own else self._plain(embedding, None)

    def layer(self, config: ModelConfig, spec: ArchSpec, index: int) -> DecoderLayer:
        """A whole layer."""
        layer = f"model.layers.{index}"
        return build_layer(
            config,
            layer_windows(config, spec)[index],
            norm_weight=lambda name: self.vector(f"{layer}.{name}.weight"),
            linear=lambda names: self.linear(*(f"{layer}.{name}" for name in names)),
            has_head_norms=spec.qk_norm,
        )

    def _plain(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return Linear(weight, bias) if self._linears is None else self._linears.plain(weight, bias)

    def _biases(self, names: Sequence[str], parts: Sequence[QuantizedWeight]) -> Tensor | None:
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in self._weights.plain]
        if not biases:
            return None
        zeros = torch.zeros(1, dtype=self.vector(biases[0]).dtype, device=self._device)
        return torch.cat(
            [
                self.vector(f"{name}.bias")
                if f"{name}.bias" in self._weights.plain
                else zeros.expand(part.shape[0])
                for name, part in zip(names, parts, strict=True)
            ]
        )

    def _quantized(self, name: str) -> QuantizedWeight:
        linear = self._weights.quantized[name]
        parts = {
            suffix: self._tensor(info).to(self._device) for suffix, info in linear.parts.items()
        }
        try:
            return linear.scheme.read(parts)
        except ValueError as error:
            file = linear.parts[linear.scheme.marker].file
            raise CheckpointError(
                f"the quantized weight of {name!r} makes no sense: {error}",
                where=str(file),
                hint="download the model again",
            ) from error

    def _tensor(self, info: TensorInfo) -> Tensor:
        tensor: Tensor = self._handles[info.file].get_tensor(info.name)
        return tensor
