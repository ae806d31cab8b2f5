"""The instructions expected of each kernel: `machine_code --check` compares with them what the
compiler makes.

They are the largest of A100, RTX 4090 and H100, with Triton 3.6 and 3.7. A figure that grows means
that a kernel became slower; one that shrinks is to be updated here. Weights, values and logits are
counted per thread; for 64 keys, the count is what one thread issues while all work on them.
"""

from dataclasses import dataclass

from localllm_kernels.compiling.aot import AotSpec


@dataclass(frozen=True, slots=True)
class Figure:
    """The most instructions per unit, and barriers per turn; `why`: what keeps it from its goal, if
    there is one that it misses.
    """

    instructions: float
    num_barriers: int
    why: str = ""


_OF_TABLES = "goal 5: the step of each weight is read by itself"
# By file and by the beginning of the kernel's label.
FIGURES: dict[tuple[str, str], Figure] = {
    ("products/int4_matmul", "_row_kernel 1 rows groups of 128 norm"): Figure(
        6.9, 0, "runs where the matrix units are not used: every code becomes a float of its own"
    ),
    ("products/int4_matmul", "_row_kernel 1 rows groups of 128 residual"): Figure(5.8, 0),
    ("products/int4_matmul", "_row_kernel 1 rows groups of 32 gate"): Figure(8.0, 0),
    ("products/int4_matmul", "_row_kernel 1 rows groups of 128 gate"): Figure(6.9, 0),
    ("products/int4_matmul", "_fragment_kernel 8 rows groups of 128 norm"): Figure(2.7, 0),
    ("products/int4_matmul", "_fragment_kernel 8 rows groups of 128 residual"): Figure(2.5, 0),
    ("products/int4_matmul", "_fragment_kernel 8 rows groups of 32 gate"): Figure(
        4.4,
        0,
        "goal 2.5: scales and zeros of groups of 32 are read one by one; memory takes longer still",
    ),
    ("products/int4_matmul", "_fragment_kernel 16 rows groups of 128 gate"): Figure(
        4.2,
        0,
        "goal 3: the squares of the norm are steps of their own; without them it is 2.5 to 3.1 and "
        "one launch more, and memory takes longer than either",
    ),
    ("products/int4_matmul", "_fragment_kernel 64 rows groups of 128 gate"): Figure(4.8, 0),
    ("products/int4_matmul", "_tile_kernel 16 rows groups of 128 norm"): Figure(
        15.3, 10, "runs where the fragments are not used"
    ),
    ("products/int4_matmul", "_tile_kernel 16 rows groups of 32 gate"): Figure(15.4, 20),
    ("products/int4_matmul", "_tile_kernel 64 rows groups of 128 gate"): Figure(23.9, 16),
    ("products/int4_matmul", "_tile_kernel 64 rows groups of 32 residual"): Figure(42.0, 9),
    ("products/trellis_matmul", "_trellis_kernel 1 rows"): Figure(12.5, 12, _OF_TABLES),
    ("products/trellis_matmul", "_trellis_kernel 64 rows"): Figure(17.4, 8, _OF_TABLES),
    ("products/trellis_matmul", "_trellis_kernel 512 rows"): Figure(21.1, 8, _OF_TABLES),
    ("products/int8_matmul", "_eight_bit_kernel 1 rows"): Figure(4.9, 2),
    ("products/int8_matmul", "_eight_bit_kernel 64 rows"): Figure(10.5, 3),
    ("products/int8_matmul", "_eight_bit_kernel 512 rows"): Figure(14.3, 3),
    ("products/block_matmul", "_block_kernel Q4_K, 1 rows"): Figure(6.7, 0),
    ("products/block_matmul", "_block_kernel Q6_K, 1 rows"): Figure(8.1, 0),
    ("products/block_matmul", "_block_kernel Q4_K, 16 rows"): Figure(11.0, 6),
    ("products/block_matmul", "_block_kernel Q6_K, 16 rows"): Figure(
        12.9, 6, "the upper bits of its codes are apart from the lower ones"
    ),
    ("products/block_matmul", "_block_kernel Q4_K, 64 rows"): Figure(13.7, 12),
    ("products/block_matmul", "_block_kernel Q6_K, 64 rows"): Figure(15.8, 12),
    ("products/block_matmul", "_dequantize_blocks_kernel Q4_K"): Figure(14.5, 5),
    ("products/block_matmul", "_dequantize_blocks_kernel Q6_K"): Figure(16.5, 3),
    ("products/fp8_matmul", "_eight_bit_kernel 1 rows, scales for all inputs"): Figure(10.3, 2),
    ("products/fp8_matmul", "_eight_bit_kernel 512 rows, scales for 128 inputs, native"): Figure(
        6.6, 2
    ),
    ("products/fp8_matmul", "_eight_bit_kernel 512 rows, scales for 128 inputs"): Figure(28.4, 3),
    ("products/fp8_matmul", "_eight_bit_kernel 64 rows, scales for all inputs, native"): Figure(
        3.9, 2
    ),
    ("attention/decode", "_fragment_decode_kernel int8 cache, 8 rows of 128"): Figure(389, 0),
    ("attention/decode", "_fragment_decode_kernel fp8 cache, 8 rows of 128"): Figure(454, 0),
    ("attention/decode", "_fragment_decode_kernel int8 cache, 16 rows of 128"): Figure(467, 0),
    ("attention/decode", "_fragment_decode_kernel int8 cache, 8 rows of 64"): Figure(252, 0),
    ("attention/decode", "_decode_kernel bf16, plain cache, 16 rows of 128"): Figure(598, 9),
    ("attention/decode", "_decode_kernel bf16, int8 cache, 16 rows of 128"): Figure(
        1192, 9, "goal 600, which the fragments reach: here codes are converted one by one"
    ),
    ("attention/decode", "_decode_kernel bf16, fp8 cache, 16 rows of 128"): Figure(
        1777, 9, "goal 700, which the fragments reach"
    ),
    ("attention/decode", "_fragment_decode_kernel int4 cache, 8 rows of 128"): Figure(436, 0),
    ("attention/decode", "_fragment_decode_kernel int4 cache, 16 rows of 128"): Figure(540, 0),
    ("attention/decode", "_fragment_decode_kernel int4 cache, 8 rows of 64"): Figure(294, 0),
    ("attention/decode", "_decode_kernel bf16, int4 cache, 16 rows of 128"): Figure(
        1538, 19, "goal 600, which the fragments reach"
    ),
    ("attention/decode", "_decode_kernel bf16, int4 cache, 16 rows of 256"): Figure(
        2721, 19, "goal 1200: codes are converted one by one, and half of them are read twice"
    ),
    ("attention/decode", "_decode_kernel bf16, int4 cache, 16 rows of 576"): Figure(
        3900, 15, "goal 1700: as above, and again where keys are values"
    ),
    ("attention/decode", "_decode_kernel own keys, 16 rows of 128"): Figure(490, 9),
    ("attention/decode", "_decode_kernel own keys, 16 rows of 576"): Figure(1114, 24),
    ("attention/decode", "_decode_kernel bf16, plain cache, 32 rows of 128"): Figure(749, 9),
    ("attention/decode", "_decode_kernel bf16, plain cache, 64 rows of 128"): Figure(723, 9),
    ("attention/decode", "_decode_kernel bf16, plain cache, 16 rows of 256"): Figure(1006, 9),
    ("attention/decode", "_decode_kernel bf16, plain cache, 64 rows of 256"): Figure(1576, 9),
    ("attention/decode", "_decode_kernel fp32, plain cache, 16 rows of 64"): Figure(1838, 3),
    ("attention/decode", "_decode_kernel fp32, plain cache, 16 rows of 128"): Figure(2048, 3),
    ("attention/decode", "_decode_kernel fp32, plain cache, 16 rows of 256"): Figure(3668, 3),
    ("attention/decode", "_decode_kernel fp32, plain cache, 32 rows of 64"): Figure(1908, 3),
    ("attention/decode", "_decode_kernel fp32, plain cache, 32 rows of 128"): Figure(3372, 3),
    ("attention/decode", "_decode_kernel fp32, plain cache, 32 rows of 256"): Figure(6276, 3),
    ("attention/decode", "_decode_kernel bf16, plain cache, 16 rows of 64, sinks"): Figure(334, 9),
    ("attention/decode", "_decode_kernel bf16, plain cache, 16 rows of 512"): Figure(1044, 9),
    ("attention/decode", "_decode_kernel bf16, plain cache, 32 rows of 512"): Figure(1392, 9),
    ("attention/decode", "_decode_kernel fp32, plain cache, 16 rows of 512"): Figure(6676, 3),
    ("attention/prefill", "_prefill_kernel bf16, plain cache, heads of 128, wi"): Figure(744, 9),
    ("attention/prefill", "_prefill_kernel bf16, plain cache, heads of 128"): Figure(712, 9),
    ("attention/prefill", "_prefill_kernel bf16, int8 cache, heads of 128"): Figure(1232, 9),
    ("attention/prefill", "_prefill_kernel bf16, fp8 cache, heads of 128"): Figure(1559, 9),
    ("attention/prefill", "_prefill_kernel bf16, int4 cache, heads of 128"): Figure(
        1844, 19, "goal 1232, as of int8: half of the codes are read twice"
    ),
    ("attention/prefill", "_prefill_kernel bf16, int4 cache, heads of 256"): Figure(
        3004, 19, "goal 1554: as above"
    ),
    ("attention/prefill", "_prefill_kernel bf16, int4 cache, heads of 576"): Figure(
        3904, 15, "goal 1700: as above"
    ),
    ("attention/prefill", "_prefill_kernel own keys, heads of 128"): Figure(670, 9),
    ("attention/prefill", "_prefill_kernel own keys, heads of 576"): Figure(1534, 16),
    ("attention/prefill", "_prefill_kernel bf16, plain cache, heads of 256"): Figure(1554, 9),
    ("attention/prefill", "_prefill_kernel fp32, plain cache, heads of 64"): Figure(2916, 3),
    ("attention/prefill", "_prefill_kernel fp32, plain cache, heads of 128"): Figure(5444, 3),
    ("attention/prefill", "_prefill_kernel fp32, plain cache, heads of 256"): Figure(6228, 3),
    ("pointwise/rms_norm_launch", "_rms_norm_kernel alone"): Figure(22, 4),
    ("pointwise/rms_norm_launch", "_rms_norm_kernel with residual"): Figure(37, 6),
    ("attention/prefill", "_prefill_kernel bf16, plain cache, heads of 64, sinks"): Figure(490, 2),
    ("attention/prefill", "_prefill_kernel bf16, plain cache, heads of 256, cap"): Figure(1746, 9),
    ("attention/prefill", "_prefill_kernel bf16, plain cache, heads of 512"): Figure(1452, 9),
    ("attention/prefill", "_prefill_kernel fp32, plain cache, heads of 512"): Figure(6496, 3),
    # Rows of latent attention, which are keys and values.
    ("attention/decode", "_decode_kernel bf16, plain cache, 16 rows of 576"): Figure(1106, 24),
    ("attention/decode", "_decode_kernel bf16, int8 cache, 16 rows of 576"): Figure(
        2472, 10, "codes are converted one by one"
    ),
    ("attention/decode", "_decode_kernel bf16, fp8 cache, 16 rows of 576"): Figure(
        4720, 10, "codes are converted one by one"
    ),
    ("attention/decode", "_decode_kernel bf16, plain cache, 32 rows of 576"): Figure(1528, 16),
    ("attention/decode", "_decode_kernel bf16, int8 cache, 32 rows of 576"): Figure(
        3322, 10, "codes are converted one by one"
    ),
    ("attention/decode", "_decode_kernel bf16, fp8 cache, 32 rows of 576"): Figure(
        5634, 10, "codes are converted one by one"
    ),
    ("attention/decode", "_decode_kernel fp32, plain cache, 16 rows of 576"): Figure(6912, 3),
    ("attention/prefill", "_prefill_kernel bf16, plain cache, heads of 576"): Figure(1536, 16),
    ("attention/prefill", "_prefill_kernel bf16, int8 cache, heads of 576"): Figure(3286, 10),
    ("attention/prefill", "_prefill_kernel bf16, fp8 cache, heads of 576"): Figure(5638, 10),
    ("attention/prefill", "_prefill_kernel fp32, plain cache, heads of 576"): Figure(6884, 3),
    ("pointwise/rms_norm_launch", "_rms_norm_kernel alone, weight in float32"): Figure(22, 6),
    ("pointwise/rms_norm_launch", "_rms_norm_kernel with residual, weight in float32"): Figure(
        37, 10
    ),
    ("experts/product", "_experts_kernel plain groups of 4096, 16 pairs by pair, silu"): Figure(
        1.3, 2
    ),
    ("experts/product", "_experts_kernel plain groups of 4096, 16 pairs"): Figure(1.8, 2),
    ("experts/product", "_experts_kernel plain groups of 4096, 32 pairs, silu"): Figure(1.7, 2),
    ("experts/product", "_experts_kernel int8 groups of 4096, 16 pairs by pair, silu"): Figure(
        6.0, 2
    ),
    ("experts/product", "_experts_kernel int8 groups of 4096, 16 pairs"): Figure(6.4, 2),
    ("experts/product", "_experts_kernel int8 groups of 4096, 32 pairs, silu"): Figure(6.2, 2),
    ("experts/product", "_experts_kernel fp8 groups of 128, 16 pairs by pair, silu"): Figure(
        10.0, 2
    ),
    ("experts/product", "_experts_kernel fp8 groups of 128, 16 pairs"): Figure(10.1, 2),
    ("experts/product", "_experts_kernel fp8 groups of 128, 32 pairs, silu"): Figure(10.2, 2),
    ("experts/product", "_experts_kernel int4 groups of 128, 16 pairs by pair, silu"): Figure(
        6.2,
        5,
        "goal 4, as long as memory takes on an H100: codes become floats one by one, since "
        "Triton's products of tiles cannot take the layout of `int4_fragments`",
    ),
    ("experts/product", "_experts_kernel int4 groups of 128, 16 pairs"): Figure(7.0, 3),
    ("experts/product", "_experts_kernel int4 groups of 128, 32 pairs, silu"): Figure(7.1, 5),
    ("experts/product", "_experts_kernel mxfp4 groups of 32, 16 pairs by pair, silu"): Figure(
        9.8,
        5,
        "goal 4: as int4, and each code is multiplied with the power of two of its group",
    ),
    ("experts/product", "_experts_kernel mxfp4 groups of 32, 16 pairs"): Figure(10.5, 3),
    ("experts/product", "_experts_kernel mxfp4 groups of 32, 32 pairs, silu"): Figure(10.7, 5),
    ("experts/product", "_experts_kernel Q4_K, 16 pairs"): Figure(10.4, 8),
    ("experts/product", "_experts_kernel Q4_K, 32 pairs, silu"): Figure(11.5, 8),
    ("experts/product", "_experts_kernel Q6_K, 16 pairs"): Figure(12.8, 8),
    ("experts/product", "_experts_kernel Q6_K, 32 pairs, silu"): Figure(13.9, 8),
    ("experts/product", "_experts_kernel trellis3 groups of 4096, 16 pairs by pair, silu"): Figure(
        13.8, 6, _OF_TABLES
    ),
    ("experts/product", "_experts_kernel trellis3 groups of 4096, 16 pairs"): Figure(
        14.2, 6, _OF_TABLES
    ),
    ("experts/product", "_experts_kernel trellis3 groups of 4096, 32 pairs, silu"): Figure(
        16.2, 6, _OF_TABLES
    ),
    ("experts/sum", "_sum_kernel 8 of bf16"): Figure(4.4, 0),
    ("pointwise/gate_launch", "_gate_kernel bf16, silu"): Figure(32, 1),
    ("pointwise/gate_launch", "_gate_kernel bf16, gelu"): Figure(35, 1),
    ("pointwise/gate_launch", "_gate_kernel bf16, clamped"): Figure(38, 1),
    ("pointwise/gate_launch", "_gate_kernel bf16, relu2"): Figure(18, 0),
    ("attention/rotate_and_store_launch", "_rotate_and_store_kernel plain cache"): Figure(50, 0),
    ("attention/rotate_and_store_launch", "_rotate_and_store_kernel int8 cache"): Figure(90, 0),
    ("attention/rotate_and_store_launch", "_rotate_and_store_kernel fp8 cache"): Figure(98, 0),
    ("attention/rotate_and_store_launch", "_rotate_and_store_kernel int4 cache"): Figure(29, 0),
    ("attention/rotate_and_store_launch", "_rotate_and_store_kernel int4 cache, rows"): Figure(
        135, 0
    ),
    (
        "attention/rotate_and_store_launch",
        "_rotate_and_store_kernel int8 cache, keys less their means",
    ): Figure(92, 0),
    (
        "attention/rotate_and_store_launch",
        "_rotate_and_store_kernel fp8 cache, keys less their means",
    ): Figure(100, 0),
    ("sampling/sample_launch", "_scan_kernel any filters"): Figure(
        158.0, 9, "the whole kernel, with noise and masses; no row needs both"
    ),
}


def figure_of(name: str, spec: AotSpec) -> Figure | None:
    """The figure of a kernel: of those that match, the one with the longest label."""
    label = f"{spec.kernel.__name__} {spec.label}"
    fitting = [
        (len(start), figure)
        for (file, start), figure in FIGURES.items()
        if file == name and label.startswith(start)
    ]
    return max(fitting, key=lambda each: each[0])[1] if fitting else None
