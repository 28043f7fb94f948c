"""The judges of the policies that choose draft shapes."""
