"""The simulation of many replicas: networks that lose, nodes that die, lists that come late.

The routing, the sessions and the ledgers are the real ones; the rest is simulated. It needs no Ray
and no torch.
"""
