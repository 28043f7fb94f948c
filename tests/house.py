"""The measures of the package's structure: `python tests/house.py` prints them.

Folders and their layers are import-linter's (`make lint`); here are sizes alone.
"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "python" / "specpool"


def file_lines() -> dict[str, int]:
    """Lines of each Python file of the package."""
    return {
        str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def function_lines() -> dict[str, int]:
    """Lines of each function below its docstring, signature included."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                first = node.body[0]
                if ast.get_docstring(node) is not None and first.end_lineno is not None:
                    lines -= first.end_lineno - first.lineno + 1
                found[f"{path.relative_to(PACKAGE)}: {node.name}"] = lines
    return found


def rooms() -> list[str]:
    """Folders and files at the top of the package."""
    return sorted(
        path.name
        for path in PACKAGE.iterdir()
        if (path.is_dir() and any(path.glob("*.py"))) or path.suffix == ".py"
    )


def folder_files() -> dict[str, int]:
    """Python files of each folder, `__init__.py` not counted."""
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
    return {
        str(folder.relative_to(PACKAGE)): count
        for folder in sorted(folders)
        if (count := sum(path.name != "__init__.py" for path in folder.glob("*.py")))
    }


def main() -> None:
    """Print the measures."""
    files, functions, folders = file_lines(), function_lines(), folder_files()
    print(f"rooms at the top: {len(rooms())}")
    median = statistics.median(files.values())
    print(f"files: {len(files)}, median {median:.0f} lines; the largest:")
    for name in sorted(files, key=files.__getitem__, reverse=True)[:5]:
        print(f"  {files[name]:4} {name}")
    print("the longest functions, without their docstrings:")
    for name in sorted(functions, key=functions.__getitem__, reverse=True)[:8]:
        print(f"  {functions[name]:4} {name}")
    print("the fullest folders:")
    for name in sorted(folders, key=folders.__getitem__, reverse=True)[:5]:
        print(f"  {folders[name]:4} {name}")


if __name__ == "__main__":
    main()
