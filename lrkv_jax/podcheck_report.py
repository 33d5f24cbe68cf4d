"""What podcheck prints: its reports as text."""

from __future__ import annotations

from typing import Any

from lrkv_jax.timing import aligned

GIB, MIB = 2**30, 2**20
HEADER = ("mesh", "remat", "params", "optim", "peak GiB", "of HBM", "compute", "HBM", "ICI ms", "bound", "MFU <=")
FOOTNOTE = """\
peak: arguments, temporaries and code as XLA plans them. compute: FLOPs of the compiled program's products, with what is
recomputed or done on several devices, over peak (those of attention kernels by formula). HBM: bytes that its operations
read and write, over bandwidth. ICI: bytes that a device sends in ring collectives, with padding, over all its links; a
ring along one axis of the torus has two of them. bound: the largest, as if the three overlapped wholly. Nothing here
was run."""
DECODE_HEADER = ("mesh", "weights", "cache", "peak GiB", "of HBM", "once", "HBM", "ICI ms", "bound", "tokens/s <=")
DECODE_FOOTNOTE = """\
weights and cache: GiB on a device, the cache as the implementation pads it. peak: with temporaries and code, as XLA
plans them. once: ms to read weights and cache once. HBM: ms for the bytes that the compiled program's operations read
and write, each kernel its operands once. ICI: as in training. Nothing here was run."""


def train_table(report: dict[str, Any]) -> str:
    """The report on training as text: a line a plan, then the best in full."""
    rows = report["plans"]
    lines = [
        f"{report['config']}: {report['parameters']:,} parameters, {report['tokens_per_step']:,} tokens and "
        f"{report['flops_per_step']:.3g} FLOPs a step",
        machine(report),
        f"{report['considered']} plans considered, {len(rows)} tried; GiB and ms are a device's",
        "",
    ]
    lines += aligned([HEADER, *(line(row) for row in rows)])
    for row in rows:
        if not row["fits"]:
            lines.append(f"{mesh_text(row)}, remat {row['remat']}: {verdict(row)}")
    if report["remedies"]:
        lines += ["", "What would fit, by estimate: " + "; or ".join(report["remedies"])]
    if rows[0]["fits"]:
        lines += ["", *details(rows[0]), "", rows[0]["command"]]
    return "\n".join([*lines, "", FOOTNOTE, *slices_note(report)])


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    start = (
        mesh_text(row),
        row["remat"],
        f"{row['parameter_bytes'] / GIB:.2f}",
        f"{row['optimizer_bytes'] / GIB:.2f}",
        *peak(row),
    )
    if "seconds" not in row:
        return (*start, "-", "-", "-", "does not fit" if row["peak_bytes"] else "refused", "-")
    times = tuple(f"{1e3 * row['seconds'][name]:.1f}" for name in ("compute", "HBM", "ICI"))
    return (*start, *times, f"{1e3 * row['step_seconds']:.1f}, {row['bound_by']}", f"{100 * row['mfu_bound']:.0f} %")


def slices_note(report: dict[str, Any]) -> list[str]:
    """What the bound leaves out where there are several slices."""
    if report["slices"] == 1:
        return []
    return ["Between slices bytes cross the data-center network, which is slower; the bound counts them as ICI."]


def mesh_text(row: dict[str, Any]) -> str:
    """`fsdp 16 x context 4`; axes of one device are left out."""
    return " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size != 1) or "one device"


def verdict(row: dict[str, Any]) -> str:
    """Why a plan is out, and by how much."""
    if row["peak_bytes"] is None:
        return row["why"]
    room = row.get("available_bytes", row["hbm_bytes"])
    over = row["peak_bytes"] - room
    return (
        f"does not fit: {row.get('why', 'the compiled program takes')} {row['peak_bytes'] / GIB:.2f} GiB of "
        f"{room / GIB:.2f} GiB, {over / GIB:.2f} GiB too much"
    )


def details(row: dict[str, Any]) -> list[str]:
    """Memory and collectives of the best plan."""
    memory = row["memory"]
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.items())
    rows = [(mesh_text(row), "a step", "payload MiB", "sent", "with padding")]
    for kind, found in row["collectives"].items():
        rows.append(
            (
                kind,
                f"{found['count']:,}",
                f"{found['payload_bytes'] / MIB:,.1f}",
                f"{found['sent_bytes'] / MIB:,.1f}",
                f"{found['carried_bytes'] / MIB:,.1f}",
            )
        )
    notes = [f"{row['kernels']:,} kernel calls"] if row["kernels"] else []
    notes += [f"{row['unknown_loops']} loops of unknown length, counted once"] if row.get("unknown_loops") else []
    return [f"memory, GiB: {parts}", *aligned(rows), *notes]


def machine(report: dict[str, Any]) -> str:
    """The topology and its chips' published rates."""
    chip = report["chip"]
    return (
        f"{report['topology']}: {report['devices']} x {report['device_kind']}; a chip has "
        f"{chip['hbm_bytes'] / GIB:.0f} GiB, {chip['hbm_bandwidth'] / 1e9:,.0f} GB/s, "
        f"{chip['flops'] / 1e12:,.0f} TFLOP/s, ICI {chip['ici_bandwidth'] / 1e9:,.0f} GB/s each way"
    )


def decode_table(report: dict[str, Any]) -> str:
    """The report on decoding as text."""
    rows = report["plans"]
    lines = [
        f"{report['config']}: decoding {report['batch']} rows at {report['length']:,} slots by "
        f"{report['implementation']}; the cache is {report['cache_bytes_logical'] / GIB:.2f} GiB in all, unpadded",
        machine(report),
        "",
    ]
    cells = []
    for row in rows:
        cell = [mesh_text(row), *(f"{row[name] / GIB:.2f}" for name in ("weight_bytes", "cache_bytes"))]
        cell += peak(row)
        if "seconds" in row:
            cell.append(f"{1e3 * row['least_seconds']:.2f}")
            cell += [f"{1e3 * row['seconds'][name]:.2f}" for name in ("HBM", "ICI")]
            cell += [f"{1e3 * row['step_seconds']:.2f}, {row['bound_by']}", f"{row['tokens_per_second']:,.0f}"]
        else:
            cell += ["-", "-", "-", "does not fit" if row["peak_bytes"] else "refused", "-"]
        cells.append(tuple(cell))
    lines += aligned([DECODE_HEADER, *cells])
    lines += [f"{mesh_text(row)}: {verdict(row)}" for row in rows if not row["fits"]]
    if rows[0]["fits"]:
        lines += ["", *details(rows[0])]
    return "\n".join([*lines, "", DECODE_FOOTNOTE])


def peak(row: dict[str, Any]) -> list[str]:
    """Peak memory, and its share of what there is."""
    if row["peak_bytes"] is None:
        return ["-", "-"]
    return [f"{row['peak_bytes'] / GIB:.2f}", f"{100 * row['peak_bytes'] / row['hbm_bytes']:.0f} %"]
