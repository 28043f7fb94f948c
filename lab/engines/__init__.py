"""Runs other engines' schedulers on a device that knows what each slot holds."""
