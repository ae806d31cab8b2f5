"""The layers of a decoder with 4-bit weights in six launches each, for steps of a few tokens.

    1  query, key and value     the norm before them in the product
    2  rotate and store         norms of the heads, rotation, and the write to the cache
    3  attention                the parts of the keys added up by the last program
    4  output                   added to the residual in the product
    5  gate and up              the norm before and the gate behind them in the product
    6  down                     added to the residual in the product

A step of more tokens is bound by arithmetic, and takes the operators one by one.
"""

from torch import Tensor

from localllm_kernels.fused_decoder import DecoderParts
from localllm_kernels.gpu_linears import Int4Product
from localllm_kernels.int4_matmul import MAX_TILE_ROWS
from localllm_kernels.int4_weight import Around
from localllm_kernels.kv_cache import KVCache
from localllm_kernels.launch import Workspace
from localllm_kernels.paged_attention_decode import paged_attention_decode
from localllm_kernels.rms_norm import rms_norm
from localllm_kernels.rotate_and_store import rotate_and_store


def fuse_decoder(workspace: Workspace, parts: DecoderParts) -> "GpuDecoder | None":
    """The layers, where all products are those of this library; else None."""
    products = [product for layer in parts.layers for product in layer.products]
    if not all(isinstance(product, Int4Product) for product in products):
        return None
    return GpuDecoder(workspace, parts)


class GpuDecoder:
    """The layers with the last norm."""

    def __init__(self, workspace: Workspace, parts: DecoderParts) -> None:
        """`parts`: see `fuse_decoder`."""
        self._workspace, self._parts = workspace, parts

    def takes(self, num_rows: int, max_query_len: int) -> bool:
        """See FusedDecoder."""
        group = self._parts.num_heads // self._parts.num_kv_heads
        return 0 < num_rows <= MAX_TILE_ROWS and max_query_len * group <= MAX_TILE_ROWS

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        caches: KVCache,
        *,
        slot_mapping: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        max_query_len: int,
    ) -> Tensor:
        """See FusedDecoder."""
        parts, rows = self._parts, len(hidden)
        for i, layer in enumerate(parts.layers):
            cache = caches.layer(i)
            qkv = _int4(layer.qkv)(hidden, Around(norm=layer.input_norm, eps=parts.eps))
            query = rotate_and_store(
                qkv.view(rows, -1, parts.head_dim),
                cos,
                sin,
                cache,
                slot_mapping,
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                eps=parts.eps,
            )
            attended = paged_attention_decode(
                query,
                cache,
                self._workspace,
                block_tables=block_tables,
                cu_seqlens_q=cu_seqlens_q,
                seq_lens=seq_lens,
                max_query_len=max_query_len,
                scale=parts.head_dim**-0.5,
                window=layer.window,
            )
            hidden = _int4(layer.output)(attended.flatten(1), Around(residual=hidden))
            before = Around(norm=layer.post_attention_norm, eps=parts.eps, is_gated=True)
            inner = _int4(layer.gate_up)(hidden, before)
            hidden = _int4(layer.down)(inner, Around(residual=hidden))
        return rms_norm(hidden, parts.last_norm, parts.eps)


def _int4(product: object) -> Int4Product:
    assert isinstance(product, Int4Product)
    return product
