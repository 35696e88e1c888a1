"""Model FLOPs utilization (MFU): the rate at which tokens are trained over the rate at the device's peak.

Operations that a program repeats, such as recomputed activations, do not count. Source: Chowdhery et al. 2022 (PaLM),
appendix B.
"""

import re
import sys

from forebay.errors import UsageError

_TABLE = """\
GB200 | 2500 | 5000 | 1250
B200 | 2250 | 4500 | 1125
H200 NVL | 835.5 | 1671 | 417.5
G?H200 | 989.4 | 1978.9 | 494.7
H100 PCIe | 756 | 1513 | 378
H100 NVL | 835.5 | 1671 | 417.5
H100 | 989.4 | 1978.9 | 494.7
A100 | 312 | - | 156
L4 | 121 | 242.5 | 60
L40S | 362.05 | 733 | 183
RTX 4090 | 165.2 | 330.3 | 82.6
RTX 3090 | 71 | - | 35.6
MI300X | 1307.4 | 2614.9 | 653.7
TPU v6 ?(?:lit)?e | 918 | - | -
TPU v5 ?(?:lit)?e | 197 | - | -
TPU v5p? | 459 | - | -
TPU v4 | 275 | - | -
"""
"""Dense TFLOP/s of devices in `_DTYPES`, by their makers' data sheets; consumers' cards with sums in F32."""
_DTYPES = ("bfloat16", "float8", "tfloat32")
_PARTS = re.compile(r"\b(MIG|Laptop|Max-Q|D|lite)\b", re.IGNORECASE)  # Slower devices of the same name.


def flops_per_token(num_parameters: int, num_layers: int = 0, width: int = 0, seq_len: int = 0) -> int:
    """Return the operations that training a transformer takes for a token: 6 N, and 12 layers x width x seq_len.

    Args:
        num_parameters: N, without position embeddings and an input embedding that is not the output's, too.
        num_layers, width: For attention over all seq_len tokens: layers, and heads x their size.
    """
    return 6 * num_parameters + 12 * num_layers * width * seq_len


def peak_flops(device: str = "", dtype: str = "bfloat16") -> float:
    """Return the dense FLOP/s of a device by its maker's data sheet.

    Args:
        device: Its name, as `torch.cuda.get_device_name` gives it, or "H100 PCIe"; by default that of PyTorch's current
            CUDA device, or of JAX's first device.
        dtype: Of the matrix products: bfloat16 (float16 is as fast), float8 or tfloat32.

    Raises:
        UsageError: If the table has no figure for it.
    """
    name = device or _device_name()
    for pattern, *peaks in (line.split(" | ") for line in _TABLE.splitlines()):
        if match := re.search(rf"\b{pattern}\b", name, re.IGNORECASE):
            peak = dict(zip(_DTYPES, peaks)).get(dtype, "-")
            if peak != "-" and not _PARTS.search(name.replace(match[0], "")):
                return float(peak) * 1e12
            break
    raise UsageError(
        f"peak_flops: expected a device whose FLOP/s in {dtype} are known, got {name!r}. Give the dense FLOP/s of its "
        "data sheet, such as peak_flops=312e12."
    )


def _device_name() -> str:
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")  # Neither is imported for this.
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return "no accelerator of PyTorch or JAX" if jax is None else str(jax.devices()[0].device_kind)
