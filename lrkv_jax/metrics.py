"""What a run tells while it runs: metrics.jsonl, TensorBoard events, the progress bar. Nothing else writes them."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from tensorboardX import SummaryWriter
from tqdm import tqdm

from lrkv_jax.storage import AnyPath, copy_tree, in_bucket, scratch_for, write_atomically

# What a train row says of the machine and not of the run: two attempts at the same step differ in it.
# A second spent on the whole is split into waiting for data, the step itself, saving and evaluating (since the row
# before). MFU is model FLOPs over the devices' peak; null where the peak is unknown.
TIMINGS = ("tokens_per_s", "tokens_per_s_per_device", "mfu", "data_s", "step_s", "checkpoint_s", "eval_s")
SPENT = ("data", "checkpoint", "eval")


class NotFinite(ArithmeticError):
    """A loss or gradient norm that is no number; `step` (from 1) says where, `values` holds what was measured."""

    def __init__(self, step: int, values: dict[str, float]):
        super().__init__(f"{values} at step {step}")
        self.step, self.values = step, values


class Metrics:
    """Writer of one run's metrics. Opening it at step n drops what an earlier, longer attempt wrote beyond n; all of
    it unless the run is `resumed`.

    The newest `lag` steps stay on the device until later ones are under way, so that the host never stalls it.
    """

    def __init__(
        self,
        run_dir: AnyPath,
        *,
        step: int,
        steps: int,
        tokens_per_step: int,
        resumed: bool = True,
        lag: int = 0,
        devices: int = 1,
        flops_per_token: float = math.nan,
        peak_flops: float | None = None,
        writes: bool = True,
    ):
        """`peak_flops` is that of one device, per second; without `writes` values are fetched and checked only."""
        self._tokens_per_step, self._lag = tokens_per_step, lag
        self._devices, self._flops = devices, flops_per_token
        self._peak = None if peak_flops is None else devices * peak_flops
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._files = _Files(run_dir, step if resumed else -1) if writes else None
        bar = {"total": steps, "initial": step, "desc": "train", "unit": "step", "dynamic_ncols": True}
        self._bar = tqdm(**bar, disable=not writes)
        self._clock = time.perf_counter()
        self._spent = dict.fromkeys(SPENT, 0.0)
        self._rate = math.nan

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Counts the time inside as spent on `data`, `checkpoint` or `eval`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spent[what] += time.perf_counter() - start

    def train(self, step: int, values: dict[str, Any]) -> None:
        """Takes the metrics of one step (counted from 1): scalars or scalar arrays, `loss` among them."""
        self._waiting.append((step, values))
        self._settle(self._lag)

    def settle(self) -> None:
        """Fetches and writes all steps, to where they outlive the machine. Raises NotFinite at the first that is no
        number."""
        self._settle(0)
        if self._files:
            self._files.publish()

    def _settle(self, lag: int) -> None:
        while len(self._waiting) > lag:
            step, values = self._waiting.pop(0)
            values = {name: float(value) for name, value in values.items()}
            if not all(map(math.isfinite, values.values())):
                raise NotFinite(step, values)
            timings = self._timings()
            self._write("train", step, values | timings)
            rate = timings["tokens_per_s"]
            self._rate = rate if math.isnan(self._rate) else 0.9 * self._rate + 0.1 * rate
            mfu = "" if self._peak is None else f", MFU {self._flops * self._rate / self._peak:.1%}"
            self._bar.set_postfix_str(f"loss {values['loss']:.3f}, {self._rate:,.0f} tokens/s{mfu}", refresh=False)
            self._bar.update(step - self._bar.n)

    def _timings(self) -> dict[str, float | None]:
        """Rates and seconds since the row before; evaluations count in no rate."""
        now = time.perf_counter()
        elapsed, spent = now - self._clock, self._spent
        self._clock, self._spent = now, dict.fromkeys(SPENT, 0.0)
        rate = self._tokens_per_step / max(elapsed - spent["eval"], 1e-9)
        values = (
            round(rate, 1),
            round(rate / self._devices, 1),
            None if self._peak is None else round(self._flops * rate / self._peak, 4),
            spent["data"],
            max(elapsed - sum(spent.values()), 0.0),
            spent["checkpoint"],
            spent["eval"],
        )
        rounded = (value if value is None else round(value, 6) for value in values)
        return dict(zip(TIMINGS, rounded, strict=True))

    def evaluation(self, step: int, split: str, ce: float, bits_per_byte: float) -> None:
        """A score on a held-out split."""
        self._write("eval", step, {"split": split, "ce": ce, "bits_per_byte": bits_per_byte})

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if self._files:
            tokens = step * self._tokens_per_step
            self._files.write({"kind": kind, "step": step, "tokens": tokens, **values})

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()
        if self._files:
            self._files.close()


class _Files:
    """metrics.jsonl and tensorboard/ of a run directory; of one in a bucket, where nothing can be appended to, copies
    on this machine's disk that `publish` writes there whole."""

    def __init__(self, run_dir: AnyPath, step: int):
        drop_rows_after(run_dir / "metrics.jsonl", step)
        self._run_dir = run_dir
        self._open = contextlib.ExitStack()
        self._folder = self._open.enter_context(scratch_for(run_dir))
        path = self._folder / "metrics.jsonl"
        if in_bucket(run_dir) and (run_dir / path.name).exists():
            path.write_bytes((run_dir / path.name).read_bytes())
        self._rows = self._open.enter_context(path.open("a"))
        self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        self._rows.write(json.dumps(row) + "\n")
        self._rows.flush()
        prefix = row.get("split", row["kind"])
        for name, value in row.items():
            if name not in ("kind", "split", "step", "tokens") and value is not None:
                self._board.add_scalar(f"{prefix}/{name}", value, row["step"])

    def publish(self) -> None:
        if in_bucket(self._run_dir):
            self._board.flush()
            copy_tree(self._folder, self._run_dir)

    def close(self) -> None:
        self._board.close()
        self.publish()
        self._open.close()


def drop_rows_after(path: AnyPath, step: int) -> None:
    """Keeps the rows of metrics.jsonl up to a step; a row cut short by a kill goes too. The rewrite is atomic."""
    if path.exists():
        kept = "".join(json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= step)
        write_atomically(path, kept.encode())


def read_rows(path: AnyPath) -> list[dict[str, Any]]:
    """All rows of a metrics.jsonl, oldest first; a last row that a kill cut short is left out."""
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last newline was never finished
