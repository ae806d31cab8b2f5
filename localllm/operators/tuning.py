"""Finds the fastest configurations of the kernels for a model, once for each GPU and shape.

The products of all layers with weights of one shape are captured and timed together, so that
weights are read from memory as in a step. Starting at the default, every configuration that differs
in one number is tried, then again from the best one, until none is better. Results are used from
the next start on: during one run of the program, a row is always computed the same way.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from localllm.model.blocks.block import LinearGroup
from localllm.model.decoder import DecoderModel
from localllm.model.layer import Sublayer
from localllm.model.linear import Projection
from localllm.model.norm import Norm
from localllm.operators.case import distance, unit_of
from localllm.operators.device import Device, is_fatal
from localllm.operators.product_cases import around
from localllm_kernels.compiling.tiles import TileConfig
from localllm_kernels.compiling.tunings import Tunings
from localllm_kernels.products.gpu_linears import Int4Product
from localllm_kernels.products.int4_weight import NOTHING, Around

logger = logging.getLogger(__name__)

ROWS = (1, 16, 64)
_REPEATS = 5
# A new configuration must take less than this share of the best time so far.
_WORTH = 0.98


def tune(
    model: DecoderModel, tunings: Tunings, device: Device, save: Callable[[str, TileConfig], None]
) -> Iterator[None]:
    """Tune the products of `model` that are not tuned yet, one trial per iteration."""
    for call in _calls(model):
        with tunings.listening() as asked:
            call()
        for key, (default, vary) in asked.items():
            if key not in tunings.found:
                yield from _descend(call, key, default, vary, tunings, device, save)


def _descend(
    call: Callable[[], Tensor],
    key: str,
    default: TileConfig,
    vary: Callable[[TileConfig], list[TileConfig]],
    tunings: Tunings,
    device: Device,
    save: Callable[[str, TileConfig], None],
) -> Iterator[None]:
    with tunings.forcing(key, default):
        expected = call().clone()
    best, best_s = default, _time(call, expected, key, default, tunings, device)
    tried = {default}
    yield
    is_better = True
    while is_better:
        is_better = False
        for config in vary(best):
            if config in tried:
                continue
            tried.add(config)
            seconds = _time(call, expected, key, config, tunings, device)
            if seconds < _WORTH * best_s:
                best, best_s, is_better = config, seconds, True
            yield
    logger.info("tuned %s: %s, %.1f us", key, best, 1e6 * best_s)
    save(key, best)


def _time(
    call: Callable[[], Tensor],
    expected: Tensor,
    key: str,
    config: TileConfig,
    tunings: Tunings,
    device: Device,
) -> float:
    """Seconds with a configuration; infinite if it does not fit this GPU, or is wrong."""
    try:
        with tunings.forcing(key, config):
            away = distance(call(), expected, unit_of(expected.dtype))  # compiles
            if away > 1:
                logger.warning("%s with %s is off by %.3g times the tolerance", key, config, away)
                return float("inf")
            replay, _ = device.capture(call)
        return min(device.time(replay) for _ in range(_REPEATS))
    except Exception as error:
        if is_fatal(error):
            raise
        logger.debug("%s cannot use %s: %s", key, config, error)
        return float("inf")


def _products(sublayer: Sublayer) -> Iterator[tuple[LinearGroup, Projection]]:
    """The products of a block that have tiles of their own; experts that are one product have none,
    nor have weights that were dequantized.
    """
    groups, products = sublayer.place.block.products, sublayer.block.products
    if len(products) < len(groups):
        groups = tuple(group for group in groups if group.share == 1)
    pairs = zip(groups, products, strict=True)
    return (pair for pair in pairs if not pair[0].is_dense)


def _calls(model: DecoderModel) -> Iterator[Callable[[], Tensor]]:
    """The products of a step for each number of rows, with the operators fused around them. Each
    call computes the product at one place in the model for all layers.
    """
    hidden = model.architecture.hidden_size
    places: dict[LinearGroup, list[tuple[Projection, Norm | None]]] = {}
    for sublayer in (each for layer in model.layers for each in layer.sublayers):
        for group, product in _products(sublayer):
            places.setdefault(group, []).append((product, sublayer.norm))
    for rows in ROWS:
        calls = []
        for group, found in places.items():
            fused = around(group, found[0][1], _drawn(model, rows, hidden))
            calls.append(([product for product, _ in found], group.width_in, fused))
        for products, width, fused in (*calls, ([model.head.projection], hidden, NOTHING)):
            x = _drawn(model, rows, width)

            def call(
                products: Sequence[Callable[..., Tensor]] = products,
                x: Tensor = x,
                fused: Around = fused,
            ) -> Tensor:
                out = x
                for product in products:
                    takes_around = isinstance(product, Int4Product) and fused is not NOTHING
                    out = product(x, fused) if takes_around else product(x)
                return out

            yield call


def _drawn(model: DecoderModel, rows: int, width: int) -> Tensor:
    embedding = model.embedding
    return torch.randn(rows, width, device=embedding.device).to(embedding.row_dtype)
