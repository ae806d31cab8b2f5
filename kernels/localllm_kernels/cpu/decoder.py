"""All layers of a decoder in one call of the C library, see decoder.c."""

import ctypes

import torch
from torch import Tensor

from localllm_kernels.cpu import structs
from localllm_kernels.cpu.linear import CProduct
from localllm_kernels.fused_decoder import DecoderParts, LayerParts
from localllm_kernels.kv_cache import KVCache


def fuse_decoder(library: ctypes.CDLL, parts: DecoderParts) -> "CpuDecoder | None":
    """The layers as one call; None where a product is not one of the library's own."""
    products = [product for layer in parts.layers for product in layer.products]
    if not all(isinstance(product, CProduct) for product in products):
        return None
    return CpuDecoder(library, parts)


class CpuDecoder:
    """The layers with the last norm; built once, for products that are the library's own.

    The memory between the operators is kept from call to call.
    """

    def __init__(self, library: ctypes.CDLL, parts: DecoderParts) -> None:
        """`parts`: see `fuse_decoder`."""
        self._parts = parts  # which holds the tensors that the structures point to
        layers = [_layer(layer) for layer in parts.layers]
        first = parts.layers[0]
        self._layers = (structs.Layer * len(layers))(*layers)
        self._decoder = structs.Decoder(
            self._layers,
            parts.last_norm.data_ptr(),
            len(layers),
            parts.last_norm.shape[0],
            _c_product(first.down).weight.width_in,
            parts.num_heads,
            parts.num_kv_heads,
            parts.head_dim,
            parts.eps,
            parts.head_dim**-0.5,
        )
        self._forward = library.decoder_forward
        self._forward.argtypes = [*5 * [ctypes.c_void_p], ctypes.c_int64]
        self._scratch_bytes = library.decoder_scratch_bytes
        self._scratch_bytes.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._scratch_bytes.restype = ctypes.c_int64
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def takes(self, num_rows: int, max_query_len: int) -> bool:
        """See FusedDecoder."""
        return True

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
        rows = hidden.shape[0]
        decoder = ctypes.addressof(self._decoder)
        needed = self._scratch_bytes(decoder, rows)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        out = hidden.clone()
        batch = structs.Batch(
            cos.data_ptr(),
            sin.data_ptr(),
            slot_mapping.data_ptr(),
            block_tables.data_ptr(),
            cu_seqlens_q.data_ptr(),
            seq_lens.data_ptr(),
            rows,
            slot_mapping.shape[0],
            *block_tables.shape,
        )
        scales = caches.key_scales
        stack = structs.Caches(
            structs.CKVCache.of(caches),
            caches.key[0].nbytes,
            0 if scales is None else scales[0].numel(),
        )
        failed = self._forward(
            decoder,
            ctypes.addressof(batch),
            ctypes.addressof(stack),
            out.data_ptr(),
            self._scratch.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the attention's tasks")
        return out


def _layer(layer: LayerParts) -> structs.Layer:
    def pointer(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    return structs.Layer(
        pointer(layer.input_norm),
        pointer(layer.post_attention_norm),
        pointer(layer.query_norm),
        pointer(layer.key_norm),
        *(_product(product) for product in layer.products),
        layer.window or 0,
    )


def _product(product: object) -> structs.Product:
    own = _c_product(product)
    return structs.Product(own.kind, ctypes.addressof(own.weight))


def _c_product(product: object) -> CProduct:
    assert isinstance(product, CProduct)
    return product
