"""Decide who runs next: waiting, running and retracted requests, sessions between turns."""
