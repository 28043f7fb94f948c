"""Readers of a checkpoint folder's files, without torch or transformers if possible."""
