"""Reads raw text of any usual format: `find_sources`, `cut`, `read`.

Hides: formats, compression, URLs. What is damaged becomes a Record with a problem, and what follows it is read as far
as its format lets one find it; only what is not in the data raises.
"""

import errno
from collections.abc import Iterator

from forebay.errors import ForebayError
from forebay.prepare.documents import Record
from forebay.prepare.read.base import Piece, ReadOptions, Source
from forebay.prepare.read.listing import Skipped
from forebay.prepare.read.opening import Budget, Damaged, Unreadable, check_unchanged
from forebay.prepare.read.sources import FORMATS, Found, cut, find_sources, settle
from forebay.storage.hub import HubReadError

MAX_MALFORMED = 1000
"""From so many on, the fraction of malformed records matters."""
MAX_WITHOUT = 1_000_000
"""Blank lines and malformed records in a row, at about 2 µs each."""

__all__ = ["FORMATS", "Found", "Piece", "ReadOptions", "Skipped", "Source", "cut", "find_sources", "read", "settle"]


def read(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    """The documents of a piece, one at a time, in order; memory is bounded by the largest document.

    A file of which nothing can be read is a Record that `failed`; raises only for what is not in the data.
    """
    chosen = FORMATS[piece.format]
    records = chosen.read(piece, options)
    place = -1
    try:
        for source in piece.sources:
            check_unchanged(source)
        # A file of one document is bounded by max_document_bytes, and says nothing of the files beside it.
        for record in records if chosen.grouped else _bounded(records, piece, options):
            place = record.place
            yield record
        for source in piece.sources:
            check_unchanged(source)
    except Damaged as error:
        yield Record(place + 1, problem=str(error))
    except Unreadable as error:
        yield Record(place + 1, problem=str(error), failed=True)
    except HubReadError as failure:
        raise failure.error from failure
    except ForebayError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # Not the file's fault.
        yield Record(place + 1, problem=f"cannot read input: {error.strerror or error}", failed=True)


def _bounded(records: Iterator[Record], piece: Piece, options: ReadOptions) -> Iterator[Record]:
    """The records; raises Damaged where their text, or what is wrong with them, becomes too much."""
    budget = Budget(piece, options)
    documents = malformed = without = 0
    for record in records:
        yield record
        if record.problem:
            without += 1
            malformed += record.problem != "blank"
            if malformed > MAX_MALFORMED and malformed > options.max_malformed * (documents + malformed):
                raise Damaged(
                    f"{malformed} of {documents + malformed} records are malformed: the rest is left out. Raise "
                    "max_malformed to read on."
                )
            if without > MAX_WITHOUT:
                raise Damaged(f"{without} records in a row hold no document: the rest is left out.")
        else:
            without = 0
            documents += 1
            budget.spend(len(record.text) + len(record.url) + len(record.id))
