"""From the files of a checkpoint to a loaded model: check every tensor, then stream them in."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from localllm.config import ModelConfig
from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.model.architectures import (
    ArchSpec,
    expected_tensors,
    layer_windows,
    resolve_biases,
)
from localllm.model.decoder import DecoderModel
from localllm.model.layers import Attention, DecoderLayer, GatedMLP, HeadNorms, RMSNorm
from localllm.model.linear import Linear
from localllm.model.rope import RopeTable
from localllm.model.safetensors_header import TensorInfo, read_header
from localllm_kernels import Ops

LOADABLE_DTYPES = ("F32", "F16", "BF16")
# Buffers that old exports stored beside the weights; they follow from the config.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


def check_weights(files: list[Path], config: ModelConfig, spec: ArchSpec) -> dict[str, TensorInfo]:
    """Hold the files' headers against the config; nothing is loaded yet.

    Raises: CheckpointError naming a tensor that is missing, left over, twice there, of a dtype
    that is not a float, or of a shape that contradicts the config.
    """
    if config.quantization is not None:
        method = config.quantization.get("quant_method") if isinstance(
            config.quantization, Mapping
        ) else config.quantization  # fmt: skip
        raise UnsupportedModelError(
            f"the checkpoint is quantized ({method!r:.40}), which this version cannot load",
            where="config.json: quantization_config",
            hint="take the unquantized checkpoint (bf16, fp16 or fp32), or vLLM for this one",
        )
    found: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in found:
                raise CheckpointError(
                    f"tensor {name!r} is in two files",
                    where=f"{found[name].file.name}, {file.name}",
                )
            found[name] = info
    expected = expected_tensors(config, spec)
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(
                f"tensor {name!r} is missing ({config.architecture} needs it)",
                where=_describe(files),
                hint="download the model again",
            )
        info = found[name]
        if info.shape != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(info.shape)}, config.json asks for {list(shape)}",
                where=str(info.file),
                hint="config.json and weights are of different models or revisions",
            )
        if info.dtype not in LOADABLE_DTYPES:
            raise CheckpointError(
                f"tensor {name!r} has dtype {info.dtype}; can load {', '.join(LOADABLE_DTYPES)}",
                where=str(info.file),
            )
    for name, info in found.items():
        is_tied_head = name == "lm_head.weight" and config.tie_word_embeddings
        if name not in expected and not is_tied_head and not name.endswith(IGNORED_SUFFIXES):
            raise CheckpointError(
                f"tensor {name!r} is left over: {config.architecture} has no place for it",
                where=str(info.file),
                hint="config.json may name the wrong architecture or too few layers",
            )
    return {name: found[name] for name in expected}


def _describe(files: list[Path]) -> str:
    return ", ".join(file.name for file in files[:3]) + (" …" if len(files) > 3 else "")


def load_model(
    tensors: dict[str, TensorInfo],
    config: ModelConfig,
    spec: ArchSpec,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
) -> DecoderModel:
    """Load the tensors that `check_weights` passed, one at a time, into fused weights."""
    with ExitStack() as stack:
        reader = _Reader(tensors, dtype, device, stack)
        embedding = reader.read("model.embed_tokens.weight")
        windows = layer_windows(config, spec)
        layers = tuple(
            _load_layer(reader, config, spec, i, windows[i]) for i in range(config.num_layers)
        )
        head = embedding if config.tie_word_embeddings else reader.read("lm_head.weight")
        return DecoderModel(
            config=config,
            embedding=embedding,
            layers=layers,
            norm=RMSNorm(reader.read("model.norm.weight"), config.rms_norm_eps),
            lm_head=Linear(head),
            rope=RopeTable.build(config.rope, config.head_dim, max_model_len, device),
            ops=ops,
        )


class _Reader:
    """Reads tensors by name, and rows of several into one."""

    def __init__(
        self,
        tensors: dict[str, TensorInfo],
        dtype: torch.dtype,
        device: torch.device,
        stack: ExitStack,
    ) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device
        self._handles: dict[Path, Any] = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in {info.file for info in tensors.values()}
        }

    def read(self, *names: str) -> Tensor:
        """One tensor, or several stacked along their rows."""
        infos = [self._tensors[name] for name in names]
        shape = (sum(info.shape[0] for info in infos), *infos[0].shape[1:])
        fused = torch.empty(shape, dtype=self._dtype, device=self._device)
        start = 0
        for info in infos:
            end = start + info.shape[0]
            fused[start:end].copy_(self._handles[info.file].get_tensor(info.name))
            start = end
        return fused

    def linear(self, layer: str, *names: str, has_bias: bool) -> Linear:
        weight = self.read(*(f"{layer}.{name}.weight" for name in names))
        bias = self.read(*(f"{layer}.{name}.bias" for name in names)) if has_bias else None
        return Linear(weight, bias)


def _load_layer(
    reader: _Reader, config: ModelConfig, spec: ArchSpec, index: int, window: int | None
) -> DecoderLayer:
    layer, eps = f"model.layers.{index}", config.rms_norm_eps
    biases = resolve_biases(config, spec)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(reader.read(f"{layer}.{name}.weight"), eps)

    attention = Attention(
        qkv_proj=reader.linear(
            layer,
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            has_bias=biases.qkv,
        ),
        o_proj=reader.linear(layer, "self_attn.o_proj", has_bias=biases.o),
        norms=HeadNorms(norm("self_attn.q_norm"), norm("self_attn.k_norm"))
        if spec.qk_norm
        else None,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=window,
    )
    mlp = GatedMLP(
        gate_up_proj=reader.linear(layer, "mlp.gate_proj", "mlp.up_proj", has_bias=biases.mlp),
        down_proj=reader.linear(layer, "mlp.down_proj", has_bias=biases.mlp),
    )
    return DecoderLayer(
        input_norm=norm("input_layernorm"),
        attention=attention,
        post_attention_norm=norm("post_attention_layernorm"),
        mlp=mlp,
    )
