"""The table of speeds at tiny sizes: every row there, every ratio a number, the README filled. Never what the clock says."""

import json
import math
import sys

import pytest

import bench
import speed
import tables
from report import UserError

TINY = dict(batch=16, large_batch=32, steps=1, turns=1, flags=("--width", "2"), images=200, many_classes=(20, 30), dim=64, calls=2,
            kmeans=(300, 16, 3, 2, 4), memory=(40_000, 128, 10), pictures=64)


def ratios(part):
    return [r["ratio"] for r in part]


def test_every_row_is_measured_and_the_readme_filled(tmp_path, capsys):
    speed.run(tmp_path, size=TINY)
    measured = json.loads((tmp_path / "speed.json").read_text())
    printed = capsys.readouterr().out
    counts = {"step": 4, "classes": 8, "surrogate": 4, "refresh": 2, "stash": 1, "kmeans": 1, "batches": 1, "profile": 1, "memory": 2}
    assert {name: len(rows) for name, rows in measured["parts"].items()} == counts
    lines = speed.table(measured).splitlines()
    assert len(lines) == 2 + sum(counts.values())
    assert all(line.strip("| ") in printed for line in lines[2:])
    for name, rows in measured["parts"].items():
        for r in rows:
            if name == "kmeans" and r["ratio"] is None:
                continue  # scikit-learn is optional
            assert math.isfinite(r["ratio"]) and r["ratio"] > 0 and r["what"] and r["setting"], r
            over, under = (r.get("seconds") or r["bytes"]).values()
            assert r["ratio"] == pytest.approx(over / under)
    assert 0 < measured["parts"]["profile"][0]["ratio"] < 1
    # the features are counted: a refresh holds at least them
    assert all(ratio > 0.9 for ratio in ratios(measured["parts"]["memory"]))

    readme = tmp_path / "README.md"
    readme.write_text("above\n<!-- speed -->\nold\n<!-- /speed -->\nbelow\n")
    tables.report(tmp_path, readme)
    assert readme.read_text() == "above\n<!-- speed -->\n" + speed.table(measured) + "\n<!-- /speed -->\nbelow\n"


def test_our_kmeans_reaches_the_inertia_of_scikit_learn():
    pytest.importorskip("sklearn")
    r, = speed.kmeans_rows(dict(TINY, kmeans=(600, 16, 3, 2, 30)))
    assert r["inertia_ratio"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("missing, part, package", [("sklearn.cluster", "kmeans", "scikit-learn"), ("torchvision", "batches", "torchvision")])
def test_a_missing_package_leaves_its_row_unmeasured_and_the_others_as_they_were(missing, part, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    speed.run(tmp_path, "surrogate", TINY)
    before = speed.load(tmp_path)["parts"]["surrogate"]
    speed.run(tmp_path, part, TINY)
    measured = speed.load(tmp_path)
    assert list(measured["parts"]) == ["surrogate", part] and measured["parts"]["surrogate"] == before
    assert ratios(measured["parts"][part]) == [None] and f"pip install {package}" in measured["parts"][part][0]["setting"]
    assert speed.table(measured).splitlines()[-1].endswith("| – | not measured |")


def test_a_missed_target_is_shown_as_missed():
    r = {"what": "w", "setting": "s", "target": 1.05, "ratio": 1.2}
    assert speed.line(r) == "| w | s | ≤ 1.05 | 1.20 **missed** |" and "missed" not in speed.line(dict(r, ratio=1.0))
    assert "missed" in speed.line(dict(r, ratio=1.0, at_least=True)) and speed.line(dict(r, at_least=True)) == "| w | s | ≥ 1.05 | 1.20 |"


def test_medians_are_taken_in_turns():
    order = []
    seconds = speed.interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2)
    assert order == ["a", "b"] * 3 and set(seconds) == {"a", "b"}  # one turn to warm up


def test_an_unknown_part_is_a_sentence(tmp_path, capsys):
    assert bench.main(["speed", "--only", "nothing"]) == 2
    assert "--only nothing" in capsys.readouterr().err
    with pytest.raises(UserError, match="--only"):
        speed.run(tmp_path, "nothing", TINY)
