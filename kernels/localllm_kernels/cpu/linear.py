"""Products with weights in the C library: float32 or bfloat16, int8, int4.

All take and give float32 rows. Inputs of the integer products are rounded to int8, a scale for
each group; see the sources for the formulas.
"""

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_LANES = 16
_INT8_GROUPS = (128, 64)
# From here on the library's bfloat16 products, whose inputs are rounded, are faster.
MIN_BFLOAT16_ROWS = 32

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_Product = Callable[[Tensor], Tensor]


class _Int4Struct(ctypes.Structure):
    _fields_ = (
        ("codes", _POINTER),
        ("scales", _POINTER),
        ("zeros", _POINTER),
        ("bias", _POINTER),
        ("has_bfloat16_scales", _LONG),
        ("width_out", _LONG),
        ("width_in", _LONG),
        ("group_size", _LONG),
    )


class _Int8Struct(ctypes.Structure):
    _fields_ = (
        ("codes", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
        ("width_out", _LONG),
        ("width_in", _LONG),
        ("group_size", _LONG),
    )


class CpuLinears:
    """Makes products from weights; each packs its weight once."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._int4, self._int8 = library.int4_linear, library.int8_linear
        for function in (self._int4, self._int8):
            function.argtypes = [_POINTER, _POINTER, _POINTER, _LONG, _LONG]
        self._float32, self._bfloat16 = library.float32_linear, library.bfloat16_linear
        for function in (self._float32, self._bfloat16):
            function.argtypes = [*4 * [_POINTER], *4 * [_LONG]]
            function.restype = None

    def plain(self, weight: Tensor, bias: Tensor | None) -> _Product:
        """`weight`: float32 or bfloat16 [out, in], which is kept as it is; `bias`: float32."""
        run = self._bfloat16 if weight.dtype == torch.bfloat16 else self._float32
        width_out, width_in = weight.shape
        bias_pointer = None if bias is None else bias.data_ptr()
        pointer = weight.data_ptr()

        def product(x: Tensor) -> Tensor:
            rows = x.shape[0]
            if rows >= MIN_BFLOAT16_ROWS and weight.dtype == torch.bfloat16:
                y = F.linear(x.bfloat16(), weight).float()
                return y if bias is None else y + bias
            x = x.contiguous()
            y = x.new_empty(rows, width_out)
            sizes = (rows, width_in, width_out, torch.get_num_threads())
            run(pointer, bias_pointer, x.data_ptr(), y.data_ptr(), *sizes)
            return y

        return product

    def int4(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        permutation: Tensor | None,
        bias: Tensor | None,
    ) -> _Product:
        """`codes`: uint8 [out, in] below 16; `scales`, `zeros`: [out, num_groups], groups of a
        multiple of 16; `permutation`: [in], the input that each column belongs to.
        """
        width_out, width_in = codes.shape
        padding = -width_out % _LANES
        blocks = F.pad(codes, (0, 0, 0, padding)).view(-1, _LANES, width_in // 8, 2, 4)
        low, high = blocks.permute(3, 0, 2, 1, 4)
        packed = (low | (high << 4)).contiguous()
        rounded = scales.bfloat16()
        is_exact = bool((rounded.float() == scales.float()).all())
        kept = _by_block(rounded if is_exact else scales.float(), padding)
        kept_zeros = None if zeros is None else _by_block(zeros, padding)
        struct = _Int4Struct(
            packed.data_ptr(),
            kept.data_ptr(),
            None if kept_zeros is None else kept_zeros.data_ptr(),
            None if bias is None else bias.data_ptr(),
            is_exact,
            width_out,
            width_in,
            width_in // scales.shape[1],
        )
        product = _prepared(self._int4, struct, width_out, (packed, kept, kept_zeros, bias))
        if permutation is None:
            return product
        return lambda x: product(x[:, permutation])

    def int8(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> _Product:
        """`codes`: int8 [out, in], in a multiple of 64; `scales`: [out]."""
        width_out, width_in = codes.shape
        group_size = next(size for size in _INT8_GROUPS if width_in % size == 0)
        codes, scales = codes.contiguous(), scales.float().contiguous()
        struct = _Int8Struct(
            codes.data_ptr(),
            scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            width_out,
            width_in,
            group_size,
        )
        return _prepared(self._int8, struct, width_out, (codes, scales, bias))


def _by_block(values: Tensor, padding: int) -> Tensor:
    """[out, num_groups] -> [blocks, num_groups, 16]."""
    padded = F.pad(values, (0, 0, 0, padding))
    return padded.view(-1, _LANES, values.shape[1]).transpose(1, 2).contiguous()


def _prepared(
    run: Callable[..., int],
    struct: ctypes.Structure,
    width_out: int,
    kept: tuple[Tensor | None, ...],
) -> _Product:
    pointer = ctypes.addressof(struct)

    def product(x: Tensor, _kept: object = (struct, kept)) -> Tensor:
        x = x.contiguous()
        y = x.new_empty(x.shape[0], width_out)
        if run(pointer, x.data_ptr(), y.data_ptr(), x.shape[0], torch.get_num_threads()):
            raise MemoryError("no memory for the inputs of a product")
        return y

    return product
