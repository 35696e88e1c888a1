"""One shard of tokens with the ids of its samples, as Templar names them: what tests damage."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.formats.vectors import npy_header, sample_id


def write_shard(folder: Path, index: int, tokens: NDArray[Any], seq_len: int) -> tuple[Path, Path]:
    """`train_%06d.npy` with NumPy's header and `sample_ids_%06d.bin`, raw u64."""
    first, second = folder / f"train_{index:06d}.npy", folder / f"sample_ids_{index:06d}.bin"
    first.write_bytes(npy_header(tokens.dtype, len(tokens)) + tokens.tobytes())
    np.array([sample_id(row) for row in tokens.reshape(-1, seq_len)], "<u8").tofile(second)
    return first, second
