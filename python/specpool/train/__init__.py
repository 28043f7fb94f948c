"""Training of an EAGLE-3 head for a target, on a user's own texts.

Only the command line imports this folder. It stands on the engine: the target's features and
its answers come from the code that serves.
"""
