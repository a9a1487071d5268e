"""The finished cells: reading bench/cells, and what a table or a picture takes from them."""

import json
import math
import re
from pathlib import Path

from bench.grids import MIDDLE, cells, made_by, vary
from harness.files import UserError, read_ours, say

ROOT = Path(__file__).resolve().parent


def in_words(name):
    """What a table or a picture calls a method or a setting: "noise alone", "sigma 0.2"."""
    return "noise alone" if name == "none" else re.sub(r"(?<=[a-z])(?=\d)", " ", name).replace(",", ", ")


def read_cell(path):
    """results.json of a run, with "figures"; NaN counts as missing. What is wrong with it is one sentence."""

    def read(path):
        r = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
        # the attacker that is the strongest on the stop images; of several, on images that all have seen
        common = lambda key, test: test.get(f"{key}_common", test[key])
        each = {name: common("mse", found["test"]) for name, found in r["attacks"].items()}
        best = r["attacks"][r["strongest"]]["test"] if each else {"mse": None, "ssim": None}
        needed = {k: r[k] for k in ("accuracy", "val_accuracy")} | {"mse": common("mse", best)}
        if not all(0 <= v < math.inf for v in needed.values() if v is not None or r["attacks"]):
            raise ValueError("a figure is no number")
        return r | {"figures": {**needed, **each, **r["leakage"], "ssim": common("ssim", best)}}

    return read_ours(path, read)


def current_cell(path, flags):
    """The cell if it is whole and was made by these flags under the defaults of today, else None."""
    try:
        cell = read_cell(path) if path.exists() else None
        if cell is None or read_ours(path, lambda _: made_by(cell, flags)):
            return cell
        say(f"{path}: made with other settings than its grid has now; it does not count")
    except UserError as error:
        say(error)


def speed_rows(root):
    path = root / "cells" / "speed.json"
    return read_ours(path, lambda path: json.loads(path.read_text())["rows"]) if path.exists() else []


def load_cells(preset, root=ROOT):
    """The finished cells, each with its name taken apart; a file of any other name is not ours."""
    found, cost = [], {r["name"]: r["ratio"] for r in speed_rows(root) if r["part"] == "step"}
    for name, flags in cells(preset):
        r = current_cell(root / "cells" / preset / f"{name}.json", flags)
        *family, method, setting = [*name.split("-")[:-1], *[""] * (name.count("-") == 1)]
        if r:
            found.append(r | {"name": name, "family": "".join(family), "method": method, "setting": setting})
            r["figures"]["cost"] = 1 if method in ("none", "clean") else cost.get(method)
    starts = {(r["base"]["name"], r["base"]["hash"]) for r in found if r.get("base")}
    if len(starts) > len({name for name, _ in starts}):  # then a comparison would not be paired
        raise UserError(f"cells/{preset}: some start from different networks of one name; run those again.")
    return found


def select(found, **wanted):
    return [r for r in found if all(r[k] == v for k, v in wanted.items())]


def point_cells(found, method, families):
    """Seed 0: the one setting that stands for a method, in each of these families that ran it, in order."""
    [(name, _)] = vary(method, MIDDLE[method])
    names = [f"{family}-{name}-seed0" for family in families]
    return [r for name in names for r in select(found, name=name)]


def line(found, figure=lambda figures: figures["mse"]):
    """{seed: {setting: (accuracy, MSE, or another figure of which more is better)}}"""
    by_seed = {}
    for r in found:
        by_seed.setdefault(r["config"]["seed"], {})[r["setting"]] = r["accuracy"], figure(r["figures"])
    return by_seed
