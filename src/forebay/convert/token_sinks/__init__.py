"""Where tokens are written: one function a format, by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from forebay.convert.content import Options, TokenSource, Written
from forebay.convert.token_sinks.arrow import write_arrow
from forebay.convert.token_sinks.blocks import write_litdata, write_mds
from forebay.convert.token_sinks.megatron import write_megatron
from forebay.convert.token_sinks.safetensors import write_safetensors
from forebay.convert.token_sinks.vectors import write_bin, write_ds, write_npy

Sink = Callable[[TokenSource, Path, Options], Written]

TOKEN_SINKS: Mapping[str, Sink] = {
    "safetensors": write_safetensors,
    "npy": write_npy,
    "bin": write_bin,
    "ds": write_ds,
    "megatron": write_megatron,
    "mds": write_mds,
    "litdata": write_litdata,
    "arrow": write_arrow,
}
