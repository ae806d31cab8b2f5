"""The operators a decoder needs, as one table: `Ops`.

The table is filled once, when a model is loaded, and passed down as an argument; a model never
asks what it runs on. `TORCH_OPS` runs wherever torch does. Shapes and layouts are documented with
each operator, in the file of its name.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from localllm_kernels.attention.paged_attention import paged_attention_reference
from localllm_kernels.attention.rotate_and_store import rotate_and_store_reference
from localllm_kernels.compiling.choice import ALL_OWN, Choice
from localllm_kernels.compiling.traits import TORCH_TRAITS, Traits
from localllm_kernels.experts.route import Routing, route_reference
from localllm_kernels.linears import Linears
from localllm_kernels.pointwise.gate import GateKind, gate_reference, sigmoid_gate_reference
from localllm_kernels.pointwise.rms_norm import add_rms_norm_reference, rms_norm_reference
from localllm_kernels.recurrence.recurrence import recurrence_reference
from localllm_kernels.recurrence.short_conv import short_conv_reference
from localllm_kernels.sampling.gumbel_argmax import gumbel_argmax_reference
from localllm_kernels.sampling.row_maxima import row_maxima_reference
from localllm_kernels.sampling.sample import SamplingRows
from localllm_kernels.trellis_ways import best_ways_reference


@dataclass(frozen=True, slots=True)
class Ops:
    """Every callable a decoder uses beyond matrix products and embedding look-ups, and one of
    quantization.

    `choice`: which of them are left to torch after all; `build`: what the bits of their results
    depend on besides.
    """

    traits: Traits
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotate_and_store: Callable[..., Tensor]
    gate: Callable[[Tensor, GateKind], Tensor]
    route: Callable[[Tensor, Routing], tuple[Tensor, Tensor]]
    paged_attention: Callable[..., Tensor]
    row_maxima: Callable[[Tensor], tuple[Tensor, Tensor]]
    gumbel_argmax: Callable[[Tensor, float, Tensor | None, int], int]
    short_conv: Callable[..., Tensor] = short_conv_reference
    sigmoid_gate: Callable[[Tensor, Tensor], Tensor] = sigmoid_gate_reference
    recurrence: Callable[..., Tensor] = recurrence_reference
    best_ways: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]] = best_ways_reference
    # Products with weights, if the library has its own; else torch's are used.
    linears: Linears | None = None
    # Samples the tokens of a whole batch in one launch, where that avoids waiting for the device.
    sample: Callable[[Tensor, SamplingRows], Tensor] | None = None
    choice: Choice = ALL_OWN
    build: str = ""


TORCH_OPS = Ops(
    traits=TORCH_TRAITS,
    rms_norm=rms_norm_reference,
    add_rms_norm=add_rms_norm_reference,
    rotate_and_store=rotate_and_store_reference,
    gate=gate_reference,
    route=route_reference,
    paged_attention=paged_attention_reference,
    row_maxima=row_maxima_reference,
    gumbel_argmax=gumbel_argmax_reference,
)
