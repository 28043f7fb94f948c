"""The options of the commands: declarations, checks before heavy imports, names in errors."""
