"""Decides which requests run next: waiting, running, retracted, and sessions between turns."""
