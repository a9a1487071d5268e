"""The evidence: grids of independent train.py runs, and the tables and figures made from them.

    python bench.py run --preset shapes                     # train the cells that are not finished yet
    python bench.py run --preset cpu --data DIR             # CIFAR-10 as a folder DIR/cifar10 (train/CLASS/*, test/CLASS/*)
    python bench.py run --preset cpu --data DIR --shard 1/4 # every fourth cell, so that four machines share the grid
    python bench.py report                                  # README tables and figures from results/ alone, no training
    python bench.py list --preset cpu                       # the cells and their exact commands
    python bench.py speed                                   # ratios of times (speed.py) -> results/speed.json

A cell is one train.py command. When it is finished its results.json and reconstructions.png are copied to
results/PRESET/; a cell that is there is never run again, one that broke is.

Gain at equal accuracy. A method is a curve of points (accuracy, MSE), one a setting, each the mean over seeds. Between its
points log MSE is linear in accuracy; only its front counts (a point that another beats in both is left out). For two
curves a and b, over the accuracies that both reach,

    gain(a, b) = exp( mean over accuracy of [log MSE_a − log MSE_b] )

as a Bjøntegaard delta compares two codecs. 1.3 means: at the same accuracy an attacker's error is 1.3 times as large.
The interval comes from the seeds: the gain of each seed's own pair of curves, mean ± t·std/√n (95 %, Student's t).
"""

import argparse
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import speed
from report import UserError, write, write_atomic

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
STUDENT_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
GRID_POINTS = 200
SURROGATES = ("none", "gmm", "cluster", "gated", "slot")
SEEDS = (0, 1, 2)


# ------------------------------------------------------------------------------------------------ grids

def shapes_cells():
    """The default run of every surrogate, three seeds, and one without noise: what the decoder can do at its best."""
    grid = {f"{s}-seed{seed}": f"--surrogate {s} --seed {seed}" for seed in SEEDS for s in SURROGATES}
    return {**grid, "clean-seed0": "--sigma 0"}


CPU = "--dataset DATA/cifar10 --train-size 10000 --epochs 8 --attack-epochs 6"
CPU_SIGMAS = (0.1, 0.2, 0.3, 0.5, 0.8)  # noise alone
CPU_LAMBDAS = {"gmm": (0.003, 0.01, 0.03, 0.1), "cluster": (1, 3, 10, 30), "gated": (10, 30, 100, 300), "slot": (16, 48, 150, 500)}


def cpu_cells():
    """CIFAR-10, 10,000 images, a narrow network: noise alone over σ, each surrogate over λ at σ = 0.1."""
    grid = {}
    for seed in SEEDS:
        for sigma in CPU_SIGMAS:
            grid[f"none-sigma{sigma}-seed{seed}"] = f"{CPU} --sigma {sigma} --seed {seed}"
        for s, lambdas in CPU_LAMBDAS.items():
            for lambd in lambdas:
                grid[f"{s}-lambda{lambd}-seed{seed}"] = f"{CPU} --surrogate {s} --lambd {lambd} --seed {seed}"
    return grid


PRESETS = {"shapes": shapes_cells, "cpu": cpu_cells}


def cells(preset, shard="1/1", only=""):
    """-> [(name, flags)] of one shard, in order."""
    if preset not in PRESETS:
        raise UserError(f"--preset {preset}: unknown; use {', '.join(PRESETS)}.")
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--shard {shard}: write I/N with 1 <= I <= N, as in 2/4.")
    chosen = [(name, flags) for name, flags in PRESETS[preset]().items() if only in name]
    return chosen[int(match[1]) - 1::int(match[2])]


def run_cells(preset, shard="1/1", only="", data="DATA", runs_dir="runs", results=RESULTS):
    """Run what is missing; -> number of cells that broke."""
    todo = [(name, flags) for name, flags in cells(preset, shard, only) if not finished(results / preset / f"{name}.json")]
    start, broken = time.perf_counter(), 0
    for i, (name, flags) in enumerate(todo):
        used = time.perf_counter() - start
        left = f"{used / i * (len(todo) - i) / 60:.0f} min left" if i else "time left unknown"
        print(f"[{i + 1}/{len(todo)}] {preset}/{name}  {left}", flush=True)
        run_dir = Path(runs_dir) / "bench" / preset
        command = [sys.executable, str(ROOT / "train.py"), *flags.replace("DATA", str(data)).split(), "--runs-dir", str(run_dir), "--out", name]
        log = run_dir / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stream:
            code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
        if code:
            broken += 1
            print(f"    broke: {(log.read_text().strip().splitlines() or ['no output'])[-1]} (see {log})")
            continue
        text = (run_dir / name / "results.json").read_text()
        cell = json.loads(text.replace(json.dumps(str(data))[1:-1], "DATA").replace(json.dumps(str(run_dir))[1:-1], "runs"))
        cell["environment"]["command"] = f"python train.py {flags}"
        write(results / preset / f"{name}.json", json.dumps(cell, indent=1))
        write(results / preset / f"{name}.png", lambda temporary: shutil.copyfile(run_dir / name / "reconstructions.png", temporary))
    return broken


def finished(path):
    try:
        return "accuracy" in json.loads(path.read_text())
    except (OSError, ValueError):
        return False


def load_cells(preset, results=RESULTS):
    """-> {name: results} of the finished cells."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((results / preset).glob("*.json")) if finished(path)}


# ------------------------------------------------------------------------------------------------ gain at equal accuracy

def front(points):
    """The points (accuracy, mse) that no other beats in both, by rising accuracy."""
    kept = []
    for accuracy, mse in sorted(set(points), reverse=True):
        if not kept or mse > kept[-1][1]:
            kept.append((accuracy, mse))
    return kept[::-1]


def interpolate(points, accuracy):
    """log MSE at `accuracy`, linear between the points of a front."""
    for (a0, m0), (a1, m1) in zip(points, points[1:]):
        if a0 <= accuracy <= a1:
            share = (accuracy - a0) / (a1 - a0)
            return (1 - share) * math.log(m0) + share * math.log(m1)
    return math.log(points[0][1])  # a front of one point


def gain(a, b):
    """exp of the mean of log MSE_a − log MSE_b over the accuracies both fronts reach; None where they share none."""
    a, b = front(a), front(b)
    low, high = max(a[0][0], b[0][0]), min(a[-1][0], b[-1][0])
    if low > high or (low == high and len(a) > 1 and len(b) > 1):
        return None
    grid = [low + (high - low) * (i + 0.5) / GRID_POINTS for i in range(GRID_POINTS)]
    return math.exp(statistics.fmean(interpolate(a, x) - interpolate(b, x) for x in grid))


def gain_interval(a_by_seed, b_by_seed):
    """-> (mean gain, low, high, n) over the seeds that both have; low and high are None for one seed."""
    gains = [gain(a_by_seed[s], b_by_seed[s]) for s in sorted(set(a_by_seed) & set(b_by_seed))]
    gains = [g for g in gains if g is not None]
    if not gains:
        return None, None, None, 0
    mean = statistics.fmean(gains)
    if len(gains) == 1:
        return mean, None, None, 1
    half = STUDENT_95[len(gains) - 1] * statistics.stdev(gains) / math.sqrt(len(gains))
    return mean, mean - half, mean + half, len(gains)


# ------------------------------------------------------------------------------------------------ tables and pictures

def mean_std(values, scale=1.0, digits=2):
    values = [v * scale for v in values if v is not None]
    if not values:
        return "–"
    return f"{statistics.fmean(values):.{digits}f}" + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def summary_table(groups):
    """Markdown from {label: [results]}; the first group is what the MSE is compared with."""
    lines = ["| method | accuracy % | decoder MSE (test) | × | SSIM | leakage, bits ≤ | active | gradient ratio | n |", "|---|---|---|---|---|---|---|---|---|"]
    base = None
    for label, rows in groups.items():
        error = [r["attacks"]["decoder"]["test"]["mse"] for r in rows]
        base = base or statistics.fmean(error)
        cel = [r["cel"] for r in rows]
        lines.append(f"| {label} | {mean_std([r['accuracy'] for r in rows], 100)} | {mean_std(error, digits=4)} | {statistics.fmean(error) / base:.2f} "
                     f"| {mean_std([r['attacks']['decoder']['test']['ssim'] for r in rows], digits=3)} | {mean_std([r['leakage']['bits'] for r in rows], digits=0)} "
                     f"| {mean_std([c['active_share'] for c in cel])} | {mean_std([c['grad_ratio'] for c in cel], digits=3)} | {len(rows)} |")
    return "\n".join(lines)


def curves(found):
    """{method: {seed: [(accuracy, decoder MSE on test)]}} from {name: results}; the method is the name's first word."""
    found_curves = {}
    for name, r in found.items():
        point = (r["accuracy"], r["attacks"]["decoder"]["test"]["mse"])
        found_curves.setdefault(name.split("-")[0], {}).setdefault(r["config"]["seed"], []).append(point)
    return found_curves


def gain_table(found):
    """Markdown: every method's points, and its gain at equal accuracy over noise alone."""
    lines = ["| method | points (accuracy %: MSE), first seed | gain over noise alone | 95 % interval | seeds |", "|---|---|---|---|---|"]
    by_method = curves(found)
    for method in [s for s in SURROGATES if s in by_method]:
        seeds = by_method[method]
        points = ", ".join(f"{100 * a:.1f}: {m:.4f}" for a, m in front(seeds[min(seeds)]))
        mean, low, high, n = gain_interval(seeds, by_method.get("none", {}))
        interval = f"{low:.2f} – {high:.2f}" if low is not None else "–"
        lines.append(f"| {method} | {points} | {f'{mean:.2f}' if mean else '–'} | {interval} | {n} |")
    return "\n".join(lines)


def stack_rows(pictures, path, columns=10):
    """One sheet from reconstructions.png files: the originals of the first, then the decoder's row of each {label: file}."""
    from PIL import Image, ImageDraw  # comes with torchvision
    from report import LABEL_WIDTH
    sheets = {label: Image.open(file) for label, file in pictures.items()}
    first = next(iter(sheets.values()))
    side = (first.width - LABEL_WIDTH) // columns
    out = Image.new("RGB", (first.width, side * (len(sheets) + 1)), "white")
    rows = [("original", first, 0)] + [(label, sheet, 1) for label, sheet in sheets.items()]
    for i, (label, sheet, row) in enumerate(rows):
        out.paste(sheet.crop((LABEL_WIDTH, row * side, first.width, (row + 1) * side)), (LABEL_WIDTH, i * side))
        ImageDraw.Draw(out).text((5, i * side + side // 2 - 5), label, fill="black")
    write_atomic(path, lambda temporary: out.save(temporary, format="PNG"))


def fill(readme, name, text):
    """Replace what stands between <!-- name --> and <!-- /name --> in the README."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
    if not pattern.search(readme):
        raise UserError(f"README.md has no <!-- {name} --> ... <!-- /{name} --> to fill.")
    return pattern.sub(lambda m: m[1] + text + "\n" + m[2], readme)


def report(results=RESULTS, readme_path=ROOT / "README.md"):
    """Rebuild every table and figure of the README from the finished cells."""
    readme = readme_path.read_text()
    shapes = load_cells("shapes", results)
    groups = {s: [r for name, r in shapes.items() if name.startswith(s + "-")] for s in SURROGATES}
    groups = {s: rows for s, rows in groups.items() if rows}
    if groups:
        readme = fill(readme, "shapes", summary_table(groups))
        pictures = {s: results / "shapes" / f"{s}-seed0.png" for s in groups if (results / "shapes" / f"{s}-seed0.png").exists()}
        stack_rows(pictures, results / "first-screen.png")
    cpu = load_cells("cpu", results)
    if cpu:
        readme = fill(readme, "cpu", gain_table(cpu))
    measured = speed.load(results)
    if measured:
        readme = fill(readme, "speed", speed.table(measured))
    write(readme_path, readme)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("command", choices=("run", "report", "list", "speed"))
    p.add_argument("--preset", default="shapes", help=f"which grid: {', '.join(PRESETS)}")
    p.add_argument("--data", default="DATA", help="folder that holds the image folders")
    p.add_argument("--shard", default="1/1", help="I/N: every N-th cell, beginning with the I-th")
    p.add_argument("--only", default="", help="cells, or parts of speed, whose name contains this")
    p.add_argument("--runs-dir", default="runs", help="where the runs themselves go")
    args = p.parse_args(argv)
    try:
        if args.command == "list":
            for name, flags in cells(args.preset, args.shard, args.only):
                print(f"{name:30} python train.py {flags}")
        elif args.command == "run":
            return 1 if run_cells(args.preset, args.shard, args.only, args.data, args.runs_dir) else 0
        elif args.command == "speed":
            speed.run(RESULTS, args.only)
        else:
            report()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
