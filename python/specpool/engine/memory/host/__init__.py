"""The host tier: KV that is kept in host memory and copied back to the device."""
