"""The assembly of an engine: load its parts, fit them to each other, and time rounds."""
