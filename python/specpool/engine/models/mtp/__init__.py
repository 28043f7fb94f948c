"""The MTP layer that ships inside a target's checkpoint (multi-token prediction)."""
