"""The server's paths, one file a concern."""
