"""The simulated device: the real scheduler and the real ledger, and no model.

`scenario(seed)` -> `Simulation(...).run()`; what breaks a law is made small by `shrink`.
"""

from specpool.sim.device import BrokenLaw, SimDevice
from specpool.sim.shrink import Failure, broken_law, shrink
from specpool.sim.simulation import Simulation
from specpool.sim.source import Arrival, Fault, Scenario, Settings, Text, scenario
from specpool.sim.watch import Tally

__all__ = [
    "Arrival",
    "BrokenLaw",
    "Failure",
    "Fault",
    "Scenario",
    "Settings",
    "SimDevice",
    "Simulation",
    "Tally",
    "Text",
    "broken_law",
    "scenario",
    "shrink",
]
