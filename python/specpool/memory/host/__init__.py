"""The tier below the device: KV kept in host memory, and brought back."""
