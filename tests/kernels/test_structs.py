"""The structures that Python shares with C: their layout is that of the compiler."""

import ctypes
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from localllm_kernels.cpu import build
from localllm_kernels.cpu.declarations import Declarations
from localllm_kernels.cpu.structs import DECLARATIONS
from localllm_kernels.pointwise.gate import GATE_KINDS

FOLDER = Path(build.__file__).parent
HEADERS = ("head.h", "short_conv.h", "route.h")  # which include the others
ENUMERATIONS = ("SCALE_E8M0", "INTEGER", "KV_FP8", "NORM_ROWS", "GATE_RELU2")


def claims(structs: Mapping[str, type[ctypes.Structure]]) -> Iterator[str]:
    """What the compiler has to confirm, each in a line of C."""
    for name, struct in structs.items():
        yield f'_Static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "size of {name}");'
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            here, size = f"{name}.{field}", f"sizeof((({name} *)0)->{field})"
            yield f'_Static_assert(offsetof({name}, {field}) == {place.offset}, "place of {here}");'
            yield f'_Static_assert({size} == {place.size}, "size of {here}");'


def complaints(lines: Iterator[str] | list[str], folder: Path) -> str:
    """What the compiler says to them."""
    compiler = build.find_compiler()
    if not compiler:
        pytest.skip("there is no C compiler")
    source = folder / "claims.c"
    includes = ["#include <stddef.h>", *(f'#include "{FOLDER / name}"' for name in HEADERS)]
    source.write_text("\n".join([*includes, *lines]))
    command = [*compiler, "-march=native", "-fsyntax-only", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_every_field_lies_where_the_compiler_puts_it(tmp_path: Path) -> None:
    assert len(DECLARATIONS.structs) == 27
    assert complaints(claims(DECLARATIONS.structs), tmp_path) == ""


def test_a_field_that_c_does_not_have_is_found(tmp_path: Path) -> None:
    class Group(ctypes.Structure):
        _fields_ = (
            ("max_blocks", ctypes.c_int64),
            *DECLARATIONS.structs["Group"]._fields_[:2],
        )

    said = complaints(claims({"Group": Group}), tmp_path)
    assert "size of Group" in said
    assert "place of Group.max_blocks" in said


def test_constants_have_the_values_of_the_headers(tmp_path: Path) -> None:
    lines = [f'_Static_assert({n} == {DECLARATIONS.value(n)}, "{n}");' for n in ENUMERATIONS]
    assert complaints(lines, tmp_path) == ""
    for place, kind in enumerate(GATE_KINDS):
        assert DECLARATIONS.value(f"GATE_{kind.upper()}") == place


def test_what_headers_do_not_use_is_refused() -> None:
    def declare(body: str) -> None:
        declarations = Declarations(f"typedef struct {{ {body} }} Odd;")
        declarations.struct("Odd")

    declare("int64_t a, b; /* , c; */ const float *x;")
    with pytest.raises(ValueError, match=r"declarations\.py does not read: 'a\[3\]'"):
        declare("int64_t a[3];")
    with pytest.raises(KeyError, match="short"):
        declare("short a;")
