"""`specpool info`: shows installed packages and which back ends work."""

from __future__ import annotations

import json as json_module
import platform
from importlib import metadata

from rich.console import Console
from rich.markup import escape
from rich.table import Table

PACKAGES = (
    "numpy",
    "torch",
    "transformers",
    "safetensors",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "flashinfer-python",
)


def collect() -> dict[str, dict[str, str]]:
    """Return the versions of packages, and a line per back end on whether it works."""
    import specpool

    versions = {"specpool": specpool.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    back_ends = {"torch, cpu": _cpu(), "torch, cuda": _cuda(), "flashinfer": _flashinfer()}
    works = back_ends["torch, cuda"].startswith("works") and back_ends["flashinfer"] == "works"
    back_ends["attention by default"] = "flashinfer" if works else "torch"
    return {"versions": versions, "back ends": back_ends}


def _cpu() -> str:
    try:
        import torch
    except ImportError:
        return "no: pip install 'specpool[hf]'"
    return f"works, {torch.get_num_threads()} threads"


def _cuda() -> str:
    try:
        import torch
    except ImportError:
        return "no: pip install 'specpool[hf]'"
    if not torch.cuda.is_available():
        return "no: torch finds no CUDA device"
    from specpool.kernels.launch import missing

    lack = missing()
    if lack is not None:
        return f"no: {lack}"
    return f"works, {torch.cuda.get_device_name()}"


def _flashinfer() -> str:
    try:
        from specpool.engine.attention.flashinfer.backend import missing
    except ImportError:
        return "no: pip install 'specpool[hf]'"
    lack = missing()
    return "works" if lack is None else f"no: {lack}"


def show(*, json: bool) -> None:
    """Print the result of `collect`, as a table or as JSON."""
    sections = collect()
    if json:
        print(json_module.dumps(sections))
        return
    table = Table(title="specpool info", show_header=False)
    for section in sections.values():
        for name, value in section.items():
            table.add_row(name, escape(value))
        table.add_section()
    Console().print(table)
