"""The loop of an engine: it checks, prepares, launches and takes over results, turn by turn."""
