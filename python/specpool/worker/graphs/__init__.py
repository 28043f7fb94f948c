"""CUDA graphs of whole rounds: capture, look up, replay."""
