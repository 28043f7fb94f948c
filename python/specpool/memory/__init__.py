"""From bytes to pages: how many pages each group gets, and the KV buffers themselves."""
