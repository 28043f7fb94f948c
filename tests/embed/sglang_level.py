"""A plug-in of pytest: loads SGLang's plug-ins before its tests are imported."""

from __future__ import annotations


def pytest_configure() -> None:
    """Load them, as SGLang's processes do."""
    # Not before: importing SGLang takes seconds.
    from sglang.srt.plugins import load_plugins

    load_plugins()
