"""What a session is not to be leased now: what it failed on lately, and what nobody can give it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.network.offers import Offers
from forebay.schedule.jobs import Job
from forebay.schedule.sessions import Session


@dataclass(frozen=True)
class Barred:
    """A question about the slices of one dataset of a job.

    Args:
        avoided: (worker, job, slice of the job) to when it may have that again.
        offers: What the others can give it; None: not known, so all.
    """

    session: Session
    job: Job
    dataset: int
    avoided: Mapping[tuple[str, str, int], float]
    offers: Offers | None
    now: float

    def __call__(self, index: int) -> bool:
        """Whether it is not to have a slice of the dataset."""
        of_job = self.job.bases[self.dataset] + index
        if of_job in self.job.failures and self.avoided.get((*self._who, of_job), self.now) > self.now:
            return True
        if self.offers is None or self.offers.is_all:
            return False
        return not (self.session.has(self.job.spec.sources[self.dataset].dataset_id, index) or self.offers.has(index))

    @property
    def _who(self) -> tuple[str, str]:
        return self.session.key[0], self.job.name

    def offered(self) -> NDArray[np.bool_] | None:
        """[S] flags: nothing else can be given by anybody; None: all can, or nobody knows."""
        return None if self.offers is None or self.offers.is_all else self.offers.copied()
