"""The split network: an encoder on the device, a server behind the wire.

    net = SplitNet("vgg11", num_classes=10, width=64, cut=2, bottleneck=8)   # the paper's setting
    z = net.encoder(x)         # [B, 3, H, W] -> [B, bottleneck, h, w], in (0, 1)
    logits = net.server(z)     # [B, num_classes]; the caller puts the channel z' = z + n between the two

The encoder is the first `cut` units of the network, a 3x3 convolution down to `bottleneck` channels and a
sigmoid: without a bounded activation the encoder could scale z up and drown the noise. The server opens
with a 3x3 convolution back to the width at the cut and goes on with the remaining units. `bottleneck=0`
leaves both convolutions out.

A unit is one convolution with BatchNorm and ReLU (and the pooling behind it) of VGG11-BN: cut 2 is the
paper's cut after the second pooling. In ResNet-20 the first unit is the stem and each further one a
residual block: cut 2 and the bottleneck make four convolutions. `width` is the number of channels of the
first unit (VGG11: 64, ResNet-20: 16). `channels` overrides the channel counts of the encoder's units, for
an encoder that was pruned.
"""

from contextlib import contextmanager

import torch
from torch import nn
from torch.utils import benchmark
from torch.utils.flop_counter import FlopCounterMode

# (channels as a multiple of the width, stride or pooling)
VGG11 = [(1, 2), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2), (8, 1), (8, 2)]
RESNET20 = [(1, 1)] + [(1, 1)] * 3 + [(2, 2)] + [(2, 1)] * 2 + [(4, 2)] + [(4, 1)] * 2
UNITS = {"vgg11": VGG11, "resnet20": RESNET20}


def conv_bn_relu(c_in, c_out, pool=1):
    # max(relu(x)) = relu(max(x)), value and gradient: behind the pooling the ReLU has a quarter of the work
    pooling = [nn.MaxPool2d(pool)] if pool > 1 else []
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(c_out),
        *pooling,
        nn.ReLU(inplace=True),
    )


class ResidualBlock(nn.Module):
    """relu(x + bn(conv(relu(bn(conv(x)))))); the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, c_in, c_out, stride=1):
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True)
        )
        self.second = nn.Sequential(nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False), nn.BatchNorm2d(c_out))
        self.stride, self.shortcut = stride, nn.Identity()
        if stride > 1 or c_in != c_out:
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, c_out, 1, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x):
        # A 1x1 convolution with a stride, taken apart: on a CPU its backward pass in channels_last writes
        # beyond its memory (torch 2.13, fewer than 8 channels)
        return torch.relu(self.shortcut(x[:, :, :: self.stride, :: self.stride]) + self.second(self.first(x)))


class SplitNet(nn.Module):
    def __init__(self, arch="vgg11", num_classes=10, width=16, cut=2, bottleneck=8, channels=None):
        super().__init__()
        if arch not in UNITS:
            raise ValueError(f"--arch {arch}: unknown network; use one of {', '.join(UNITS)}.")
        plan = UNITS[arch]
        if not 1 <= cut < len(plan):
            raise ValueError(f"--cut {cut}: {arch} has {len(plan)} units; cut after 1 to {len(plan) - 1}.")
        if width < 1 or bottleneck < 0:
            raise ValueError(f"--width {width}, --bottleneck {bottleneck}: use at least 1 and 0 channels.")
        counts = [multiple * width for multiple, _ in plan]
        if channels is not None:
            if len(channels) != cut:
                raise ValueError(f"channels: {len(channels)} counts for {cut} units; give each unit one.")
            counts[:cut] = channels
        self.config = dict(
            arch=arch, num_classes=num_classes, width=width, cut=cut, bottleneck=bottleneck, channels=channels
        )

        units, c_in = [], 3
        for i, (c_out, (_, stride)) in enumerate(zip(counts, plan)):
            if i == cut and bottleneck:
                c_in = plan[cut - 1][0] * width  # the server's entry, back to the unpruned width at the cut
                units.append(conv_bn_relu(bottleneck, c_in))
            unit = ResidualBlock if arch == "resnet20" and i > 0 else conv_bn_relu
            units.append(unit(c_in, c_out, stride))
            c_in = c_out
        squeeze = []
        if bottleneck:
            squeeze = [nn.Conv2d(counts[cut - 1], bottleneck, 3, padding=1), nn.BatchNorm2d(bottleneck)]
        self.encoder = nn.Sequential(*units[:cut], *squeeze, nn.Sigmoid())
        self.server = nn.Sequential(
            *units[cut:], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, num_classes)
        )


def apply(module, x, precision):
    """module(x); its convolutions in bfloat16 if `precision` says so, weights and result as they were."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        return module(x).to(x.dtype)


@contextmanager
def evaluating(encoder, image_size):
    """One black image on the encoder's device, with the encoder in eval mode and no gradients meanwhile."""
    was_training = encoder.training
    encoder.eval()
    with torch.no_grad():
        yield torch.zeros(1, 3, image_size, image_size, device=next(encoder.parameters()).device)
    encoder.train(was_training)


def feature_shape(encoder, image_size):
    """[c, h, w] of what the encoder sends for one image."""
    with evaluating(encoder, image_size) as x:
        return tuple(encoder(x).shape[1:])


def count_params(module):
    return sum(p.numel() for p in module.parameters())


@torch.no_grad()
def operations(module, x):
    """Operations (a multiply-add counts two) of the convolutions and matrix products in module(x)."""
    counter = FlopCounterMode(display=False)
    with counter:
        module(x)
    return counter.get_total_flops()


def count_flops(encoder, image_size):
    with evaluating(encoder, image_size) as x:
        return operations(encoder, x)


def latency_ms(encoder, image_size):
    """Median milliseconds of one image through the encoder on its device."""
    with evaluating(encoder, image_size) as x:
        timer = benchmark.Timer(
            "encoder(x)", globals={"encoder": encoder, "x": x}, num_threads=torch.get_num_threads()
        )
        return timer.blocked_autorange(min_run_time=0.2).median * 1e3
