"""What harness/split_net.py builds: the paper's parameter counts, FLOPs by hand, every cut joins to the same
network, and each layer is the literal computation."""

import pytest
import torch
import torch.nn.functional as F
from conftest import seeded
from torch import nn

from harness.split_net import UNITS, SplitNet, apply, count_flops, count_params, feature_shape, latency_ms

CUTS = [(arch, cut) for arch in UNITS for cut in range(1, len(UNITS[arch]))]


def images(n=4, size=32):
    return torch.rand(n, 3, size, size, generator=seeded(0))


def convolutions(module):
    return [m for m in module.modules() if isinstance(m, nn.Conv2d)]


# -------------------------------------------------------------------------------- the paper's setting


def test_the_papers_encoder():
    net = SplitNet("vgg11", num_classes=10, width=64, cut=2, bottleneck=8)
    # 3x3 convolutions 3 -> 64 -> 128 without bias, 128 -> 8 with; two numbers a channel for BatchNorm
    by_hand = 9 * (3 * 64 + 64 * 128 + 128 * 8) + 8 + 2 * (64 + 128 + 8)
    assert count_params(net.encoder) == by_hand == pytest.approx(0.085e6, rel=0.01)
    assert feature_shape(net.encoder, 32) == (8, 8, 8) == tuple(net.encoder(images()).shape[1:])
    first = convolutions(net.server)[0]
    assert (first.in_channels, first.out_channels, first.kernel_size) == (8, 128, (3, 3))
    assert [m.out_channels for m in convolutions(net.server)] == [128, 256, 256, 512, 512, 512, 512]


def test_the_whole_vgg11_has_eight_convolutions_of_the_published_size():
    """Without a bottleneck: VGG11-BN's convolutions (others give them biases, which BatchNorm makes idle)."""
    net = SplitNet("vgg11", width=64, cut=2, bottleneck=0)
    widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    weights = sum(9 * a * b for a, b in zip(widths, widths[1:])) + 2 * sum(widths[1:])
    assert count_params(net) == weights + 512 * 10 + 10


def test_resnet20_has_the_published_parameters():
    """He et al., table 6: 0.27 M; two shortcuts more with projections. Cut 2 is behind four convolutions."""
    net = SplitNet("resnet20", cut=2, bottleneck=0)
    stem, blocks = 9 * 3 * 16, 6 * 9 * 16**2 + (9 * 16 * 32 + 5 * 9 * 32**2) + (9 * 32 * 64 + 5 * 9 * 64**2)
    norms, shortcuts = 2 * (7 * 16 + 6 * 32 + 6 * 64), (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64)
    assert count_params(net) == stem + blocks + norms + shortcuts + 64 * 10 + 10
    assert count_params(net) - shortcuts == pytest.approx(0.27e6, rel=0.01)
    assert len(convolutions(SplitNet("resnet20", cut=2, bottleneck=8).encoder)) == 4


# -------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize("size", [32, 64])
def test_flops_of_vgg_by_hand(size):
    net = SplitNet("vgg11", width=64, cut=2, bottleneck=8)
    places = size * size  # pooled to a quarter behind each unit; a multiply-add counts two
    by_hand = 2 * 9 * (3 * 64 * places + 64 * 128 * places // 4 + 128 * 8 * places // 16)
    assert count_flops(net.encoder, size) == by_hand


def test_flops_of_resnet_by_hand():
    net = SplitNet("resnet20", width=16, cut=5, bottleneck=4)
    stem, plain = 9 * 3 * 16 * 32**2, 3 * 2 * 9 * 16 * 16 * 32**2
    strided = (9 * 16 * 32 + 9 * 32 * 32 + 16 * 32) * 16**2  # the fifth unit halves the side
    squeeze = 9 * 32 * 4 * 16**2
    assert count_flops(net.encoder, 32) == 2 * (stem + plain + strided + squeeze)


def test_pruned_channels_cost_less_by_hand():
    net = SplitNet("vgg11", width=16, cut=3, bottleneck=8, channels=[5, 7, 11])
    by_hand = 2 * 9 * (3 * 5 * 32**2 + 5 * 7 * 16**2 + 7 * 11 * 8**2 + 11 * 8 * 8**2)
    assert count_flops(net.encoder, 32) == by_hand


@pytest.mark.parametrize("measure", [feature_shape, count_flops, latency_ms])
@pytest.mark.parametrize("training", [True, False])
def test_measuring_leaves_the_encoder_as_it_was(measure, training):
    encoder = SplitNet(width=4).train(training).encoder
    before = {k: v.clone() for k, v in encoder.state_dict().items()}
    assert measure(encoder, 32)
    assert all(m.training == training for m in encoder.modules())
    assert all(torch.equal(before[k], v) for k, v in encoder.state_dict().items())


# -------------------------------------------------------------------------------- cuts


@pytest.mark.parametrize("bottleneck", [0, 3])
@pytest.mark.parametrize("arch, cut", CUTS)
def test_every_cut_runs_joins_and_trains(arch, cut, bottleneck):
    torch.manual_seed(0)
    net = SplitNet(arch, num_classes=7, width=4, cut=cut, bottleneck=bottleneck)
    z = net.encoder(images())
    side = 32
    for _, stride in UNITS[arch][:cut]:
        side //= stride
    assert tuple(z.shape[1:]) == feature_shape(net.encoder, 32)
    assert z.shape[1:] == ((bottleneck or 4 * UNITS[arch][cut - 1][0]), side, side)
    assert (z > 0).all() and (z < 1).all()
    F.cross_entropy(net.server(z), torch.arange(4)).backward()
    for name, p in net.named_parameters():
        # BatchNorm takes the mean away: the bias of the convolution in front of it gets only rounding
        idle = bottleneck and name == f"encoder.{cut}.bias"
        assert p.grad is not None and p.grad.isfinite().all() and (idle or p.grad.abs().max() > 0), name


@pytest.mark.parametrize("arch, cut", CUTS)
def test_a_cut_moves_units_and_changes_nothing_else(arch, cut):
    """Without a bottleneck, encoder units and server are the same list of units for every cut."""
    whole = SplitNet(arch, width=4, cut=1, bottleneck=0)
    net = SplitNet(arch, width=4, cut=cut, bottleneck=0)
    tensors = list(whole.state_dict().values())
    assert [v.shape for v in net.state_dict().values()] == [v.shape for v in tensors]
    net.load_state_dict(dict(zip(net.state_dict(), tensors)))
    joined = lambda n: nn.Sequential(*n.encoder[:-1], *n.server).eval()(images())
    assert torch.equal(joined(whole), joined(net)) and isinstance(net.encoder[-1], nn.Sigmoid)


def randomised(module):
    """BatchNorm away from its start, where it would hide a mistake."""
    for m in module.double().eval().modules():
        if isinstance(m, nn.BatchNorm2d):
            for t, low in ((m.running_mean, -1), (m.running_var, 0.5), (m.weight, 0.5), (m.bias, -1)):
                t.data.uniform_(low, low + 1.5)
    return module


def norm(x, m):
    mean, var, gain, bias = (t.view(1, -1, 1, 1) for t in (m.running_mean, m.running_var, m.weight, m.bias))
    return (x - mean) / (var + m.eps).sqrt() * gain + bias


def test_encoder_is_the_literal_computation():
    torch.manual_seed(0)
    net, x = randomised(SplitNet("vgg11", width=4, cut=2, bottleneck=3)), images().double()
    (c1, n1, *_), (c2, n2, *_), c3, n3, _ = net.encoder
    h = F.max_pool2d(norm(F.conv2d(x, c1.weight, padding=1), n1).clamp(min=0), 2)
    h = F.max_pool2d(norm(F.conv2d(h, c2.weight, padding=1), n2).clamp(min=0), 2)
    h = norm(F.conv2d(h, c3.weight, c3.bias, padding=1), n3)
    assert torch.allclose(net.encoder(x), 1 / (1 + torch.exp(-h)), atol=1e-12)


def test_residual_block_is_the_literal_computation():
    """With a 1x1 convolution of stride 2 as its shortcut, and with an identity."""
    torch.manual_seed(0)
    encoder = randomised(SplitNet("resnet20", width=4, cut=6, bottleneck=0)).encoder
    for block, stride, channels in ((encoder[4], 2, 4), (encoder[5], 1, 8)):
        x = torch.randn(2, channels, 8, 8, dtype=torch.float64)
        inner = norm(F.conv2d(x, block.first[0].weight, stride=stride, padding=1), block.first[1]).clamp(
            min=0
        )
        inner = norm(F.conv2d(inner, block.second[0].weight, padding=1), block.second[1])
        short = x
        if stride == 2:
            short = norm(F.conv2d(x, block.shortcut[0].weight, stride=2), block.shortcut[1])
        assert torch.allclose(block(x), (short + inner).clamp(min=0), atol=1e-12)


def test_a_narrow_strided_block_in_channels_last_has_the_gradients_of_the_plain_one():
    """Where torch's own strided 1x1 convolution wrote beyond its memory."""
    torch.manual_seed(0)
    block = SplitNet("resnet20", width=2, cut=5, bottleneck=0).encoder[4]
    grads = []
    for layout in (torch.contiguous_format, torch.channels_last):
        block.zero_grad()
        x = torch.rand(8, 2, 16, 16, generator=seeded(0)).contiguous(memory_format=layout).requires_grad_()
        block(x).square().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in block.parameters())])
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(*grads))


def test_bottleneck_zero_sends_the_cuts_own_channels():
    net = SplitNet("vgg11", width=4, cut=2, bottleneck=0)
    assert feature_shape(net.encoder, 32) == (8, 8, 8) and len(convolutions(net.encoder)) == 2
    assert convolutions(net.server)[0].in_channels == 8 and convolutions(net.server)[0].out_channels == 16


@pytest.mark.parametrize("arch, bottleneck", [(arch, b) for arch in UNITS for b in (0, 6)])
def test_pruned_channels(arch, bottleneck):
    torch.manual_seed(0)
    net = SplitNet(arch, num_classes=5, width=8, cut=3, bottleneck=bottleneck, channels=[2, 3, 7])
    width = lambda unit: (unit if isinstance(unit, nn.Sequential) else unit.first)[0].out_channels
    assert [width(unit) for unit in net.encoder[:3]] == [2, 3, 7]
    entry = convolutions(net.server)[0]
    assert entry.in_channels == (bottleneck or 7)
    if bottleneck:
        assert entry.out_channels == UNITS[arch][2][0] * 8  # back to the unpruned width at the cut
    net.server(net.encoder(images())).square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    plain = SplitNet(arch, num_classes=5, width=8, cut=3, bottleneck=bottleneck)
    behind = lambda net: [m.out_channels for m in convolutions(net.server) if m.kernel_size == (3, 3)]
    assert behind(net) == behind(plain)  # nothing of the server is lost


def test_config_rebuilds_the_network():
    pruned = dict(arch="resnet20", cut=4, bottleneck=2, channels=[3, 4, 5, 6], num_classes=4)
    for kwargs in (dict(width=8), pruned):
        net = SplitNet(**kwargs).eval()
        twin = SplitNet(**net.config).eval()
        twin.load_state_dict(net.state_dict())
        assert torch.equal(net.server(net.encoder(images())), twin.server(twin.encoder(images())))


WRONG = [
    (dict(arch="alexnet"), "alexnet"),
    (dict(cut=0), "--cut 0"),
    (dict(cut=8), "--cut 8"),
    (dict(arch="resnet20", cut=10), "--cut 10"),
    (dict(width=-1), "--width"),
    (dict(bottleneck=-1), "--bottleneck"),
    (dict(cut=2, channels=[4]), "channels"),
    (dict(cut=2, channels=[4, 4, 4]), "channels"),
]


@pytest.mark.parametrize("kwargs, word", WRONG)
def test_mistakes_are_one_sentence(kwargs, word):
    with pytest.raises(ValueError, match=rf"^[^\n]*{word}[^\n]*\.$"):
        SplitNet(**kwargs)


def test_bfloat16_computes_about_the_same_and_leaves_weights_and_result_in_float32():
    net, x = SplitNet(width=8).eval(), torch.rand(4, 3, 32, 32)
    exact, half = (apply(net.encoder, x, precision) for precision in ("float32", "bfloat16"))
    assert torch.equal(exact, net.encoder(x)) and half.dtype == torch.float32
    assert 0 < (half - exact).abs().max() < 0.02  # 8 bits of a sigmoid in (0, 1)
    half.sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in net.encoder.parameters())
