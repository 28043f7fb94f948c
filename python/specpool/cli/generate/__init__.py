"""`specpool generate`: run, print, report."""
