"""Run one turn after another: prepare, launch, take over results, check."""
