"""Models: the target behind its pages and the draft heads."""
