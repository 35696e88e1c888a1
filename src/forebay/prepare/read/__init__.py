"""Reads raw text of any usual format: `find_sources`, `cut`, `read`.

Hides: formats, compression, URLs. What is damaged becomes a Record with a problem, and what follows it is read as far
as its format lets one find it; only what is not in the data raises.
"""

from __future__ import annotations

from collections.abc import Iterator

from forebay.errors import PrepareError
from forebay.prepare.documents import Record
from forebay.prepare.read.base import Piece, ReadOptions, Source
from forebay.prepare.read.formats import FORMATS
from forebay.prepare.read.hub_api import Lost
from forebay.prepare.read.opening import Damaged
from forebay.prepare.read.sources import Found, cut, find_sources, settle

__all__ = ["FORMATS", "Found", "Piece", "ReadOptions", "Source", "cut", "find_sources", "read", "settle"]


def read(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    """The documents of a piece, one at a time, in order; memory is bounded by the largest document.

    Raises:
        PrepareError: If a source cannot be read at all: it is gone, has no text column of that name, or the package
            that reads it is missing.
        DownloadError, AccessError: If it is the hub's, which is away or closed.
    """
    place = -1
    try:
        for record in FORMATS[piece.format].read(piece, options):
            place = record.place
            yield record
    except Damaged as error:
        yield Record(place + 1, problem=str(error))
    except Lost as lost:
        raise lost.error from lost
    except OSError as error:
        raise PrepareError(
            f"{piece.sources[0].path}: cannot read input: {error.strerror or error}. Check the disk, or leave it out."
        ) from error
