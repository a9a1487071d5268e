"""What the losses cost: ratios of times, each measured in one run, both sides in turns, medians.

    python bench.py speed                # every row -> results/speed.json; bench.py report puts them into the README
    python bench.py speed --only kmeans  # the rows whose name contains this; the others stay as they were

A ratio is (time of what is claimed) / (time of what it is compared with). The training step is train.Run.train_epoch
itself on a few in-memory batches (crop and flip, encoder, wire, server, cross-entropy, surrogate, stash, optimiser), with
the default network and flags and the surrogate at full weight. Rows that need scikit-learn or torchvision are marked as
not measured where these are missing.

Peak memory is resident memory: a fresh process makes random features, refreshes, and asks the system for its highest
resident size (Linux: VmHWM); the highest before the features existed is subtracted.
"""

import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import data
import train
from cluster_cel import ClusterCEL
from options import DEFAULTS, parse
from report import UserError, write

SURROGATES = tuple(name for name in DEFAULTS if name != "none")
STEP = "training step with {} / without"
# Sizes of `bench.py speed`; the tests pass smaller ones.
FULL = dict(batch=128, large_batch=256, steps=4, turns=9, flags=(), images=6000, many_classes=(100, 200), dim=512, calls=61,
            kmeans=(50_000, 512, 10, 5, 20), memory=(50_000, 512, 10), pictures=10_000)
EPOCHS = 3  # of the rows that time whole epochs
KMEANS = "refresh of cluster (K-means) / scikit-learn's KMeans, same start and iterations"
BATCHES = "an epoch of batches, crop and flip / torchvision's transforms and DataLoader"
# aten operators that are a convolution or a matrix product, forward and backward; each counts with what it calls
PRODUCTS = ("aten::convolution", "aten::convolution_backward", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def interleaved(contenders, repeats=7):
    """Median seconds of each {name: function}, run in turns so that a slow moment hits all of them; one turn to warm up."""
    times = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, work in contenders.items():
            start = time.perf_counter()
            work()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def row(what, setting, target, seconds, over, under, **more):
    """One line of the table: the ratio seconds[over] / seconds[under] and what it should be at most."""
    return {"what": what, "setting": setting, "target": target, "ratio": seconds[over] / seconds[under],
            "seconds": {over: seconds[over], under: seconds[under]}, **more}


# ------------------------------------------------------------------------------------------------ the training step

def random_splits(n, classes):
    """n random 32x32 pictures to train on; validation and test are never touched."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 32, 32, 3), dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)
    part = data.Images(x, torch.randint(0, classes, (n,), generator=generator))
    return data.Splits(part, part[:1], part[:1], part[:0], [str(c) for c in range(classes)])


def make_run(splits, flags):
    """A run behind its warm-up and ramp, its statistics fitted."""
    run = train.Run(parse([*flags, "--device", "cpu"]), splits)
    run.epoch = min(run.args.warmup + run.args.ramp, run.args.epochs - 1)
    if run.refreshes:
        run.refresh()
    return run


def time_steps(size, batch, classes, variants):
    """Median seconds of `steps` training steps for each {name: flags}."""
    splits = random_splits(batch * size["steps"], classes)
    runs = {name: make_run(splits, ["--batch-size", str(batch), *size["flags"], *flags]) for name, flags in variants.items()}
    return interleaved({name: lambda run=run: run.train_epoch(lambda *_: None) for name, run in runs.items()}, size["turns"])


def network(size):
    return " ".join(["default network and flags", *size["flags"]])


def setting(size, batch, classes):
    return f"B = {batch}, C = {classes}, {network(size)}, median of {size['turns']} × {size['steps']} steps"


def step_rows(size):
    targets = {"gmm": 1.05, "cluster": 1.05, "gated": 1.10, "slot": 1.25}
    seconds = time_steps(size, size["batch"], 10, {"none": [], **{s: ["--surrogate", s] for s in SURROGATES}})
    return [row(STEP.format(s), setting(size, size["batch"], 10), targets[s], seconds, s, "none") for s in SURROGATES]


def class_rows(size):
    rows, few = [], 10
    for s in SURROGATES:
        counts = (few, *size["many_classes"])
        splits = {c: random_splits(size["large_batch"] * size["steps"], c) for c in counts}
        flags = ["--batch-size", str(size["large_batch"]), *size["flags"], "--surrogate", s]
        runs = {c: make_run(splits[c], flags) for c in counts}
        seconds = interleaved({f"C = {c}": lambda run=run: run.train_epoch(lambda *_: None) for c, run in runs.items()}, size["turns"])
        rows += [row(f"training step with {s}, C = {c} / C = {few}", setting(size, size["large_batch"], c), 1.3, seconds, f"C = {c}", f"C = {few}")
                 for c in size["many_classes"]]
    return rows


def stash_rows(size):
    flags = {how: ["--surrogate", "cluster", "--stash", how] for how in ("cut", "params")}
    seconds = time_steps(size, size["batch"], 10, flags)
    return [row("training step, --stash cut / --stash params", setting(size, size["batch"], 10) + ", cluster", 1.0, seconds, "cut", "params")]


def refresh_rows(size):
    """Features and K-means or EM, over the epoch of training before it."""
    splits, rows = data.load("shapes", train_size=size["images"]), []
    for s in ("gmm", "cluster"):
        run = make_run(splits, [*size["flags"], "--surrogate", s])
        seconds = interleaved({"epoch": lambda: run.train_epoch(lambda *_: None), "refresh": run.refresh}, EPOCHS)
        rows.append(row(f"refresh of {s} (features and fit) / the training epoch before it",
                        f"shapes, {len(splits.train)} pictures, C = 10, K = 3, {network(size)}, median of {EPOCHS} epochs", 0.15, seconds, "refresh", "epoch"))
    return rows


def profile_rows(size):
    """Share of a plain step's wall time inside convolutions and matrix products."""
    run = make_run(random_splits(size["batch"] * size["steps"], 10), ["--batch-size", str(size["batch"]), *size["flags"]])
    seconds = {"products": [], "steps": []}
    for turn in range(size["turns"] + 1):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            with torch.profiler.record_function("steps"):
                run.train_epoch(lambda *_: None)
        total = {event.key: event.cpu_time_total / 1e6 for event in profiler.key_averages()}
        if turn:  # the first warms up
            seconds["steps"].append(total["steps"])
            seconds["products"].append(sum(total.get(name, 0) for name in PRODUCTS))
    seconds = {name: statistics.median(values) for name, values in seconds.items()}
    return [row("share of a plain training step in convolutions and matrix products", setting(size, size["batch"], 10) + " under torch.profiler",
                0.85, seconds, "products", "steps", at_least=True)]


# ------------------------------------------------------------------------------------------------ the surrogates alone

def surrogate_rows(size):
    """forward + backward of each surrogate on random features, over the same of a dim x dim linear layer."""
    targets = {"gmm": 4, "cluster": 4, "gated": 5, "slot": 40}
    B, D, C = size["batch"], size["dim"], 10
    torch.manual_seed(0)
    z, y = torch.rand(B, D).requires_grad_(), torch.randint(0, C, (B,))
    linear = nn.Linear(D, D)
    work = {"linear": lambda: torch.autograd.grad(linear(z).sum(), [z, *linear.parameters()])}
    for s in SURROGATES:
        cel = train.build_surrogate(parse(["--surrogate", s, "--device", "cpu"]), C, (D // 64, 8, 8))
        if hasattr(cel, "refresh"):
            cel.refresh(torch.rand(20 * B, D), torch.arange(20 * B) % C)
        work[s] = lambda cel=cel: torch.autograd.grad(cel(z, y), [z, *cel.parameters()], allow_unused=True)
    seconds = interleaved(work, size["calls"])
    return [row(f"{s} alone, forward + backward / a linear layer of D × D", f"B = {B}, D = {D}, C = {C}, random features, median of {size['calls']} calls",
                targets[s], seconds, s, "linear") for s in SURROGATES]


def kmeans_rows(size):
    """The refresh of cluster against scikit-learn's K-means of each class, from the same start with the same number of iterations."""
    try:
        from sklearn.cluster import KMeans
    except ImportError:
        raise UserError("bench.py speed compares K-means with scikit-learn's: pip install scikit-learn, in this environment.") from None
    n, dim, classes, k, iters = size["kmeans"]
    generator = torch.Generator().manual_seed(0)
    z, y = torch.rand(n, dim, generator=generator), torch.arange(n) % classes
    starts = torch.stack([z[y == c][:k] for c in range(classes)])  # [C, K, D]
    cel = ClusterCEL(classes, dim, tau=1.0, clusters=k, iters=iters)

    def ours():
        cel.centers.copy_(starts)
        cel.fitted.fill_(True)  # begin at the centres given
        cel.refresh(z, y)

    def theirs():
        return [KMeans(k, init=starts[c].numpy(), n_init=1, max_iter=iters, tol=0, algorithm="lloyd")
                .fit(z.index_select(0, (y == c).nonzero().flatten()).numpy()) for c in range(classes)]

    ours()
    inertia = len(z) / classes * (cel.weights * cel.variances).sum().item()  # classes of equal size
    seconds = interleaved({"ours": ours, "scikit-learn": theirs})
    return [row(KMEANS, f"{n} x {dim}, {classes} classes, K = {k}, {iters} iterations", 1.0,
                seconds, "ours", "scikit-learn", inertia_ratio=inertia / sum(fitted.inertia_ for fitted in theirs()))]


# ------------------------------------------------------------------------------------------------ pictures

class Pictures(torch.utils.data.Dataset):
    def __init__(self, images, transform, as_pil):
        self.x = images.x.permute(0, 2, 3, 1).contiguous().numpy() if as_pil else images.x.contiguous()
        self.y, self.transform, self.as_pil = images.y.tolist(), transform, as_pil

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        from PIL import Image  # comes with torchvision
        return self.transform(Image.fromarray(self.x[i]) if self.as_pil else self.x[i]), self.y[i]


def batch_rows(size):
    """One epoch of cropped and flipped batches, ours and the fastest of torchvision's ways."""
    try:
        data.import_torchvision()
        from torchvision import transforms
    except ImportError:
        raise UserError("bench.py speed compares batches with torchvision's: pip install torchvision, in this environment.") from None
    images = random_splits(size["pictures"], 10).train
    augment = [transforms.RandomCrop(32, padding=data.CROP_PADDING, padding_mode="edge"), transforms.RandomHorizontalFlip()]
    ways = {"PIL": (transforms.Compose([*augment, transforms.ToTensor()]), True),
            "tensors": (transforms.Compose([*augment, transforms.ConvertImageDtype(torch.float32)]), False)}
    work = {"ours": lambda: sum(len(y) for _, y in data.batches(images, size["batch"], augment=True))}
    for name, (transform, as_pil) in ways.items():
        for workers in (0, 2):
            loader = torch.utils.data.DataLoader(Pictures(images, transform, as_pil), size["batch"], shuffle=True, num_workers=workers, drop_last=True)
            work[f"torchvision, {name}, {workers} workers"] = lambda loader=loader: sum(len(y) for _, y in loader)
    seconds = interleaved(work, EPOCHS)
    best = min((name for name in seconds if name != "ours"), key=seconds.get)
    return [row(BATCHES,
                f"{len(images)} pictures of 32 x 32 in memory, B = {size['batch']}, fastest of PIL or tensors and 0 or 2 workers: {best.split(', ', 1)[1]}", 0.3,
                seconds, "ours", best)]


# ------------------------------------------------------------------------------------------------ memory

def peak_bytes():
    """Highest resident memory of this process so far. Linux's ru_maxrss begins with the parent's, so VmHWM there."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def refresh_peak(surrogate, n, dim, classes):
    """Run in a process of its own: highest resident memory of features and refresh, in bytes."""
    make = lambda: train.build_surrogate(parse(["--surrogate", surrogate, "--device", "cpu"]), classes, (dim // 64, 8, 8))
    make().refresh(torch.rand(20 * classes, dim), torch.arange(20 * classes) % classes)  # loads whatever a refresh loads
    before = peak_bytes()
    make().refresh(torch.rand(n, dim), torch.arange(n) % classes)
    return peak_bytes() - before


def memory_rows(size):
    n, dim, classes = size["memory"]
    rows = []
    for s in ("gmm", "cluster"):
        code = f"import speed; print(speed.refresh_peak({s!r}, {n}, {dim}, {classes}))"
        out = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parent, capture_output=True, text=True, check=True)
        held = {"peak": int(out.stdout), "features": 4 * n * dim}
        rows.append({"what": f"peak resident memory of a refresh of {s}, features included / the features", "setting": f"{n} x {dim} float32, {classes} classes, K = 3",
                     "target": 1.5, "ratio": held["peak"] / held["features"], "bytes": held})
    return rows


# ------------------------------------------------------------------------------------------------ all of it

PARTS = {"step": step_rows, "classes": class_rows, "surrogate": surrogate_rows, "refresh": refresh_rows, "stash": stash_rows, "kmeans": kmeans_rows,
         "batches": batch_rows, "profile": profile_rows, "memory": memory_rows}


def measure(size=FULL, only="", old=None):
    """-> {"environment": ..., "parts": {name: [rows]}}; parts not asked for are those of `old`. A part whose package is missing says so."""
    environment = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cores": os.cpu_count()}
    parts = dict(old["parts"]) if old and old["environment"] == environment else {}
    for name, rows in PARTS.items():
        if only in name:
            try:
                parts[name] = rows(size)
            except UserError as error:
                parts[name] = [{"what": {"kmeans": KMEANS, "batches": BATCHES}[name], "setting": str(error), "target": None, "ratio": None}]
            for r in parts[name]:
                print(line(r).strip("| "), flush=True)
    return {"environment": environment, "parts": {name: parts[name] for name in PARTS if name in parts}}


def line(r):
    if r["ratio"] is None:
        return f"| {r['what']} | {r['setting']} | – | not measured |"
    met = r["ratio"] >= r["target"] if r.get("at_least") else r["ratio"] <= r["target"]
    return f"| {r['what']} | {r['setting']} | {'≥' if r.get('at_least') else '≤'} {r['target']:g} | {r['ratio']:.2f}{'' if met else ' **missed**'} |"


def table(measured):
    """Markdown of what `measure` found."""
    head = ["| what | setting | target | measured |", "|---|---|---|---|"]
    return "\n".join(head + [line(r) for rows in measured["parts"].values() for r in rows])


def load(results):
    """What results/speed.json holds, or None where it is missing, broken or of an older kind."""
    try:
        measured = json.loads((results / "speed.json").read_text())
    except (OSError, ValueError):
        return None
    return measured if "parts" in measured else None


def step_cost(measured):
    """{surrogate: time of a training step with it / without}"""
    rows = (measured or {"parts": {}})["parts"].get("step", [])
    return {name: row["ratio"] for name in SURROGATES for row in rows if row["what"] == STEP.format(name)}


def run(results, only="", size=FULL):
    if not any(only in name for name in PARTS):
        raise UserError(f"--only {only}: no such part; use {', '.join(PARTS)}.")
    write(results / "speed.json", json.dumps(measure(size, only, load(results)), indent=1))
