"""What the README and docs/finetune.md tell people to type the commands themselves parse; what is linked to exists."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lrkv_jax.config import RunConfig, parse_command

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = sorted(
    {
        match.strip()
        for match in re.findall(
            r"python ((?:train\.py|-m lrkv_jax\.\w+)[^\n#|`]*)", README + (ROOT / "docs/finetune.md").read_text()
        )
        if "--help" not in match
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command, monkeypatch):
    """Bug: a flag, a config or a module that is no longer called so."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(RunConfig, "load", lambda run_dir: RunConfig())  # of runs that a reader has made by now
    words = shlex.split(command)
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words[1]
    if words[0] == "train.py" or words[1] == "lrkv_jax.prepare":
        parse_command(words[0], "", words[1:] if words[0] == "train.py" else words[2:])


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "benchmarks").glob("*.py")))
def test_benchmarks_find_the_package(script, tmp_path):
    """Bug: `python benchmarks/...` as documented runs only where PYTHONPATH names the project."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    load = f"import runpy; runpy.run_path({str(ROOT / 'benchmarks' / script)!r})"
    done = subprocess.run(
        [sys.executable, "-c", load], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()


def test_links_and_files_exist():
    """Bug: a moved file."""
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    tree = re.findall(r"\b(?:configs/\w+\.py|lrkv_jax/\w+\.py|benchmarks/\w+\.py|docs/\w+\.md)\b", README)
    missing = [path for path in links + tree if not (ROOT / path).exists()]
    assert missing == []
    listing = README.split("## Files")[1].split("## ")[0]
    in_package = set(re.findall(r"\b(\w+\.py)\b", listing))
    assert {path.name for path in (ROOT / "lrkv_jax").glob("[a-z]*.py")} <= in_package
