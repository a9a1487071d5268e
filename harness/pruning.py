"""Removing whole channels of an encoder, for PATROL: which ones, and down to how many."""

import math
from bisect import bisect_right

import torch
from torch import nn

from harness.files import UserError
from harness.split_net import UNITS, SplitNet, count_flops


def encoder_flops(config, image_size):
    with torch.device("meta"):  # shapes without weights: nothing is drawn, no BatchNorm buffer moves
        return count_flops(SplitNet(**config).encoder, image_size)


def channels_within(config, budget, image_size):
    """Channel counts of the widest encoder of at most `budget` FLOPs, every unit narrowed by the same factor.

    Without a bottleneck the last unit's channels are what is sent; they stay, with all units of that width.
    """
    full = [multiple * config["width"] for multiple, _ in UNITS[config["arch"]][: config["cut"]]]
    fixed, widest = len(full) if config["bottleneck"] else full.index(full[-1]), max(full)

    def narrowed(k):
        return [math.ceil(n * k / widest) for n in full[:fixed]] + full[fixed:]

    flops = lambda k: encoder_flops({**config, "channels": narrowed(k)}, image_size)
    k = bisect_right(range(1, widest + 1), budget, key=flops)
    if k == 0:
        raise UserError(
            f"--defense patrol: this encoder cannot be pruned to {budget:.3g} FLOPs; use a --bottleneck."
        )
    return narrowed(k)


@torch.no_grad()
def prune(net, channels):
    """Remove channels of net.encoder, in place, until unit i has channels[i]: the smallest gains |γ| first.

    Behind a BatchNorm a channel's standard deviation is |γ|, whatever the norm of its filter. Units that an
    identity shortcut joins share their channels and are ranked by the sum of their gains. `net.config`
    describes the result.
    """
    cut = net.config["cut"]
    units = list(net.encoder)[:cut]
    joined = lambda unit: isinstance(getattr(unit, "shortcut", None), nn.Identity)
    starts = [i for i, unit in enumerate(units) if not joined(unit)]
    ins = torch.arange(units[0][0].in_channels, device=units[0][0].weight.device)
    for start, end in zip(starts, [*starts[1:], cut]):
        last = [chain[-1] for unit in units[start:end] for chain in chains(unit)]
        outs = largest_gains(last, channels[start])
        for unit in units[start:end]:
            for chain in chains(unit):
                kept = [ins, *(largest_gains([layers], channels[start]) for layers in chain[:-1]), outs]
                for layers, before, behind in zip(chain, kept, kept[1:]):
                    narrow(layers, before, behind)
            ins = outs
    if net.config["bottleneck"]:
        narrow(net.encoder[cut:], ins, torch.arange(net.config["bottleneck"], device=ins.device))
    net.config["channels"] = list(channels)


def chains(unit):
    """The ways through a unit that have weights: lists of parts that begin with convolution and BatchNorm."""
    if not hasattr(unit, "shortcut"):
        return [[unit]]
    return [[unit.first, unit.second]] + ([] if isinstance(unit.shortcut, nn.Identity) else [[unit.shortcut]])


def largest_gains(parts, count):
    gain = sum(part[1].weight.abs() for part in parts)
    return gain.topk(count).indices.sort().values


def narrow(layers, ins, outs):
    conv, norm = layers[0], layers[1]
    kept = conv.weight[outs][:, ins].contiguous(memory_format=torch.channels_last)
    conv.weight, conv.in_channels, conv.out_channels = nn.Parameter(kept), len(ins), len(outs)
    norm.weight, norm.bias = nn.Parameter(norm.weight[outs]), nn.Parameter(norm.bias[outs])
    norm.running_mean, norm.running_var = norm.running_mean[outs], norm.running_var[outs]
    norm.num_features = len(outs)
