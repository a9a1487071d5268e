"""Gain at equal accuracy on curves with a known answer, and the grid's bookkeeping."""

import json
import math
import random
import re
import statistics
import sys
import types

import pytest

import bench
import gain
import tables
from options import parse
from report import UserError


def curve(k, accuracies):
    """MSE falls exponentially with accuracy, k times as high as for k = 1."""
    return [(a, k * math.exp(-3 * a)) for a in accuracies]


def test_gain_of_a_curve_k_times_as_high_is_k():
    a, b = curve(1.3, [0.5, 0.6, 0.72, 0.9]), curve(1.0, [0.45, 0.61, 0.7, 0.85])
    assert gain.gain(a, b) == pytest.approx(1.3, rel=1e-9)
    assert gain.gain(b, a) == pytest.approx(1 / 1.3, rel=1e-9)
    assert gain.gain(a, a) == pytest.approx(1, abs=1e-12)


def test_gain_is_the_mean_log_ratio():
    """Two straight lines in log MSE that cross in the middle of the shared range have gain 1; tilted, the known mean."""
    assert gain.gain([(0.4, 4.0), (0.6, 1.0)], [(0.4, 3.0), (0.6, 4 / 3 * 0.999999)]) == pytest.approx(1, rel=1e-5)
    # ratio goes from 1 to 4 linearly in the log: the mean is its square root, 2
    assert gain.gain([(0.0, 8.0), (1.0, 4.0)], [(0.0, 8.0), (1.0, 1.0)]) == pytest.approx(2, rel=1e-9)


def test_beaten_points_and_order_do_not_count():
    points = curve(1.2, [0.5, 0.7, 0.9])
    worse = points + [(0.6, 1e-3), (0.5, 0.01)]
    random.Random(0).shuffle(worse)
    assert gain.front(worse) == sorted(points)
    assert gain.gain(worse, curve(1, [0.5, 0.9])) == pytest.approx(1.2, rel=1e-9)


def test_single_points_and_curves_that_never_meet():
    assert gain.gain([(0.7, 0.03)], curve(0.1, [0.6, 0.8])) == pytest.approx(0.03 / (0.1 * math.exp(-2.1)), rel=1e-9)
    assert gain.gain(curve(1, [0.1, 0.2]), curve(1, [0.5, 0.6])) is None


def test_interval_over_seeds():
    a = {s: curve(k, [0.5, 0.9]) for s, k in enumerate((1.2, 1.3, 1.4))}
    b = {s: curve(1, [0.5, 0.9]) for s in range(3)}
    mean, low, high, n = gain.gain_interval(a, b)
    middle, factor = (1.2 * 1.3 * 1.4) ** (1 / 3), math.exp(4.303 * statistics.stdev(map(math.log, (1.2, 1.3, 1.4))) / math.sqrt(3))
    assert (mean, low, high, n) == (pytest.approx(middle), pytest.approx(middle / factor), pytest.approx(middle * factor), 3)
    assert gain.gain_interval(b, a)[:3] == (pytest.approx(1 / mean), pytest.approx(1 / high), pytest.approx(1 / low))
    assert gain.gain_interval({0: a[0]}, b)[1:] == (None, None, 1)


def test_shards_cover_the_grid_once():
    whole = bench.cells("shapes")
    parts = [bench.cells("shapes", f"{i}/4") for i in (1, 2, 3, 4)]
    assert sorted(sum(parts, [])) == sorted(whole) and len({name for name, _ in whole}) == len(whole) == 16
    for shard in ("0/2", "3/2", "x"):
        with pytest.raises(UserError, match="--shard"):
            bench.cells("shapes", shard)
    with pytest.raises(UserError, match="--preset"):
        bench.cells("nothing")


def test_only_a_whole_name_takes_that_cell_alone():
    """distcorr_cluster-lambda0.4-seed0 contains the name too."""
    assert [name for name, _ in bench.cells("cpu", only="cluster-lambda0.4-seed0")] == ["cluster-lambda0.4-seed0"]
    assert len(bench.cells("cpu", only="cluster-lambda0.4")) == 12 and len(bench.cells("cpu", only="cluster-lambda0.4-seed0", shard="2/2")) == 0


def test_pictures_are_labelled_by_method_and_noise():
    labels = {"none-sigma0.1-seed0": "none\nsigma 0.1", "gated-lambda2-seed0": "gated", "noise_arl_cluster-lambda0.2-seed0": "noise_arl\n+ cluster"}
    assert {name: tables.picture_label(name) for name in labels} == labels


def test_every_curve_has_a_row():
    assert sorted(bench.CURVES) == sorted(tables.METHODS)


def test_every_cell_of_every_preset_is_a_command_that_train_takes():
    for preset in bench.PRESETS:
        for name, flags in bench.cells(preset):
            args = parse(flags.split())
            assert f"seed{args.seed}" in name.split("-")
            assert args.surrogate in re.split("[-+_]", name) or args.surrogate == "none"


TINY = ("--width 4 --bottleneck 2 --train-size 200 --batch-size 64 --epochs 2 --warmup 1 --attack-epochs 1 --attack-blocks 1 --attack-channels 8 "
        "--surrogate {}")


def test_run_resume_and_report_on_two_tiny_cells(tmp_path, monkeypatch, capsys):
    results = tmp_path / "results"
    monkeypatch.setitem(bench.PRESETS, "shapes", lambda: {f"{s}-seed0": TINY.format(s) for s in ("none", "gated")})
    assert bench.run_cells("shapes", runs_dir=tmp_path / "runs", results=results) == 0
    before = {p.name: p.stat().st_mtime_ns for p in (results / "shapes").iterdir()}
    assert sorted(before) == ["gated-seed0.json", "gated-seed0.png", "none-seed0.json", "none-seed0.png"]
    assert str(tmp_path) not in (results / "shapes" / "none-seed0.json").read_text()  # no path of the machine
    assert json.loads((results / "shapes" / "none-seed0.json").read_text())["config"]["dataset"] == "shapes"

    # a finished cell is never run again; a broken one is
    (results / "shapes" / "gated-seed0.json").write_text('{"accur')
    assert bench.run_cells("shapes", runs_dir=tmp_path / "runs", results=results) == 0
    assert (results / "shapes" / "none-seed0.json").stat().st_mtime_ns == before["none-seed0.json"]
    assert tables.finished(results / "shapes" / "gated-seed0.json", TINY.format("gated"))

    # nor does a cell count that another command made
    monkeypatch.setitem(bench.PRESETS, "shapes", lambda: {f"{s}-seed0": TINY.format(s) + " --sigma 0.2" for s in ("none", "gated")})
    monkeypatch.setattr(bench.subprocess, "run", lambda *a, **k: types.SimpleNamespace(returncode=1))
    assert bench.run_cells("shapes", runs_dir=tmp_path / "runs", results=results) == 2

    # the report is made from the cells alone
    monkeypatch.setattr(bench.subprocess, "run", lambda *a, **k: pytest.fail("the report must not train"))
    readme = tmp_path / "README.md"
    readme.write_text("above\n<!-- shapes -->\nold\n<!-- /shapes -->\nbelow\n")
    tables.report(results, readme)
    text = readme.read_text()
    cell = json.loads((results / "shapes" / "gated-seed0.json").read_text())
    assert "old" not in text and text.startswith("above") and text.endswith("below\n")
    assert f"| gated | {100 * cell['accuracy']:.2f} | {cell['attacks']['decoder']['test']['mse']:.4f} |" in text
    from PIL import Image
    with Image.open(results / "first-screen.png") as sheet, Image.open(results / "shapes" / "gated-seed0.png") as own:
        assert sheet.height == own.height // 2 * 3
        assert sheet.crop((70, 192, 166, 288)).tobytes() == own.crop((70, 96, 166, 192)).tobytes()


def test_a_cell_made_under_other_defaults_is_not_finished(tmp_path):
    def made(flags, **other):
        (tmp_path / "c.json").write_text(json.dumps({"accuracy": 0.5, "environment": {"command": f"python train.py {flags}"}, "config": {**vars(parse(flags.split())), **other}}))
        return tables.finished(tmp_path / "c.json", flags)
    assert made("--surrogate gated") and made("--surrogate gated", out="elsewhere", device="cuda") and made("--sigma 0.2", lambd=9.0)
    assert not made("--surrogate gated", lambd=9.0) and not made("--sigma 0.2", attack_epochs=2)


def test_every_committed_cell_is_what_its_command_makes_today():
    """Not the numbers, which take hours, but the settings: a changed default leaves no stale cell behind."""
    for preset in bench.PRESETS:
        grid = dict(bench.cells(preset))
        for path in sorted((tables.RESULTS / preset).glob("*.json")):
            assert path.stem in grid and tables.finished(path, grid[path.stem]), f"{preset}/{path.stem}: run it again or remove it"


def test_a_broken_cell_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench.PRESETS, "shapes", lambda: {"bad": "--sigma -1"})
    assert bench.run_cells("shapes", runs_dir=tmp_path, results=tmp_path / "results") == 1
    assert "--sigma" in capsys.readouterr().out and not (tmp_path / "results").exists()


def test_rank_correlation():
    assert tables.spearman([1, 2, 3, 4], [10, 100, 1000, 10000]) == pytest.approx(1)
    assert tables.spearman([1, 2, 3, 4], [9, 7, 5, 1]) == pytest.approx(-1)
    # d = (0, −1, 1, −1, 1): 1 − 6·4 / (5·24)
    assert tables.spearman([1, 2, 3, 4, 5], [1, 3, 2, 5, 4]) == pytest.approx(0.8)
    # ties share the mean rank: ranks (0, 1.5, 1.5, 3) and (0, 1, 2, 3)
    assert tables.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def cell(bits, errors, accuracy=0.9):
    attacks = {name: {"test": {"mse": e + 1, "mse_common": e, "nmse": e, "ssim": 0.5, "images": 64}} for name, e in errors.items()}
    return {"accuracy": accuracy, "leakage": {"bits": bits, "stderr": 0.5}, "attacks": attacks, "strongest": {"test": min(errors, key=errors.get)}}


def test_audit_table_ranks_bits_against_the_strongest_attacker():
    found = {"a-seed0": cell(10, {"decoder": 0.03, "gan": 0.04, "whitebox": 0.05}), "b-seed0": cell(30, {"decoder": 0.02, "gan": 0.01}),
             "c-seed0": cell(20, {"decoder": 0.09, "gan": 0.08, "whitebox": 0.02})}
    text = tables.audit_table(found)
    assert [line.split(" | ")[0] for line in text.splitlines()[2:5]] == ["| b", "| c", "| a"]  # by falling bits
    assert "| 0.0200 | 0.0100 | – | 0.0100 (gan) |" in text and "0.0200 (whitebox)" in text
    assert "over these 3 settings: -1.00" in text


def test_strength_table_has_a_row_an_attacker():
    text = tables.strength_table({"x-seed0": cell(1, {"decoder": 0.004, "whitebox": 0.001})})
    assert text.splitlines()[2:] == ["| x | decoder | 1.0040 | 0.0040 | 0.004 | 0.500 | 64 |", "| x | whitebox | 1.0010 | 0.0010 | 0.001 | 0.500 | 64 |"]


def run_at(seed, accuracy, mse, bits=50, common=None):
    """A cell; with `common`, one whose strongest of two attackers is the gan, at that error."""
    r = {"config": {"seed": seed}, "accuracy": accuracy, "attacks": {"decoder": {"test": {"mse": mse, "mse_common": mse, "ssim": 0.5}}},
         "leakage": {"bits": bits}, "strongest": {"test": "decoder"}}
    if common is not None:
        r["attacks"]["gan"], r["strongest"] = {"test": {"mse": 9.0, "mse_common": common, "ssim": 0.4}}, {"test": "gan"}
    return r


def rows_of(table):
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


NOISE = {f"none-sigma{v}-seed{seed}": run_at(seed, accuracy, mse) for seed in (0, 1) for v, accuracy, mse in ((1, 0.6, 0.01), (2, 0.5, 0.04))}  # 0.02 at 0.55


def test_points_table_measures_each_point_against_noise_at_its_own_accuracy():
    found = {"cluster-K=1-seed0": run_at(0, 0.55, 0.03, common=0.025), "slot-off=a,b-seed0": run_at(0, 0.6, 0.01), "slot-off=a,b-seed1": run_at(1, 0.6, 0.02),
             "gated-x=1-seed0": run_at(0, 0.7, 0.01)}
    rows = rows_of(tables.points_table(found, tables.curves(NOISE)["none"]))
    assert rows[0] == ["cluster-K=1", "0.0250", "55.0", "0.0300", "1.50", "50", "1"]
    assert rows[1][0] == "slot-off=a,b" and rows[1][4].startswith("1.41 (") and rows[1][6] == "2"
    assert rows[2][4] == "–"  # noise alone does not reach its accuracy
    found["cluster-K=1-seed1"] = run_at(1, 0.3, 0.1)
    assert rows_of(tables.points_table(found, tables.curves(NOISE)["none"]))[0][4] == "1.50 [1 of 2 seeds]"


def test_results_table_shows_what_several_attackers_met():
    found = {**NOISE, "none-sigma2-seed0": run_at(0, 0.5, 0.04, common=0.035), "gated-lambda3-seed0": run_at(0, 0.55, 0.024, common=0.02),
             "gated-lambda3-seed1": run_at(1, 0.55, 0.028, common=0.03), "gated-lambda9-seed0": run_at(0, 0.5, 0.05)}
    del found["none-sigma2-seed1"]
    found["none-sigma3-seed1"] = run_at(1, 0.5, 0.04)
    rows = rows_of(tables.results_table(found, {"gated": 1.234}))
    assert rows[0] == ["none", "sigma2", "50.0", "0.0400", "0.0350 (gan)", "0.500", "50", "1", "1", "1"]
    assert rows[1][:5] == ["gated", "lambda3", "55.0 ± 0.0", "0.0260 ± 0.0028", "0.0250 ± 0.0071 (gan)"]
    factor = math.exp(12.706 * math.log(1.4 / 1.2) / 2)  # for two values t·std/√2 is t/2 of their distance
    assert rows[1][7:] == ["1.23", f"{math.sqrt(1.2 * 1.4):.2f} ({math.sqrt(1.2 * 1.4) / factor:.2f} to {math.sqrt(1.2 * 1.4) * factor:.2f})", "2"] and len(rows) == 2


def test_gain_table_compares_whole_curves():
    found = {**NOISE, "cluster-lambda1-seed0": run_at(0, 0.6, 0.013, bits=20), "cluster-lambda2-seed0": run_at(0, 0.5, 0.052, bits=5), "cluster-lambda1-seed1": run_at(1, 0.55, 9.0),
             "gated-lambda1-seed0": run_at(0, 0.6, 0.026), "gated-lambda2-seed0": run_at(0, 0.5, 0.104)}
    rows = rows_of(tables.gain_table(found))
    assert rows[1] == ["cluster", "50.0: 0.0520, 60.0: 0.0130", "1.30", "–", "1", "2.50", "1"]  # seed 1 did not run both settings; noise alone has 50 bits at both, so its front is 60 %: 50 / 20
    assert rows[2][2:] == ["2.60", "–", "2.00", "1.00", "1"]


def test_the_mean_curve_takes_the_seeds_that_ran_every_setting():
    by_seed = {0: [(0.6, 0.01), (0.5, 0.04)], 1: [(0.7, 0.03), (0.4, 0.02)], 2: [(0.1, 9.0)]}
    assert tables.mean_points(by_seed) == [(pytest.approx(0.65), pytest.approx(0.02)), (pytest.approx(0.45), pytest.approx(0.03))]


def test_ablations_stand_below_the_unchanged_setting_and_beside_noise_behind_the_same_cut():
    reference = {**NOISE, "cluster-lambda2-seed0": run_at(0, 0.55, 0.03, common=0.03), "cluster-lambda3-seed0": run_at(0, 0.5, 1.0)}
    found = {"cluster-clusters=8-seed0": run_at(0, 0.55, 0.024), "cluster-form=lin,lambd=8-seed0": run_at(0, 0.55, 0.02), "cluster-cut=3-seed0": run_at(0, 0.55, 0.03),
             "none-cut=3,sigma=0.1-seed0": run_at(0, 0.6, 0.005), "none-cut=3,sigma=0.2-seed0": run_at(0, 0.5, 0.02), "none-cut=1,sigma=0.2-seed0": run_at(0, 0.5, 9.0)}
    by_topic = {topic: rows_of(table) for topic, table in tables.ablation_tables(found, reference).items()}
    assert list(by_topic) == ["form", "clusters", "depth"]
    assert [row[:2] + [row[4]] for row in by_topic["form"]] == [["cluster", "nothing", "1.50"], ["cluster", "form=lin,lambd=8", "1.00"]]
    assert by_topic["form"][1][-1] == "0.67" and by_topic["clusters"][1][-1] == "0.80"
    assert by_topic["clusters"][1][4] == "1.20"
    assert [row[:2] + [row[4]] for row in by_topic["depth"]] == [
        ["none", "cut=3,sigma=0.1", "1.00"], ["none", "cut=3,sigma=0.2", "1.00"], ["none", "cut=1,sigma=0.2", "1.00"],
        ["cluster", "nothing", "1.50"], ["cluster", "cut=3", "3.00"]]


def test_datasets_are_compared_with_their_own_noise():
    found = {f"{d}-{name}": {**r, "attacks": {"decoder": {"test": {"mse": scale * point, "mse_common": 0.0}}}} for d, scale in (("a", 1), ("b", 2))
             for name, r in {**NOISE, "slot-seed0": run_at(0, 0.55, 0.03)}.items() for point in [r["attacks"]["decoder"]["test"]["mse"]]}
    rows = rows_of(tables.datasets_table(found))
    assert [row[:2] + [row[4]] for row in rows if row[1] == "slot"] == [["a", "slot", "1.50"], ["b", "slot", "1.50"]] and len(rows) == 6


def test_every_ablation_has_a_topic():
    knobs = [knob for topic in tables.TOPICS.values() for knob in topic]
    for name, _ in bench.cells("ablations"):
        assert name.split("-", 1)[1].split("=")[0] in knobs, name


def test_curves_are_drawn_or_it_is_said_why_not(tmp_path, capsys, monkeypatch):
    by_method = {"none": {0: [(0.5, 0.04), (0.6, 0.01)]}, "gmm": {0: [(0.55, 0.03)]}}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    tables.draw_curves(by_method, tmp_path / "curves.png")
    assert "pip install matplotlib" in capsys.readouterr().out and not (tmp_path / "curves.png").exists()
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    tables.draw_curves(by_method, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_report_has_a_table_for_every_grid_that_is_run(tmp_path):
    """One cell in each: every table is filled, and nothing else of the page changes."""
    ran = [name for name in bench.PRESETS if name != "paper"]
    whole = {**run_at(0, 0.5, 0.02, common=0.01), "cel": {"active_share": None, "grad_ratio": None}, "encoder": {"flops": 1e6}}
    whole["leakage"]["stderr"] = 1.0
    for measured in whole["attacks"].values():
        measured["test"] |= {"nmse": 0.1, "images": 64}
    from PIL import Image
    for preset in ran:
        (tmp_path / preset).mkdir()
        name, _ = bench.cells(preset)[0]
        (tmp_path / preset / f"{name}.json").write_text(json.dumps(whole))
        Image.new("RGB", (70 + 10 * 8, 16)).save(tmp_path / preset / f"{name}.png")
    filled = [name for name in ran if name != "ablations"] + ["gain", "form"]
    readme = tmp_path / "README.md"
    readme.write_text("".join(f"{name}\n<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in filled))
    tables.report(tmp_path, readme)
    assert "old" not in readme.read_text() and all(f"{name}\n<!-- {name} -->\n|" in readme.read_text() for name in filled)
    assert (tmp_path / "first-screen.png").exists() and (tmp_path / "cifar.png").exists()
