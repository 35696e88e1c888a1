"""Every format that is read, by the name with which it is forced. The first whose `sniff` says yes is taken."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.prepare.read.api import API
from millrace.prepare.read.base import Format
from millrace.prepare.read.hub import HUB
from millrace.prepare.read.lines import LINE_FORMATS
from millrace.prepare.read.reddit import REDDIT
from millrace.prepare.read.stackexchange import SEVENZIP, STACKEXCHANGE
from millrace.prepare.read.tables import ARROW, PARQUET
from millrace.prepare.read.tar import TAR
from millrace.prepare.read.tfrecord import TFRECORD
from millrace.prepare.read.warc import WARC, WET
from millrace.prepare.read.wikipedia import WIKIPEDIA

_DUMPS = (WARC, WET, WIKIPEDIA, STACKEXCHANGE, SEVENZIP, REDDIT, API)
_ALL = (*_DUMPS, PARQUET, ARROW, TFRECORD, TAR, HUB, *LINE_FORMATS)
FORMATS: Mapping[str, Format] = {known.name: known for known in _ALL}
