"""Measured milliseconds of a forward's linear layers, by its tokens, as others published them.

Source: Vidur (Agrawal et al., MLSys 2024), github.com/microsoft/vidur, MIT licence, commit
7d47513, the files data/profiling/compute/a100/meta-llama/*/mlp.csv. The medians of one layer's
projections, norms, activations, rotary embeddings and additions are summed, times the number of
layers. Not in them: attention's reads of keys and values, the output layer, and messages between
cards.
"""

from __future__ import annotations

Curve = tuple[tuple[int, float], ...]

#: Llama 3 8B, 32 layers, bf16, on one A100 of 80 GB.
LLAMA_8B_A100: Curve = (
    (1, 9.7),
    (8, 9.98),
    (16, 10.13),
    (32, 10.91),
    (64, 11.23),
    (96, 12.61),
    (128, 13.18),
    (160, 17.44),
    (192, 16.77),
    (224, 19.07),
    (256, 19.49),
    (320, 27.12),
    (384, 27.74),
    (448, 35.12),
    (512, 34.64),
    (640, 48.21),
    (768, 52.94),
    (1024, 75.14),
    (1536, 106.91),
    (2048, 143.68),
    (4096, 273.25),
    (8192, 543.89),
)
#: Llama 3 70B, 80 layers, bf16, split over four A100s of 80 GB.
LLAMA_70B_4_A100: Curve = (
    (1, 24.88),
    (8, 25.76),
    (16, 26.16),
    (32, 26.24),
    (64, 26.88),
    (96, 31.84),
    (128, 33.52),
    (160, 42.64),
    (192, 45.2),
    (224, 48.92),
    (256, 50.96),
    (320, 62.16),
    (384, 63.12),
    (448, 87.52),
    (512, 89.92),
    (640, 105.28),
    (768, 131.6),
    (1024, 186.72),
    (1536, 262.96),
    (2048, 338.38),
    (4096, 653.14),
    (8192, 1287.66),
)
