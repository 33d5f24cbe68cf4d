"""Runs a study: each of its runs by train.py, what is finished skipped, what was interrupted resumed.

    python -m lrkv_jax.sweep configs/study.py [--out DIR] [--results DIR] [--jobs N] [--dry-run]

Run `name` with seed s is the run directory OUT/name-s<s>, its output OUT/logs/name-s<s>.log, what is kept of it
RESULTS/name-s<s>.json; with that, a finished run whose directory is gone, or on another machine, is done. A run that
fails is told and doesn't stop the rest; exit status 1 then. SIGTERM and Ctrl-C reach the runs, which save; the same
command goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lrkv_jax import accounting, records, rundir
from lrkv_jax.config import RunConfig
from lrkv_jax.intervals import smallest_difference
from lrkv_jax.settings import Parser, UserError, command
from lrkv_jax.study import Study, load_study

TRAIN = Path(__file__).parent.parent / "train.py"
TENSOR_WAYS = (1, 2, 3, 6)  # of figure 3
POLL_SECONDS = 1.0


class Job(NamedTuple):
    """One run of a study with one seed."""

    name: str
    seed: int
    run_dir: Path
    steps: int
    """Of the whole run."""
    summary: Path
    """What is kept of it."""

    @property
    def title(self) -> str:
        """As files and tables name it."""
        return self.run_dir.name

    def result(self) -> dict | None:
        """eval.json of the last step (eval.py may have written one of an earlier), as kept where the run is gone."""
        path = self.run_dir / "eval.json"
        if self.run_dir.exists():
            found = json.loads(path.read_text()) if path.exists() else None
        else:
            found = self.kept().get("eval")
        return found if found and found["step"] == self.steps else None

    def kept(self) -> dict:
        """The summary; empty while there is none. Raises UserError where it is broken."""
        try:
            return json.loads(self.summary.read_text()) if self.summary.exists() else {}
        except ValueError as error:
            raise UserError(f"{self.summary}: not JSON ({error}); without it the run is made again") from None

    def step(self) -> int:
        """Steps done so far, by its metrics."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        with contextlib.suppress(IndexError, json.JSONDecodeError):  # a row that is just being written
            return json.loads(lines[-1])["step"]
        return 0


class Sweep:
    """The state of a sweep: jobs that wait, run, are done or have failed."""

    def __init__(self, file: str, study: Study, out: Path, results: Path, jobs: int):
        self._file, self._study = file, study
        self._logs = out / "logs"
        self._free = [cores(slot, jobs) for slot in range(jobs)]
        self._running: dict[Job, tuple[subprocess.Popen, set[int]]] = {}
        self.failed: dict[Job, str] = {}
        every = [
            Job(name, seed, out / f"{name}-s{seed}", study.runs[name].train.steps, results / f"{name}-s{seed}.json")
            for name, seed in study.order()
        ]
        for job in every:
            check_same(study.runs[job.name], job)
        check_corpora(study, every)
        self.done = [job for job in every if job.result()]
        self._waiting = [job for job in every if job not in self.done]
        self.stopped = 0
        self._started, self._steps_at_start = time.monotonic(), self._steps_left()

    def run(self) -> None:
        """Runs what waits, until nothing is left or a signal says to stop."""
        with self._signals():
            for job in self.done:
                if not self.stopped:
                    self._keep(job)
            try:
                while (self._waiting and not self.stopped) or self._running:
                    while self._waiting and self._free and not self.stopped:
                        self._start(self._waiting.pop(0))
                    self._collect()
                    if sys.stdout.isatty():
                        print(f"\r{self.status()}\x1b[K", end="", flush=True)
                    time.sleep(POLL_SECONDS)
            finally:
                for process, _ in self._running.values():  # only where this loop itself has failed
                    process.terminate()

    def _start(self, job: Job) -> None:
        share = self._free.pop()
        train = [sys.executable, str(TRAIN), "--config", f"{self._file}:{job.name}"]
        train += ["--train.seed", str(job.seed), "--run-dir", str(job.run_dir)]
        with (self._logs / f"{job.title}.log").open("wb") as log:
            process = subprocess.Popen(train, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self._running[job] = process, share
        if share:
            os.sched_setaffinity(process.pid, share)
        if self.stopped:  # by a signal that came before this run was known
            process.terminate()
        self._tell(f"{job.title}: started")

    def _collect(self) -> None:
        for job, (process, share) in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[job]
            self._free.append(share)
            result = job.result()
            if result:
                self.done.append(job)
                self._keep(job)
                self._tell(f"{job.title}: test CE {result['ce']:.4f}")
            elif self.stopped and process.returncode == 128 + signal.SIGTERM:
                self._waiting.insert(0, job)
                self._tell(f"{job.title}: stopped at step {job.step()}, saved")
            elif self.stopped and process.returncode == -signal.SIGTERM:
                self._waiting.insert(0, job)
                self._tell(f"{job.title}: cut at step {job.step()}; its last checkpoint stands")
            else:
                self.failed[job] = ending(process.returncode)
                self._steps_at_start -= job.steps - job.step()
                self._tell(f"{job.title}: {self.failed[job]}: {self._last_line(job)}")

    def _keep(self, job: Job) -> None:
        """Leaves a finished run's summary among the results."""
        log, kept = self._logs / f"{job.title}.diversity.log", job.kept()
        if not job.run_dir.exists() or (kept.get("eval") == job.result() and "diversity" in kept):
            return
        diversity = [sys.executable, "-m", "lrkv_jax.diversity", str(job.run_dir)]
        with log.open("wb") as output:
            done = subprocess.run(
                diversity, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, check=False
            )
        if done.returncode:
            self._tell(f"{job.title}: no diversity, {ending(done.returncode)}; its output: {log}")
        label = self._study.labels.get(job.name, job.name)
        summary = records.summarise(job.run_dir, job.name, job.seed, label)
        corpus = json.loads((job.run_dir / "corpus.json").read_text())["fingerprint"]
        records.write_summary(job.summary, summary | {"shards": shards(self._study.runs[job.name]), "corpus": corpus})

    def _last_line(self, job: Job) -> str:
        lines = (self._logs / f"{job.title}.log").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """While entered, a signal goes to every run, and no new one starts."""

        def note(number: int, _: object) -> None:
            if not self.stopped:  # a second one would make the runs end unsaved
                for process, _ in self._running.values():
                    process.terminate()
            self.stopped = number

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _tell(self, event: str) -> None:
        print(f"\r{event}\x1b[K\n{self.status()}" if sys.stdout.isatty() else f"{event}\n{self.status()}", flush=True)

    def _steps_left(self) -> int:
        unfinished = [*self._waiting, *self._running]
        return sum(job.steps - job.step() for job in unfinished)

    def status(self) -> str:
        """One line: runs done, running and how far, left; time spent and, by the steps done in it, time to go."""
        running = ", ".join(f"{job.title} {100 * job.step() / job.steps:.0f} %" for job in self._running)
        counts = {"done": len(self.done), "running": len(self._running), "left": len(self._waiting)}
        if self.failed:
            counts["failed"] = len(self.failed)
        listed = ", ".join(f"{count} {name}" for name, count in counts.items())
        minutes, left = (time.monotonic() - self._started) / 60, self._steps_left()
        to_go = f"{minutes * left / (self._steps_at_start - left):.0f}" if left < self._steps_at_start else "?"
        return f"  {listed}; {minutes:.0f} min, {to_go} to go{f'; {running}' if running else ''}"


def ending(status: int) -> str:
    """How a process ended, in words."""
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def cores(slot: int, jobs: int) -> set[int]:
    """The cores of one of several jobs side by side, which would slow each other down on shared ones; empty = all."""
    if jobs == 1 or not hasattr(os, "sched_getaffinity"):
        return set()
    every = sorted(os.sched_getaffinity(0))
    return set(every[slot::jobs]) if jobs <= len(every) else set()


def check_same(config: RunConfig, job: Job) -> None:
    """Raises UserError where a run, or what is kept of it, is of another config than the study's, before any is run."""
    train = config.train.model_copy(update={"seed": job.seed})
    ours = config.model_copy(update={"train": train, "family": job.name})
    if (job.run_dir / "config.json").exists():
        ours.check_resume(RunConfig.load(job.run_dir), job.run_dir)
    elif kept := job.kept():
        ours.check_resume(RunConfig.parse(json.dumps(kept.get("config")), job.summary), job.summary)


def check_corpora(study: Study, jobs: list[Job]) -> None:
    """Raises UserError where runs of one data config read different texts (python_stdlib is each Python's own)."""
    first: dict[str, tuple[Job, str]] = {}
    for job in jobs:
        path = job.run_dir / "corpus.json"
        fingerprint = json.loads(path.read_text())["fingerprint"] if path.exists() else job.kept().get("corpus")
        if fingerprint:
            other, theirs = first.setdefault(study.runs[job.name].data.model_dump_json(), (job, fingerprint))
            if fingerprint != theirs:
                raise UserError(f"{job.run_dir} is of another corpus than {other.run_dir}; their numbers don't compare")


def shards(config: RunConfig) -> dict[str, int]:
    """Cache bytes per token on each device, by the ways of tensor parallelism that divide the query heads."""
    ways = [ways for ways in TENSOR_WAYS if config.attention.heads % ways == 0]
    return {str(tensor): accounting.cache_bytes(config, tensor).per_device for tensor in ways}


def power(study: Study, done: list[Job]) -> str:
    """What differences this study's seeds can show, from the spread measured so far or the one expected."""
    counts = [
        len({seed for stage in study.stages if name in stage.runs for seed in stage.seeds}) for name in study.runs
    ]
    seeds = max(counts)
    if seeds < 2:
        return "one seed a run: differences between methods can't be told from those between seeds"
    scores: dict[str, list[float]] = {}
    for job in done:
        scores.setdefault(job.name, []).append(job.result()["ce"])
    spreads = [statistics.variance(found) for found in scores.values() if len(found) > 1]
    sd = statistics.mean(spreads) ** 0.5 if spreads else study.seed_sd
    source = f"measured, {len(spreads)} groups" if spreads else "expected; none measured yet"
    return (
        f"{seeds} seeds a side can show a difference of {smallest_difference(sd, seeds):.3f} nats/token "
        f"(standard deviation over seeds {sd:.4f}, {source}; 95 %, power 80 %)"
    )


def main() -> int:
    """Command line to exit status: 0 done, 1 where a run has failed, 128 + signal when stopped."""
    parser = Parser(prog="lrkv_jax.sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="a study, like configs/study.py")
    parser.add_argument("--out", type=Path, help="run directories; default: runs/<file>")
    parser.add_argument("--results", type=Path, help="summaries; default: results/<file>, with --out OUT/results")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each on its share of the cores")
    parser.add_argument("--dry-run", action="store_true", help="print the runs and what they can show; run nothing")
    options = parser.parse_args()
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: must be at least 1")
    study, stem = load_study(options.file), Path(options.file).stem
    out = options.out or Path("runs") / stem
    # A trial elsewhere must not replace what is kept.
    results = options.results or (out / "results" if options.out else Path("results") / stem)
    sweep = Sweep(options.file, study, out, results, options.jobs)
    print(sweep.status().strip())
    print(power(study, sweep.done), flush=True)
    if options.dry_run:
        print("\n".join(f"{name}-s{seed}" for name, seed in study.order()))
        return 0
    for folder in (out / "logs", results):
        folder.mkdir(parents=True, exist_ok=True)
    rundir.lock(out, "--out")
    sweep.run()
    for job, how in sweep.failed.items():
        print(f"failed: {job.title}, {how}; its output: {out / 'logs' / job.title}.log", file=sys.stderr)
    if sweep.stopped:
        return 128 + sweep.stopped
    return 1 if sweep.failed else 0


if __name__ == "__main__":
    command(main)()
