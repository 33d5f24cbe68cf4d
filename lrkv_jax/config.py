"""RunConfig: everything that decides a run, composed of the configs that live beside the code they configure.

Also how the command line makes one: a config file's entry, overridden by flags, validated as a whole.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import json
import operator
import re
import runpy
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pydantic
import tyro

from lrkv_jax import distributed, profiling, storage
from lrkv_jax import origin as origins
from lrkv_jax.attention import families
from lrkv_jax.attention.base import AttentionConfig
from lrkv_jax.checkpoint import CheckpointConfig
from lrkv_jax.data import DataConfig
from lrkv_jax.optimizer import OptimizerConfig, make_schedule
from lrkv_jax.settings import Parser, Settings, UserError, describe
from lrkv_jax.sharding import MeshConfig
from lrkv_jax.step import TrainConfig
from lrkv_jax.storage import AnyPath
from lrkv_jax.transformer import ModelConfig

DEFAULT_CONFIG = "configs/tiny.py"

_CONFIGS = tuple(module.Config for module in families().values())
AttentionField = Annotated[functools.reduce(operator.or_, _CONFIGS), pydantic.Field(discriminator="family")]

# What may change when a run is resumed: where it runs and what it keeps, never what it computes. Where the text lies is
# free too, since the corpus's fingerprint says whether it is the same.
FREE_ON_RESUME = {
    "mesh": True,
    "checkpoint": True,
    "data": {"path", "tokenizer", "cache_dir"},
    "attention": {"implementation"},  # the same mathematics by another kernel
}


class RunConfig(Settings):
    """A run. `config.json` in the run directory is this, resolved."""

    family: str = "lrkv"
    """Name of the entry in the config file (lrkv, mha, gqa, ...); a label for tables and figures."""
    model: ModelConfig = ModelConfig()
    """The Transformer around the attention."""
    attention: AttentionField = families()["lrkv"].Config()
    """The attention family's own knobs."""
    data: DataConfig = DataConfig()
    """Corpus, tokenizer, context length."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and schedule."""
    train: TrainConfig = TrainConfig()
    """Length, batch, evaluation."""
    mesh: MeshConfig = MeshConfig()
    """Devices."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved and when."""

    def model_post_init(self, _: Any) -> None:
        """Checks across sections."""
        if self.data.context % self.train.loss_chunks:
            raise ValueError(
                f"train.loss_chunks = {self.train.loss_chunks}: must divide data.context = {self.data.context}"
            )
        self.attention.check_layers(self.model.layers)
        make_schedule(self.optimizer, self.train.steps)  # refuses a warm-up or decay that doesn't fit

    def with_attention(self, attention: AttentionConfig) -> RunConfig:
        """The same run with another attention."""
        return self.model_copy(update={"attention": attention})

    def without_adapters(self) -> RunConfig:
        """That of the model with its adapters merged; nothing is frozen, since their names are gone."""
        model = self.model.model_copy(update={"lora_rank": 0})
        optimizer = self.optimizer.model_copy(update={"freeze": ()})
        return self.model_copy(update={"model": model, "optimizer": optimizer})

    def for_fine_tuning(self, run_dir: AnyPath) -> RunConfig:
        """What a run begins with that begins from this one, in `run_dir`: its model, attention, data and tokenizer.

        Devices, length and optimizer are the new run's own: a few steps of AdamW at a rate that is gentle for any size.
        """
        shape = self.train.model_dump(include={"batch_size", "microbatches", "loss_chunks", "z_loss", "eval_windows"})
        return RunConfig(
            family=self.family,
            model=self.model,
            attention=self.attention.model_copy(update={"implementation": "auto"}),
            data=self.data.model_copy(update={"tokenizer": str(run_dir / "tokenizer.json")}),
            optimizer=OptimizerConfig(name="adamw", peak_lr=3e-4, warmup_steps=10),
            train=TrainConfig(steps=200, eval_every=50, **shape),
            checkpoint=CheckpointConfig(every_steps=50),
        )

    @classmethod
    def load(cls, run_dir: AnyPath) -> RunConfig:
        """The resolved config of a run directory. Raises UserError where there is none, or it is not ours."""
        path = run_dir / "config.json"
        try:
            return cls.parse(path.read_text(), path)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{run_dir} is no run directory: {path} is missing") from None

    @classmethod
    def parse(cls, content: str, source: AnyPath) -> RunConfig:
        """A config written as JSON; `source` is its name in errors. Raises UserError where it is not ours."""
        try:
            return cls.model_validate_json(content)
        except pydantic.ValidationError as error:
            raise UserError(f"{source}: {describe(error)}") from None

    def check_resume(self, saved: RunConfig, run_dir: AnyPath) -> None:
        """Raises UserError naming the fields that differ from the run's own and may not."""
        ours, theirs = (flatten(json.loads(config.model_dump_json(exclude=FREE_ON_RESUME))) for config in (self, saved))
        fields = [key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)]
        if fields:
            listed = ", ".join(f"{key} = {ours.get(key)} (the run has {theirs.get(key)})" for key in sorted(fields))
            raise UserError(
                f"{run_dir} is a run of another config: {listed}. Use another --run-dir, or the same values"
            )


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, keys joined by dots."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        key: value for name, sub in tree.items() for key, value in flatten(sub, f"{prefix}.{name}".strip(".")).items()
    }


class Command(NamedTuple):
    """A parsed command line."""

    config: RunConfig
    run_dir: AnyPath
    dry_run: bool
    profile: tuple[int, int] | None
    """First and last step to trace."""
    compile_cache: str
    """As `profiling.keep_compiled` takes it."""
    init_from: str
    """The run to begin from, as origin.py reads it; empty for none."""
    distill_from: str
    """The run to learn from, likewise."""


def load_configs(reference: str) -> tuple[str, RunConfig]:
    """(name, config) of `FILE` or `FILE:key`; the file's first key is its default."""
    file, _, key = reference.partition(":")
    if not Path(file).is_file():
        raise UserError(f"--config {reference}: no file {file}")
    try:
        configs = runpy.run_path(file).get("configs")
    except pydantic.ValidationError as error:
        raise UserError(f"--config {file}: {describe(error)}") from None
    if not isinstance(configs, dict) or not configs:
        raise UserError(f"--config {file}: defines no `configs: dict[str, RunConfig]`")
    key = key or next(iter(configs))
    if key not in configs:
        raise UserError(f"--config {reference}: {file} has {', '.join(configs)}, not {key!r}")
    return f"{Path(file).stem}-{key}", configs[key].model_copy(update={"family": key})


def parse_command(prog: str, doc: str, args: list[str] | None = None, *, trains: bool = True) -> Command:
    """Reads `--config FILE[:key]`, each field as `--section.field VALUE`; where it `trains`, `--run-dir`, `--dry-run`.

    Raises UserError, one line, for an unknown flag, a wrong type or a refused value.
    """
    args = sys.argv[1:] if args is None else args
    first = Parser(prog=prog, add_help=False, allow_abbrev=False)
    first.add_argument("--config", metavar="FILE[:KEY]", help=f"config file, and its entry; default: {DEFAULT_CONFIG}")
    first.add_argument(
        "--init-from", default="", metavar="RUN_DIR[@STEP]", help="begin with that run's parameters, and its config"
    )
    first.add_argument(
        "--distill-from", default="", metavar="RUN_DIR[@STEP]", help="learn from that run by train.distill_weight"
    )
    if trains:
        first.add_argument(
            "--run-dir", type=storage.path, metavar="DIR", help="or gs://...; default: runs/<file>-<key>"
        )
        first.add_argument("--dry-run", action="store_true", help="print parameters, cache and FLOPs; allocate nothing")
        first.add_argument("--profile", type=profiling.parse_span, metavar="FIRST:LAST", help="trace these steps")
        profiling.add_cache_flag(first)
        distributed.add_flags(first)
    options, rest = first.parse_known_args(args)
    run_dir = getattr(options, "run_dir", None)
    if options.init_from and not options.config:
        name, default = _source_config(options.init_from, run_dir, rest)
    else:
        name, default = load_configs(options.config or DEFAULT_CONFIG)
    config = parse_fields(prog, f"{doc}\n\n{first.format_help()}", default, rest)
    if trains:
        _check_weight(config, options.distill_from)
    run_dir = run_dir or Path("runs") / name
    others = (options.init_from, options.distill_from)
    for role, reference in zip((origins.SOURCE, origins.TEACHER), others, strict=True):
        if reference and not config.data.tokenizer:
            tokenizer = str(origins.parse(reference, role)[0] / "tokenizer.json")
            config = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": tokenizer})})
    if not trains:
        return Command(config, run_dir, False, None, "off", *others)
    return Command(config, run_dir, options.dry_run, options.profile, options.compile_cache, *others)


def _check_weight(config: RunConfig, teacher: str) -> None:
    """Raises UserError for a teacher that has no weight, and for a weight that has no teacher."""
    weight = config.train.distill_weight
    if teacher and not weight:
        raise UserError(
            f"--distill-from {teacher}: train.distill_weight = 0 gives it no say; name its share of the objective, "
            f"such as --train.distill-weight 0.5"
        )
    if weight and not teacher:
        raise UserError(f"train.distill_weight = {weight}: needs a teacher, --distill-from RUN_DIR[@STEP]")


def _source_config(reference: str, run_dir: AnyPath | None, args: list[str]) -> tuple[str, RunConfig]:
    """(name, config) of a run that begins from another and names no config file.

    A run that has begun keeps its source's config, since the source may be gone or changed.
    """
    source, _ = origins.parse(reference)
    name = f"{source.name}-tuned"
    run_dir = run_dir or Path("runs") / name
    known = origins.recorded(run_dir, origins.SOURCE)
    if known is None:
        config = RunConfig.load(source)
    else:  # whether it is this source is for find_origin to say
        config = RunConfig.parse(json.dumps(known.config), run_dir / origins.SOURCE.file)
    config = config.for_fine_tuning(source)
    if any(arg.split("=")[0] == "--data.dataset" for arg in args):  # the old one's files are none of the new
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": "", "repeats": ()})})
    return name, config


def parse_fields(prog: str, doc: str, default: RunConfig, args: list[str]) -> RunConfig:
    """Overrides a config's fields by flags, through tyro; its boxed complaints are folded into one line."""
    known = {"--" + key.replace("_", "-") for key in flatten(default.model_dump())}
    for arg in args:
        flag = arg.split("=")[0].replace("_", "-")
        if flag in ("--family", "--attention.family"):
            raise UserError(f"{flag}: the family is chosen by --config FILE:KEY")
        if flag.startswith("--") and flag not in known | {"--help"} and flag.replace(".no-", ".") not in known:
            near = difflib.get_close_matches(flag, known, n=3, cutoff=0.5)
            raise UserError(f"{flag}: no such flag" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    # The family is chosen by --config FILE:KEY, so tyro gets its config class and not the union of all.
    family = type(default.attention)
    flags = pydantic.create_model(
        "RunConfig", __base__=RunConfig, __doc__=doc, attention=(family, pydantic.Field(description=family.__doc__))
    )
    parse = functools.partial(tyro.cli, flags, prog=prog, description=doc, default=flags(**dict(default)), args=args)
    if "--help" in args or "-h" in args:
        parse()
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(complaint):
            return _anywhere(RunConfig(**dict(parse())))
    except SystemExit:
        raise UserError(fold(complaint.getvalue())) from None


def _anywhere(config: RunConfig) -> RunConfig:
    """The config with absolute paths, since a run's later commands may start elsewhere."""
    places = {name: getattr(config.data, name) for name in ("path", "tokenizer", "cache_dir")}
    places = {name: place for name, place in places.items() if place[:1] not in "~" and "://" not in place}
    places = {name: str(Path(place).resolve()) for name, place in places.items()}
    return config.model_copy(update={"data": config.data.model_copy(update=places)})


def fold(complaint: str) -> str:
    """tyro's box around a message, or around one of pydantic's, as one line that names field and value."""
    text = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯]", " ", complaint)
    text = re.split(r"─{9,}", text.replace("-" * 9, "─" * 9))
    parts = [part for part in text if part.strip("─- \n")]
    body = parts[min(1, len(parts) - 1)]  # what stands before the first rule is a title
    body = re.sub(r"\s+", " ", body.strip("─- \n"))
    pydantic_says = re.search(r"Error parsing (\S+): .*? for \w+ (.*?) \[type=\w+, input_value=(.*?), input_type", body)
    if not pydantic_says:
        return body
    section, message, value = pydantic_says.groups()
    prefix = "" if section == "RunConfig" else f"{section}."
    if message.startswith("Value error, "):
        return prefix + message.removeprefix("Value error, ")
    field, _, message = message.partition(" ")
    return f"{prefix}{field} = {value}: {message[:1].lower()}{message[1:]}"
