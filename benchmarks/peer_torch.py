"""Our training step against the same model in PyTorch, turn by turn on one machine.

PyTorch is no requirement of this project, so it lives in an environment of its own, and this script in neither:

    python -m venv peer && peer/bin/pip install torch==2.13.0 numpy     # a CPU build
    python benchmarks/peer_torch.py --torch-python peer/bin/python --json benchmarks/results/peer_torch.json

Two child processes hold a compiled step each (ours: `lrkv_jax.bench`'s standard shape as MHA; theirs: torch.compile
with autocast, fused AdamW) and take turns on request, so that neither runs while the other is timed. The models are
one: the PyTorch side starts from our initial parameters and batch, and the losses of the first steps must agree, or
nothing is reported. What other work there is on the machine slows both: read the ratios, not the times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEADS, HEAD_DIM, EPS, BASE, CAP = 4, 64, 1e-6, 10000.0, 15.0
WARM_UP = 4
# Relative difference of the losses over the first steps: rounding only.
AGREEMENT = {"float32": 1e-4, "bfloat16": 2e-3}


class Child:
    """A process that keeps a compiled step alive and runs it when told."""

    def __init__(self, python: str, side: str, dtype: str, weights: Path):
        command = [python, __file__, "--child", side, "--dtypes", dtype, "--weights", str(weights)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.about = self._read()

    def run(self, steps: int) -> dict[str, Any]:
        """{"seconds": [...], "losses": [...], "processor": mean processor seconds of a step} of the next steps."""
        assert self.process.stdin is not None
        print(steps, file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"error: {' '.join(map(str, self.process.args))} ended with status {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Rounds of both sides in one dtype; `ratio` is our tokens/s over theirs."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        weights = Path(folder) / "start.npz"
        sides = {}
        for side, python in (("jax", options.jax_python), ("torch", options.torch_python)):
            sides[side] = Child(python, side, dtype, weights)
            stack.callback(sides[side].close)
        first = {side: child.run(WARM_UP)["losses"] for side, child in sides.items()}
        gaps = [abs(a - b) / b for a, b in zip(first["jax"], first["torch"], strict=True)]
        about = {side: child.about for side, child in sides.items()}
        if about["jax"]["parameters"] != about["torch"]["parameters"] or max(gaps) > AGREEMENT[dtype]:
            sys.exit(f"error: the models differ, nothing to compare: {about}, losses {first}")
        print(f"{dtype}: {about['jax']['parameters']:,} parameters each, first losses within {max(gaps):.1e}")
        rounds = []
        for _ in range(options.rounds):
            ms = {side: 1e3 * statistics.median(child.run(options.steps)["seconds"]) for side, child in sides.items()}
            rounds.append({**ms, "ratio": ms["torch"] / ms["jax"]})
            print(
                f"  ours {ms['jax']:7.1f} ms   torch {ms['torch']:7.1f} ms   ratio {rounds[-1]['ratio']:.2f}",
                flush=True,
            )
    ratio = statistics.median(turn["ratio"] for turn in rounds)
    best = {side: about[side]["tokens_per_step"] / min(turn[side] for turn in rounds) * 1e3 for side in about}
    print(f"  median ratio {ratio:.2f}; best round: ours {best['jax']:,.0f} tokens/s, torch {best['torch']:,.0f}")
    return {
        "about": about,
        "first_losses": first,
        "rounds_ms": rounds,
        "best_tokens_per_s": best,
        "median_ratio": ratio,
    }


def serve(run: Any, about: dict[str, Any]) -> None:
    """The child's loop: says what it is, then runs as many steps as each line asks for."""
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        seconds, losses, processor = [], [], time.process_time()
        for _ in range(int(line)):
            start = time.perf_counter()
            losses.append(run())
            seconds.append(time.perf_counter() - start)
        processor = time.process_time() - processor
        print(json.dumps({"seconds": seconds, "losses": losses, "processor": processor / len(losses)}), flush=True)


def jax_child(dtype: str, weights: Path) -> None:
    """Our side: writes its start to `weights`, then serves."""
    import jax
    import numpy as np

    from lrkv_jax import bench, sharding

    config = bench.chosen(None, ["mha"], dtype)["mha"]
    stepper = bench.Stepper(config, sharding.make_mesh(config.mesh))
    named = jax.tree_util.tree_leaves_with_path(stepper.state["params"])
    start = {".".join(str(k.key) for k in path if hasattr(k, "key")): np.asarray(leaf) for path, leaf in named}
    np.savez(weights, batch=np.asarray(stepper.batch), **start)

    def run() -> float:
        stepper.run(1)
        return stepper.losses[-1]

    about = {
        "version": f"jax {jax.__version__}",
        "parameters": sum(array.size for array in start.values()),
        "tokens_per_step": stepper.tokens_per_step,
        "compile_seconds": stepper.compile_seconds,
    }
    serve(run, about)


def torch_model(start: dict[str, Any], compute: Any, length: int) -> Any:
    """The model as a PyTorch user writes it, of the sizes and with the weights of `start`."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    layers, width = start["blocks.attention.w_q.w"].shape[:2]
    vocab, hidden = start["embed"].shape[0], start["blocks.mlp.w_up.w"].shape[2]

    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), eps=EPS)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            def rope(x: Tensor) -> Tensor:
                a, b = x.chunk(2, dim=-1)
                return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

            qkv = self.qkv(norm(x)).view(*x.shape[:2], 3, HEADS, HEAD_DIM)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            o = F.scaled_dot_product_attention(norm(rope(q)), norm(rope(k)), v, is_causal=True)
            x = x + self.out(o.transpose(1, 2).reshape(x.shape))
            return x + self.down(F.relu(self.up(norm(x))).square())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocab, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.unembed = nn.Linear(width, vocab, bias=False)
            frequencies = BASE ** (-torch.arange(HEAD_DIM // 2) * (2.0 / HEAD_DIM))
            angles = torch.arange(length)[:, None] * frequencies
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

        def forward(self, tokens: Tensor) -> Tensor:
            x = norm(self.embed(tokens[:, :-1]).to(compute))
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = CAP * torch.tanh(self.unembed(norm(x)).float() / CAP)
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    model = Model()
    with torch.no_grad():
        load(model, start)
    return model


def load(model: Any, start: dict[str, Any]) -> None:
    """Copies our initial parameters into theirs."""
    import torch

    model.embed.weight.copy_(start["embed"])
    model.unembed.weight.copy_(start["unembed"].T)
    for i, block in enumerate(model.blocks):
        q, k, v = (start[f"blocks.attention.w_{name}.w"][i].flatten(1) for name in "qkv")
        block.qkv.weight.copy_(torch.cat([q, k, v], dim=1).T)
        block.out.weight.copy_(start["blocks.attention.w_o.w"][i].flatten(0, 1).T)
        block.up.weight.copy_(start["blocks.mlp.w_up.w"][i].T)
        block.down.weight.copy_(start["blocks.mlp.w_down.w"][i].T)


def torch_child(dtype: str, weights: Path) -> None:
    """Their side: the model, its start from `weights`, one compiled step."""
    import numpy as np
    import torch
    from torch import nn

    start = {name: torch.from_numpy(array) for name, array in np.load(weights).items()}
    batch = start.pop("batch").long()
    model = torch_model(start, getattr(torch, dtype), batch.shape[1] - 1)
    matrices = [parameter for name, parameter in model.named_parameters() if name.startswith("blocks")]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [model.embed.weight, model.unembed.weight], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    compiled = torch.compile(model)

    def run() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = compiled(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    about = {
        "version": f"torch {torch.__version__}",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_step": batch.shape[0] * (batch.shape[1] - 1),
        "threads": torch.get_num_threads(),
    }
    serve(run, about)


def main() -> None:
    """Parent or child, by the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", help="interpreter that has torch")
    parser.add_argument("--jax-python", default=sys.executable, help="interpreter that has this project's requirements")
    parser.add_argument("--dtypes", nargs="+", choices=list(AGREEMENT), default=list(AGREEMENT))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--child", choices=("jax", "torch"), help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        {"jax": jax_child, "torch": torch_child}[options.child](options.dtypes[0], options.weights)
        return
    if options.torch_python is None:
        parser.error("--torch-python is needed: see the top of this file")
    report = {"rounds": options.rounds, "steps": options.steps, **{d: compare(options, d) for d in options.dtypes}}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
