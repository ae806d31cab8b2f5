"""Which of the programs that share a task arrives last: it adds up their parts.

A sum that is split among programs therefore takes one launch, and its order is that of the parts,
never that of the arrivals.
"""

import triton
import triton.language as tl


@triton.jit
def is_last(counter_ptr, count):
    """Whether all `count` programs have arrived; what each stored before is then visible.

    The counter is zero before the first and after the last, so that the next launch can use it.
    """
    tl.debug_barrier()  # every thread of this program has stored its part
    num_before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = num_before == count - 1
    if last:
        tl.store(counter_ptr, 0)
    return last
