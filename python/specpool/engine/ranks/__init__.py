"""Ranks: the processes that share one model, and the records that keep them the same."""
