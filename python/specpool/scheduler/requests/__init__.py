"""Requests, their queue, their latencies, and the conversations that they belong to."""
