"""Strangers' machines lease slices of one scheduler in virtual time, on the code that runs the real network.

Only time, sockets and disks are simulated: leases are granted by the scheduler's `Desk` to the workers' `LeaseState`.
"""

from forebay.simulate.leasing import simulate
from forebay.simulate.result import SimulationResult
from forebay.simulate.settings import SimulationSettings

__all__ = ["SimulationResult", "SimulationSettings", "simulate"]
