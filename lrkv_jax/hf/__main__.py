"""Takes in a checkpoint of the Hugging Face kind, or gives one out.

    python -m lrkv_jax.hf import DIR OUT [--data.dataset NAME ...]
    python -m lrkv_jax.hf export RUN_DIR DIR [--step newest|best|N] [--dtype float32|bfloat16] [--max-shard-bytes N]

`import` makes the run directory OUT of DIR's config.json, safetensors and tokenizer.json: of a Llama, a Qwen2, a Qwen3,
or what `export` has written. eval.py, generate and --init-from take OUT; any flag of train.py that doesn't change the
model sets what they find there, such as the text that eval.py scores.

`export` writes a Llama, Qwen2 or Qwen3 where the run's model is one exactly, and says why where it isn't; then DIR has
our own names for tensors, with a README.md that explains them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from lrkv_jax import lora, rundir, storage
from lrkv_jax.accounting import abstract_parameters, accounts, textless_program
from lrkv_jax.config import RunConfig, flatten, parse_fields
from lrkv_jax.data import DataConfig, Tokenizer
from lrkv_jax.handover import by_name, filled, host, write_run
from lrkv_jax.hf import architecture, files, tensors
from lrkv_jax.hf.page import page
from lrkv_jax.settings import Parser, UserError, command
from lrkv_jax.trained import restored

PROG = "python -m lrkv_jax.hf"
OURS = "lrkv_jax"  # model_type of what is no Llama, Qwen2 or Qwen3
FREE = ("model.dtype", "model.scan_layers", "model.remat", "attention.implementation")
"""Fields of model and attention that a checkpoint leaves open."""


def main() -> int:
    """Command line to exit status."""
    parser = Parser(prog=PROG, description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export")
    taken = commands.add_parser("import", allow_abbrev=False)
    taken.add_argument("source", type=Path, metavar="DIR")
    taken.add_argument("out", type=storage.path, metavar="OUT")
    given = commands.add_parser("export", allow_abbrev=False)
    given.add_argument("run_dir", type=storage.path, metavar="RUN_DIR")
    given.add_argument("target", type=Path, metavar="DIR")
    given.add_argument("--step", default="newest", help="newest, best, or a step's number")
    given.add_argument("--dtype", choices=tuple(files.DTYPES), default="float32", help="of the tensors (float32)")
    given.add_argument("--max-shard-bytes", type=int, default=5 * 10**9, metavar="N", help="of a file (5e9)")
    options, rest = parser.parse_known_args()
    if options.command == "import":
        print(take_in(options.source.expanduser(), options.out, rest))
    elif rest:
        raise UserError(f"{rest[0]}: no such flag of export")
    else:
        print(
            give_out(options.run_dir, options.target.expanduser(), options.step, options.dtype, options.max_shard_bytes)
        )
    return 0


def take_in(source: Path, out: storage.AnyPath, flags: list[str]) -> str:
    """Makes `out` the run directory of the checkpoint in `source`, at step 0; returns what to print.

    Raises UserError, and leaves nothing, for whatever is missing, damaged, or no model of ours.
    """
    raw = read_object(source / "config.json")
    own = raw.get("model_type") == OURS
    default = RunConfig.parse(json.dumps(raw.get("run")), source / "config.json") if own else foreign_run(source, raw)
    tokenizer = source / "tokenizer.json"
    default = default.model_copy(update={"data": default.data.model_copy(update={"tokenizer": str(tokenizer)})})
    config = parse_fields(f"{PROG} import", __doc__, default, flags)
    check_model(config, default)
    Tokenizer.load(tokenizer, config.data.begin_token, config.data.end_token)
    abstract, held = abstract_parameters(config), files.Tensors(source)
    shapes = {name: param.get_value().shape for name, param in by_name(abstract).items()}
    shapes = shapes if own else tensors.shapes(abstract, config.model.layers)
    held.check(shapes, ignored=(*tensors.IGNORED, *(("lm_head.weight",) if config.model.tie_embeddings else ())))
    params = filled(abstract, held.__getitem__) if own else tensors.to_params(held, abstract, config.model.layers)
    write_run(out, config, params, tokenizer)
    count = accounts(config).parameters
    return f"imported  {config.family}, {count:,} parameters, computing in {config.model.dtype}\nrun directory  {out}"


def foreign_run(source: Path, raw: dict[str, Any]) -> RunConfig:
    """The run of a config.json that isn't ours, over the default corpus."""
    model, attention = architecture.imported(raw)
    data = DataConfig(**special_tokens(source, raw))
    return RunConfig(family=raw["model_type"], model=model, attention=attention, data=data)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises UserError where it is missing or holds something else."""
    content = rundir.read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return content


def special_tokens(source: Path, raw: dict[str, Any]) -> dict[str, str]:
    """`begin_token` and `end_token` as far as the checkpoint tells; where it has no begin, the end stands for it."""
    names = source / "tokenizer_config.json"
    named = read_object(names) if names.exists() else {}
    added = read_object(source / "tokenizer.json").get("added_tokens") or ()
    spelled = {token.get("id"): token.get("content") for token in added}
    found = {}
    for name, key in (("end_token", "eos_token"), ("begin_token", "bos_token")):
        number, token = raw.get(f"{key}_id"), named.get(key)
        number = number[0] if isinstance(number, list) else number
        token = spelled.get(number) or (token.get("content") if isinstance(token, dict) else token)
        found |= {name: token} if token else {}
    return {"begin_token": found["end_token"], **found} if "end_token" in found else found


def check_model(config: RunConfig, default: RunConfig) -> None:
    """Raises UserError for a flag that makes another model than the checkpoint's."""
    ours, theirs = (flatten(run.model_dump(include={"model", "attention"})) for run in (config, default))
    for name, value in ours.items():
        if name not in FREE and value != theirs[name]:
            raise UserError(f"{name} = {value}: the checkpoint has {theirs[name]}")


def give_out(run_dir: storage.AnyPath, target: Path, step: str, dtype: str, most: int) -> str:
    """Writes a run's model into `target`; returns what to print. Raises UserError, and leaves nothing."""
    if most < 1:
        raise UserError(f"--max-shard-bytes {most}: must be at least 1")
    config = RunConfig.load(run_dir)
    tokenizer = Tokenizer.load(run_dir / "tokenizer.json", config.data.begin_token, config.data.end_token)
    config, params, number = trained(run_dir, config, step)
    reason = architecture.hindrance(config)
    with storage.all_or_nothing(target) as folder:
        if reason is None:
            described = architecture.exported(config, tokenizer.begin_id, tokenizer.end_id, dtype)
            content = tensors.from_params(params, config.model.layers)
        else:
            described = {"model_type": OURS, "torch_dtype": dtype, "run": config.model_dump(mode="json")}
            content = {name: np.asarray(param.get_value()) for name, param in by_name(params).items()}
            (folder / "README.md").write_text(page(config, params))
        files.write(folder, content, dtype, most)
        tokenizer.save(folder / "tokenizer.json")
        named = {"bos_token": config.data.begin_token, "eos_token": config.data.end_token}
        rundir.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
        rundir.write_json(folder / "config.json", described)
    if reason:
        print(f"{reason}: no Llama, Qwen2 or Qwen3 has that; README.md says what the tensors are", file=sys.stderr)
    return f"exported  {described['model_type']}, step {number:,}, {dtype}\nfolder    {target}"


def trained(run_dir: storage.AnyPath, config: RunConfig, step: str) -> tuple[RunConfig, PyTree, int]:
    """The run's parameters in the host's memory, adapters merged, their config and step."""
    place = jax.sharding.SingleDeviceSharding(host())
    program = textless_program(config)
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), program.abstract_params()
    )
    params, number = restored(run_dir, config, template, step)
    if config.model.lora_rank:
        params = lora.merge(program.graph, params)
        config = config.without_adapters()
    return config, params, number


if __name__ == "__main__":
    command(main)()
