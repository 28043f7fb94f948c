"""Rows as bytes, and the ways that carry them to another process (docs/transfer.md)."""
