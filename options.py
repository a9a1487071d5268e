"""Every flag of train.py in one place: its default, its one-line why, and what it must satisfy."""

import argparse
import hashlib
import math
import re
from pathlib import Path

import torch

from attack import ATTACKS
from data import CROP_PADDING
from defenses import extra_cut
from report import UserError
from split_net import MIN_IMAGE_SIZE, UNITS

MAX_IMAGE_SIZE = 4096
MIN_SIGMA = 1e-6  # below it σ² drowns in the rounding of a covariance

GATES = ("cross_attention", "per_dim_gate", "snr_gate", "slot_mass", "class_gate")  # of slot, each can be switched off
REFRESHED = ("gmm", "cluster")  # silent until their statistics were fitted at the end of the first epoch
SHORT_RUN = 0.2  # of the epochs: the longest warm-up; of the steps behind it: the longest delay of a surrogate
# README, "How the defaults were chosen": λ, γ, warm-up epochs.
DEFAULTS = {"none": (0.0, 1.0, 0), "gmm": (0.0008, 1.0, 1), "cluster": (0.2, 1.0, 1), "gated": (2.0, 0.1, 5), "slot": (5.0, 0.25, 3)}


# flags that only some surrogates take
OWN = {"clusters": ("gmm", "cluster"), "form": ("cluster",), "variance": ("cluster", "gated"), "outliers": ("cluster",), "covariance": ("gmm",),
       "update_scale": ("gmm",), "attention": ("gated", "slot"), "measure_on": ("gated", "slot"), "hidden": ("gated",), "slots": ("slot",), "off": ("slot",)}
NOT_SETTINGS = ("out", "runs_dir", "resume", "verbose", "device", "data_dir")  # do not change what a run computes
IN_NAME = ("dataset", "surrogate", "defense", "sigma", "lambd", "seed")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        return action.help if action.default in (None, "") else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; see --help.")


def parse(argv=None):
    p = Parser(description="Train a split network with a conditional-entropy loss, attack it, report.", formatter_class=Help, allow_abbrev=False)
    g = p.add_argument_group("images")
    g.add_argument("--dataset", default="shapes", help="shapes (drawn, no download), cifar10, cifar100, tinyimagenet, facescrub, or a folder")
    g.add_argument("--data-dir", default="data", help="where data sets are looked for and downloaded to")
    g.add_argument("--image-size", type=int, help="resize and centre-crop a folder's images to this (default: the short side of the first)")
    g.add_argument("--train-size", type=int, help="use only that many training images, for quick runs (default: all)")
    g.add_argument("--val-share", type=float, default=0.1, help="share of the training images kept for choosing settings; test is never used for that")
    g = p.add_argument_group("network")
    g.add_argument("--arch", default="vgg11", choices=UNITS, help="VGG11-BN or ResNet-20")
    g.add_argument("--width", type=int, help="channels of the first unit; the paper's VGG11 has 64 (default: 16)")
    g.add_argument("--cut", type=int, default=2, help="units on the device; vgg11: 2 is behind the second pooling")
    g.add_argument("--bottleneck", type=int, default=8, help="channels that are sent; 0 sends the cut's own")
    g = p.add_argument_group("training")
    g.add_argument("--epochs", type=int, default=10, help="passes over the training images")
    g.add_argument("--batch-size", type=int, default=128, help="in-batch surrogates need several images of a class in it")
    g.add_argument("--lr", type=float, default=0.05, help="peak learning rate of SGD (one cycle)")
    g.add_argument("--schedule", default="onecycle", choices=("onecycle", "steps"), help="steps: x0.2 at 1/4, 1/2, 2/3 and 5/6 of the run")
    g.add_argument("--momentum", type=float, default=0.9, help="SGD momentum")
    g.add_argument("--weight-decay", type=float, default=5e-4, help="for encoder and server, not for the surrogate")
    g.add_argument("--shift", type=int, default=CROP_PADDING, help="pixels by which a training image is shifted at random; 0 is better for short runs")
    g.add_argument("--seed", type=int, default=0, help="decides images drawn, splits, weights, order and noise")
    g.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    g = p.add_argument_group("privacy")
    g.add_argument("--surrogate", default="none", choices=DEFAULTS, help="which conditional-entropy loss")
    g.add_argument("--sigma", type=float, default=0.1, help="standard deviation of the channel noise")
    g.add_argument("--lambd", type=float, help="λ, weight of the surrogate's gradient (default: the surrogate's own)")
    g.add_argument("--scale", type=float, help="γ, the loss scale (default: the surrogate's own)")
    g.add_argument("--warmup", type=int, help="epochs without the surrogate (default: its own, at most a fifth of --epochs)")
    g.add_argument("--ramp", type=int, default=2, help="epochs over which γ rises behind the warm-up")
    g.add_argument("--eta-ref", type=float, default=0.0, help="r(η) = min(1, this/η) holds λ back at high learning rates; 0: off, the documents' is 1e-3")
    g.add_argument("--clip", type=float, default=0.0, help="longest ‖∂L_CEL/∂z‖ of a step; 0: no limit")
    g.add_argument("--stash", default="cut", choices=("cut", "params"), help="where the two gradients meet; the same step, cut is faster")
    g.add_argument("--var-threshold", type=float, default=0.125, help="τ = this·σ² per dimension: spread below it is not penalised")
    g.add_argument("--floor", type=float, default=0.01, help="g0 inside both logs, per dimension")
    g.add_argument("--pool", type=int, default=0, help="average z to this many cells a side before the surrogate, which then sees less; 0: as it is")
    g.add_argument("--refresh-every", type=int, default=1, help="epochs between refreshes of gmm's and cluster's statistics")
    g.add_argument("--refresh-samples", type=int, default=50000, help="at most this many images in a refresh, to bound memory")
    g = p.add_argument_group("surrogate's own (default: as in its file)")
    g.add_argument("--clusters", type=int, help="K of gmm and cluster")
    g.add_argument("--form", choices=("log", "lin"), help="cluster: log hinge or plain variance")
    g.add_argument("--variance", choices=("trace", "per_dim"), help="cluster, gated: one hinge on the trace or one per dimension (default: per_dim)")
    g.add_argument("--outliers", choices=("keep", "truncate", "reseed"), help="cluster: what happens to clusters of outlying variance")
    g.add_argument("--covariance", choices=("diag", "full"), help="gmm")
    g.add_argument("--update-scale", type=float, help="gmm: s of the running update")
    g.add_argument("--attention", choices=("joint", "detached", "adversarial", "fit"), help="gated, slot: what the attention is trained for")
    g.add_argument("--measure-on", choices=("sent", "layernorm"), help="gated, slot: whose spread; layernorm as in the documents")
    g.add_argument("--hidden", type=int, help="gated: size of the attention")
    g.add_argument("--slots", type=int, help="slot: S")
    g.add_argument("--off", default="", help="slot: gates to switch off, e.g. class_gate,slot_mass")
    g = p.add_argument_group("defence")
    g.add_argument("--defense", default="none", help="none, dropout, distcorr, patrol, noise_arl, or several joined by +")
    for name in ("dropout", "distcorr", "patrol", "noise-arl"):
        g.add_argument(f"--{name}", type=float, help=f"strength of {name} (default: as in defenses.py)")
    g = p.add_argument_group("attack")
    g.add_argument("--attack", default="decoder", help="attackers to run, joined by commas; none: skip")
    g.add_argument("--attacker-data", default="train", choices=("train", "aux"), help="the victim's training images, or others")
    g.add_argument("--aux-share", type=float, default=0.25, help="with aux: share of the training images the victim does not get")
    g.add_argument("--attack-epochs", type=int, default=16, help="passes over the attacker's images; the paper: 50")
    g.add_argument("--attack-blocks", type=int, default=2, help="residual blocks of the decoder; the paper: 8")
    g.add_argument("--attack-channels", type=int, default=48, help="their width; the paper: 64")
    g.add_argument("--attack-batch", type=int, default=32, help="images in an attacker's step")
    g.add_argument("--attack-lr", type=float, default=3e-3, help="peak learning rate of the attacker's Adam")
    g.add_argument("--whitebox-images", type=int, default=64, help="how many images of each split the whitebox attack reconstructs")
    g.add_argument("--whitebox-steps", type=int, default=300, help="steps of its optimisation")
    g = p.add_argument_group("output")
    g.add_argument("--out", help="NAME of the run's folder (default: made from the settings)")
    g.add_argument("--runs-dir", default="runs", help="folder that holds the runs")
    g.add_argument("--resume", action="store_true", help="go on with an interrupted run of the same settings")
    g.add_argument("--verbose", action="store_true", help="print the surrogate's own figures every 200 calls")
    args = p.parse_args(argv)
    changed = {k: v for k, v in vars(args).items() if v != p.get_default(k) and k not in (*NOT_SETTINGS, *IN_NAME)}
    return complete(args, hashlib.sha256(repr(sorted(changed.items())).encode()).hexdigest()[:6] if changed else "")


HUGE = 2 ** 31  # no flag means anything beyond

# (flags, what they must satisfy, how to say it)
CHECKS = [
    ("epochs batch_size lr refresh_every refresh_samples attack_epochs attack_blocks attack_channels attack_batch attack_lr whitebox_images whitebox_steps var_threshold floor",
     lambda v: v > 0, "must be greater than 0"),
    ("update_scale", lambda v: v > 0, "must be greater than 0"),
    ("lambd scale warmup ramp eta_ref clip pool weight_decay shift", lambda v: v >= 0, "must not be negative"),
    ("sigma", lambda v: v == 0 or MIN_SIGMA <= v <= 1 / MIN_SIGMA, f"must be 0 or lie between {MIN_SIGMA:g} and {1 / MIN_SIGMA:g}"),
    ("momentum", lambda v: 0 <= v < 1, "must be at least 0 and less than 1"),
    ("image_size", lambda v: MIN_IMAGE_SIZE <= v <= MAX_IMAGE_SIZE, f"must lie between {MIN_IMAGE_SIZE} and {MAX_IMAGE_SIZE}"),
    ("train_size width clusters hidden slots", lambda v: v >= 1, "must be at least 1"),
    ("seed", lambda v: 0 <= v < 2 ** 31, "must lie between 0 and 2147483647"),
    ("val_share aux_share", lambda v: 0 < v < 1, "must lie between 0 and 1"),
]


def complete(args, tag=""):
    """Check every flag and fill in what depends on others; `tag` tells runs apart that differ in settings not in the name."""
    for names, holds, sentence in CHECKS:
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not (math.isfinite(value) and holds(value)):
                raise UserError(f"--{name.replace('_', '-')} {value}: {sentence}.")
    for name, value in vars(args).items():
        if isinstance(value, (int, float)) and not abs(value) < HUGE:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be a number below {HUGE}.")
    if args.surrogate != "none" and args.sigma == 0:
        raise UserError(f"--sigma 0: without noise every bound is infinite, so --surrogate {args.surrogate} has nothing to hold on to; give a positive --sigma.")
    for name, takers in OWN.items():
        if getattr(args, name) not in (None, "") and args.surrogate not in takers:
            raise UserError(f"--{name.replace('_', '-')}: --surrogate {args.surrogate} does not take it, only {' and '.join(takers)}; leave it out.")
    extra_cut(args.defense)  # refuses an unknown defence
    if args.surrogate in OWN["variance"]:
        args.variance = args.variance or "per_dim"
    lambd, scale, warmup = DEFAULTS[args.surrogate]
    args.lambd = lambd if args.lambd is None else args.lambd
    args.scale = scale if args.scale is None else args.scale
    args.warmup = min(warmup, max(int(SHORT_RUN * args.epochs), 1 if args.surrogate in REFRESHED else 0)) if args.warmup is None else args.warmup
    silent = max(args.warmup, 1 if args.surrogate in REFRESHED else 0)
    if args.surrogate != "none" and silent >= args.epochs:
        raise UserError(f"--epochs {args.epochs}: --surrogate {args.surrogate} would never act, its first {silent} epochs are warm-up; raise --epochs or lower --warmup.")
    args.attack = [] if args.attack == "none" else args.attack.split(",")
    for name in args.attack:
        if name not in ATTACKS:
            raise UserError(f"--attack {name}: unknown attacker; use {', '.join(ATTACKS)}, joined by commas, or none.")
    args.off = [name for name in args.off.split(",") if name]
    for name in args.off:
        if name not in GATES:
            raise UserError(f"--off {name}: no such gate; use {', '.join(GATES)}, joined by commas.")
    args.aux_share = args.aux_share if args.attacker_data == "aux" else 0.0
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        known = torch.device(args.device).type in ("cpu", "cuda", "mps") and torch.zeros(1, device=args.device) is not None
    except (RuntimeError, AssertionError):
        known = False
    if not known:
        raise UserError(f"--device {args.device}: not available here; use cpu or auto.")
    if args.out is None:
        dataset = re.sub(r"[^A-Za-z0-9]+", "-", Path(args.dataset).name) or "images"
        args.out = f"{dataset}-{args.surrogate}-{args.defense}-sigma{args.sigma:g}-lambda{args.lambd:g}-seed{args.seed}" + (f"-{tag}" if tag else "")
    if not re.fullmatch(r"[A-Za-z0-9_+=-][A-Za-z0-9._+=,-]*", args.out):
        raise UserError(f"--out {args.out}: use a plain name of letters, digits and ._+=,-; the folder above it is --runs-dir.")
    return args
