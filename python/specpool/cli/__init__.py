"""The command line: `specpool generate`, `replay`, `inspect`, `sim`, `bench`, `info`."""

from specpool.cli.app import main

__all__ = ["main"]
