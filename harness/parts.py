"""Network, defence and surrogates, made from a run's flags."""

import math

import torch

from cluster_cel import ClusterCEL
from direct_cel import DirectCEL
from gated_att_cel import GatedAttCEL
from gmm_cel import GMMCEL
from harness.defenses import extra_cut, make_defense
from harness.split_net import UNITS, SplitNet, count_flops, feature_shape
from slot_cross_cel import SlotCrossCEL

SURROGATES = {
    "gmm": GMMCEL,
    "cluster": ClusterCEL,
    "gated": GatedAttCEL,
    "slot": SlotCrossCEL,
    "direct": DirectCEL,
}
# the flags of each; those that were not given stay as the file has them
FLAGS = {
    "gmm": ("clusters", "covariance", "update_scale"),
    "cluster": ("clusters", "form", "variance", "outliers", "var_threshold", "floor"),
    "gated": ("mode", "variance", "hidden", "memory", "var_threshold", "floor"),
    "slot": ("mode", "slots", "memory", "var_threshold", "floor", "off"),
    "direct": ("measure",),
}
FEW_OF_A_CLASS, REMEMBERED = 4, 32  # with fewer images of a class in a batch, gated and slot remember so many
# slot, documented: silent in its first calls, and where the mean of the SNR gate is above this
DELAY, SHUTOFF = 100, 0.5


def make_network(args, classes, image_size):
    """-> (net, defence, shape of z), from the seed."""
    torch.manual_seed(args.seed)
    cut = args.cut + extra_cut(args.defense)
    if args.cut < len(UNITS[args.arch]) <= cut:
        raise ValueError(
            f"--cut {args.cut}: {args.defense} cuts deeper and leaves the server no unit; lower it."
        )
    net = SplitNet(args.arch, classes, args.width, cut, args.bottleneck)
    plain = SplitNet(args.arch, classes, args.width, args.cut, args.bottleneck)
    shape, flops = feature_shape(net.encoder, image_size), count_flops(plain.encoder, image_size)
    defense = make_defense(args.defense, args.strength, args.seed, shape, image_size, flops)
    return net.to(args.device, memory_format=torch.channels_last), defense.to(args.device), shape


def load_network(state, args, image_size):
    """The network of a checkpoint, and the defence whose wire stands between it and every attacker."""
    net = SplitNet(**state["net"]).to(args.device, memory_format=torch.channels_last)
    net.load_state_dict(state["weights"])
    shape = feature_shape(net.encoder, image_size)
    return net, make_defense(args.defense, args.strength, args.seed, shape, image_size).to(args.device)


def make_surrogates(args, classes, shape, image_size):
    """-> the surrogates of args.surrogate as an nn.ModuleDict."""
    if args.pool and shape[1] % args.pool:
        text = f"--pool {args.pool}: the features are {shape[1]}x{shape[2]}"
        raise ValueError(f"{text}; use a number of cells that divides {shape[1]}.")
    side = args.pool or shape[1]
    shape, sigma = (shape[0], side, side), args.sigma * side / shape[1]  # the mean of n cells has noise σ/√n
    found = torch.nn.ModuleDict()
    for name in args.surrogate:
        given = {flag: getattr(args, flag) for flag in FLAGS[name] if getattr(args, flag) is not None}
        if name == "gmm" and "clusters" in given:
            given["components"] = given.pop("clusters")
        if name in ("gated", "slot") and args.mode != "image" and args.batch_size < FEW_OF_A_CLASS * classes:
            given.setdefault("memory", REMEMBERED)
        if name == "direct" or given.get("mode") == "image":
            if image_size % side:
                pixels = f"{image_size}x{image_size} pixels; change --pool or --image-size."
                raise ValueError(f"--surrogate {name}: {side}x{side} cells do not divide {pixels}")
            given["shape"] = shape
        if given.get("mode") == "image":
            given["image_size"] = image_size
        if name == "slot" and given.get("mode") == "documented":
            given |= {"delay": DELAY, "shutoff": SHUTOFF}
        found[name] = SURROGATES[name](classes, math.prod(shape), sigma, **given)
    return found.to(args.device)


def tau_of(cel):
    """τ per dimension, or None where there is none."""
    tau = getattr(cel, "tau", None) if getattr(cel, "mode", "") != "image" else None  # which looks at pixels
    return tau / cel.dim if tau and getattr(cel, "variance", "") == "trace" else tau
