"""Peak rates of accelerators, for the model FLOPs utilisation. A device that is not listed has none."""

from __future__ import annotations

import re

# Dense TFLOP/s of the data sheets: (part of the device's name, of 16-bit formats, of TF32, of fp32).
# None: the device lacks the format. The first name that fits counts.
_PEAKS: tuple[tuple[str, float, float | None, float], ...] = (
    (r"H100 PCIe", 756.0, 378.0, 51.2),
    (r"H100 NVL", 835.0, 417.5, 60.0),
    (r"\bG?H[12]00\b", 989.4, 494.7, 66.9),
    (r"\bA100\b", 312.0, 156.0, 19.5),
    (r"\bV100-PCIE", 112.0, None, 14.0),
    (r"\bV100\b", 125.0, None, 15.7),
    (r"\bMI300X\b", 1307.4, 653.7, 163.4),
)
_HAS_NO_BF16 = re.compile(r"\bV100\b")


def peak_flops(device_name: str, precision: str, *, tf32: bool) -> float | None:
    """FLOP/s that the device could do in matrix products of `precision` (fp32, bf16, fp16), or None."""
    for pattern, half, of_tf32, full in _PEAKS:
        if re.search(pattern, device_name):
            if precision == "fp32":
                return 1e12 * (of_tf32 if tf32 and of_tf32 is not None else full)
            if precision == "bf16" and _HAS_NO_BF16.search(device_name):
                return None
            return 1e12 * half
    return None
