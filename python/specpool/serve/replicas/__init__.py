"""Replicas of the server on Ray Serve. They need `specpool[ray]`; `routing` does not."""
