"""Block drafters (DFlash): small models whose one forward proposes a block of tokens."""
