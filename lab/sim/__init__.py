"""The simulation: the real scheduler and ledger on a simulated device, without a model.

`Simulation(scenario(seed), ...).run()` runs a scenario; `shrink` reduces one that breaks a law.
"""

from lab.sim.arrivals import Arrival, Text
from lab.sim.broken_law import BrokenLaw
from lab.sim.device import SimDevice
from lab.sim.settings import Settings
from lab.sim.shrink import Failure, broken_law, shrink
from lab.sim.simulation import Simulation
from lab.sim.source import Fault, Scenario, scenario
from lab.sim.watch import Tally

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
