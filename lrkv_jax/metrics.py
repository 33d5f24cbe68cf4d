"""What a run tells while it runs: metrics.jsonl, TensorBoard events, the progress bar. Nothing else writes them."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboardX import SummaryWriter
from tqdm import tqdm


class NotFinite(ArithmeticError):
    """A loss or gradient norm that is no number; `step` (from 1) says where, `values` holds what was measured."""

    def __init__(self, step: int, values: dict[str, float]):
        super().__init__(f"{values} at step {step}")
        self.step, self.values = step, values


class Metrics:
    """Writer of one run's metrics. Opening it at step n drops what an earlier, longer attempt wrote beyond n.

    The newest `lag` steps stay on the device until later ones are under way, so that the host never stalls it.
    """

    def __init__(self, run_dir: Path, *, step: int, steps: int, tokens_per_step: int, lag: int = 0):
        path = run_dir / "metrics.jsonl"
        drop_rows_after(path, step)
        self._tokens_per_step, self._lag = tokens_per_step, lag
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._file = path.open("a")
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)
        self._bar = tqdm(total=steps, initial=step, desc="train", unit="step", dynamic_ncols=True)
        self._clock = time.perf_counter()
        self._rate = math.nan

    def train(self, step: int, values: dict[str, Any]) -> None:
        """Takes the metrics of one step (counted from 1): scalars or scalar arrays, `loss` among them."""
        self._waiting.append((step, values))
        self.settle(self._lag)

    def settle(self, lag: int = 0) -> None:
        """Fetches and writes all but the newest `lag` steps. Raises NotFinite at the first that is no number."""
        while len(self._waiting) > lag:
            step, values = self._waiting.pop(0)
            values = {name: float(value) for name, value in values.items()}
            if not all(map(math.isfinite, values.values())):
                raise NotFinite(step, values)
            now = time.perf_counter()
            rate = self._tokens_per_step / max(now - self._clock, 1e-9)
            self._clock = now
            self._rate = rate if math.isnan(self._rate) else 0.9 * self._rate + 0.1 * rate
            self._write("train", step, {**values, "tokens_per_s": round(rate, 1)})
            self._bar.set_postfix_str(f"loss {values['loss']:.3f}, {self._rate:,.0f} tokens/s", refresh=False)
            self._bar.update(step - self._bar.n)

    def evaluation(self, step: int, split: str, ce: float, bits_per_byte: float) -> None:
        """A score on a held-out split."""
        self._write("eval", step, {"split": split, "ce": ce, "bits_per_byte": bits_per_byte})
        self._clock = time.perf_counter()

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        row = {"kind": kind, "step": step, "tokens": step * self._tokens_per_step, **values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        prefix = values.get("split", kind)
        for name, value in values.items():
            if name != "split":
                self._board.add_scalar(f"{prefix}/{name}", value, step)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()
        self._board.close()
        self._file.close()


def drop_rows_after(path: Path, step: int) -> None:
    """Keeps the rows of metrics.jsonl up to a step; a row cut short by a kill goes too. The rewrite is atomic."""
    if path.exists():
        scratch = path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= step))
        os.replace(scratch, path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics.jsonl, oldest first; a last row that a kill cut short is left out."""
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last newline was never finished
