"""Whether an engine that is installed is one that a plug-in was checked against.

Two things are compared: the parameters of what the plug-in takes over or calls, and the text of
what it depends on.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

#: What to do if the engine differs from the known releases: let its own code serve, end the
#: process, or accept changed texts.
ON_DRIFT = ("own", "exit", "trust")


def differences(
    signatures: Mapping[str, str],
    texts: Mapping[str, Mapping[str, str]],
    unimported: Mapping[str, Mapping[str, str]] | None = None,
) -> list[str]:
    """Return how the engine differs from the known releases, a line each; empty if it does not.

    What cannot be found is one line, whatever else would be: nothing more is imported.

    Args:
        signatures: for each `module:name` its parameters, separated by commas.
        texts: for each `module:name` the digest of its text in each known release.
        unimported: the same for modules that must not be imported to compare them.
    """
    lines = []
    for target, expected in signatures.items():
        try:
            now = ", ".join(inspect.signature(pkgutil.resolve_name(target)).parameters)
        except (ImportError, AttributeError, ValueError) as error:
            return [f"{target}: {error}"]
        if now != expected:
            lines.append(f"{target} has the parameters ({now}), known are ({expected})")
    if lines:
        return lines
    parts: list[tuple[Mapping[str, Mapping[str, str]], Callable[[str], str]]]
    parts = [(texts, text_digest), (unimported or {}, file_digest)]
    for part, digest_of in parts:
        for target, releases in part.items():
            digest = digest_of(target)
            if digest not in releases.values():
                lines.append(f"{target} has the text {digest}, known are {', '.join(releases)}")
    return lines


def text_digest(target: str) -> str:
    """Return a digest of a class's or function's text, without comments of their own line."""
    try:
        return _digest(inspect.getsource(pkgutil.resolve_name(target)))
    except OSError as error:
        return f"unreadable: {error}"


def file_digest(target: str) -> str:
    """Return the same as `text_digest` from the module's file, which is read, not imported."""
    module, _, names = target.partition(":")
    try:
        spec = importlib.util.find_spec(module)
        text = Path(spec.origin or "").read_text("utf-8") if spec else ""
        node: ast.AST = ast.parse(text)
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        return f"unreadable: {error}"
    for name in names.split("."):
        inner = (
            child for child in ast.iter_child_nodes(node) if getattr(child, "name", "") == name
        )
        inner_node = next(inner, None)
        if not isinstance(inner_node, ast.ClassDef | ast.FunctionDef):
            return f"unreadable: {module} has no {names}"
        node = inner_node
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return _digest("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def _digest(text: str) -> str:
    lines = (line.rstrip() for line in textwrap.dedent(text).splitlines())
    code_lines = [line for line in lines if line and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(code_lines).encode()).hexdigest()[:16]
