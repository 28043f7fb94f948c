"""Plug-ins that other engines load by entry points. Each does nothing unless switched on."""
