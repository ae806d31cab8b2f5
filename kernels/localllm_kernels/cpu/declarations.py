"""The structures, enumerations and functions of our C sources, read from their text.

It reads what these use: `typedef struct` of numbers, pointers and other structures, `enum` without
values, and functions of numbers and pointers. A test compares the layout with the compiler's.
"""

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_STRUCT = re.compile(r"typedef struct \{(.*?)\} (\w+);", re.DOTALL)
_ENUM = re.compile(r"^enum \{(.*?)\};", re.DOTALL | re.MULTILINE)
_DECLARATION = re.compile(r"(?:const )?(\w+) (.+)", re.DOTALL)
_DECLARATOR = re.compile(r"(\**)(\w+)")
_FUNCTION = re.compile(r"^(void|int|int64_t) (\w+)\(([^()]*)\) \{", re.MULTILINE)
_NUMBERS: Mapping[str, type] = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}
_PASSED: Mapping[str, type | None] = {
    **_NUMBERS,
    **{"void": None, "int": ctypes.c_int, "uint64_t": ctypes.c_uint64, "TeamWork": ctypes.c_void_p},
}


class Declarations:
    """What sources declare; `structs`: the structures that Python has too, by their names in C."""

    def __init__(self, text: str) -> None:
        code = _COMMENT.sub(" ", text)
        self._functions: list[tuple[str, str, str]] = _FUNCTION.findall(code)
        self._bodies = {name: body for body, name in _STRUCT.findall(code)}
        self._values = {
            name.strip(): value
            for names in _ENUM.findall(code)
            for value, name in enumerate(names.split(","))
        }
        self.structs: dict[str, type[ctypes.Structure]] = {}

    @classmethod
    def of_folder(cls, folder: Path) -> "Declarations":
        """Those of all headers and sources in a folder."""
        return cls("\n".join(path.read_text("utf-8") for path in sorted(folder.glob("*.[ch]"))))

    def value(self, name: str) -> int:
        """The value of an enumeration's constant."""
        return self._values[name]

    def struct(self, name: str) -> type[ctypes.Structure]:
        """The structure `name`; what it holds or points to as such must be asked for before."""
        fields = self._fields(self._bodies[name])
        self.structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
        return self.structs[name]

    def bind(self, library: ctypes.CDLL) -> None:
        """Give the functions of a library the types that they are declared with."""
        for result, name, arguments in self._functions:
            function = getattr(library, name)
            function.restype = _PASSED[result]
            taken = [] if arguments == "void" else arguments.split(",")
            function.argtypes = [_passed(each) for each in taken]

    def _fields(self, body: str) -> list[tuple[str, type]]:
        found = []
        for declaration in filter(str.strip, body.split(";")):
            kind, declarators = _matched(_DECLARATION, declaration)
            for declarator in declarators.split(","):
                stars, field = _matched(_DECLARATOR, declarator)
                found.append((field, self._type(kind, stars)))
        return found

    def _type(self, kind: str, stars: str) -> type:
        if not stars:
            return self.structs[kind] if kind in self.structs else _NUMBERS[kind]
        if stars == "*" and kind in self.structs:
            return ctypes.POINTER(self.structs[kind])
        return ctypes.c_void_p


def _passed(argument: str) -> type | None:
    return ctypes.c_void_p if "*" in argument else _PASSED[argument.split()[0]]


def _matched(pattern: re.Pattern[str], text: str) -> tuple[str, str]:
    found = pattern.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"a declaration that declarations.py does not read: {text.strip()!r}")
    return found[1], found[2]
