"""What accelerators can do at best, by their makers: the rates that MFU and roofline bounds are held against.

TPU rates are those of Google's pages, one a generation (https://cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e,
/tpu7x), read in 2026; GPU rates those of NVIDIA's data sheets, without sparsity. All are per chip. An interconnect's
published rate counts both directions; here it counts one, since that is what a collective's bytes are sent at.
"""

from __future__ import annotations

import dataclasses

GB, GIB = 10**9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published rates of one chip."""

    name: str
    """As topologies are named (v5e), or the GPU's name."""
    kinds: tuple[str, ...]
    """What jax reports as `device_kind`, letter for letter: an H100 NVL has other rates than an H100."""
    hbm_bytes: int
    """Device memory."""
    hbm_bandwidth: float
    """Bytes a second from and to it."""
    flops: float
    """Peak FLOP/s of dense bfloat16 products."""
    ici_bandwidth: float
    """Bytes a second that a chip sends over all its links to other chips (ICI, NVLink)."""
    links: int
    """Links that `ici_bandwidth` is the sum of; a ring along one axis of a torus uses two."""
    devices: int = 1
    """JAX devices a chip."""


CHIPS = (
    # docs/v4: 275 TFLOPs, 32 GiB, 1200 GBps; 3D torus. The interconnect is table 4 of arXiv 2304.01433: 6 x 50 GB/s.
    Chip("v4", ("TPU v4",), 32 * GIB, 1200e9, 275e12, 300e9, 6),
    # docs/v5e: 197 TFLOPs, 16 GB, 819 GBps; 2D torus, 400 GBps in both directions.
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), 16 * GIB, 819e9, 197e12, 200e9, 4),
    # docs/v5p: 459 TFLOPs, 95 GiB, 2765 GBps; 3D torus, 1200 GBps in both directions.
    Chip("v5p", ("TPU v5p", "TPU v5"), 95 * GIB, 2765e9, 459e12, 600e9, 6),
    # docs/v6e: 918 TFLOPs, 32 GB, 1600 GBps; 2D torus, 3200 Gbps one way.
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 32 * GIB, 1600e9, 918e12, 400e9, 4),
    # docs/tpu7x: 2307 TFLOPs, 192 GiB, 7380 GBps; 3D torus, 1200 GBps in both directions; two devices a chip.
    Chip("tpu7x", ("TPU7x",), 192 * GIB, 7380e9, 2307e12, 600e9, 6, devices=2),
    # GPUs of other shapes (NVL, GH200) are left out: JAX names them otherwise, and their rates are others.
    # NVIDIA A100 data sheet (SXM): 312 TFLOPS; 40 GB at 1555 GB/s or 80 GB at 2039 GB/s; NVLink 600 GB/s both ways.
    Chip("A100-80GB", ("NVIDIA A100-SXM4-80GB",), 80 * GB, 2039e9, 312e12, 300e9, 12),
    Chip("A100-40GB", ("NVIDIA A100-SXM4-40GB",), 40 * GB, 1555e9, 312e12, 300e9, 12),
    # NVIDIA H100 data sheet (PCIe): 756 TFLOPS, 80 GB at 2000 GB/s, NVLink bridge 600 GB/s both ways.
    Chip("H100-PCIe", ("NVIDIA H100 PCIe",), 80 * GB, 2000e9, 756e12, 300e9, 12),
    # NVIDIA H100 data sheet (SXM): 989 TFLOPS, 80 GB at 3.35 TB/s, NVLink 900 GB/s both ways.
    Chip("H100", ("NVIDIA H100 80GB HBM3",), 80 * GB, 3350e9, 989e12, 450e9, 18),
    # NVIDIA H200 data sheet (SXM): 989 TFLOPS, 141 GB at 4.8 TB/s, NVLink 900 GB/s both ways.
    Chip("H200", ("NVIDIA H200",), 141 * GB, 4800e9, 989e12, 450e9, 18),
    # NVIDIA HGX B200 data sheet, an eighth of it: 2250 TFLOPS, 180 GB at 8 TB/s, NVLink 1.8 TB/s both ways.
    Chip("B200", ("NVIDIA B200",), 180 * GB, 8000e9, 2250e12, 900e9, 18),
)


def of_kind(device_kind: str) -> Chip | None:
    """The chip behind jax's `device_kind`; None for one not in the table."""
    return next((chip for chip in CHIPS if device_kind in chip.kinds), None)


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of one JAX device; None where the device is not in the table (a CPU, a newer chip)."""
    chip = of_kind(device_kind)
    return None if chip is None else chip.flops / chip.devices
