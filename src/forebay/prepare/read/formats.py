"""Every format that is read, by the name with which it is forced. `forebay.formats.detect` says which a file is."""

from collections.abc import Mapping

from forebay.prepare.read.api import API
from forebay.prepare.read.base import Format
from forebay.prepare.read.hub import HUB
from forebay.prepare.read.lines import LINE_FORMATS
from forebay.prepare.read.reddit import REDDIT
from forebay.prepare.read.stackexchange import SEVENZIP, STACKEXCHANGE
from forebay.prepare.read.tables import ARROW, PARQUET
from forebay.prepare.read.tar import TAR
from forebay.prepare.read.tfrecord import TFRECORD
from forebay.prepare.read.warc import WARC, WET
from forebay.prepare.read.wikipedia import WIKIPEDIA

_DUMPS = (WARC, WET, WIKIPEDIA, STACKEXCHANGE, SEVENZIP, REDDIT, API)
_ALL = (*_DUMPS, PARQUET, ARROW, TFRECORD, TAR, HUB, *LINE_FORMATS)
FORMATS: Mapping[str, Format] = {known.name: known for known in _ALL}
