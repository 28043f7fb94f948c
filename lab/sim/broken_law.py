"""`BrokenLaw`: what a simulation finds."""


class BrokenLaw(AssertionError):  # noqa: N818 - what a simulation finds
    """The error for a broken law; the message says which law, where and when."""
