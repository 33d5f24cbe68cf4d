"""Scores a run on tasks of EleutherAI's lm-evaluation-harness (`pip install lm-eval`), from its directory alone.

    python -m lrkv_jax.lm_eval RUN_DIR --tasks arc_easy,arc_challenge
    python -m lrkv_jax.lm_eval RUN_DIR --tasks gsm8k --num-fewshot 5 --limit 100 --out gsm8k.json
    python -m lrkv_jax.lm_eval RUN_DIR --tasks my_task --include-path my_tasks

Prints the harness's table. What is longer than the run's data.context loses its beginning; how often is told below the
table. A document scored whole ends with its end token, which counts, as in eval.py.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh
from jaxtyping import PyTree

from lrkv_jax import sharding, trained
from lrkv_jax.config import RunConfig
from lrkv_jax.data import Tokenizer
from lrkv_jax.decode import Decoder
from lrkv_jax.likelihood import Scorer, continued, document
from lrkv_jax.rundir import write_json
from lrkv_jax.settings import Parser, UserError, command
from lrkv_jax.sharding import MeshConfig
from lrkv_jax.step import Program
from lrkv_jax.storage import AnyPath, path
from lrkv_jax.until import Writer, wanted

try:
    from lm_eval.api.model import LM

    MISSING = None
except ModuleNotFoundError as error:  # told when the command runs; importing this module is no mistake
    LM, MISSING = object, error.name

RESAMPLES = 1000  # of the harness's bootstrap errors; its default of 100,000 is meant for many processes
KEPT = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better", "config", "lm_eval_version")


class Model(NamedTuple):
    """A trained model, without adapters, and what reading text with it takes."""

    config: RunConfig
    tokenizer: Tokenizer
    program: Program
    params: PyTree
    step: int
    mesh: Mesh


class HarnessModel(LM):
    """A run as the harness asks it: likelihoods by whole passes, continuations from the compressed cache."""

    def __init__(self, model: Model, batch: int):
        """`batch`: rows at a time, rounded up to what the devices divide."""
        super().__init__()
        self.model = model
        context, vocab = model.config.data.context, model.tokenizer.vocab_size
        self.scorer = Scorer(model.program, model.params, model.mesh, batch=batch, context=context, vocab=vocab)
        self._writer: Writer | None = None

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log p, whether greedy decoding would draw it) of each continuation after its context."""
        texts = [continued(self.model.tokenizer, *request.args) for request in requests]
        return [(-found.nats, found.greedy) for found in self.scorer.score(texts, None if disable_tqdm else "score")]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of each text as a document, begin to end token, in the windows of eval.py."""
        texts = [document(self.model.tokenizer, request.args[0]) for request in requests]
        return [-found.nats for found in self.scorer.score(texts, None if disable_tqdm else "score")]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop string."""
        contexts, how = [request.args[0] for request in requests], [wanted(request.args[1]) for request in requests]
        return self.writer.write(contexts, how, None if disable_tqdm else "write")

    @property
    def writer(self) -> Writer:
        """Made when the first task asks for text: its weights and cache take memory."""
        if self._writer is None:
            _, tokenizer, program, params, _, mesh = self.model
            sizes = {"batch": self.scorer.batch, "slots": self.scorer.context, "vocab": tokenizer.vocab_size}
            self._writer = Writer(Decoder(program, params, mesh, **sizes), tokenizer)
        return self._writer

    def notes(self) -> dict[str, int]:
        """How many requests did not fit into the context, by what became of them."""
        found = {"contexts cut from the left": self.scorer.shortened}
        if self._writer is not None:
            found["prompts cut from the left"] = self._writer.shortened
            found["continuations limited to half the context"] = self._writer.limited
        return found

    def get_model_info(self) -> dict[str, Any]:
        """What the harness keeps of the model beside its results."""
        config = self.model.config
        return {
            "family": config.family,
            "step": self.model.step,
            "context": config.data.context,
            "rows": self.scorer.batch,
            **self.notes(),
        }


def load(run_dir: AnyPath, step: str) -> Model:
    """A run's model on all devices here, each with copies, adapters merged. Raises UserError as a restore does."""
    config = RunConfig.load(run_dir)
    mesh = sharding.make_mesh(MeshConfig())
    tokenizer = Tokenizer.load(run_dir / "tokenizer.json", config.data.begin_token, config.data.end_token)
    config, program, params, number = trained.load(run_dir, config, tokenizer, mesh, step)
    return Model(config, tokenizer, program, params, number, mesh)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options. Raises UserError for what fits no run."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("python -m lrkv_jax.lm_eval", description=__doc__, formatter_class=raw, allow_abbrev=False)
    add = parser.add_argument
    add("run_dir", type=path)
    add("--tasks", required=True, metavar="NAME,...", help="tasks, groups or tags of the harness, * as in file names")
    add("--include-path", type=Path, metavar="DIR", help="a folder of your own task files, beside the harness's")
    add("--num-fewshot", type=int, metavar="N", help="solved examples before each question (the task's)")
    add("--limit", type=int, metavar="N", help="questions a task (all)")
    add("--batch-size", type=int, default=16, metavar="B", help="rows at a time, over all devices (16)")
    add("--step", default="newest", help="checkpoint: newest, best, or a step's number")
    add("--out", type=Path, metavar="FILE.json", help="a file for the results")
    options = parser.parse_args(arguments)
    for name, least in (("num_fewshot", 0), ("limit", 1), ("batch_size", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    if options.include_path is not None and not options.include_path.is_dir():
        raise UserError(f"--include-path {options.include_path}: is no folder")
    if options.out is not None and not options.out.absolute().parent.is_dir():  # said before the work is done
        raise UserError(f"--out {options.out}: there is no folder {options.out.absolute().parent}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Command line to exit status."""
    options = parse(arguments)
    if MISSING is not None:
        raise UserError(f"the lm-evaluation-harness is not installed (no module {MISSING}): pip install lm-eval")
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    manager = TaskManager(include_path=options.include_path)
    names = [name for pattern in options.tasks.split(",") for name in found_tasks(manager, pattern.strip())]
    model = HarnessModel(load(options.run_dir, options.step), options.batch_size)
    result = evaluate(model, manager, names, options)
    for column in ("results", "groups"):
        if result.get(column):
            print(make_table(result, column))
    for what, count in model.notes().items():
        if count:
            print(f"{what}: {count:,} (data.context = {model.scorer.context})")
    if options.out is not None:
        write_json(
            options.out, {"run_dir": str(options.run_dir), **{key: result[key] for key in KEPT if key in result}}
        )
    return 0


def found_tasks(manager: Any, pattern: str) -> list[str]:
    """Names that the harness knows for a pattern. Raises UserError where there are none."""
    names = manager.match_tasks([pattern])
    if not names:
        raise UserError(f"--tasks {pattern}: no such task; `lm-eval ls tasks` lists the harness's, --include-path adds")
    return names


def evaluate(model: HarnessModel, manager: Any, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """The harness's results. Raises UserError where a task's data is not here and can't be fetched."""
    import lm_eval

    # Its bootstrap would fork this process, whose threads (JAX's) a fork does not survive.
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        return lm_eval.simple_evaluate(
            model,
            tasks=names,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            task_manager=manager,
            bootstrap_iters=RESAMPLES,
            log_samples=False,
        )
    except (ConnectionError, FileNotFoundError) as error:  # what `datasets` raises without a network
        lines = str(error).splitlines() or [type(error).__name__]
        raise UserError(f"--tasks {options.tasks}: a task's data can't be had: {lines[0]}") from error


if __name__ == "__main__":
    command(main)()
