"""What the losses cost: ratios of times, both sides measured in turns in one run, medians.

    python -m bench speed                 # every part -> bench/cells/speed.json
    python -m bench speed --only kmeans   # the parts with this in their name; the others stay as they were

A training step is train.Run.train_epoch itself on a few batches in memory, default network and flags, the
surrogate at its full weight. A part whose package is missing is not measured.
"""

import json
import os
import re
import statistics
import time

import torch

import train
from bench.finished import ROOT, speed_rows
from bench.grids import cifar, harden
from cluster_cel import ROUNDS, ClusterCEL
from harness import data
from harness.files import UserError, say, write
from harness.options import parse_flags

SIZE = {"batch": 128, "steps": 4, "flags": "", "images": 6000, "kmeans": (50_000, 512, 10, 5)}


def medians(contenders, turns):
    """Median seconds of each function, run in turns so that a slow moment hits all; one turn to warm up."""
    times = [[] for _ in contenders]
    for turn in range(turns + 1):
        for work, own in zip(contenders, times):
            start = time.perf_counter()
            work()
            own += [time.perf_counter() - start] if turn else []
    return [statistics.median(own) for own in times]


def random_splits(n, classes=10):
    x = torch.randint(0, 256, (n, 32, 32, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    part = data.Images(x, torch.arange(n) % classes)
    return data.Splits(part, part[:1], part[:1], part[:0], [str(c) for c in range(classes)])


def fitted(splits, size, flags=""):
    """A run behind its warm-up and ramp, its statistics fitted. -> (an epoch of it, its refresh)"""
    flags = f"--batch-size {size['batch']} --device cpu {size['flags']} {flags}"
    run = train.Run(parse_flags(flags.split()), splits)
    run.epoch = min(run.args.warmup + train.RAMP, run.args.epochs - 1)
    run.refresh()
    return lambda: run.train_epoch(lambda _: None), run.refresh


# Each part yields (name, what is compared, the work, what it is divided by, turns).


def step(size):
    hardened = {n.split("-")[1]: f for n, f in cifar().items() if re.fullmatch("tier[12]-.*-seed0", n)}
    methods = [(name, f.removeprefix(harden(0)), 10) for name, f in hardened.items() if name != "none"]
    for name, flags, classes in [*methods, ("gated with memory", "--surrogate gated --memory 32", 200)]:
        splits = random_splits(size["batch"] * size["steps"], classes)
        own, plain = fitted(splits, size, flags)[0], fitted(splits, size)[0]
        yield name, f"training step with {name}, {classes} classes / without", own, plain, 25


def stash(size):
    splits, flags = random_splits(size["batch"] * size["steps"]), "--surrogate cluster --stash {}"
    cut, params = (fitted(splits, size, flags.format(how))[0] for how in ("cut", "params"))
    yield "stash", "training step with cluster, --stash cut / --stash params", cut, params, 9


def refresh(size):
    for name in ("gmm", "cluster"):
        epoch, again = fitted(random_splits(size["images"]), size, f"--surrogate {name}")
        yield name, f"refresh of {name} / an epoch, {size['images']} pictures", again, epoch, 3


def kmeans(size):
    from sklearn.cluster import KMeans

    n, dim, classes, k = size["kmeans"]
    z, y = torch.rand(n, dim), torch.arange(n) % classes
    starts = torch.stack([z[y == c][:k] for c in range(classes)])  # [C, K, D]
    cel = ClusterCEL(classes, dim, sigma=0.1, clusters=k)

    def ours():
        cel.centers.copy_(starts)
        cel.weights.fill_(1 / k)  # as if fitted before, so that it goes on from these centres
        cel.refresh(z, y)
        # the inertia, so that a test can compare
        return n / classes * (cel.weights * cel.variances).sum().item()

    def theirs():
        fit = lambda c: KMeans(k, init=starts[c], n_init=1, max_iter=ROUNDS, tol=0).fit(z[y == c])
        return sum(fit(c).inertia_ for c in range(classes))

    what = f"K-means of {n} x {dim}, {classes} classes, K = {k} / scikit-learn's from the same centres"
    yield "kmeans", what, ours, theirs, 3


def batches(size):
    data.import_torchvision()
    from torchvision import transforms as t

    images = random_splits(size["images"]).train
    crop = t.RandomCrop(32, padding=data.CROP_PADDING, padding_mode="edge")
    change = t.Compose([crop, t.RandomHorizontalFlip(), t.ConvertImageDtype(torch.float32)])

    def theirs():
        for index in torch.randperm(len(images)).split(size["batch"]):
            torch.stack([change(x) for x in images.x[index]])

    ours = lambda: sum(len(y) for _, y in data.batches(images, size["batch"]))
    yield "batches", "an epoch of batches, cropped and flipped / torchvision's transforms", ours, theirs, 3


PARTS = {part.__name__: part for part in (step, stash, refresh, kmeans, batches)}


def run(only="", size=SIZE, root=ROOT):
    if not any(only in part for part in PARTS):
        raise UserError(f"--only {only}: no such part; use {', '.join(PARTS)}.")
    found = [r for r in speed_rows(root) if only not in r["part"]]
    for part in [part for part in PARTS if only in part]:
        try:
            for name, what, over, under, turns in PARTS[part](size):
                seconds = medians((over, under), turns)
                row = {"part": part, "name": name, "what": what, "ratio": seconds[0] / seconds[1]}
                found.append({**row, "seconds": seconds})
                say(f"{what}: {row['ratio']:.2f}")
        except ImportError as error:
            say(f"{part} is not measured: {error}")
    where = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cores": os.cpu_count()}
    found.sort(key=lambda r: list(PARTS).index(r["part"]))
    write(root / "cells" / "speed.json", json.dumps({"environment": where, "rows": found}, indent=1))
