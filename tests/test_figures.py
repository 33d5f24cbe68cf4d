"""Figures from made-up runs: what is drawn, what lacks, and what a broken file does."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from lrkv_jax import figures, records
from lrkv_jax.config import RunConfig
from lrkv_jax.grouping import arrange
from lrkv_jax.panels import all_panels
from lrkv_jax.plots import draw
from lrkv_jax.settings import UserError

ROOT = Path(__file__).parent.parent
HEADS = {"heads": 4, "head_dim": 8, "rope_base": 10000.0, "qk_norm": True, "qkv_bias": False, "implementation": "auto"}
LRKV = {"family": "lrkv", "kv_heads": None, "rank": 3, "rope_mode": "full"}
MHA = {"family": "gqa", "kv_heads": None}


def run(attention, ce, seed=0, *, percent=100.0, label="", width=32, mlp=None, diversity=True, shards=True, lr=0.02):
    """A summary as a study keeps it: evaluations at 100, 200, 300 and 400 tokens, the last at `ce` + 0.1."""
    curve = [(100 * i, ce + 0.1 + 0.5 * (4 - i)) for i in (1, 2, 3, 4)]
    ev = [{"kind": "eval", "step": t // 100, "tokens": t, "split": "validation", "ce": y} for t, y in curve]
    found = {
        "name": label or attention["family"],
        "seed": seed,
        "label": label,
        "config": {
            "family": "x",
            "model": {"layers": 2, "width": width, "mlp_width": mlp},
            "attention": HEADS | attention,
            "data": {"dataset": "none", "context": 100, "cache_dir": f"/somewhere/{seed}"},
            "optimizer": {"peak_lr": lr},
            "train": {"steps": 4, "batch_size": 1, "seed": seed},
            "mesh": {"tensor": 1},
        },
        "metrics": [{"kind": "train", "step": 1, "tokens": 100, "loss": 9.0}, *ev],
        "eval": {
            **{"split": "test", "ce": ce, "bits_per_byte": ce / 2, "tokens": 50, "bytes": 200, "documents": 3},
            **{"parameters": 1000, "train_tokens": 400, "train_flops": 400 * (2.0 + (attention["family"] == "lrkv"))},
            **{"cache_bytes_per_token": int(10 * percent), "cache_percent_of_mha": percent},
        },
    }
    if diversity:
        found["diversity"] = [{"layer": i, "heads": 4, "uncentred": 3.5 - i, "centred": 2.5} for i in (0, 1)]
    if shards:
        found["shards"] = {"1": int(10 * percent), "2": int(6 * percent)}
    return found


def write(directory, *summaries):
    """Study files, named as the sweep names them."""
    for i, summary in enumerate(summaries):
        records.write_summary(directory / f"{i}-{summary['name']}-s{summary['seed']}.json", summary)
    return directory


@pytest.fixture
def study(tmp_path):
    """Two seeds of LRKV and MHA, other ranks, modes, families, a control and a matched run."""
    mla = {"family": "mla", "latent": 8}
    return write(
        tmp_path,
        run(LRKV, 2.8, 0, percent=40.0),
        run(LRKV, 2.9, 1, percent=40.0),
        run(LRKV | {"rank": 6}, 2.7, percent=80.0),
        run(LRKV | {"rope_mode": "shared"}, 2.6, percent=40.0),
        run(MHA, 3.0, 0, percent=100.0),
        run(MHA, 3.2, 1, percent=100.0),
        run(MHA | {"kv_heads": 2}, 3.1, percent=50.0),
        run(MHA | {"kv_heads": 1}, 3.3, percent=25.0),
        run(mla, 3.4, percent=30.0),
        run(MHA | {"rotary_dim": 4}, 3.05, percent=100.0, label="MHA, half rotary"),
        run(LRKV, 2.75, percent=40.0, mlp=150, label="LRKV R=3, wider MLP"),
    )


def panels_of(directory):
    return all_panels(arrange(records.read_runs(directory))[0])


def point(panels, figure, name, series):
    """The one point, or all, of a series in a panel."""
    (panel,) = [panel for panel in panels if (panel.figure, panel.name) == (figure, name)]
    found = [point for point in panel.points if point.series == series]
    return found[0] if len(found) == 1 else found


def test_every_plotted_number_is_in_the_csv(study):
    """Fails if a figure draws what figures.csv lacks, or the table of numbers promises what isn't drawn."""
    panels = panels_of(study)
    rows = list(csv.DictReader(io.StringIO(figures.numbers(panels))))
    for name in ("1", "2", "3", "4"):
        mine = [panel for panel in panels if panel.figure == name]
        figure = draw(mine)
        for panel, axes in zip(mine, figure.axes, strict=True):
            listed = [row for row in rows if (row["figure"], row["panel"]) == (name, panel.name)]
            numbers = sorted((float(row["x"]), float(row["y"])) for row in listed)
            bars = [container.lines for container in axes.containers]
            drawn = sorted(tuple(xy) for data, _, _ in bars for xy in data.get_xydata())
            assert listed
            assert drawn == numbers
            assert len(axes.lines) == sum(1 + len(caps) for _, caps, _ in bars)  # nothing beside error bars
            ends = [segment for _, _, (lines,) in bars for segment in lines.get_segments() if len(segment)]
            heights = sorted(np.ptp(end[:, 1]) / 2 for end in ends)
            assert heights == pytest.approx(sorted(float(row["error"]) for row in listed if row["error"]))
        plt.close(figure)
    assert {row["source"] for row in rows} == {"ours", "paper"}


def test_seeds_become_mean_and_standard_deviation(study):
    """Fails if seeds are drawn as groups of their own, or the error is a population's, or no seed's is a zero."""
    panels = panels_of(study)
    assert point(panels, "1", "a", "LRKV R=3")[:5] == (
        *("LRKV R=3", 40.0, pytest.approx(2.85), pytest.approx(0.1 / 2**0.5), 2),
    )
    assert point(panels, "1", "a", "LRKV R=6").error is None


def test_differences_and_savings_are_taken_seed_by_seed(study):
    """Fails if LRKV's mean is compared with MHA's mean of other seeds."""
    panels = panels_of(study)
    end = point(panels, "1", "b end", "LRKV R=3")
    assert (end.x, end.y, end.seeds) == (3 / 8, pytest.approx((-0.2 - 0.3) / 2), 2)
    only_seed_0 = point(panels, "1", "b end", "LRKV R=6")
    assert (only_seed_0.y, only_seed_0.seeds) == (pytest.approx(-0.3), 1)
    saved = point(panels, "2", "b tokens", "LRKV R=3 to reach MHA")
    assert saved.y == pytest.approx(100 * (0.1 + 0.15) / 2)  # of 400 tokens: 0.2 and 0.3 nats at 0.5 per 100 tokens
    flops = point(panels, "2", "b FLOPs", "LRKV R=3 to reach MHA")
    assert flops.y == pytest.approx(100 * (1 - (0.9 + 0.85) / 2 * 3 / 2))


def test_roles_are_told_apart(study):
    """Fails if a control or a matched run stands among runs in which attention alone was swapped."""
    found, notes = arrange(records.read_runs(study))
    roles = {group.label: group.role for group in found}
    assert roles.pop("MHA, half rotary") == "control"
    assert roles.pop("LRKV R=3, wider MLP") == "matched"
    assert set(roles) == {"LRKV R=3", "LRKV R=6", "LRKV R=3 shared", "MLA L=8", "MHA", "GQA-2", "MQA"}
    assert set(roles.values()) == {"main"}
    assert notes == []


def test_what_was_trained_otherwise_is_left_out_and_told(tmp_path):
    """Fails if a run of another width or text is drawn beside the others."""
    other = run(MHA, 1.0, width=64)
    elsewhere = run(MHA, 1.1, 1)
    elsewhere["eval"]["bytes"] += 1
    write(tmp_path, run(LRKV, 2.8), run(MHA, 3.0), other, elsewhere)
    found, notes = arrange(records.read_runs(tmp_path))
    assert [group.role for group in found] == ["main", "main", "apart", "apart"]
    assert "width 64" in " ".join(notes)
    assert "another text" in " ".join(notes)
    drawn = [point.y for panel in all_panels(found) if panel.name == "a" for point in panel.points]
    assert min(drawn) == pytest.approx(1.4)  # bits per byte of LRKV
    assert figures.table(found, notes).count("\n| ") == 4


def test_rates_of_one_model_become_a_point_and_controls(tmp_path):
    """Fails if three rates of a family are averaged, or the best one is chosen by the test split."""
    tuned = run(MHA, 3.1, lr=0.04)
    tuned["metrics"][-1]["ce"] = 2.0
    write(tmp_path, run(LRKV, 2.8), run(MHA, 3.0), tuned)
    found, _ = arrange(records.read_runs(tmp_path))
    (main,) = [group for group in found if group.role == "main" and group.kind == "mha"]
    assert main.mean("ce")[0] == 3.1
    assert sorted(group.label for group in found) == ["LRKV R=3", "MHA", "MHA (peak_lr 0.02)"]


def test_layers_of_different_rank_are_a_control(tmp_path):
    """Fails if a list of ranks is a traceback, or such a run a point of the uniform ranks' curve."""
    found, _ = arrange(records.read_runs(write(tmp_path, run(LRKV, 2.8), run(LRKV | {"ranks": [1, 3]}, 2.7))))
    assert [(group.label, group.role) for group in found] == [("LRKV R=3", "main"), ("LRKV R=1 3", "control")]


def test_runs_that_came_from_others_are_no_seeds_of_one(tmp_path):
    """Fails if what a run began or learned from is no part of its method, or another teacher a copy."""

    def other(seed, **attention):
        config = {"family": "mha", "attention": {"family": "gqa"} | attention, "train": {"seed": seed}}
        return {"fingerprint": f"{seed}{attention}", "config": config}

    write(
        tmp_path,
        run(LRKV, 2.8),
        run(LRKV, 2.7) | {"teacher": other(0)},
        run(LRKV, 2.6) | {"teacher": other(1)},
        run(LRKV, 2.5, 1) | {"teacher": other(0, kv_heads=1)},
    )
    read = records.read_runs(tmp_path)
    assert not [record.note for record in read if record.note]
    assert [len(group) for group in records.groups(read)] == [1, 2, 1]


def test_two_run_directories(tmp_path, capsys):
    """Fails if a plain user's runs need a study, a label, shards or diversity; writes every file."""
    for summary in (run(LRKV, 2.8, percent=40.0, diversity=False), run(MHA, 3.0, diversity=False)):
        folder = tmp_path / "runs" / summary["name"]
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(summary["config"]))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in summary["metrics"]))
        (folder / "eval.json").write_text(json.dumps(summary["eval"]))
    (tmp_path / "runs" / "begun").mkdir()
    (tmp_path / "runs" / "begun" / "config.json").write_text(json.dumps(run(MHA, 0, seed=1)["config"]))
    (tmp_path / "runs" / "begun" / "metrics.jsonl").write_text("")
    out = tmp_path / "figures"
    assert figures.main([str(tmp_path), "--out", str(out)]) == 0
    pictures = {f"figure{i}.{suffix}" for i in (1, 2, 3, 4) for suffix in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == pictures | {"figures.csv", "table.md"}
    table, printed = (out / "table.md").read_text(), capsys.readouterr().out
    for note in (
        "begun: not finished",
        "no finished run of MLA, GQA, MQA",
        "no cache bytes per device",
        "no head diversity",
    ):
        assert note in table
        assert note in printed
    assert "| LRKV R=3 | 0 | 1,000 | 40.0 | 400 |" in table
    assert "2.8000 (n=1)" in table


def test_unreached_and_bound_savings(tmp_path):
    """Fails if a baseline never reached is drawn, or a first evaluation below it passes for a crossing."""
    write(tmp_path, run(LRKV, 2.8), run(MHA, 2.0), run(MHA | {"kv_heads": 1}, 9.0))
    panels = panels_of(tmp_path)
    (panel,) = [panel for panel in panels if panel.name == "b tokens"]
    assert [point.series for point in panel.points] == ["LRKV R=3 to reach MQA (at least)"]
    assert panel.points[0].y == pytest.approx(75)
    assert "LRKV R=3 to reach MHA: n/a, reached by 0 of 1 seeds" in panel.note


def test_broken_files_are_one_line_each(tmp_path):
    """Fails if a truncated or malformed run takes the others with it, or is passed over in silence."""
    write(tmp_path, run(LRKV, 2.8), run(MHA, 3.0))
    (tmp_path / "cut.json").write_text('{"name": "x", ')
    lacking = run(MHA, 3.0, 2)
    del lacking["eval"]["ce"]
    write(tmp_path, {**lacking, "name": "lacking"})
    (tmp_path / "else.json").write_text('{"something": "else"}')
    read = records.read_runs(tmp_path)
    notes = [record.note for record in read if record.note]
    assert len(read) == 4
    assert any("cut.json: not JSON" in note for note in notes)
    assert any("lacks 'ce'" in note for note in notes)
    assert all("\n" not in note for note in notes)
    assert len(arrange(read)[0]) == 2


def test_a_run_found_twice_counts_once(tmp_path):
    """Fails if a copy of a run becomes a second seed, with a spread of zero."""
    write(tmp_path, run(LRKV, 2.8), run(LRKV, 2.8))
    found, notes = arrange(records.read_runs(tmp_path))
    assert found[0].mean("ce") == (2.8, None)
    assert "the same run as" in notes[0]


def test_no_directory_and_no_runs_are_one_line(tmp_path):
    """Fails if a wrong path draws empty figures."""
    for place, words in ((tmp_path / "none", "no such directory"), (tmp_path, "holds no run")):
        with pytest.raises(UserError, match=words):
            figures.main([str(place), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_only_unfinished_runs_still_draw(tmp_path):
    """Fails if a study that has just begun can't be looked at."""
    begun = run(LRKV, 2.8)
    begun["eval"] = None
    found, notes = arrange(records.read_runs(write(tmp_path, begun)))
    assert found == []
    assert "not finished" in notes[0]
    plt.close(draw([panel for panel in all_panels(found) if panel.figure == "3"]))


def test_summary_keeps_evaluations_and_thins_training(tmp_path):
    """Fails if the curve's last training row or an evaluation is lost, or a long run's summary grows without end."""
    rows = [{"kind": "train", "step": i, "tokens": i, "loss": 1.0} for i in range(1, 1001)]
    rows[500:500] = [{"kind": "eval", "step": 500, "tokens": 500, "split": "validation", "ce": 2.0}]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = records.summarise(tmp_path, "a", 3, "A")
    train = [row for row in found["metrics"] if row["kind"] == "train"]
    assert len(train) == records.TRAIN_POINTS
    assert (train[0]["step"], train[-1]["step"]) == (1, 1000)
    assert rows[500] in found["metrics"]
    assert (found["name"], found["seed"], found["label"], found["eval"]) == ("a", 3, "A", None)


def test_configs_of_other_versions_mean_the_same():
    """Fails if a field new in RunConfig splits kept runs from new ones of the same mathematics: it belongs in ADDED."""
    new = RunConfig().model_dump(mode="json")
    old = {
        section: {
            name: value
            for name, value in fields.items()
            if value is not None and f"{section}.{name}" not in records.ADDED
        }
        for section, fields in new.items()
        if isinstance(fields, dict)
    }
    assert records.flatten(old | {"family": new["family"]}) == records.flatten(new)
    for path in sorted((ROOT / "results").glob("study*/*-s0.json")):
        kept = json.loads(path.read_text())["config"]
        assert records.flatten(kept) == records.flatten(RunConfig.model_validate(kept).model_dump(mode="json"))


def test_no_jax():
    """Fails if figures or what they import bring in JAX, which a laptop that only draws need not have."""
    code = "import sys, lrkv_jax.figures; sys.exit(any(name in sys.modules for name in ('jax', 'flax', 'jaxlib')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
