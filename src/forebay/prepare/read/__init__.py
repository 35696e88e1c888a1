"""Reads raw text of any usual format: `find_sources`, `cut`, `read`.

Hides: formats, compression, URLs. What is damaged becomes a Record with a problem, and what follows it is read as far
as its format lets one find it; only what is not in the data raises.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from forebay.errors import ForebayError
from forebay.prepare.documents import Record
from forebay.prepare.read.base import Piece, ReadOptions, Source
from forebay.prepare.read.formats import FORMATS
from forebay.prepare.read.hub_api import Lost
from forebay.prepare.read.listing import Skipped
from forebay.prepare.read.opening import Damaged, Unreadable, check_unchanged
from forebay.prepare.read.sources import Found, cut, find_sources, settle

__all__ = ["FORMATS", "Found", "Piece", "ReadOptions", "Skipped", "Source", "cut", "find_sources", "read", "settle"]


def read(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    """The documents of a piece, one at a time, in order; memory is bounded by the largest document.

    Raises:
        PrepareError: If an input changed since it was listed, its origin is away, or the package that reads it is
            missing. (A file of which nothing can be read is a Record that `failed`.)
        DownloadError, AccessError: If it is the hub's, which is away or closed.
    """
    place = -1
    try:
        for source in piece.sources:
            check_unchanged(source)
        for record in FORMATS[piece.format].read(piece, options):
            place = record.place
            yield record
        for source in piece.sources:
            check_unchanged(source)
    except Damaged as error:
        yield Record(place + 1, problem=str(error))
    except Unreadable as error:
        yield Record(place + 1, problem=str(error), failed=True)
    except Lost as lost:
        raise lost.error from lost
    except ForebayError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # Not the file's fault.
        yield Record(place + 1, problem=f"cannot read input: {error.strerror or error}", failed=True)
