"""Requests, and what is known of each while it waits and while it runs."""
