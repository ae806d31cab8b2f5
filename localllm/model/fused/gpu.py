"""The layers of a decoder with 4-bit weights in six launches each, for steps of a few tokens.

    1  query, key and value     includes the norm before it
    2  rotate and store         head norms, rotation, and the write to the cache
    3  attention                the last program adds up the parts of the keys
    4  output                   adds its result to the residual
    5  gate and up              includes the norm before it and the gate after it
    6  down                     adds its result to the residual

A step with more tokens is bound by arithmetic, and runs the blocks one by one.
"""

from collections.abc import Mapping, Sequence
from typing import Self

from torch import Tensor

from localllm.model.fused.decoder import FusedDecoder, UniformLayer
from localllm.model.inputs import ForwardBatch
from localllm.model.norm import Norm
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.model.rope import RopeTable, Rotation
from localllm_kernels.attention.decode import paged_attention_decode
from localllm_kernels.attention.rotate_and_store_launch import rotate_and_store
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.linears import Linears
from localllm_kernels.pointwise.rms_norm_launch import rms_norm
from localllm_kernels.products.gpu_linears import GpuLinears, Int4Product
from localllm_kernels.products.int4_matmul import MAX_TILE_ROWS
from localllm_kernels.products.int4_weight import Around


class GpuDecoder(FusedDecoder):
    """The layers and the final norm; all products must have 4-bit weights."""

    team = None

    def __init__(
        self, workspace: Workspace, layers: Sequence[UniformLayer], last_norm: Norm
    ) -> None:
        self._workspace, self._layers, self._last_norm = workspace, layers, last_norm
        sizes = layers[0].attention.spec
        self._group = sizes.num_heads // sizes.num_kv_heads

    @classmethod
    def of(
        cls, linears: Linears | None, layers: Sequence[UniformLayer], last_norm: Norm
    ) -> Self | None:
        """None unless all products of `layers` have 4-bit weights that `linears` packed."""
        if not isinstance(linears, GpuLinears) or not all(
            isinstance(each, Int4Product) for layer in layers for each in layer.products
        ):
            return None
        return cls(linears.workspace, layers, last_norm)

    def takes(self, batch: ForwardBatch) -> bool:
        num_rows = batch.input_ids.shape[0]
        attended = batch.max_query_len * self._group
        return 0 < num_rows <= MAX_TILE_ROWS and attended <= MAX_TILE_ROWS

    def __call__(
        self,
        hidden: Tensor,
        rotations: Mapping[RopeTable, Rotation],
        batch: ForwardBatch,
        kv_cache: PagedKVCache,
        taps: Sequence[int],
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        streams: dict[int, Tensor] = {}
        [rotation] = rotations.values()
        for i, layer in enumerate(self._layers):
            cache, attention = kv_cache.layer(i), layer.attention
            tables = kv_cache.tables(i, batch.tables)
            assert cache is not None
            assert tables is not None
            spec, norms = attention.spec, attention.norms
            norm, _, mlp_norm, _ = layer.norms
            assert norm is not None
            assert mlp_norm is not None
            qkv = _int4(attention.qkv_proj)(hidden, Around(norm=norm.weight, eps=norm.eps))
            query = rotate_and_store(
                qkv.view(len(hidden), -1, spec.head_dim),
                rotation.cos,
                rotation.sin,
                cache,
                tables.slot_mapping,
                query_norm=None if norms is None else norms.query.weight,
                key_norm=None if norms is None or norms.key is None else norms.key.weight,
                eps=0.0 if norms is None else norms.query.eps,
                uncoded_slots=tables.uncoded_slots,
            )
            attended = paged_attention_decode(
                query,
                cache,
                self._workspace,
                block_tables=tables.block_tables,
                cu_seqlens_q=batch.cu_seqlens_q,
                seq_lens=batch.seq_lens,
                max_query_len=batch.max_query_len,
                scale=spec.score_scale,
                window=spec.window,
                num_hidden=spec.scores.num_hidden,
                uncoded_tables=tables.uncoded_tables,
            )
            hidden = _int4(attention.o_proj)(attended.flatten(1), Around(residual=hidden))
            before = Around(norm=mlp_norm.weight, eps=mlp_norm.eps, is_gated=True)
            *_, gate_up, down = layer.products
            inner = _int4(gate_up)(hidden, before)
            hidden = _int4(down)(inner, Around(residual=hidden))
            if i in taps:
                streams[i] = hidden
        return rms_norm(hidden, self._last_norm.weight, self._last_norm.eps), streams


def _int4(product: object) -> Int4Product:
    assert isinstance(product, Int4Product)
    return product
