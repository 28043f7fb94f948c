"""A session or a request leaves an engine and goes on in another (docs/transfer.md)."""
