"""Triton's interpreter, quicker: without what it does again and again to no effect."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def make_the_interpreter_quick() -> None:
    """All of it; what another version of Triton does otherwise is left as it is there."""
    patch_the_language_once_a_launch()
    know_the_types_of_numpy()
    look_for_no_overflow()
    broadcast_only_what_differs()
    know_the_shapes_of_blocks()


def patch_the_language_once_a_launch() -> None:
    """Have it patch `triton.language` once for each module of a kernel's functions.

    By itself it does so for every call of a function in a kernel, which takes a third of the time.
    """
    if not hasattr(interpreter, "_patch_lang"):
        return  # another version of Triton, which may be quick enough
    patch: Callable[[Any], Any] = interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch(function)

    def launch_anew(executor: Any, *arguments: Any, **named: Any) -> Any:
        # Behind a launch the language is as it was.
        patched.clear()
        return launch(executor, *arguments, **named)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew


def know_the_types_of_numpy() -> None:
    """Have it make its table of numpy's types once, and not for every value."""
    if not hasattr(interpreter, "_get_np_dtype"):
        return
    find: Callable[[Any], Any] = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def find_once(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    interpreter._get_np_dtype = find_once


def look_for_no_overflow() -> None:
    """Have it not compute, in int64 and for each sum of integers, whether a debugging build would
    have stopped there: without one it does nothing with that.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def broadcast_only_what_differs() -> None:
    """Have it leave two blocks of one shape as they are: it compares a tuple with a list."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_what_differs(semantic: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape == rhs.type.shape:
            return lhs, rhs
        return broadcast(semantic, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_what_differs


def know_the_shapes_of_blocks() -> None:
    """Have it check and wrap each shape once, and not for every value; and name a type for whoever
    asks.
    """
    new_type = core.block_type.__init__
    num_values = cache(core.validate_block_shape)

    @cache
    def wrapped(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(
            math.prod(shape)
        )

    def new_known_type(block: Any, element_ty: Any, shape: Any) -> None:
        if not shape or any(type(size) is not int for size in shape):
            new_type(block, element_ty, shape)
            return
        block.element_ty, block.shape = element_ty, tuple(shape)
        block.numel = num_values(block.shape)

    def new_known_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = wrapped(kind.shape if kind.is_block() else ())

    core.block_type.name = property(
        lambda block: f"<{block.shape}, {block.element_ty}>", lambda block, name: None
    )
    core.block_type.__init__ = new_known_type
    core.tensor.__init__ = new_known_tensor


def product_of_rows_alike(
    builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: object
) -> TensorHandle:
    """A tile's product, each element summed in the order of its terms, as on a GPU.

    The interpreter's own is numpy's, where the bits of a row depend on its place in the tile (seen
    with OpenBLAS 0.3 on processors with AVX512).
    """
    total = np.zeros(d.data.shape, d.data.dtype)
    for k in range(a.data.shape[1]):
        total += a.data[:, k, None] * b.data[k]
    return TensorHandle(total + d.data, d.dtype.scalar)
