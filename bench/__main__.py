"""The evidence: grids of train.py runs (bench/grids.py) and the page made from them (bench/RESULTS.md).

    python -m bench list --preset cifar               # the cells and their commands
    python -m bench run --preset bases --data DIR     # CIFAR-10: DIR/cifar10, or torchvision's in DIR
    python -m bench run --preset cifar --data DIR --only tier1 --shard 1/2    # every second cell of tier 1
    python -m bench report                            # RESULTS.md, figures, README's table: from bench/cells
    python -m bench speed                             # ratios of times -> bench/cells/speed.json
    python -m bench compare runs/A runs/B             # any runs side by side: a table and compare.png

A cell is one train.py command. Its results go to bench/cells/PRESET/NAME.json; while they stand there, made
by the same settings, it is not run again. The networks of `bases`, from which the others start, go to
bench/bases. With other images than those they were trained on, remove that folder and train your own.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench import speed
from bench.finished import ROOT, current_cell
from bench.grids import PRESETS, cells, settings
from bench.tables import compare, report
from harness.data import NAMED
from harness.files import FIELDS, UserError, command_line, read_checkpoint, read_ours, say, write
from harness.options import Parser


def command(flags, data="data", root=ROOT):
    """The words behind `python train.py`, with the folders of this machine."""
    words = [word.replace("BASE/", f"{root}/bases/") for word in flags.split()]
    dataset = settings(flags)["dataset"]
    folder = Path(data) / dataset
    if not folder.is_dir() and dataset not in (*NAMED, "shapes"):
        raise UserError(f"--data {data}: there is no folder {folder}; give the folder that holds it.")
    return [*words, *(["--dataset", str(folder)] if folder.is_dir() else []), "--data-dir", str(data)]


def as_anybody(flags):
    """The command without this machine's folders."""
    return f"python train.py {flags.replace('BASE/', 'bench/bases/')}"


def keep(folder, flags, path, pictured):
    """Copy a run's results to the cells, as if anybody had run it, and its picture if a figure shows it."""
    cell, own = read_ours(folder / "results.json", lambda p: json.loads(p.read_text())), settings(flags)
    base = own["init"] and f"bench/bases/{own['init']}"
    cell["config"].update(dataset=own["dataset"], data_dir="data", runs_dir="runs", init=base)
    cell["environment"]["command"] = as_anybody(flags)
    write(path, json.dumps(cell, indent=1))
    if pictured and (folder / "reconstructions.png").exists():
        write(path.with_suffix(".png"), lambda to: shutil.copyfile(folder / "reconstructions.png", to))


def keep_base(folder, dataset, path):
    """Copy a trained network to where others start from: no optimiser, the weights in half the bytes."""
    state = read_checkpoint(folder / "checkpoint.pt")
    half = {name: w.half() if w.is_floating_point() else w for name, w in state["weights"].items()}
    slim = {key: state[key] for key in ("format", *FIELDS)} | {"weights": half}
    # as if anybody had trained it; `command` says where the images lie
    slim["config"] |= {"dataset": dataset, "data_dir": "data", "runs_dir": "runs"}
    write(path, lambda to: torch.save(slim, to))


def run_cells(preset, data="data", shard="1/1", only="", runs_dir="runs", root=ROOT):
    """Run what is not finished; a network that others start from is, when it is there itself."""
    path = lambda name: root / "cells" / preset / f"{name}.json"
    base_path = lambda base: root / "bases" / base / "checkpoint.pt"
    chosen, broken, start = cells(preset, shard, only), 0, time.perf_counter()
    done = [n for n, f in chosen if current_cell(path(n), f) and (preset != "bases" or base_path(n).exists())]
    todo = [(name, flags) for name, flags in chosen if name not in done]
    say(f"{preset}: {len(done)} of {len(chosen)} cells were finished already")
    for i, (name, flags) in enumerate(todo):
        left = f"  {(time.perf_counter() - start) / i * (len(todo) - i) / 60:.0f} min left" if i else ""
        say(f"[{i + 1}/{len(todo)}] {name}{left}")
        folder, base = Path(runs_dir) / preset / name, settings(flags)["init"]
        place = ["--runs-dir", str(folder.parent), "--name", name, "--overwrite"]
        child = [sys.executable, str(ROOT.parent / "train.py"), *command(flags, data, root), *place]
        log, why = folder.with_name(f"{name}.log"), ""
        if base and not base_path(base).exists():
            why = f"its base {base} is not trained yet: python -m bench run --preset bases --only {base}"
        else:
            write(log, "")  # makes the folder, or says why not
            with log.open("w") as stream:
                ended = subprocess.run(child, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
            if ended.returncode:
                lines = log.read_text(errors="replace").split("\n")
                why = f"broke: {next(filter(str.strip, reversed(lines)), 'no output')} (see {log})"
        if why:
            say(f"    {why}")
            broken += 1
        else:
            if preset == "bases":
                keep_base(folder, settings(flags)["dataset"], base_path(name))
            shown = preset == "shapes" or name.startswith("tier1-")
            keep(folder, flags, path(name), shown and name.endswith("-seed0"))
    if broken:
        raise UserError(f"{preset}: {broken} of {len(todo)} cells broke; the same command tries them again.")


def bench(argv):
    p = Parser("bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=("list", "run", "report", "speed", "compare"))
    p.add_argument("runs", nargs="*", help="compare: folders of runs")
    p.add_argument("--preset", default="shapes", help=f"which grid: {', '.join(PRESETS)}")
    p.add_argument("--data", default="data", help="folder that holds the folders of images")
    p.add_argument("--shard", default="1/1", help="I/N: every N-th cell, beginning with the I-th")
    p.add_argument("--only", default="", help="cells, or parts of speed, with this in their name")
    p.add_argument("--runs-dir", default="runs", help="where the runs themselves go")
    p.add_argument("--out", default=".", help="compare: folder for compare.png")
    args = p.parse_args(argv)
    if bool(args.runs) != (args.command == "compare"):
        raise UserError("compare takes the folders of runs, as in: python -m bench compare runs/A runs/B")
    if args.command == "list":
        for name, flags in cells(args.preset, args.shard, args.only):
            say(f"{name:40} {as_anybody(flags)}")
    elif args.command == "run":
        run_cells(args.preset, args.data, args.shard, args.only, args.runs_dir)
    elif args.command == "compare":
        compare(args.runs, args.out)
    elif args.command == "speed":
        speed.run(args.only)
    else:
        report()


def main(argv=None):
    return command_line(bench, argv, "-m bench")


if __name__ == "__main__":
    sys.exit(main())
