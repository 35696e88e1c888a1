"""Every format that is read, by the name with which it is forced. The first whose `sniff` says yes is taken."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.prepare.read.base import Format
from millrace.prepare.read.hub import HUB
from millrace.prepare.read.lines import LINE_FORMATS
from millrace.prepare.read.tables import ARROW, PARQUET
from millrace.prepare.read.tar import TAR
from millrace.prepare.read.tfrecord import TFRECORD

FORMATS: Mapping[str, Format] = {format.name: format for format in (PARQUET, ARROW, TFRECORD, TAR, HUB, *LINE_FORMATS)}
