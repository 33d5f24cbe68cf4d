"""A study: named runs, the order in which they are worth having, and which of them may be compared.

A study file (configs/study.py) defines `study = Study(...)` and `configs = study.runs`, so that each run is also one of
`python train.py --config FILE:name`. Runs that are compared differ in the fields that their `Comparison` names, and in
nothing else; what is said to be matched (parameters, cache bytes, training FLOPs) is measured.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import pydantic

from lrkv_jax.accounting import accounts
from lrkv_jax.config import RunConfig, flatten
from lrkv_jax.settings import UserError, describe

TOLERANCE = 1e-3  # of a matched quantity, as a share of the reference's
# Where two families differ by being what they are; anything else of the attention is a confound, or is named.
FAMILY = tuple(f"attention.{name}" for name in ("family", "kv_heads", "rank", "ranks", "latent", "rope_mode"))
# The knob that sets each family's cache, if it isn't K, the number of key/value heads.
CACHE_KNOBS = {"lrkv": "rank", "mla": "latent"}


class Stage(NamedTuple):
    """Runs that are worth having together, before those of later stages."""

    title: str
    """What the stage is for."""
    runs: tuple[str, ...]
    """Names of runs."""
    seeds: tuple[int, ...] = (0,)
    """Values of train.seed."""


class Comparison(NamedTuple):
    """Runs whose results are put beside each other."""

    title: str
    """What is compared."""
    runs: tuple[str, ...]
    """Names; what is matched is matched to the first."""
    differ: tuple[str, ...] = FAMILY
    """Fields, or sections, in which the runs may differ."""
    matched: Literal["parameters", "cache", "flops"] | None = None
    """What must be the same within a thousandth; None = the paper's way, only the attention is swapped."""
    tolerance: float = TOLERANCE
    """Of what is matched; cache bytes come in steps, so that a study may have to allow more."""


class Study(NamedTuple):
    """Everything of a study but where it runs."""

    runs: dict[str, RunConfig]
    """By name."""
    stages: tuple[Stage, ...]
    """In the order of running."""
    comparisons: tuple[Comparison, ...]
    """Every run must be in one."""
    labels: Mapping[str, str] = MappingProxyType({})
    """How figures and tables write a run; its name where none is given."""
    seed_sd: float = 0.01
    """Standard deviation over seeds of the test CE that is expected before any is measured, nats/token."""

    def order(self) -> list[tuple[str, int]]:
        """(name, seed) of all runs, each once, the first stage's first."""
        return list(dict.fromkeys((name, seed) for stage in self.stages for seed in stage.seeds for name in stage.runs))

    def check(self) -> None:
        """Raises UserError for names without a run, runs without a comparison, and comparisons that are confounded."""
        named = {name for part in (*self.stages, *self.comparisons) for name in part.runs}
        if unknown := sorted(named - self.runs.keys()):
            raise UserError(f"study: {', '.join(unknown)}: no such run; there are {', '.join(self.runs)}")
        compared = {name for comparison in self.comparisons for name in comparison.runs}
        if alone := sorted({name for stage in self.stages for name in stage.runs} - compared):
            raise UserError(f"study: {', '.join(alone)}: in no comparison, so nothing says what it may differ in")
        for comparison in self.comparisons:
            if len(comparison.runs) < 2:
                raise UserError(f"study: {comparison.title}: compares {len(comparison.runs)} runs; must be at least 2")
            self._check(comparison)

    def _check(self, comparison: Comparison) -> None:
        first, *others = comparison.runs
        for name in others:
            found = differences(self.runs[first], self.runs[name])
            confounded = {field: values for field, values in found.items() if not allowed(field, comparison.differ)}
            if confounded:
                listed = ", ".join(f"{field} = {ours} and {theirs}" for field, (ours, theirs) in confounded.items())
                raise UserError(
                    f"study: {comparison.title}: {first} and {name} differ in {listed}; "
                    f"they may differ in {', '.join(comparison.differ)} only"
                )
            if comparison.matched:
                reference, value = (cost(self.runs[run], comparison.matched) for run in (first, name))
                if abs(value / reference - 1) > comparison.tolerance:
                    raise UserError(
                        f"study: {comparison.title}: {comparison.matched} of {name} are {value:,.0f} and of {first} "
                        f"{reference:,.0f}, {100 * (value / reference - 1):+.2f} %; must match within "
                        f"{100 * comparison.tolerance:g} %"
                    )


def load_study(file: str) -> Study:
    """The study that a file defines. Raises UserError where there is no such file, or no study in it."""
    if not Path(file).is_file():
        raise UserError(f"{file}: no such file; a study is a Python file like configs/study.py")
    try:
        study = runpy.run_path(file).get("study")
    except pydantic.ValidationError as error:
        raise UserError(f"{file}: {describe(error)}") from None
    except (SyntaxError, ImportError, NameError) as error:
        raise UserError(f"{file}: {type(error).__name__}: {error}") from None
    if not isinstance(study, Study):
        raise UserError(f"{file}: defines no `study = Study(...)`")
    study.check()
    return study


def differences(ours: RunConfig, theirs: RunConfig) -> dict[str, tuple]:
    """Fields in which two configs differ, with both values; the label and the seed aside."""
    a, b = (
        flatten(config.model_dump(mode="json", exclude={"family": True, "train": {"seed"}}))
        for config in (ours, theirs)
    )
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def allowed(field: str, differ: tuple[str, ...]) -> bool:
    """Whether a field is one of those named, or in a section that is."""
    return any(field == name or field.startswith(f"{name}.") for name in differ)


def cost(config: RunConfig, kind: str) -> float:
    """Parameters, cache bytes per token or training FLOPs of a run."""
    found = accounts(config)
    tokens = config.train.steps * config.train.batch_size * config.data.context
    costs = {
        "parameters": found.parameters,
        "cache": found.cache_bytes_per_token,
        "flops": found.train_flops_per_token * tokens,
    }
    return float(costs[kind])


def match_parameters(config: RunConfig, reference: RunConfig) -> RunConfig:
    """The config with the MLP width that gives it the reference's number of parameters, as nearly as widths allow."""
    per_unit = cost(_with(config, "model", mlp_width=2), "parameters") - cost(
        _with(config, "model", mlp_width=1), "parameters"
    )
    missing = cost(reference, "parameters") - cost(config, "parameters")
    return _with(config, "model", mlp_width=config.model.hidden + round(missing / per_unit))


def match_cache(config: RunConfig, reference: RunConfig) -> RunConfig:
    """The config with the rank, latent or key/value heads whose cache bytes are nearest to the reference's."""
    knob = CACHE_KNOBS.get(config.attention.family, "kv_heads")
    divisors = [k for k in range(1, config.attention.heads + 1) if config.attention.heads % k == 0]
    target = cost(reference, "cache")

    def bytes_at(value: int) -> float:
        return cost(_with(config, "attention", **{knob: value}), "cache")

    if knob != "kv_heads":  # bytes grow by the same amount at each step; codes that rotate come in pairs
        step = 2 if getattr(config.attention, "rope_mode", None) == "latent" else 1
        slope = bytes_at(2 * step) - bytes_at(step)
        nearest = step * (1 + round((target - bytes_at(step)) / slope))
        return _with(config, "attention", **{knob: max(nearest, step)})
    return _with(config, "attention", **{knob: min(divisors, key=lambda value: abs(bytes_at(value) - target))})


def match_flops(config: RunConfig, reference: RunConfig) -> RunConfig:
    """The config with the number of steps that costs the reference's training FLOPs."""
    return _with(config, "train", steps=round(config.train.steps * cost(reference, "flops") / cost(config, "flops")))


def _with(config: RunConfig, section: str, **fields: int) -> RunConfig:
    """A config with fields of one section replaced, validated again."""
    changed = config.model_dump() | {section: getattr(config, section).model_dump() | fields}
    return RunConfig.model_validate(changed)
