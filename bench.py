"""The evidence: grids of independent train.py runs, and the tables and figures made from them.

    python bench.py run --preset shapes                     # train the cells that are not finished yet
    python bench.py run --preset cpu --data DIR             # CIFAR-10 as a folder DIR/cifar10 (train/CLASS/*, test/CLASS/*)
    python bench.py run --preset cpu --data DIR --shard 1/4 # every fourth cell, so that four machines share the grid
    python bench.py report                                  # README tables and figures from results/ alone, no training
    python bench.py list --preset cpu                       # the cells and their exact commands
    python bench.py speed                                   # ratios of times (speed.py) -> results/speed.json

A cell is one train.py command. When it is finished its results.json, and its pictures if a figure shows them, are copied to
results/PRESET/; a cell that is there is never run again, one that broke or was made by another command or other defaults is.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import speed
import tables
from defenses import DEFENSES
from options import GATES, Parser, parse
from report import UserError, prepare_folder, say_error, write
from tables import PICTURED, RESULTS, ROOT, SURROGATES, finished

SEEDS = (0, 1, 2)
PLUGGED_IN = "cluster"  # the surrogate that the baselines are combined with
BASELINES = [name for name in DEFENSES if name != "none"]


# ------------------------------------------------------------------------------------------------ grids

def shapes_cells():
    """The default run of every surrogate, three seeds, and one without noise: what the decoder can do at its best."""
    grid = {f"{s}-seed{seed}": f"--surrogate {s} --seed {seed}" for seed in SEEDS for s in SURROGATES}
    return {**grid, "clean-seed0": "--sigma 0"}


def defense_cells():
    """Every baseline alone on `shapes`, at its default strength, and none."""
    grid = {}
    for seed in SEEDS:
        grid[f"none-seed{seed}"] = f"--surrogate none --seed {seed}"
        grid |= {f"{name}-seed{seed}": f"--defense {name} --seed {seed}" for name in BASELINES}
    return grid


def audit_cells():
    """Leakage bits against three attackers, over settings of `shapes`."""
    settings = {f"none-sigma{sigma}": f"--sigma {sigma}" for sigma in (0.05, 0.1, 0.2, 0.4)}
    settings |= {name: f"--surrogate {name.split('-')[0]} --lambd {lambd} --eta-ref 0.001"
                 for name, lambd in {"gmm": 0.01, "cluster": 3, "cluster-lambda10": 10, "gated": 30, "slot": 48}.items()}
    return {f"{label}-seed0": f"{flags} --attack decoder,gan,whitebox --attack-epochs 4 --whitebox-images 32" for label, flags in settings.items()}


def strength_cells():
    """Attackers at their best, CIFAR-10 images without noise: what is sent are the cut's own 32 channels, or 8."""
    flags = "--dataset DATA/cifar10 --sigma 0 --train-size 20000 --epochs 5 --attack decoder,gan,whitebox --attack-epochs 12"
    return {f"bottleneck{b}-seed0": f"{flags} --bottleneck {b}" for b in (0, 8)}


CPU = "--dataset DATA/cifar10 --train-size 10000 --epochs 16 --shift 0 --attack-epochs 4"
SHORT = CPU.replace("--epochs 16", "--epochs 8")
ALL_ATTACKERS = "--attack decoder,gan,whitebox --whitebox-images 32"
# method: what is swept, its flags, its values in the table (their first seed meets all attackers), its other values; σ is 0.1 where nothing else is said
CURVES = {"none": ("sigma", "--sigma {}", (0.1, 0.2), (0.3, 0.5)),
          "gmm": ("lambda", "--surrogate gmm --lambd {}", (0.0008,), (0.0004, 0.0016, 0.0032)),
          "cluster": ("lambda", "--surrogate cluster --lambd {}", (0.2,), (0.1, 0.4, 0.8)),
          "cluster_k1": ("lambda", "--surrogate cluster --clusters 1 --lambd {}", (0.2,), (0.1, 0.4, 0.8)),
          "gated": ("lambda", "--surrogate gated --lambd {}", (2,), (1, 4, 8)),
          "slot": ("lambda", "--surrogate slot --lambd {}", (5,), (2.5, 10, 20)),
          "distcorr": ("strength", "--defense distcorr --distcorr {}", (0.3,), (1,)),
          "distcorr_cluster": ("lambda", "--defense distcorr --surrogate cluster --lambd {}", (0.2,), (0.1, 0.4)),
          "noise_arl": ("strength", "--defense noise_arl --noise-arl {}", (1,), ()),
          "noise_arl_cluster": ("lambda", "--defense noise_arl --surrogate cluster --lambd {}", (0.2,), (0.1, 0.4)),
          "patrol": ("strength", "--defense patrol --patrol {}", (0.3,), ()),
          "patrol_cluster": ("lambda", "--defense patrol --surrogate cluster --lambd {}", (0.2,), (0.1, 0.4))}


def curve_cells(flags, curves):
    grid = {}
    for seed in SEEDS:
        for method, (knob, own, in_table, others) in curves.items():
            for v in (*in_table, *others):
                attackers = f" {ALL_ATTACKERS}" if v in in_table and seed == 0 else ""
                grid[f"{method}-{knob}{v}-seed{seed}"] = f"{flags} {own.format(v)} --seed {seed}{attackers}"
    return grid


def cpu_cells():
    """CIFAR-10, 10,000 images, a narrow network: noise alone over σ, each surrogate over λ; what stands in the table meets all attackers on the first seed."""
    return curve_cells(CPU, CURVES)


def short_cells():
    """The same in half the epochs, surrogates at their default λ: what baselines and ablations are compared with."""
    in_table = {s: (*CURVES[s][:3], ()) for s in SURROGATES}
    return curve_cells(SHORT, in_table | {"none": (*CURVES["none"][:3], (0.15, 0.3, 0.5))})


def baseline_cells():
    """CIFAR-10: every baseline alone and with a surrogate plugged in."""
    return {f"{name}{plus}-seed{seed}": f"{SHORT} --defense {name} --surrogate {s} --seed {seed} --attack decoder,gan"
            for seed in SEEDS for name in BASELINES for plus, s in (("", "none"), (f"+{PLUGGED_IN}", PLUGGED_IN))}


ABLATIONS = {"cluster": ["variance=trace", "form=lin,lambd=8", "floor=0.001", "floor=0.05", "var-threshold=0.03", "var-threshold=2", "clusters=1", "clusters=8",
                         "eta-ref=0.001,lambd=3", "warmup=4", "warmup=4,lambd=0.6", "batch-size=32", "sigma=0.05,lambd=0.4", "sigma=0.2,lambd=0.1"],
             "gmm": ["clusters=1", "clusters=8", "covariance=full"],
             "gated": ["variance=trace", "attention=joint", "attention=detached", "attention=adversarial", "measure-on=layernorm", "batch-size=32",
                       "batch-size=512", "warmup=4"],
             "slot": ["slots=2", "slots=16", "attention=joint", "attention=detached", "attention=adversarial", "measure-on=layernorm", "batch-size=32",
                      "batch-size=512", "warmup=4", *(f"off={gate}" for gate in GATES)]}
DEPTHS, DEPTH_SIGMAS = (1, 3), (0.1, 0.2, 0.3)  # noise alone behind another cut


def ablation_cells():
    """CIFAR-10, one thing changed at a time (and λ where its scale changes with it). A cell is KNOB=VALUE under its surrogate's name."""
    grid = {}
    for seed in SEEDS:
        for s, found in ABLATIONS.items():
            grid |= {f"{s}-{change}-seed{seed}": f"{SHORT} --surrogate {s} " + " ".join(f"--{c.replace('=', ' ')}" for c in change.split(",")) + f" --seed {seed}"
                     for change in found}
        for cut in DEPTHS:
            grid |= {f"none-cut={cut},sigma={sigma}-seed{seed}": f"{SHORT} --cut {cut} --sigma {sigma} --seed {seed}" for sigma in DEPTH_SIGMAS}
            grid[f"cluster-cut={cut}-seed{seed}"] = f"{SHORT} --cut {cut} --surrogate cluster --seed {seed}"
    return grid


def long_cells():
    """What stood out in the 8 epochs of the ablations, again in 16: the deeper cut, and less noise beside a larger λ."""
    settings = {f"none-cut=3,sigma={sigma}": f"--cut 3 --sigma {sigma}" for sigma in DEPTH_SIGMAS} | {
        "cluster-cut=3": "--cut 3 --surrogate cluster --lambd 0.2", "cluster-cut=3,clusters=1": "--cut 3 --surrogate cluster --clusters 1 --lambd 0.2",
        "cluster-sigma=0.05,lambd=0.4": "--surrogate cluster --sigma 0.05 --lambd 0.4",
        "cluster-sigma=0.05,lambd=0.4,clusters=1": "--surrogate cluster --clusters 1 --sigma 0.05 --lambd 0.4",
        "cluster-sigma=0.025,lambd=0.8": "--surrogate cluster --sigma 0.025 --lambd 0.8"}
    return {f"{label}-seed{seed}": f"{CPU} {flags} --seed {seed}" for seed in SEEDS for label, flags in settings.items()}


def dataset_cells():
    """Tiny ImageNet (20 classes, made smaller) and the faces: noise alone over σ, and one operating point a surrogate at σ = 0.1."""
    flags = {"tiny": "--dataset DATA/tiny-imagenet-200 --image-size 32 --epochs 8 --shift 0 --attack-epochs 4",
             "faces": "--dataset DATA/orl-faces --image-size 64 --cut 3 --batch-size 96 --epochs 120 --attack-epochs 60"}
    points = {f"none-sigma{sigma}": f"--sigma {sigma}" for sigma in (0.1, 0.2, 0.3)} | {s: f"--surrogate {s}" for s in ("cluster", "gated", "slot")}
    return {f"{label}-{point}-seed{seed}": f"{f} {own} --seed {seed}" for seed in SEEDS for label, f in flags.items() for point, own in points.items()}


def paper_cells():
    """The network, noise and schedule of the paper, for a GPU. Not run by us."""
    flags = ("--dataset cifar10 --width 64 --sigma 0.025 --schedule steps --epochs 240 --attack decoder,gan --attack-epochs 50 --attack-blocks 8 "
             "--attack-channels 64")
    return {f"{s}-{d}-seed{seed}": f"{flags} --surrogate {s} --defense {d} --seed {seed}" for seed in SEEDS for d in DEFENSES for s in SURROGATES}


PRESETS = {"shapes": shapes_cells, "defenses": defense_cells, "audit": audit_cells, "strength": strength_cells, "cpu": cpu_cells, "short": short_cells,
           "baselines": baseline_cells, "ablations": ablation_cells, "long": long_cells, "datasets": dataset_cells, "paper": paper_cells}


def cells(preset, shard="1/1", only=""):
    """-> [(name, flags)] of one shard, in order."""
    if preset not in PRESETS:
        raise UserError(f"--preset {preset}: unknown; use {', '.join(PRESETS)}.")
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--shard {shard}: write I/N with 1 <= I <= N, as in 2/4.")
    grid = PRESETS[preset]()
    chosen = [(name, flags) for name, flags in grid.items() if (name == only if only in grid else only in name)]
    if not chosen:
        raise UserError(f"--only {only}: no cell of {preset} has that in its name; see python bench.py list --preset {preset}.")
    return chosen[int(match[1]) - 1::int(match[2])]


def run_cells(preset, shard="1/1", only="", data="DATA", runs_dir="runs", results=RESULTS):
    """Run what is missing; -> number of cells that broke."""
    todo = [(name, flags) for name, flags in cells(preset, shard, only)
            if not finished(results / preset / f"{name}.json", flags)]
    run_dir = Path(runs_dir) / "bench" / preset
    for folder in sorted({Path(word.replace("DATA", str(data))) for _, flags in todo for word in flags.split() if word.startswith("DATA/")}):
        if not folder.is_dir():
            raise UserError(f"--data {data}: there is no folder {folder}; give the folder that holds it, with train/CLASS/* and test/CLASS/*.")
    prepare_folder(run_dir)
    start, broken = time.perf_counter(), 0
    for i, (name, flags) in enumerate(todo):
        used = time.perf_counter() - start
        left = f"{used / i * (len(todo) - i) / 60:.0f} min left" if i else "time left unknown"
        print(f"[{i + 1}/{len(todo)}] {preset}/{name}  {left}", flush=True)
        command = [sys.executable, str(ROOT / "train.py"), *(word.replace("DATA", str(data)) for word in flags.split()), "--runs-dir", str(run_dir), "--out", name]
        log = run_dir / f"{name}.log"
        with log.open("w") as stream:
            code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
        if code:
            broken += 1
            print(f"    broke: {(log.read_text().strip().splitlines() or ['no output'])[-1]} (see {log})")
            continue
        cell = json.loads((run_dir / name / "results.json").read_text())
        # as anybody can run it, without this machine's folders
        cell["config"].update(dataset=parse(flags.split()).dataset, data_dir="data", runs_dir="runs")
        cell["environment"]["command"] = f"python train.py {flags}"
        write(results / preset / f"{name}.json", json.dumps(cell, indent=1))
        if preset in PICTURED and name.endswith("-seed0"):
            write(results / preset / f"{name}.png", lambda temporary: shutil.copyfile(run_dir / name / "reconstructions.png", temporary))
    return broken


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    p = Parser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("command", choices=("run", "report", "list", "speed"))
    p.add_argument("--preset", default="shapes", help=f"which grid: {', '.join(PRESETS)}")
    p.add_argument("--data", default="DATA", help="folder that holds the image folders")
    p.add_argument("--shard", default="1/1", help="I/N: every N-th cell, beginning with the I-th")
    p.add_argument("--only", default="", help="cells, or parts of speed, whose name contains this; a whole name: that cell alone")
    p.add_argument("--runs-dir", default="runs", help="where the runs themselves go")
    try:
        args = p.parse_args(argv)
        if args.command == "list":
            for name, flags in cells(args.preset, args.shard, args.only):
                print(f"{name:30} python train.py {flags}")
        elif args.command == "run":
            return 1 if run_cells(args.preset, args.shard, args.only, args.data, args.runs_dir) else 0
        elif args.command == "speed":
            speed.run(RESULTS, args.only)
        else:
            tables.report()
    except UserError as error:
        say_error(error)
        return 2
    except KeyboardInterrupt:
        say_error(f"interrupted; what is finished stays, go on with: python bench.py {shlex.join(argv)}")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
