"""A scheduler and its workers in virtual time, on the code of the real network.

Only time, sockets and disks are simulated: the scheduler's `SchedulerCore` grants leases to the workers' `LeaseState`.
"""

from forebay.simulate.leasing import simulate
from forebay.simulate.scenario import Scenario, SimulationResult

__all__ = ["Scenario", "SimulationResult", "simulate"]
