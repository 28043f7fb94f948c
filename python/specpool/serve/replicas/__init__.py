"""Replicas of the server on Ray Serve. They need `specpool[ray]`; `routing` and `fleet` do not."""
