"""Triton's interpreter, quicker: without what it does again and again to no effect."""

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


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
