"""Every flag of train.py in one place: its default, its one-line why, and what it must satisfy."""

import argparse
import hashlib
import json
import re
from pathlib import Path

import torch

from harness.data import MIN_IMAGE_SIZE, NAMED
from harness.defenses import defense_classes
from harness.files import UserError, read_checkpoint, read_ours
from harness.parts import FLAGS
from harness.split_net import UNITS

# λ, γ and the warm-up epochs of each surrogate: starting values, to be chosen anew for other images
DEFAULTS = {
    "gmm": (0.0008, 1.0, 1),
    "cluster": (0.2, 1.0, 1),
    "gated": (2.0, 0.1, 5),
    "slot": (2.0, 0.25, 3),
    "direct": (0.3, 1.0, 0),
}
OF_IMAGE = (0.6, 1.0, 3)  # the same of slot's mode "image"
REFRESHED = ("gmm", "cluster")  # silent until their statistics were fitted at the end of an epoch
SHORT_RUN = 0.2  # of the epochs: the longest warm-up
ATTACKS = ("decoder", "gan", "whitebox")
MODES = {"gated": ("fit", "adversarial", "documented"), "slot": ("mixture", "documented", "image")}
# what the types of the flags give, by their names
KINDS = {None: str, "whole number": int, "number": (int, float), "sigma": float, "attack_epochs": (int, str)}
LISTS = {"names": str, "parts": str, "numbers": (int, float), "size": int}
FILLED = ("epochs", "lr", "lambd", "scale", "warmup", "name")  # never None behind `parse_flags`
# may differ when a trained run is attacked again
OF_THE_ATTACK = ("attack", "attack_epochs", "attack_size", "looks")
# change nothing that is computed
OF_THE_PLACE = ("name", "runs_dir", "resume", "overwrite", "device", "data_dir")
# with --init, as in the base
OF_THE_BASE = ("dataset", "image_size", "train_size", "attacker_data", "seed")
OF_THE_BASE += ("arch", "width", "cut", "bottleneck")


# ------------------------------------------------------------------------------------------------ types of flags


def number(low, high=10**9, kind=float, open_low=False):
    """An argparse type: a number from `low` (without it if open_low) to `high`."""
    words = f"{'greater than' if open_low else 'at least'} {low} and at most {high}"

    def convert(text):
        value = kind(text)
        if not (low < value if open_low else low <= value) or not value <= high:  # so NaN is refused too
            raise argparse.ArgumentTypeError(f"{text}: must be {words}")
        return value

    convert.__name__ = {float: "number", int: "whole number"}[kind]  # for argparse's own sentence
    return convert


def count(low=1, high=10**9):
    return number(low, high, int)


positive = number(0, open_low=True)


def sigma(text):
    """0, or large enough that σ² does not drown in the rounding of a variance."""
    value = float(text)
    if value != 0 and not 1e-6 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text}: must be 0, or at least 1e-6 and at most 1e6")
    return abs(value)


def numbers(text):
    """One number, or one for each part joined by +."""
    return [number(0)(part) for part in text.split("+")]


def names(allowed, what, joint="+"):
    def convert(text):
        found = [] if text == "none" else text.split(joint)
        if not set(found) <= set(allowed) or len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(
                f"{text}: use none, or different {what} of {', '.join(allowed)} joined by {joint}"
            )
        return found

    convert.__name__ = "names"
    return convert


def parts(text):
    return text.split(",")


def attack_epochs(text):
    return "auto" if text == "auto" else count()(text)


def size(text):
    """BLOCKSxCHANNELS"""
    match = re.fullmatch(r"([1-9]\d{0,2})x([1-9]\d{0,3})", text, re.ASCII)
    if not match:
        raise argparse.ArgumentTypeError(f"{text}: write BLOCKSxCHANNELS, as in 2x48")
    return [int(n) for n in match.groups()]


# ------------------------------------------------------------------------------------------------ the flags


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message.removeprefix('argument ')}; see --help.")


# fmt: off
def make_parser():
    p = Parser("train.py", description="Train a split network with a conditional-entropy loss, attack it, report.",
               formatter_class=Help, allow_abbrev=False)
    add = p.add_argument_group("images").add_argument
    add("--dataset", default="shapes", help="shapes (drawn, no download), cifar10, cifar100, tinyimagenet, facescrub, or a folder")
    add("--data-dir", default="data", help="where data sets are looked for, downloaded to and cached")
    add("--image-size", type=count(MIN_IMAGE_SIZE, 4096), help="resize and crop a folder's images to this (default: the first's short side)")
    add("--train-size", type=count(), help="use only so many training images, for quick runs (default: all)")
    add = p.add_argument_group("network").add_argument
    add("--arch", default="vgg11", choices=UNITS, help="VGG11-BN or ResNet-20")
    add("--width", type=count(), default=16, help="channels of the first unit; the paper's VGG11 has 64")
    add("--cut", type=count(), default=2, help="units on the device; vgg11: 2 is behind the second pooling")
    add("--bottleneck", type=count(0), default=8, help="channels that are sent; 0 sends the cut's own")
    add = p.add_argument_group("training").add_argument
    add("--init", help="harden a trained run: start from the weights in this folder, same network and images")
    add("--epochs", type=count(), help="passes over the training images (default: 10, with --init 3)")
    add("--batch-size", type=count(), default=128, help="in-batch surrogates need several images of a class in it")
    add("--lr", type=number(0), help="peak learning rate of SGD (default: 0.02, with --init 0.01); the paper: 0.05")
    add("--schedule", default="onecycle", choices=("onecycle", "steps"), help="steps: the paper's, x0.2 at 1/4, 1/2, 2/3 and 5/6")
    add("--label-smoothing", type=number(0, 0.9), default=0.0, help="of the cross-entropy; 0.1 lifts the accuracy of long runs")
    add("--seed", type=count(0, 2**31 - 1), default=0, help="decides images drawn, splits, weights, order and noise")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--precision", default="float32", choices=("float32", "bfloat16"), help="of the networks' convolutions in training; bfloat16: up to 1.8x faster, if the CPU knows it")
    add = p.add_argument_group("privacy").add_argument
    add("--surrogate", type=names(DEFAULTS, "surrogates"), default="none", help="which conditional-entropy loss, or several joined by +")
    add("--sigma", type=sigma, default=0.1, help="standard deviation of the channel noise")
    add("--lambd", type=numbers, help="λ, weight of the surrogate's gradient, one for each joined by + (default: its own)")
    add("--scale", type=number(0), help="γ, the loss scale (default: the surrogate's own)")
    add("--warmup", type=count(0), help="epochs that only fit the surrogate (default: its own, at most a fifth of all, of gmm and cluster at least 1; with --init 0)")
    add("--eta-ref", type=number(0), default=0.0, help="r(η) = min(1, this/η) holds λ back at high learning rates; the paper: 1e-3; 0: off")
    add("--clip", type=number(0), default=0.0, help="longest ‖∂L_CEL/∂z‖ of a step; 0: no limit")
    add("--momentum-decay", type=number(0, 0.9999), default=0.0, help="exponential average of the encoder's g_CEL; needs --stash params")
    add("--stash", default="cut", choices=("cut", "params"), help="where the two gradients meet; the same step, cut is faster")
    add("--pool", type=count(0), default=0, help="average z to so many cells a side before the surrogate; 0: as it is")
    add("--refresh-every", type=count(), default=1, help="epochs between refreshes of gmm's and cluster's statistics")
    add = p.add_argument_group("a surrogate's own (default: as in its file)").add_argument
    add("--var-threshold", type=positive, help="τ = this·σ² per dimension: spread below it is not penalised")
    add("--floor", type=positive, help="ε = this·σ² inside both logs, per dimension")
    add("--clusters", type=count(), help="K of gmm and cluster")
    add("--form", choices=("log", "lin", "released"), help="cluster: log hinge, plain variance, or the released code's loss")
    add("--variance", choices=("per_dim", "trace"), help="cluster, gated: a hinge per dimension, or one on their sum")
    add("--outliers", choices=("keep", "truncate", "reseed"), help="cluster: what happens to clusters of outlying variance")
    add("--covariance", choices=("diag", "full"), help="gmm")
    add("--update-scale", type=positive, help="gmm: s of the running update; the paper: 1, its code: 10")
    add("--mode", choices=sorted({m for modes in MODES.values() for m in modes}), help="gated, slot: what the attention is trained for")
    add("--hidden", type=count(), help="gated: width of the attention")
    add("--slots", type=count(), help="slot: S")
    add("--memory", type=count(0), help="gated, slot: remembered samples of a class (default: 32 if a batch has under 4 of each, else 0)")
    add("--off", type=parts, help="slot, documented: gates to switch off, joined by commas")
    add("--measure", choices=("trace", "logdet"), help="direct: squared error or information of the linear estimate")
    add = p.add_argument_group("defence").add_argument
    add("--defense", default="none", help="none, dropout, distcorr, patrol, noise_arl, or several joined by +")
    add("--strength", type=numbers, help="of each defence, joined by + (default: as in harness/defenses.py)")
    add = p.add_argument_group("attack").add_argument
    add("--attack", type=names(ATTACKS, "attackers", ","), default="decoder", help="attackers to run, joined by commas; none: skip")
    add("--attacker-data", default="train", choices=("train", "aux"), help="the victim's training images, or a quarter kept from it")
    add("--attack-epochs", type=attack_epochs, default=10, help="epochs of at most 20,000 of the attacker's images, or auto: until it has converged")
    add("--attack-size", type=size, default="2x48", help="residual blocks x channels of the decoder; the paper: 8x64")
    add("--looks", type=count(), default=1, help="transmissions of the same picture that the attacker may average")
    add = p.add_argument_group("output").add_argument
    add("--name", help="of the run's folder (default: made from the settings)")
    add("--runs-dir", default="runs", help="folder that holds the runs")
    add("--resume", action="store_true", help="go on with an interrupted run, or attack a finished one with other attack flags")
    add("--overwrite", action="store_true", help="replace a run of the same name")
    return p
# fmt: on


def given_flags(argv):
    """Names of the flags that stand in argv."""
    parser = make_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(argv)))


def parse_flags(argv):
    """-> every setting of a run, checked, with what depends on others filled in."""
    args, given = make_parser().parse_args(argv), given_flags(argv)
    if args.init:
        inherit(args, given)
    args.epochs = args.epochs or (3 if args.init else 10)
    args.lr = (0.01 if args.init else 0.02) if args.lr is None else args.lr
    check_surrogates(args)
    check_defenses(args)
    args.device = usable_device(args.device)
    if args.name is None:
        args.name = default_name(args)
    if not re.fullmatch(r"[A-Za-z0-9_+=-][A-Za-z0-9._+=,-]*", args.name):
        raise UserError(
            f"--name {args.name}: use letters, digits and ._+=,-; the folder above it is --runs-dir."
        )
    return args


def read_run(path):
    """The checkpoint of a run; every setting in it has the type that its flag gives."""

    def read(path):
        state = read_checkpoint(path)
        for action in make_parser()._actions[1:]:  # without --help
            value, of = state["config"][action.dest], getattr(action.type, "__name__", None)
            kind = bool if action.nargs == 0 else list if of in LISTS else KINDS[of]
            items = value if isinstance(value, list) else []
            unset = value is None and action.default is None and action.dest not in FILLED
            if not unset and not (isinstance(value, kind) and all(isinstance(v, LISTS[of]) for v in items)):
                raise ValueError(f"its {action.dest} is {value!r}")
        return state

    return read_ours(path, read)


def inherit(args, given):
    """With --init, network and images are the base's; --dataset may say where the same images lie."""
    state = read_run(Path(args.init) / "checkpoint.pt")
    base = state["config"]
    if state["epoch"] < base["epochs"]:
        raise UserError(
            f"--init {args.init}: its training is not finished; finish it first with train.py --resume."
        )
    if "patrol" in (args.defense + base["defense"]):
        raise UserError(
            "--init: patrol changes the network and cannot start from, or be, a base; train it from scratch."
        )
    for name in OF_THE_BASE:
        flag = f"--{name.replace('_', '-')}"
        if name == "dataset" and name in given and not {args.dataset, base["dataset"]} <= {"shapes", *NAMED}:
            continue  # a folder: the images themselves are compared when they are read
        if name in given and getattr(args, name) != base[name]:
            raise UserError(
                f"{flag} {getattr(args, name)}: the base of --init has {base[name]}; leave the flag out."
            )
        setattr(args, name, base[name])


def check_surrogates(args):
    chosen = args.surrogate
    ignored = {"slot": ("var_threshold", "floor") if args.mode == "image" else (),
               "cluster": ("variance", "floor") if args.form == "released" else ()}  # fmt: skip
    for name in sorted({name for flags in FLAGS.values() for name in flags}):
        takers = [surrogate for surrogate, flags in FLAGS.items() if name in flags]
        acts = [taker for taker in takers if taker in chosen and name not in ignored.get(taker, ())]
        if getattr(args, name) is not None and not acts:
            takes = " and ".join(takers) + (" takes it" if len(takers) == 1 else " take it")
            takes += ", but not with this --mode or --form" if set(takers) & set(chosen) else ""
            raise UserError(f"--{name.replace('_', '-')}: only {takes}; leave it out.")
    for name in set(chosen) & set(MODES):
        if args.mode is not None and args.mode not in MODES[name]:
            raise UserError(f"--mode {args.mode}: {name} has {', '.join(MODES[name])}; choose one.")
    if chosen and args.sigma == 0:
        raise UserError(
            "--sigma 0: without noise every bound is infinite; give a positive --sigma or leave --surrogate out."
        )
    if args.momentum_decay and args.stash != "params":
        raise UserError("--momentum-decay: the average is of the encoder's own gradient; add --stash params.")
    own = [OF_IMAGE if name == "slot" and args.mode == "image" else DEFAULTS[name] for name in chosen]
    args.lambd = [lambd for lambd, _, _ in own] if args.lambd is None else args.lambd
    if len(args.lambd) != len(chosen):
        raise UserError(f"--lambd: give one number for each of the {len(chosen)} surrogates, joined by +.")
    scales = [scale for _, scale, _ in own] or [1.0]
    if args.scale is None and len(set(scales)) > 1:
        raise UserError(f"--surrogate {'+'.join(chosen)}: each has another γ; give one for all with --scale.")
    args.scale = scales[0] if args.scale is None else args.scale
    refreshed = not args.init and any(name in REFRESHED for name in chosen)
    if args.warmup is None:
        longest = max([epochs for _, _, epochs in own], default=0)
        args.warmup = 0 if args.init else min(longest, max(int(SHORT_RUN * args.epochs), int(refreshed)))
    silent = max(args.warmup, int(refreshed))
    if chosen and silent >= args.epochs:
        raise UserError(
            f"--epochs {args.epochs}: the first {silent} are warm-up, so the surrogate would never act; raise it."
        )


def check_defenses(args):
    classes = defense_classes(args.defense)
    if args.strength is not None and args.defense == "none":
        raise UserError("--strength: there is no --defense to be strong; name one or leave it out.")
    if args.strength is not None and len(args.strength) != len(classes):
        raise UserError(f"--strength: give one number for each of the {len(classes)} defences, joined by +.")


def usable_device(name):
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        known = torch.device(name).type in ("cpu", "cuda", "mps")
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, ImportError):
        known = False
    if not known:
        raise UserError(f"--device {name}: not available here; use cpu or auto.")
    return name


def training_settings(args):
    """What a trained network depends on: everything but the attack and the place."""
    return {k: v for k, v in vars(args).items() if k not in (*OF_THE_ATTACK, *OF_THE_PLACE)}


def default_name(args):
    """Readable, and with a hash of every setting and of where the images lie, so that two runs never share a name."""
    place = args.data_dir if args.dataset in NAMED else args.dataset
    settings = {
        **training_settings(args),
        "place": "" if args.dataset == "shapes" else str(Path(place).resolve()),
        "init": str(Path(args.init).resolve()) if args.init else None,
    }
    written = json.dumps(settings, sort_keys=True).encode(errors="surrogateescape")
    digest = hashlib.sha256(written).hexdigest()[:8]
    dataset = re.sub(r"[^A-Za-z0-9]+", "-", Path(args.dataset).name) or "images"
    surrogate, lambd = "+".join(args.surrogate) or "none", "+".join(f"{v:g}" for v in args.lambd)
    parts = [dataset, surrogate, args.defense, f"sigma{args.sigma:g}", *([f"lambda{lambd}"] if lambd else [])]
    return "-".join([*parts, f"seed{args.seed}", digest])
