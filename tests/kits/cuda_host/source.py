"""The text of a kernel file: its lines, its entries, and the one construct that g++ cannot read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Source = str | Path | Sequence[Path]

_LAUNCH_BOUNDS = r"(?:__launch_bounds__\s*\(\s*(\w+)[^)]*\)\s*)?"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(
    rf'extern\s+"C"\s+{_LAUNCH_BOUNDS}__global__\s+{_LAUNCH_BOUNDS}void\s+{_LAUNCH_BOUNDS}(\w+)\s*\('
)
_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?([\w:\s]+?)\s*\b(\w+)\s*\[\s*\]\s*;"
)


@dataclass(frozen=True)
class Entry:
    """A kernel that a launcher can ask for by name."""

    name: str
    max_threads: int  # per block, as in __launch_bounds__ if that is a number


def read(source: Source, filename: str = "kernel.cu") -> str:
    """The text of one file, of several in a row, or the text itself, with its own line numbers.

    Args:
        source: a path, a text (it has a newline), or paths of which the later may use the earlier.
        filename: what messages call a text.
    """
    if isinstance(source, str) and "\n" in source:
        return f'#line 1 "{filename}"\n{source}\n'
    paths = [Path(source)] if isinstance(source, str | Path) else list(source)
    return "".join(f'#line 1 "{p.name}"\n{p.read_text(encoding="utf-8")}\n' for p in paths)


def files(text: str) -> list[tuple[str, str]]:
    """The name and the lines of each file of a text that `read` returned."""
    _, *parts = re.split(r'^#line 1 "([^"]*)"\n', text, flags=re.MULTILINE)
    return list(zip(parts[::2], parts[1::2], strict=True))


def with_headers(file: Path) -> list[Path]:
    """The file after every `.cuh` of its folder, as the package hands them to the compiler."""
    return [*sorted(file.parent.glob("*.cuh")), file]


def entries(text: str) -> list[Entry]:
    """Every `extern "C" __global__` function, in order."""
    entries_by_name: dict[str, Entry] = {}
    for *bounds, name in _ENTRY.findall(_COMMENT.sub(" ", text)):
        numbers = [int(b) for b in bounds if b.isdigit()]
        entries_by_name[name] = Entry(name, min([1024, *numbers]))
    return list(entries_by_name.values())


def for_host(text: str) -> str:
    """The text with `extern __shared__ T x[];` made a pointer; only in the body of a function."""
    return _DYNAMIC_SHARED.sub(r"\1* const \2 = (\1*)host_dynamic_shared();", text)
