"""Cut the marked lines or paragraphs out of the texts of a part, as they pass once more."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from forebay.errors import PrepareError
from forebay.prepare.dedup import kernels
from forebay.prepare.dedup.config import Dedup
from forebay.prepare.dedup.corpus import Flags
from forebay.prepare.dedup.signer import UNIT, scratch_for, table_for
from forebay.prepare.documents import text_buffers, text_column


class Cutter:
    """Cuts a part's texts, given all of them in the order in which they were signed, in any batches.

    Documents that are dropped pass too (they have marks, and may be cut or not): drop them after this.

    Args:
        flags: `DedupResult.cut` of the part.
        config: As they were signed with.
    """

    def __init__(self, flags: Flags, config: Dedup) -> None:
        self._flags = flags
        self._cut = flags.load()
        self._config = config
        self._used = 0
        self._scratch = np.empty(0, np.uint8)
        self.lost_bytes = 0

    def cut(self, texts: pa.LargeStringArray) -> pa.LargeStringArray:
        """The texts without what is marked; one of which nothing is left is "".

        Raises:
            PrepareError: If they are not the texts that were signed.
        """
        offsets, data = text_buffers(texts)
        config = self._config
        self._scratch = scratch_for(offsets, self._scratch)
        table = table_for(config.normalise_of(config.unit))
        out, out_offsets = np.empty(int(offsets[-1] - offsets[0]), np.uint8), np.empty(len(offsets), np.int64)
        # A text of n bytes has at most n units; marks past the end are read only if these are other texts.
        marks = self._cut[self._used : self._used + len(out) + 1]
        if len(marks) <= len(out):
            marks = np.concatenate([marks, np.zeros(len(out) + 1 - len(marks), np.uint8)])
        used, lost = kernels.cut_units(
            data, offsets, UNIT[config.unit], table, config.min_characters, self._scratch, marks, out, out_offsets
        )
        self._used += used
        self.lost_bytes += lost
        if self._used > len(self._cut):
            raise PrepareError(
                f"{self._flags.path}: expected the {len(self._cut)} lines or paragraphs that were signed, got more. "
                "The documents have changed since: run the task that signed them again."
            )
        return text_column(out_offsets, out[: out_offsets[-1]])
