"""The parts of `specpool generate`: run, print, report."""
