"""`install`: lets old and new releases of engines be imported on a CPU in one environment.

Packages of kernels that need a GPU, and those that only a loader of weights asks for, become
modules whose every name is a class that takes any call. A scheduler names them and calls none.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

#: What schedulers import and never call; used where the real package is not installed.
ABSENT = (
    *("sgl_kernel", "flashinfer", "deep_gemm", "sglang_kernel", "gguf", "mistral_common"),
    *("blake3", "diskcache", "outlines_core", "setproctitle", "compressed_tensors", "depyf"),
)


class HollowType(type):
    """The type of `Hollow`, so that the class has every attribute too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Hollow(metaclass=HollowType):
    """A class and function in one: takes every call, and has every attribute."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Return itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow()


class HollowModule(ModuleType):
    """A module with every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow


class HollowFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of `ABSENT`, after everybody else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for an absent package or a part of it."""
        if fullname.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the hollow module."""
        return HollowModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


def install() -> None:
    """Find hollow packages, and let old releases register configurations that transformers has."""
    sys.meta_path.append(HollowFinder())
    if importlib.util.find_spec("transformers") is None:
        return
    from transformers.models.auto import configuration_auto

    register = configuration_auto._LazyConfigMapping.register

    def replace(mapping: Any, key: Any, value: Any, exist_ok: bool = False) -> None:
        register(mapping, key, value, exist_ok=True)

    configuration_auto._LazyConfigMapping.register = replace  # type: ignore[method-assign,assignment]
