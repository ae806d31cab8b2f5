"""Shared memory that a kernel addresses itself, past what Triton plans for its own operations.

A thread that reads only what it has copied needs no barrier, and values of a warp that lie side by
side are written and read without conflicts between banks. Neither can be asked of Triton, hence a
few lines of PTX; addresses are int32 [threads], the same in all of them.
"""

import triton
import triton.language as tl

# A kernel may have 48 KiB without asking the driver for more (CUDA C++ Programming Guide, "Compute
# Capabilities"), which Triton does for its own part only; that part is a few bytes where this is
# used.
MAX_BYTES = 47 * 1024
# Values that are exchanged at once.
_AT_ONCE = tl.constexpr(8)


@triton.constexpr_function
def exchange_bytes(threads):
    """The memory that `sums_over_warps` needs."""
    return 4 * 8 * threads


@triton.jit
def shared_memory(THREADS: tl.constexpr, SIZE: tl.constexpr):
    """The address of SIZE bytes; call it once in a kernel."""
    return tl.inline_asm_elementwise(
        _declaration(SIZE), "=r,r", [tl.arange(0, THREADS)], tl.int32, False, 1
    )


@triton.jit
def sums_over_warps(values, memory, DEEP: tl.constexpr, PTX: tl.constexpr):
    """Tuple of float32 [threads] -> the same number, in the first 1 / DEEP of all threads: the sums
    over every thread that is a multiple of [threads] / DEEP away, in their order. Elsewhere: 0.

    `memory`: see `exchange_bytes`. Triton's `tl.sum` would put the values of one lane side by side,
    so that all lanes of a warp meet in one bank.
    """
    THREADS: tl.constexpr = values[0].shape[0]
    found = ()
    if DEEP == 1:
        found = values
    elif PTX:
        for first in tl.static_range(0, len(values), _AT_ONCE):
            found = found + _exchanged(values[first : first + _AT_ONCE], memory, DEEP)
    else:
        FOUND: tl.constexpr = THREADS // DEEP
        is_first = tl.arange(0, THREADS) < FOUND
        for i in tl.static_range(len(values)):
            sums = tl.sum(tl.reshape(values[i], [DEEP, FOUND]), axis=0)
            everywhere = tl.reshape(tl.broadcast_to(sums[None, :], [DEEP, FOUND]), [THREADS])
            found = found + (tl.where(is_first, everywhere, 0.0),)
    return found


@triton.jit
def _exchanged(values, memory, DEEP: tl.constexpr):
    """The same for at most as many values as are exchanged at once."""
    COUNT: tl.constexpr = len(values)
    THREADS: tl.constexpr = values[0].shape[0]
    place = memory + 4 * tl.arange(0, THREADS)
    return tl.inline_asm_elementwise(
        _exchange(COUNT, THREADS, DEEP),
        _constraints(COUNT),
        (place,) + values,
        (tl.float32,) * COUNT,
        False,
        1,
    )


@triton.constexpr_function
def _declaration(size):
    return f"{{ .shared .align 16 .b8 memory[{size}]; mov.u32 $0, memory; }}"


@triton.constexpr_function
def _exchange(count, threads, deep):
    """Store `count` values of every thread, and add up in the first 1 / `deep` of them. Copies that
    are still under way into this memory end before.
    """
    size, step = 4 * threads, 4 * threads // deep
    code = ["{ .reg .pred p; .reg .f32 x; .reg .u32 thread;", "cp.async.wait_all; bar.sync 0;"]
    code += [f"st.shared.f32 [${count} + {size * i}], ${count + 1 + i};" for i in range(count)]
    code += ["bar.sync 0; mov.u32 thread, %tid.x;"]
    code += [f"setp.ge.u32 p, thread, {threads // deep};"]
    code += [f"mov.f32 ${i}, 0f00000000;" for i in range(count)]
    code += ["@p bra END;"]
    for part in range(deep):
        for i in range(count):
            code += [f"ld.shared.f32 x, [${count} + {size * i + step * part}];"]
            code += [f"add.f32 ${i}, ${i}, x;"]
    return " ".join([*code, "END: }"])


@triton.constexpr_function
def _constraints(count):
    return ",".join(["=&f"] * count + ["r"] + ["f"] * count)
