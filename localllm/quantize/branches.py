"""The inputs of products that some of a layer's rows reach: experts, and what is beside them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.model.blocks.block import LinearGroup
from localllm.model.blocks.experts import MixtureOfExperts
from localllm.model.blocks.experts_beside import ExpertsBeside
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.blocks.latent_experts import LatentExperts
from localllm.model.layer import Sublayer
from localllm.model.norm import Norm
from localllm.quantize.stream import BATCH_TOKENS, CalibrationStream
from localllm_kernels import Ops

# A tensor of the layer by its name; of a linear that is quantized already, its values.
Tensors = Callable[[str], Tensor]
# From the residual stream to the inputs of a product.
Before = Callable[[Tensor, Ops], Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """A product to quantize: its inputs in the model that is quantized so far and in the
    unquantized one, [num_tokens, width] at a time; `num_rows` in all. `is_last`: of an expert.
    """

    group: LinearGroup
    inputs: Iterator[Tensor]
    reference: Iterator[Tensor]
    num_rows: int
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Branches:
    """Both models before a block with experts: the rows, and the tensors of the layer."""

    stream: CalibrationStream
    reference: CalibrationStream
    tensors: Tensors
    original: Tensors

    def steps(self, sublayer: Sublayer) -> Iterator[Step]:
        """The products of the block in order; the tensors of one are asked for after the step
        before it. `sublayer`: the block as it is quantized so far, whose router decides.
        """
        block = sublayer.block
        if isinstance(block, ExpertsBeside):
            everything = torch.arange(sum(len(rows) for rows in self.stream.rows()))
            yield from self._gated(block.mlp.spec, block.mlp_norms[0], everything)
            yield from self._experts(block.experts, block.expert_norms[0], block.router_norm)
        elif isinstance(block, MixtureOfExperts):
            assert sublayer.norm is not None
            yield from self._experts(block, sublayer.norm, sublayer.norm)
        elif isinstance(block, LatentExperts):
            assert sublayer.norm is not None
            yield from self._experts(block.experts, _through(sublayer.norm, block), sublayer.norm)
        else:
            raise TypeError(f"{type(block).__name__} has no steps")

    def _experts(self, block: MixtureOfExperts, before: Before, router: Norm) -> Iterator[Step]:
        ops = self.stream.ops
        seen = (router(rows, ops) for rows in self.stream.rows())
        chosen = torch.cat([block.choose(rows, ops)[0].cpu() for rows in seen])
        for number in range(block.spec.router.num_experts):
            tokens = (chosen == number).any(1).nonzero()[:, 0]
            first, last = self._gated(block.spec.expert_at(number), before, tokens)
            yield first
            yield replace(last, is_last=True)

    def _gated(self, spec: GatedMLPSpec, before: Before, tokens: Tensor) -> Iterator[Step]:
        gate_up, down = spec.products

        def rows(stream: CalibrationStream) -> Iterator[Tensor]:
            for part in torch.split(tokens, BATCH_TOKENS):
                yield before(stream.rows_at(part), self.stream.ops)

        def inner(stream: CalibrationStream, tensors: Tensors) -> Iterator[Tensor]:
            weight = torch.cat([tensors(f"{name}.weight") for name in gate_up.names])
            bias = None
            if spec.has_bias:
                bias = torch.cat([tensors(f"{name}.bias") for name in gate_up.names])
            for x in rows(stream):
                yield self.stream.ops.gate(F.linear(x, weight, bias), spec.gate)

        own, whole = self.stream, self.reference
        yield Step(gate_up, rows(own), rows(whole), len(tokens))
        of_own, of_whole = inner(own, self.tensors), inner(whole, self.original)
        yield Step(down, of_own, of_whole, len(tokens))


def _through(norm: Norm, block: LatentExperts) -> Before:
    """From the residual stream to the experts' narrower space."""
    return lambda x, ops: block.first(norm(x, ops))
