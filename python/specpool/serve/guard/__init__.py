"""What stands before the paths: keys, limits, timeouts, the access log."""
