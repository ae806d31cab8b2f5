"""Modules that are executed when something of them is used, not when they are imported."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# The kernels of torch's Python side for tensors without values. Only compilers use them, and they
# take a quarter of the time that importing torch takes.
OF_COMPILERS = "torch._meta_registrations"


def import_late(name: str) -> None:
    """Execute the module `name`, which is not imported yet, with its first use."""
    sys.meta_path.insert(0, _Finder(name))


class _LateModule(ModuleType):
    """A module that executes itself when an attribute is missing."""

    _execute: Callable[[ModuleType], None]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by the machinery of imports
            raise AttributeError(name)
        execute = self._execute
        self.__class__ = ModuleType  # type: ignore[assignment]
        del self._execute
        execute(self)
        return getattr(self, name)


class _Late(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_execute"] = self._loader.exec_module


class _Finder(MetaPathFinder):
    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Late(spec.loader)
        return spec
