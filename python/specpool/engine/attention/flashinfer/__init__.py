"""The flashinfer back end: its plans for one forward, and for CUDA graphs."""
