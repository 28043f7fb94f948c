"""CUDA graphs of whole rounds: how they are captured, found and replayed."""
