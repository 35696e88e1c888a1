"""A whole network in virtual time, on the code that runs the real one.

Only time, sockets and disks are simulated. Leases are granted by the scheduler's `Desk` to the workers' `LeaseState`,
ranks follow `schedule.membership` with the workers' `MembershipState`, readers are `SwarmReaderState`s steered by
`store.tracker.steer`, and a rank's share is `order.plan`'s.
"""

import gc

from forebay.simulate.clock import Progress
from forebay.simulate.result import Result
from forebay.simulate.settings import Settings

__all__ = ["Progress", "Result", "Settings", "simulate"]


def simulate(settings: Settings, progress: Progress | None = None) -> Result:
    """Runs a world to its end. Equal settings give equal results.

    Args:
        progress: Told now and then how far it is.
    """
    from forebay.simulate import broadcast, elastic, leasing

    runs = {"lease": leasing.run, "order": elastic.run, "swarm": broadcast.run}
    collects = gc.isenabled()
    gc.disable()  # It would look at all that is kept, again and again: a quarter of the time, for next to nothing.
    try:
        return runs[settings.mode](settings, progress)
    finally:
        if collects:
            gc.enable()
