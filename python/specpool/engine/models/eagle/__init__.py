"""EAGLE draft heads: their config, weights and forward."""
