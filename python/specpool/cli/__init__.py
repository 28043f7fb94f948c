"""The command line: `specpool generate`, `specpool bench`, `specpool info`."""

from specpool.cli.app import main

__all__ = ["main"]
