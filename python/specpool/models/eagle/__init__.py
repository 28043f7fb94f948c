"""EAGLE heads: config, weights, forward."""
