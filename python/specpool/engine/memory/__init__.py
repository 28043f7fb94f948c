"""Memory for KV: the sizes of the groups, the KV buffers, and the host tier."""
