"""Measurements of specpool, each beside a reference in the same run: `python -m benches NAME`."""
