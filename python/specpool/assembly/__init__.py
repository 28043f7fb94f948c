"""Load the parts of an engine, fit them to each other, and time them."""
