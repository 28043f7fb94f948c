"""The command line: `specpool generate`, `plan`, `replay`, `inspect`, `bench`, `info`."""

from specpool.cli.app import main

__all__ = ["main"]
