"""bench/: gain at equal accuracy on curves with a known answer, the rule for λ, the grids, what happens to
cells, the page and its numbers, compare, and the speed table (that it is measured, not what it says)."""

import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import sentence
from PIL import Image

import bench.__main__ as program
from bench import finished, gain, grids, speed, tables
from harness.files import UserError

HERE = Path(__file__).resolve().parent.parent

POINTS, (LOW, MIDDLE, HIGH) = grids.POINTS, grids.METHODS["gmm"][2]


def curve(k, accuracies):
    """MSE falls exponentially with accuracy, k times as high as for k = 1."""
    return {f"lambda{a}": (a, k * math.exp(-3 * a)) for a in accuracies}


# ------------------------------------------------------------------------------------------------ gain


def test_gain_of_a_curve_k_times_as_high_is_k():
    a, b = curve(1.3, [0.5, 0.6, 0.72, 0.9]).values(), curve(1.0, [0.45, 0.61, 0.7, 0.85]).values()
    assert gain.gain(a, b) == pytest.approx(1.3, rel=1e-9)
    assert gain.gain(b, a) == pytest.approx(1 / 1.3, rel=1e-9)
    assert gain.gain(a, a) == pytest.approx(1, abs=1e-12)


def test_gain_is_the_mean_log_ratio():
    # two lines in log MSE that cross in the middle of the shared range
    crossing = gain.gain([(0.4, 4.0), (0.6, 1.0)], [(0.4, 3.0), (0.6, 4 / 3 * 0.999999)])
    assert crossing == pytest.approx(1, rel=1e-5)
    # the ratio goes from 1 to 4, linearly in the log: the mean is its square root, 2
    assert gain.gain([(0.0, 8.0), (1.0, 4.0)], [(0.0, 8.0), (1.0, 1.0)]) == pytest.approx(2, rel=1e-9)


def test_beaten_points_and_order_do_not_count():
    points = list(curve(1.2, [0.5, 0.7, 0.9]).values())
    worse = points + [(0.6, 1e-3), (0.5, 0.01)]
    random.Random(0).shuffle(worse)
    assert gain.front(worse) == sorted(points)
    assert gain.gain(worse, curve(1, [0.5, 0.9]).values()) == pytest.approx(1.2, rel=1e-9)


def test_single_points_and_curves_that_never_meet():
    alone = gain.gain([(0.7, 0.03)], curve(0.1, [0.6, 0.8]).values())
    assert alone == pytest.approx(0.03 / (0.1 * math.exp(-2.1)), rel=1e-9)
    assert gain.gain(curve(1, [0.1, 0.2]).values(), curve(1, [0.5, 0.6]).values()) is None
    assert gain.gain([], [(0.5, 0.1)]) is None


def test_interval_over_seeds():
    a = {s: curve(k, [0.5, 0.9]) for s, k in enumerate((1.2, 1.3, 1.4))}
    b = {s: curve(1, [0.5, 0.9]) for s in range(3)}
    logs = [math.log(k) for k in (1.2, 1.3, 1.4)]
    middle, factor = math.exp(statistics.fmean(logs)), math.exp(4.303 * statistics.stdev(logs) / math.sqrt(3))
    mean, low, high, n = gain.gain_interval(a, b)
    assert (mean, low, high) == pytest.approx((middle, middle / factor, middle * factor)) and n == 3
    assert gain.gain_interval(b, a)[:3] == pytest.approx((1 / mean, 1 / high, 1 / low))
    assert gain.gain_interval({0: a[0]}, b)[1:] == (None, None, 1)
    assert gain.gain_interval({}, b) == (None, None, None, 0)


def test_a_gain_through_a_third_curve_needs_no_common_accuracy():
    noise = {s: {"x": (0.6, 0.01), "y": (0.5, 0.04)} for s in (0, 1, 2)}  # 0.02 at 55 %
    a, b = {0: {"p": (0.55, 0.06)}, 1: {"p": (0.5, 0.08)}}, {0: {"q": (0.6, 0.02)}, 1: {"q": (0.55, 0.02)}}
    assert gain.gain_interval(a, b)[3] == 0
    # seed 0: (0.06 / 0.02) / (0.02 / 0.01), seed 1: (0.08 / 0.04) / (0.02 / 0.02)
    mean, low, high, n = gain.gain_interval(a, b, noise)
    assert mean == pytest.approx(math.sqrt(1.5 * 2)) and n == 2
    assert low * high == pytest.approx(1.5 * 2) and low == pytest.approx(mean * (1.5 / 2) ** (12.706 / 2))
    assert gain.gain_interval(a, {0: {"q": (0.9, 1.0)}, 1: b[1]}, noise)[3] == 1  # noise never has 90 %


def test_a_curve_at_an_accuracy_is_read_between_its_settings():
    curves = {0: curve(2, [0.5, 0.8]), 1: curve(3, [0.5, 0.6]), 2: curve(1, [0.5, 0.9])}
    curves = {seed: {str(i): p for i, p in enumerate(points.values())} for seed, points in curves.items()}
    curves[0]["2"] = 0.7, 0.001  # worse than the others, and no other seed has it
    found = gain.points_at(curves, {0: 0.7, 1: 0.7, 3: 0.7})  # seed 1 does not reach it, 2 has none wanted
    assert found == {0: {"": (0.7, pytest.approx(2 * math.exp(-2.1), rel=1e-9))}}
    assert gain.points_at({}, {0: 0.7}) == gain.points_at({0: {}}, {0: 0.7}) == {}


def test_only_equal_settings_are_averaged():
    by_seed = {
        0: {"x": (0.6, 0.01), "y": (0.5, 0.04)},
        1: {"y": (0.4, 0.02), "x": (0.7, 0.03), "z": (0.1, 9.0)},  # another order, and one that seed 0 lacks
    }
    assert gain.same_settings(by_seed) == {s: {k: p[k] for k in ("x", "y")} for s, p in by_seed.items()}
    (low, of_low), (high, of_high) = sorted(gain.mean_points(by_seed).items())
    assert low == pytest.approx((0.45, 0.03)) and high == pytest.approx((0.65, 0.02))
    # of two values half their difference, times the root of 2
    assert of_low == pytest.approx((0.05 * 2**0.5, 0.01 * 2**0.5)) == of_high
    assert gain.mean_points({0: {"x": (0.6, 0.01)}}) == {(0.6, 0.01): (0.0, 0.0)}
    # a seed that only one side ran takes no setting from the others
    more = {**by_seed, 2: {"x": (0.1, 9.0)}}
    assert gain.gain_interval(by_seed, more) == gain.gain_interval(by_seed, by_seed) == (1.0, 1.0, 1.0, 2)
    assert gain.same_settings({0: {"x": (0.1, 9.0)}, 1: {"y": (0.1, 9.0)}}) == {0: {}, 1: {}}
    assert gain.gain_interval(by_seed, {0: {}, 1: {}})[3] == 0 and gain.mean_points({}) == {}


# ------------------------------------------------------------------------------------------------ λ


def test_lambda_is_the_one_that_costs_one_and_a_half_points_of_validation_accuracy():
    # costs 0.5, 1.2 and 3 points
    assert grids.choose_lambda({0.3: 0.795, 0.6: 0.788, 1.2: 0.77}, noise_alone=0.8) == 0.6
    # 1.0 and 2.0 are equally near: the smaller λ, in whatever order they come
    assert grids.choose_lambda({2: 0.78, 1: 0.79}, 0.8) == 1
    # none reaches it: the nearest; all cost too much: the cheapest
    assert grids.choose_lambda({1: 0.80, 2: 0.799}, 0.8) == 2
    assert grids.choose_lambda({1: 0.7, 2: 0.5}, 0.8) == 1


def test_points_are_what_the_rule_takes_from_the_finished_cells():
    found = finished.load_cells("cifar")
    mean = lambda cells: statistics.fmean(r["val_accuracy"] for r in cells)
    noise = finished.select(found, family="tier1", method="none", setting="sigma0.1")
    for method, (_, _, values) in grids.METHODS.items():
        settings = {v: grids.vary(method, v)[0][0].partition("-")[2] for v in values}
        runs = {
            v: finished.select(found, family="tier1", method=method, setting=s) for v, s in settings.items()
        }
        if method != "none" and all(len(cells) == len(grids.SEEDS) for cells in (noise, *runs.values())):
            chosen = grids.choose_lambda({v: mean(cells) for v, cells in runs.items()}, mean(noise))
            assert POINTS[method] == chosen, f"bench/grids.py: POINTS[{method!r}] should be {chosen}"


# ------------------------------------------------------------------------------------------------ grids


@pytest.mark.parametrize("preset", grids.PRESETS)
def test_every_cell_is_a_command_that_train_takes(preset):
    for name, flags in grids.cells(preset):
        found = grids.settings(flags)
        assert name.endswith(f"-seed{found['seed']}") and name.count("-") <= 3, name
        if found["init"]:  # else the defaults of --init would count, which `settings` does not know
            assert {"--epochs", "--lr", "--warmup"} <= set(flags.split()), name
            images = "tiny-imagenet-180" if name.startswith("tiny") else "cifar10"
            assert found["init"].endswith(f"seed{found['seed']}") and found["dataset"] == images


def test_what_the_grids_hold():
    shapes, bases, cifar = (dict(grids.cells(p)) for p in ("shapes", "bases", "cifar"))
    tier1 = [grids.settings(f) for name, f in cifar.items() if name.startswith("tier1")]
    assert len(shapes) == 19 and len(bases) == 9 and len(tier1) == 3 * (5 + 11 * 3 + 1 + 1 + 2)  # direct, Noise-ARL and their pair have more than three
    attacked = {(s["epochs"], s["attack_epochs"], *s["attack_size"]) for s in tier1}
    assert attacked == {(2, 10, 4, 64)}  # all alike
    patrol = [f for name, f in cifar.items() if "patrol" in name]
    assert len(patrol) == 6 and not any("--init" in f for f in patrol)  # it changes the network
    assert all(f.startswith(grids.scratch("")) for f in patrol) and "scratch-none-sigma0.1-seed0" in cifar
    seeds = lambda family: {name[-1] for name in cifar if name.startswith(family)}
    assert seeds("tier2") == seeds("tier4-gated-mode=documented") == {"0", "1", "2"}
    assert seeds("tier3") == seeds("tier4-gated-mode=adversarial") == {"0"}
    small = [grids.settings(f) for name, f in cifar.items() if name.startswith("tier4-")]
    assert {(s["init"], s["width"]) for s in small} == {(f"w16-seed{n}", 16) for n in range(3)}


def test_shards_cover_the_grid_once_and_only_takes_a_whole_name_alone():
    whole = grids.cells("shapes")
    parts = [grids.cells("shapes", f"{i}/4") for i in (1, 2, 3, 4)]
    assert sorted(sum(parts, [])) == sorted(whole) and len(dict(whole)) == len(whole)
    one = f"tier1-cluster-lambda{POINTS['cluster']:g}-seed0"
    assert [name for name, _ in grids.cells("cifar", only=one)] == [one]
    assert len(grids.cells("cifar", only=f"cluster-lambda{POINTS['cluster']:g}")) > 3
    for shard in ("0/2", "3/2", "x", "1/2/3"):
        sentence(lambda shard=shard: grids.cells("shapes", shard), "--shard")
    sentence(lambda: grids.cells("nothing"), "--preset nothing")
    sentence(lambda: grids.cells("shapes", only="nothing"), "--only nothing")


def test_images_come_from_a_folder_or_from_the_named_data_set(tmp_path):
    named = ["--data-dir", str(tmp_path)]  # torchvision's layout
    assert (
        program.command("--dataset cifar10 --width 16", tmp_path)
        == "--dataset cifar10 --width 16".split() + named
    )
    (tmp_path / "cifar10").mkdir()
    folder = ["--dataset", str(tmp_path / "cifar10"), *named]
    assert program.command("--dataset cifar10", tmp_path) == [
        "--dataset",
        "cifar10",
        *folder,
    ]  # the last counts
    assert program.command("--init BASE/w32-seed0", tmp_path, "a b") == [
        "--init",
        "a b/bases/w32-seed0",
        *folder,
    ]
    sentence(lambda: program.command("--dataset orl-faces", tmp_path), tmp_path / "orl-faces")


# ------------------------------------------------------------------------------------------------ cells


def results(flags, accuracy=0.9, mse=0.02, val_accuracy=None, base=None, attacks=None, **more):
    """What train.py would write for these flags."""
    test = {"mse": mse, "ssim": 0.5, "nmse": 0.1, "psnr": 17.0, "images": 100}
    return {
        "config": {**grids.settings(flags), "processes": 1, "threads": 1},
        "accuracy": accuracy,
        "val_accuracy": accuracy if val_accuracy is None else val_accuracy,
        "attacks": {"decoder": {"test": test}} if attacks is None else attacks,
        "strongest": more.get("strongest", "decoder"),
        "leakage": {"bits": more.get("bits", 100.0), "dfil": 3.0},
        "seconds": {"train": 60.0, "attack": 60.0},
        "base": base,
        "environment": {"command": "python train.py somewhere"},
    }


def put(root, preset, name, **figures):
    path = root / "cells" / preset / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results(dict(grids.cells(preset))[name], **figures)))
    return path


@pytest.fixture
def root(tmp_path):
    blocks = [f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in ("first", "rest")]
    (tmp_path / "RESULTS.md").write_text("above\n" + "between\n".join(blocks) + "below\n")
    return tmp_path


TINY = "--width 2 --bottleneck 2 --train-size 200 --batch-size 64 --epochs 1"


def test_a_base_and_a_cell_that_starts_from_it(root, monkeypatch, capsys):
    """The one test that trains: the settings that the grid expects are those that train.py writes."""
    hardened = (
        f"--init BASE/w16-seed0 {TINY} --lr 0.01 --warmup 0 --attack-epochs 1 --attack-size 1x8 --sigma 0.2"
    )
    monkeypatch.setitem(grids.PRESETS, "bases", lambda: {"w16-seed0": f"{TINY} --attack none --seed 0"})
    monkeypatch.setitem(grids.PRESETS, "cifar", lambda: {"none-sigma0.2-seed0": hardened})
    run = lambda preset: program.run_cells(preset, root / "images", runs_dir=root / "runs", root=root)

    sentence(lambda: run("cifar"), "1 of 1 cells broke")
    assert "w16-seed0 is not trained yet" in capsys.readouterr().out
    run("bases")
    # kept is what --init needs: the weights in half the bytes, and no optimiser
    full, kept = (torch.load(root / of / "w16-seed0/checkpoint.pt") for of in ("runs/bases", "bases"))
    assert {"optimizer", "cels"} <= set(full) - set(kept)
    for name, weight in full["weights"].items():
        assert torch.equal(kept["weights"][name], weight.half() if weight.is_floating_point() else weight)
    run("cifar")
    capsys.readouterr()
    run("cifar")
    assert capsys.readouterr().out == "cifar: 1 of 1 cells were finished already\n"
    for path in [*(root / "cells").rglob("*.json"), *(root / "bases").rglob("*.pt")]:
        assert str(root).encode() not in path.read_bytes(), path  # no folder of this machine
    cell = json.loads((root / "cells/cifar/none-sigma0.2-seed0.json").read_text())
    assert cell["config"]["init"] == "bench/bases/w16-seed0" and cell["config"]["dataset"] == "shapes"
    assert cell["environment"]["command"].startswith("python train.py --init bench/bases/w16-seed0 --width 2")
    # the figures of a base are not enough: the network itself is needed
    shutil.rmtree(root / "bases")
    monkeypatch.setattr(program.subprocess, "run", lambda *a, **k: types.SimpleNamespace(returncode=1))
    sentence(lambda: run("bases"), "1 of 1")


def trainer(monkeypatch, fails=()):
    """train.py replaced by something that writes results at once. -> names of the cells that ran"""
    ran = []

    def run(child, stdout, **_):
        words = child[2:]
        name, runs_dir = words[words.index("--name") + 1], Path(words[words.index("--runs-dir") + 1])
        ran.append(name)
        assert "--overwrite" in words
        if name in fails:
            stdout.write("first line\nthis is why\n\n")
            return types.SimpleNamespace(returncode=2)
        (runs_dir / name).mkdir(parents=True, exist_ok=True)
        own = results(dict(grids.cells(runs_dir.name))[name])
        own["config"].update(data_dir="/machine/data", runs_dir=str(runs_dir))
        (runs_dir / name / "results.json").write_text(json.dumps(own))
        Image.new("RGB", (70 + 80, 16)).save(runs_dir / name / "reconstructions.png")
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(program.subprocess, "run", run)
    return ran


def test_only_what_is_not_finished_runs(root, monkeypatch, capsys):
    ran = trainer(monkeypatch, fails=["gated-seed0"])
    run = lambda **more: program.run_cells("shapes", runs_dir=root / "runs", root=root, only="seed0", **more)
    sentence(run, "1 of 7 cells broke")
    out = capsys.readouterr().out
    assert "0 of 7 cells were finished" in out and "broke: this is why" in out and len(ran) == 7
    assert "/machine" not in (root / "cells/shapes/none-seed0.json").read_text()
    assert (root / "cells/shapes/none-seed0.png").exists() and not (
        root / "cells/shapes/gated-seed0.json"
    ).exists()

    ran = trainer(monkeypatch)
    run()
    assert ran == ["gated-seed0"] and "6 of 7" in capsys.readouterr().out
    # a cell that is broken, or that other defaults made, runs again; one from elsewhere does not
    cells = root / "cells/shapes"
    (cells / "none-seed0.json").write_text('{"accur')
    for name, change in (
        ("gmm-seed0", {"lambd": [9.0]}),
        ("slot-seed0", {"device": "cuda", "data_dir": "/x"}),
    ):
        cell = json.loads((cells / f"{name}.json").read_text())
        cell["config"] |= change
        (cells / f"{name}.json").write_text(json.dumps(cell))
    run(shard="1/1")
    assert ran[1:] == ["none-seed0", "gmm-seed0"]
    out = capsys.readouterr().out
    assert "none-seed0.json: damaged" in out and "gmm-seed0.json: made with other settings" in out


BROKEN = {
    "5": "5",
    "nothing": "",
    "a list": "[]",
    "NaN accuracy": lambda r: {**r, "accuracy": math.nan},
    "infinite error": lambda r: {**r, "attacks": {"decoder": {"test": {"mse": math.inf, "ssim": 0.5}}}},
    "a number too large": lambda r: json.dumps(r).replace("0.02", "1e999"),
    "text for a number": lambda r: {**r, "accuracy": "0.9"},
    "no error": lambda r: {**r, "attacks": {"decoder": {"test": {"mse": None, "ssim": 0.5}}}},
    "another strongest": lambda r: {**r, "strongest": "nobody"},
    "a data set that is a number": lambda r: {**r, "config": {**r["config"], "dataset": 5}},
    "no settings": lambda r: {**r, "config": 5},
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_damaged_cell_is_one_sentence_and_nothing_else_breaks(how, root, capsys):
    good = put(root, "shapes", "none-seed1")
    path = put(root, "shapes", "none-seed0")
    made = BROKEN[how](json.loads(path.read_text())) if callable(BROKEN[how]) else BROKEN[how]
    path.write_text(made if isinstance(made, str) else json.dumps(made))
    assert [r["name"] for r in finished.load_cells("shapes", root)] == ["none-seed1"]
    (said,) = capsys.readouterr().out.splitlines()
    assert str(path) in said and good.exists()
    tables.report(root)
    assert "| noise alone | 90.00 | 0.0200 |" in (root / "RESULTS.md").read_text()


def test_a_missing_figure_is_a_dash_and_copies_are_not_ours(root, capsys):
    path = put(root, "shapes", "none-seed0")
    cell = json.loads(path.read_text())
    cell["leakage"] = {"bits": None, "dfil": math.nan}
    path.write_text(json.dumps(cell))
    for copy in ("none-seed0.json~", "none-seed0 (copy).json", "none-seed7.json", ".none-seed0.json.swp"):
        shutil.copy(path, path.with_name(copy))
    (r,) = finished.load_cells("shapes", root)
    assert tables.figures([r])[-2:] == ["–", "–"] and capsys.readouterr().out == ""


def test_cells_of_one_base_are_paired_or_refused(root):
    name = "tier1-none-sigma0.{}-seed0"
    put(root, "cifar", name.format(1), base={"name": "w16-seed0", "hash": "a"})
    put(root, "cifar", name.format(2), base={"name": "w16-seed0", "hash": "a"})
    assert len(finished.load_cells("cifar", root)) == 2
    put(root, "cifar", name.format(2), base={"name": "w16-seed0", "hash": "b"})
    sentence(lambda: finished.load_cells("cifar", root), "cells/cifar", "different networks")


def test_how_an_attack_would_have_gone_does_not_count_where_there_was_none():
    plain, attacked = results("--attack none"), results("--attack decoder")
    assert grids.made_by(plain, "--attack none --attack-epochs 3") and not grids.made_by(plain, "--sigma 0.3")
    assert not grids.made_by(attacked, "--attack-epochs 3") and not grids.made_by(plain, "--attack decoder")


def test_every_committed_cell_is_what_its_command_makes_today(capsys):
    for path in sorted((finished.ROOT / "cells").glob("*/*.json")):
        grid = dict(grids.cells(path.parent.name))
        assert path.stem in grid, f"{path}: in no grid; remove it"
        assert finished.current_cell(path, grid[path.stem]), capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ the page


def rows_of(table):
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def section(root, title):
    text = (root / "RESULTS.md").read_text()
    return [part for part in text.split("## ") if part.startswith(title)][0]


def table_in(root, title):
    lines = section(root, title).splitlines()
    return {row[0]: row[1:] for row in rows_of("\n".join(line for line in lines if line.startswith("|")))}


def noise(root, preset, family="", seeds=(0,)):
    """Noise alone: 0.01 at 60 %, 0.04 at 50 %, so 0.02 at 55 %."""
    for seed in seeds:
        for sigma, accuracy, mse in ((0.1, 0.6, 0.01), (0.2, 0.5, 0.04)):
            put(root, preset, f"{family}none-sigma{sigma}-seed{seed}", accuracy=accuracy, mse=mse)


def test_the_shapes_table_has_mean_and_deviation_over_seeds_and_the_cost_of_a_step(root):
    for seed, mse in ((0, 0.01), (1, 0.02), (2, 0.03)):
        put(root, "shapes", f"gated-seed{seed}", mse=mse)
    put(root, "shapes", "none-seed0")
    step = {"part": "step", "name": "gated", "what": "gated / plain", "ratio": 1.234}
    (root / "cells/speed.json").write_text(json.dumps({"rows": [step]}))
    tables.report(root)
    rows = table_in(root, "Drawn images")
    assert rows["gated"] == ["90.00 ± 0.00", "0.0200 ± 0.0100", "0.500 ± 0.000", "100 ± 0", "3.00 ± 0.00",
                             "1.23", "3"]  # fmt: skip
    assert rows["noise alone"] == ["90.00", "0.0200", "0.500", "100", "3.00", "1.00", "1"]
    assert "| gated / plain | 1.23 |" in section(root, "Speed")


def test_gain_of_a_setting_is_at_its_own_accuracy_in_its_own_family(root):
    noise(root, "cifar", "tier1-")
    put(root, "cifar", f"tier1-gmm-lambda{MIDDLE:g}-seed0", accuracy=0.55, mse=0.03)
    put(root, "cifar", f"tier1-gated-lambda{POINTS['gated']:g}-seed0", accuracy=0.7)
    tables.report(root)
    rows = table_in(root, "CIFAR-10: every setting")
    assert rows[f"tier1 gmm lambda {MIDDLE:g}"][-2:] == ["1.50", "1"]
    # noise alone does not reach gated's accuracy
    assert rows[f"tier1 gated lambda {POINTS['gated']:g}"][-2] == "–"
    assert rows["tier1 noise alone sigma 0.1"][-2] == "1" and "JPEG" in section(root, "CIFAR-10: every setting")


def test_the_cifar_table_has_the_gain_of_the_point_that_the_rule_takes(root):
    noise(root, "cifar", "tier1-", seeds=(0, 1, 2))
    for seed, factor in ((0, 1.2), (1, 1.4), (2, 9.0)):
        put(root, "cifar", f"tier1-gmm-lambda{HIGH:g}-seed{seed}", accuracy=0.5, mse=0.5)  # no say in it
        if seed < 2:
            put(root, "cifar", f"tier1-gmm-lambda{MIDDLE:g}-seed{seed}", accuracy=0.6, mse=factor * 0.01)
        put(root, "cifar", f"tier1-slot-lambda{POINTS['slot']:g}-seed{seed}", accuracy=0.6, mse=0.03)
    put(root, "cifar", "tier2-dropout-strength0.1-seed0", accuracy=0.55, mse=0.05)
    tables.report(root)
    rows = table_in(root, "CIFAR-10: each method")
    # no interval from two seeds
    assert rows[f"gmm lambda {MIDDLE:g}"][-3:] == [f"{math.sqrt(1.2 * 1.4):.2f}", "1", "2"]
    over_gmm = f"{3 / math.sqrt(1.2 * 1.4):.2f} [2 of 3 seeds]"
    assert rows[f"slot lambda {POINTS['slot']:g}"][-3:] == ["3.00 (3.00 to 3.00)", over_gmm, "3"]
    assert rows["noise alone sigma 0.1"][-3:] == ["1", "–", "3"] and f"gmm lambda {HIGH:g}" not in rows
    # tier 2 stands beside the noise of tier 1, in both tables
    assert rows["dropout strength 0.1"][-3] == "2.50"
    assert table_in(root, "CIFAR-10: every setting")["tier2 dropout strength 0.1"][-2] == "2.50"
    assert all(word in section(root, "CIFAR-10: each") for word in ("JPEG", "figures/curves.png"))


def test_what_each_method_gives_at_equal_cost(root):
    """Against oracles: curves exponential in accuracy, c times as high in error and k times in bits."""
    mse, bits = lambda a: 0.1 * math.exp(-3 * a), lambda a: 9 * math.exp(5 * a)
    for seed, (c, k) in enumerate([(1.2, 0.9), (1.3, 0.8), (1.4, 0.7)]):
        start = 0.8 + seed / 100
        for sigma, a in ((0.1, start), (0.2, start - 0.05)):
            put(root, "cifar", f"tier1-none-sigma{sigma}-seed{seed}", accuracy=a, mse=mse(a), bits=bits(a))
        for value, a in ((LOW, start - 0.009), (HIGH, start - 0.03 + 0.008 * (seed == 0))):
            figures = {"accuracy": a, "mse": c * mse(a), "bits": k * bits(a)}
            put(root, "cifar", f"tier1-gmm-lambda{value:g}-seed{seed}", **figures)
            if seed < 2:
                value = {LOW: 0.8, HIGH: 1.6}[value]
                put(root, "cifar", f"tier1-direct-lambda{value}-seed{seed}", **figures | {"mse": 2 * mse(a)})
    marks = ["gain gmm over noise at 1.5", "gain direct over gmm at 2", "gain gmm over direct at 0.5"]
    marks += [f"cost gmm@lambda{LOW:g}", "cost gmm@lambda9"]  # and one that was not run
    (root / "RESULTS.md").open("a").write("".join(f"**x**<!-- {mark} -->\n" for mark in marks))
    tables.report(root)
    text = section(root, "CIFAR-10: each")
    gains, of_bits = [line.split(" | ")[1:] for line in text.splitlines() if line.startswith("| gmm |")]
    middle, log = math.prod((1.2, 1.3, 1.4)) ** (1 / 3), [math.log(c) for c in (1.2, 1.3, 1.4)]
    half = 4.303 * statistics.stdev(log) / math.sqrt(3)
    interval = f"{middle:.2f} ({middle * math.exp(-half):.2f} to {middle * math.exp(half):.2f})"
    # half a point is before the curves begin, 2.5 behind the end of one of them
    assert gains == ["–", interval, interval, interval, f"{math.sqrt(1.3 * 1.4):.2f} [2 of 3 seeds] |"]
    assert of_bits[0] == "–" and of_bits[1].startswith(f"{math.prod((0.9, 0.8, 0.7)) ** (1 / 3):.2f} (")
    assert of_bits[-1] == f"{math.sqrt(0.8 * 0.7):.2f} [2 of 3 seeds] |"
    prose = (interval, f"{2 / math.sqrt(1.2 * 1.3):.2f}", "–", "0.9 ± 0.0", "x")
    end = "".join(f"**{number}**<!-- {mark} -->\n" for number, mark in zip(prose, marks))
    assert (root / "RESULTS.md").read_text().endswith(end)


def test_the_strongest_attacker_is_the_one_chosen_on_the_stop_images(root):
    """gan was the strongest there; here it is not, and is shown all the same, on the images all have seen."""
    both = {"decoder": {"test": {"mse": 0.01, "mse_common": 0.011, "ssim": 0.9, "ssim_common": 0.8}},
            "gan": {"test": {"mse": 0.02, "mse_common": 0.022, "ssim": 0.7, "ssim_common": 0.6}}}  # fmt: skip
    path = put(root, "shapes", "none-seed0", attacks=both, strongest="gan")
    assert tables.figures([finished.read_cell(path)])[1:3] == ["0.0220", "0.600"]
    assert tables.figures([finished.read_cell(path)], tables.EACH) == ["0.0110", "0.0220", "–"]


def test_the_report_is_the_same_byte_for_byte_and_leaves_the_rest_of_the_page(root):
    noise(root, "cifar", "tier1-")
    name = put(root, "shapes", "none-seed0")
    Image.effect_noise((70 + 80, 16), 50).convert("RGB").save(name.with_suffix(".png"))
    tables.report(root)
    first = {p: p.read_bytes() for p in [root / "RESULTS.md", *(root / "figures").iterdir()]}
    tables.report(root)
    assert {p: p.read_bytes() for p in first} == first and root / "figures/shapes.png" in first
    text = first[root / "RESULTS.md"].decode()
    assert text.startswith("above\n<!-- first -->") and text.endswith("<!-- /rest -->\nbelow\n")
    assert "<!-- /first -->\nbetween\n<!-- rest -->" in text and "old" not in text
    assert text.index("CIFAR-10: each") < text.index("between") < text.index("CIFAR-10: every")
    shutil.rmtree(root / "cells")
    tables.report(root)  # sections go with their cells
    assert (
        "No cell has been run" in (root / "RESULTS.md").read_text()
        and "##" not in (root / "RESULTS.md").read_text()
    )
    (root / "RESULTS.md").write_text("no markers")
    sentence(lambda: tables.report(root), "<!-- first -->")


def test_the_committed_pages_are_what_their_cells_make(tmp_path):
    """The numbers in RESULTS.md below its line and in README's first table and sentence come from cells."""
    root = tmp_path / "bench"
    root.mkdir()
    if (finished.ROOT / "cells").exists():
        shutil.copytree(finished.ROOT / "cells", root / "cells")
    shutil.copy(finished.ROOT / "RESULTS.md", root)
    for name in ("README.md", "README.zh.md"):
        shutil.copy(finished.ROOT.parent / name, tmp_path)
    tables.report(root)
    for page in (root / "RESULTS.md", tmp_path / "README.md", tmp_path / "README.zh.md"):
        committed = finished.ROOT.parent / page.relative_to(tmp_path)
        assert page.read_bytes() == committed.read_bytes(), "run python -m bench report"


def test_readme_says_what_to_expect_of_all_runs_of_its_command(tmp_path):
    root, page = tmp_path / "bench", tmp_path / "README.md"
    page.write_text("<!-- table -->\nold\n<!-- /table -->\n<!-- expect -->\n<!-- /expect -->\n")
    tables.fill_readme(page, [], [], [])
    assert "old" in page.read_text()  # no cell, no change
    put(root, "shapes", "gated-seed0", accuracy=0.991, mse=0.02)
    put(root, "shapes", "gated-seed1", accuracy=0.995, mse=0.01)
    put(root, "shapes", "none-seed0", accuracy=0.999, mse=0.005)
    put(root, "again", "gated-seed0", accuracy=0.985, mse=0.012)
    noise(root, "cifar", "tier1-")
    put(root, "cifar", f"tier1-gmm-lambda{MIDDLE:g}-seed0", accuracy=0.55, mse=0.03)
    tables.fill_readme(page, *(finished.load_cells(preset, root) for preset in ("cifar", "shapes", "again")))
    text = page.read_text()
    assert "98.5 to 99.5 %" in text and "0.010 to 0.020" in text and "(0.005 without a loss; 3 runs" in text
    assert "old" not in text
    assert "| noise alone sigma 0.1 | 60.00 | 0.0100 | 1 | 1 |" in text
    assert f"| gmm lambda {MIDDLE:g} | 55.00 | 0.0300 | 1.50 | 1 |" in text


def test_a_gain_in_prose_is_that_of_the_cells(tmp_path):
    root, page = tmp_path / "bench", tmp_path / "page.md"
    noise(root, "cifar", "tier1-", seeds=(0, 1, 2))
    for seed, mse in ((0, 0.03), (1, 0.02), (2, 0.04 / 3)):
        put(root, "cifar", f"tier1-gmm-lambda{MIDDLE:g}-seed{seed}", accuracy=0.55, mse=mse)
        put(root, "cifar", f"tier1-slot-lambda{POINTS['slot']:g}-seed{seed}", accuracy=0.6, mse=mse)
    page.write_text("a **x**<!-- gain gmm over noise -->, **y** and **z**<!-- gain slot over gmm -->")
    tables.fill_prose(page, finished.load_cells("cifar", root))
    factor = math.exp(4.303 * math.log(1.5) / math.sqrt(3))  # the seeds' gains are 1.5, 1 and 1/1.5
    shown = f"1.00 ({1 / factor:.2f} to {factor:.2f})"
    slot = "**2.00 (2.00 to 2.00)**<!-- gain slot over gmm -->"
    assert page.read_text() == f"a **{shown}**<!-- gain gmm over noise -->, **y** and {slot}"


def test_bits_in_prose_are_those_of_noise_alone_over_a_methods_own_at_equal_accuracy(tmp_path):
    root, page = tmp_path / "bench", tmp_path / "page.md"
    for sigma, accuracy, bits in ((0.1, 0.8, 400.0), (0.2, 0.6, 100.0)):
        put(root, "cifar", f"tier1-none-sigma{sigma}-seed0", accuracy=accuracy, bits=bits)
    put(root, "cifar", f"tier1-direct-lambda{POINTS['direct']:g}-seed0", accuracy=0.7, bits=250.0)
    page.write_text("**x**<!-- bits direct over noise -->")
    tables.fill_prose(page, finished.load_cells("cifar", root))
    assert page.read_text() == "**0.80**<!-- bits direct over noise -->"  # √(400·100) / 250


def test_a_gain_against_a_stronger_attacker_is_that_of_its_family(tmp_path):
    root, page, direct = tmp_path / "bench", tmp_path / "page.md", f"direct-lambda{POINTS['direct']:g}"
    put(root, "cifar", f"tier1-{direct}-seed0", accuracy=0.7, mse=0.09)
    put(root, "cifar", f"tier1-{direct}-seed1", accuracy=0.7, mse=0.5)
    put(root, "cifar", "tier1-none-sigma0.15-seed1", accuracy=0.7, mse=0.1)
    for sigma, accuracy, mse in ((0.15, 0.8, 0.01), (0.2, 0.6, 0.04)):
        put(root, "cifar", f"tier1-none-sigma{sigma}-seed0", accuracy=accuracy, mse=2 * mse)
        put(root, "cifar", f"tier3epochs20-none-sigma{sigma}-seed0", accuracy=accuracy, mse=mse)
    put(root, "cifar", f"tier3epochs20-{direct}-seed0", accuracy=0.7, mse=0.03)
    put(root, "cifar", f"tier1-direct-lambda0.4-seed0", accuracy=0.65, mse=0.9)  # does not stand for direct
    put(root, "cifar", "tier2-dropout-strength0.1-seed0", accuracy=0.8, mse=0.05)  # beside tier 1's noise
    put(root, "cifar", "tier2-dropout+slot_image-lambda0.6-seed0", accuracy=0.8, mse=0.06)
    marks = [f"{m} over noise in tier3epochs20" for m in ("direct", "slot_image")] + ["dropout over noise in tier2"]
    marks += [f"direct@lambda{POINTS['direct']:g} over noise of seed 0", "direct over noise of seed 1"]
    marks += ["dropout+slot_image over dropout in tier2", "direct@lambda0.4 over direct of seed 0"]
    page.write_text(" ".join(f"**x**<!-- gain {mark} -->" for mark in marks))
    tables.fill_prose(page, finished.load_cells("cifar", root))
    # 0.03 / √(0.01·0.04), nothing, 0.05 / 0.02, 0.09 / √(0.02·0.08), 0.5 / 0.1, 0.06 / 0.05,
    # and (0.9 / noise at 65 %) / (0.09 / noise at 70 %), which are 0.08 / √2 and 0.04
    shown = zip(("1.50", "–", "2.50", "2.25", "5.00", "1.20", f"{10 / 2**0.5:.2f}"), marks)
    assert page.read_text() == " ".join(f"**{number}**<!-- gain {mark} -->" for number, mark in shown)


def test_every_grid_but_the_bases_has_a_section(root):
    for preset in grids.PRESETS:
        put(root, preset, grids.cells(preset)[0][0])
    tables.report(root)
    text = (root / "RESULTS.md").read_text()
    assert all(f"--preset {preset}`" in text for preset in grids.PRESETS if preset != "bases")


def test_without_matplotlib_a_sentence_says_so_and_the_page_is_the_same(root, monkeypatch, capsys):
    noise(root, "cifar", "tier1-")
    tables.report(root)
    before = (root / "RESULTS.md").read_bytes()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    capsys.readouterr()
    tables.report(root)
    assert "pip install matplotlib" in capsys.readouterr().out
    assert (root / "RESULTS.md").read_bytes() == before


# ------------------------------------------------------------------------------------------------ compare


def make_run(folder, flags, colours, size=8, **figures):
    """runs/NAME with a sheet of two rows: originals in one colour, the decoder's in another."""
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results(flags, **figures)))
    sheet = Image.new("RGB", (70 + 10 * size, 2 * size), "white")
    for i, colour in enumerate(colours):
        sheet.paste(colour, (70, i * size, 70 + 10 * size, (i + 1) * size))
    sheet.save(folder / "reconstructions.png")
    return str(folder)


def colours_of(path):
    with Image.open(path) as sheet:
        return [sheet.convert("RGB").getpixel((sheet.width - 4, y)) for y in range(4, sheet.height, 8)]


def test_compare_prints_one_table_and_draws_one_picture(tmp_path, capsys):
    red, green, blue, grey = (255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 9, 9)
    a = make_run(tmp_path / "a", "--sigma 0.1", (red, green))
    b = make_run(tmp_path / "b", "--surrogate gated --sigma 0.2", (red, blue), accuracy=0.8, mse=0.03)
    assert program.main(["compare", a, b, "--out", str(tmp_path)]) == 0
    head, first, second, last = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "run" and first.split()[:3] == ["a", "90.00", "0.0200"]
    assert (
        second.split()[:3] == ["b", "80.00", "0.0300"]
        and "surrogate gated" in second
        and "sigma 0.2" in second
    )
    assert "surrogate none" in first and "epochs" not in first and "compare.png" in last
    assert colours_of(tmp_path / "compare.png") == [
        red,
        green,
        blue,
    ]  # one row of originals, then a row a run
    # other originals are shown again, larger pictures made smaller
    c = make_run(tmp_path / "c", "--sigma 0.1", (grey, green), size=16)
    assert program.main(["compare", a, b, c, "--out", str(tmp_path)]) == 0
    assert colours_of(tmp_path / "compare.png") == [red, green, blue, grey, green]


def test_the_picture_compares_each_method_near_the_accuracy_of_one_noise_level(root):
    red, green, blue, grey = (255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 9, 9)
    runs = {"none-sigma0.15": (0.6, grey), "none-sigma0.2": (0.5, green)}
    runs |= {f"gmm-lambda{LOW:g}": (0.55, grey), f"gmm-lambda{MIDDLE:g}": (0.48, blue)}
    for name, (accuracy, colour) in runs.items():
        path = put(root, "cifar", f"tier1-{name}-seed0", accuracy=accuracy)
        make_run(root / name, "--sigma 0.1", (red, colour))
        shutil.copy(root / name / "reconstructions.png", path.with_suffix(".png"))
    tables.report(root)
    assert colours_of(root / "figures/equal_accuracy.png") == [red, green, blue]
    assert colours_of(root / "figures/readme.png") == [red, green, blue]
    assert "figures/equal_accuracy.png" in section(root, "CIFAR-10: each")


def test_the_error_against_the_attackers_compute_has_a_line_for_methods_with_two_budgets(root, monkeypatch):
    lines, picture = {}, pytest.importorskip("matplotlib.axes").Axes

    def errorbar(self, x, y, *a, label=None, **k):
        lines.update({label: (x, y)} if "operations" in self.get_xlabel() and x else {})

    monkeypatch.setattr(picture, "errorbar", errorbar)
    monkeypatch.setattr(picture, "legend", lambda self, **k: None)
    error = lambda cost, mse: {"decoder": {"operations": cost, "test": {"mse": mse, "ssim": 0.5}}}
    none, gmm = f"none-sigma{POINTS['none']}-seed0", f"gmm-lambda{POINTS['gmm']}-seed0"
    for name, attacks in {
        f"tier1-{none}": error(200, 0.03),
        "tier1-none-sigma0.3-seed0": error(200, 0.09),  # not the point of its method
        f"tier3size8x64-{none}": error(900, 0.01),
        f"tier3epochs20-{none}": error(400, 0.02),
        f"tier3looks10-{none}": error(300, 0.001),  # sees more, does not compute more
        f"tier1-{gmm}": error(200, 0.05),  # one budget is no line
    }.items():
        put(root, "cifar", name, attacks=attacks)
    tables.report(root)
    assert lines == {"noise alone, sigma 0.2": ([200, 400, 900], [0.03, 0.02, 0.01])}
    assert "figures/attackers.png" in section(root, "CIFAR-10: each")


def test_compare_says_what_is_wrong_in_one_sentence(tmp_path, capsys):
    a = make_run(tmp_path / "a", "--sigma 0.1", ((0, 0, 0), (1, 1, 1)))
    assert program.main(["compare", a, str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "a" / "reconstructions.png").write_bytes(b"no picture")
    assert program.main(["compare", a, "--out", str(tmp_path)]) == 2
    assert "reconstructions.png" in capsys.readouterr().err
    (tmp_path / "a" / "results.json").write_text(
        json.dumps(results("--sigma 0.1", attacks={}, strongest=None))
    )
    assert program.main(["compare", a, "--out", str(tmp_path)]) == 0
    assert "no picture" in capsys.readouterr().out
    assert program.main(["compare"]) == 2 and program.main(["report", a]) == 2


def test_list_into_head_ends_quietly():
    command = f"{sys.executable} -m bench list --preset cifar | head -1"
    done = subprocess.run(command, shell=True, cwd=HERE, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and "python train.py --init bench/bases/w32-seed0" in done.stdout
    assert done.stderr == ""


# ------------------------------------------------------------------------------------------------ speed

SMALL = {"batch": 16, "steps": 1, "flags": "--width 2", "images": 32, "kmeans": (90, 8, 3, 2)}


def test_every_ratio_is_measured(tmp_path, capsys, monkeypatch):
    medians = speed.medians
    monkeypatch.setattr(speed, "medians", lambda contenders, turns: medians(contenders, 1))
    speed.run(size=SMALL, root=tmp_path)
    found = finished.speed_rows(tmp_path)
    names = [(r["part"], r["name"]) for r in found if r["part"] != "kmeans"]  # scikit-learn is optional
    plugged = ("dropout", "dropout+slot_image", "distcorr", "distcorr+slot_image", "noise_arl+slot_image")
    steps = [*list(grids.METHODS)[1:], *plugged, "gated with memory"]  # so all have a cost
    others = [("stash", "stash"), ("refresh", "gmm"), ("refresh", "cluster"), ("batches", "batches")]
    assert names == [*(("step", name) for name in steps), *others]
    assert all(
        r["ratio"] == pytest.approx(r["seconds"][0] / r["seconds"][1]) and r["ratio"] > 0 for r in found
    )
    printed = capsys.readouterr().out
    assert all(f"{r['what']}: {r['ratio']:.2f}" in printed for r in found)


def test_a_part_alone_leaves_the_others_and_a_missing_package_is_a_sentence(tmp_path, capsys, monkeypatch):
    rows = [
        {"part": part, "name": part, "what": part, "ratio": 1.0, "seconds": [1, 1]}
        for part in ("step", "kmeans")
    ]
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells/speed.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    speed.run("kmeans", SMALL, tmp_path)
    assert finished.speed_rows(tmp_path) == rows[:1] and "kmeans is not measured" in capsys.readouterr().out
    with pytest.raises(UserError, match="--only nothing"):
        speed.run("nothing", SMALL, tmp_path)


def test_our_kmeans_and_scikit_learn_do_the_same_work():
    pytest.importorskip("sklearn")
    ((_, _, ours, theirs, _),) = speed.kmeans({**SMALL, "kmeans": (300, 16, 3, 2)})
    assert ours() == pytest.approx(theirs(), rel=1e-3)


def test_medians_are_taken_in_turns_behind_one_turn_to_warm_up():
    order = []
    assert len(speed.medians([lambda: order.append("a"), lambda: order.append("b")], turns=2)) == 2
    assert order == ["a", "b"] * 3
