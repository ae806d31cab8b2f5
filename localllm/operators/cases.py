"""The cases of the self-check: the operators that a model is about to use, on its own shapes.

Inputs are random; weights are those of the model's first layer and its head.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.blocks.per_layer_gate import PerLayerGateSpec
from localllm.model.norm import NormSpec
from localllm.model.weights import WeightSource
from localllm.operators.attention_cases import attention, rotation
from localllm.operators.case import OperatorCase, Setting, Sizes
from localllm.operators.pointwise_cases import gate, norms, route, sampling
from localllm.operators.product_cases import product_cases
from localllm.operators.recurrence_cases import recurrences
from localllm_kernels import Ops
from localllm_kernels.attention.cache_arguments import CODES
from localllm_kernels.compiling.choice import ALL_OWN, Choice, Piece
from localllm_kernels.pointwise.gate import GateKind
from localllm_kernels.products.int4_matmul import MAX_TILE_ROWS

_CONTEXT, _NEW = 1000, 200  # tokens of a request, and of a prompt
ALL_FRAGMENTS = Choice(fragment_rows=range(1, MAX_TILE_ROWS + 1), key_fragments=True)


def operator_cases(
    source: WeightSource,
    sizes: Sizes,
    device: torch.device,
    tables: Callable[[Choice], Ops],
) -> Iterator[OperatorCase]:
    """Yield every case; its tensors are freed before the next. `tables`: the operators by choice.

    Raises: as `WeightReader`.
    """
    on = Setting(sizes, device, tables(ALL_OWN))
    second = replace(on, own=tables(ALL_FRAGMENTS), rival=on.own)
    architecture = sizes.architecture
    for rows in (1, 512):
        for is_wide in dict.fromkeys(norm.is_wide for norm in _norms(architecture)):
            yield from norms(on, rows, is_wide=is_wide)
        for inner, kind in dict.fromkeys(_gates(architecture)):
            yield gate(on, rows, inner, kind)
        for spec in architecture.rotations():
            yield rotation(on, rows, spec)
        for router in dict.fromkeys(spec.router for _, spec in architecture.experts()):
            yield route(on, rows, router)
    many = replace(on, own=tables(Choice(frozenset([Piece.FEW_QUERIES]))))
    for spec in architecture.attentions():
        yield from _attentions(on, second, many, spec)
    yield from recurrences(on)
    if on.own.sample is not None:
        yield sampling(on)
    yield from product_cases(on, second, source)


def _attentions(
    on: Setting, second: Setting, many: Setting, spec: AttentionSpec
) -> Iterator[OperatorCase]:
    """One attention by each kernel. `second`: fragments of keys; `many`: for many queries."""
    # One request, several requests, and the longest draft that the few-queries kernel takes.
    drafted = max(1, 16 * spec.num_kv_heads // spec.num_heads)
    few = ([(_CONTEXT, 1)], [(1000 // (i + 1) + 17, 1) for i in range(4)], [(300, drafted)])
    for requests in few:
        yield attention(on, Piece.FEW_QUERIES, requests, spec)
        if on.sizes.kv_dtype in CODES.values():
            yield attention(second, Piece.KEY_FRAGMENTS, requests, spec)
    # Two prompts in a step, and a turn after a long conversation.
    for requests in ([(_CONTEXT, _NEW), (_NEW, _NEW)], [(4 * _CONTEXT, 70)]):
        yield attention(many, Piece.MANY_QUERIES, requests, spec)
    # A prompt and a decoding request in one step, which takes both kernels.
    yield attention(on, Piece.FEW_QUERIES, [(_CONTEXT, _NEW), (_CONTEXT, 1)], spec)


def _norms(architecture: Architecture) -> Iterator[NormSpec]:
    yield architecture.norm
    for layer in architecture.layers:
        for place in layer.places:
            yield from place.norms


def _gates(architecture: Architecture) -> Iterator[tuple[int, GateKind]]:
    """The width of each gate, and its function."""
    for block in architecture.blocks():
        if isinstance(block, GatedMLPSpec):
            yield block.inner_size, block.gate
        if isinstance(block, PerLayerGateSpec):
            yield block.width, "gelu"
