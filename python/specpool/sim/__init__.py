"""The simulation: the real scheduler and ledger on a simulated device, without a model.

`Simulation(scenario(seed), ...).run()` runs a scenario; `shrink` reduces one that breaks a law.
"""

from specpool.sim.arrivals import Arrival, Text
from specpool.sim.device import BrokenLaw, SimDevice
from specpool.sim.settings import Settings
from specpool.sim.shrink import Failure, broken_law, shrink
from specpool.sim.simulation import Simulation
from specpool.sim.source import Fault, Scenario, scenario
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
