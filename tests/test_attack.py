"""What attack.py and its decoder promise: attackers that are strong, fair, and leave their victim alone.

Oracles: the error of the best linear estimate, the most probable image of a linear channel, the identity.
"""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, go, seeded
from PIL import Image
from torch import nn

import attack
from attack import AttackImages, attacker_images, decoder_attack, gan_attack, whitebox_attack
from harness import decoder as decoder_module
from harness import evaluation
from harness.data import Images, Splits, draw_shapes, image_hashes
from harness.decoder import Decoder, Muon, fit_decoder, flat, orthogonal
from harness.evaluation import Victim, state_hash
from harness.files import UserError
from harness.metrics import metrics, mse
from harness.split_net import ResidualBlock, SplitNet

quiet = lambda done: None


def options(**changes):
    """The flags of the attack group."""
    settings = {
        "attack": ["decoder"],
        "attack_size": [1, 8],
        "attack_epochs": 2,
        "looks": 1,
        "seed": 0,
        "precision": "float32",
    }
    return SimpleNamespace(**{**settings, **changes})


def pictures(n, seed, size=16):
    """uint8 images that are all different, with labels."""
    x = torch.randint(0, 256, (n, 3, size, size), generator=seeded(seed), dtype=torch.uint8)
    return Images(x.contiguous(memory_format=torch.channels_last), torch.arange(n) % 3)


def smooth(n, seed):
    """Images of a few colours that run into each other: easy to reconstruct."""
    colours = torch.rand(n, 3, 2, 2, generator=seeded(seed))
    x = (F.interpolate(colours, 16, mode="bilinear") * 255).to(torch.uint8)
    return Images(x.contiguous(memory_format=torch.channels_last), torch.arange(n) % 3)


def attack_images(make=pictures, fit=16):
    return AttackImages(make(fit, 1), make(7, 2), {"train": make(5, 3), "test": make(6, 4)})


def small_victim(sigma=0.1, **wire):
    torch.manual_seed(0)
    net = SplitNet("vgg11", num_classes=3, width=4, cut=1, bottleneck=3)
    with torch.no_grad():
        net.encoder(torch.rand(8, 3, 16, 16))  # BatchNorm's buffers away from their start
    return Victim(net.encoder, sigma, **wire)


class Linear(nn.Module):
    """x [B, 3, H, W] -> work(x), with a parameter, as every encoder has one."""

    def __init__(self, work):
        super().__init__()
        self.scale, self.work = nn.Parameter(torch.ones(())), work

    def forward(self, x):
        return self.scale * self.work(x)


# ------------------------------------------------------------ the victim


def test_fresh_noise_on_every_look():
    victim, z = small_victim(0.2), torch.zeros(100, 3, 8, 8)
    looks = torch.stack([victim.send(z) for _ in range(4)])
    assert len(torch.unique(looks.flatten(1), dim=0)) == 4
    assert looks.std().item() == pytest.approx(0.2, rel=0.02)
    assert abs(looks.mean()) < 4 * 0.2 / looks.numel() ** 0.5
    assert abs((looks[0] * looks[1]).mean()) < 4 * 0.04 / looks[0].numel() ** 0.5
    assert torch.equal(small_victim(0.0).send(z), z)


@pytest.mark.parametrize("looks", (2, 9, 25))
def test_the_mean_of_many_looks_has_less_noise(looks):
    """σ/√R, around z."""
    torch.manual_seed(0)
    z = torch.rand(200, 3, 8, 8)
    noise = small_victim(0.3).send(z, looks) - z
    assert noise.std().item() == pytest.approx(0.3 / math.sqrt(looks), rel=0.02)
    assert abs(noise.mean()) < 4 * noise.std() / noise.numel() ** 0.5


def test_many_looks_see_through_a_wire_that_drops():
    """What a look dropped, an exact 0, says nothing: the mean is of the looks that arrived."""
    torch.manual_seed(0)
    z = torch.rand(50, 3, 8, 8) + 0.1
    victim = evaluation.Victim(torch.nn.Identity(), 0.0, lambda z: z * (torch.rand_like(z) < 0.5))
    seen = victim.send(z, 3)
    assert torch.allclose(seen[seen != 0], z[seen != 0])
    assert (seen == 0).float().mean().item() == pytest.approx(0.5**3, abs=0.02)


def test_the_wire_acts_behind_the_noise_and_on_every_look():
    victim = small_victim(0.2, wire=lambda z: 1.0 + (z > 0))
    sent = victim.send(torch.zeros(50, 3, 8, 8))
    assert set(sent.unique().tolist()) == {1.0, 2.0} and sent.mean().item() == pytest.approx(1.5, abs=0.03)
    sent = victim.send(torch.zeros(50, 3, 8, 8), 4)
    assert set(sent.unique().tolist()) == {1.0, 1.25, 1.5, 1.75, 2.0}


def test_features_are_the_encoder_in_eval_mode_whatever_the_batch(monkeypatch):
    victim, images = small_victim(), pictures(7, 0)
    victim.encoder.eval()
    with torch.no_grad():
        want = victim.encoder(images.x.double().div(255).float())
    victim.encoder.train()
    for batch in (500, 2):
        monkeypatch.setattr(evaluation, "FEATURE_BATCH", batch)
        assert torch.allclose(victim.features(images.x), want, atol=1e-6)
    assert not victim.features(images.x).requires_grad and not victim.encoder.training


def test_an_accuracy_over_several_draws_is_the_mean_of_as_many_looks():
    victim, images = small_victim(), draw_shapes(40)  # untrained: the noise decides
    net = SimpleNamespace(eval=lambda: None, server=lambda sent: sent.flatten(1)[:, :10])
    torch.manual_seed(1)
    looks = [evaluation.accuracy(net, victim, images) for _ in range(4)]
    torch.manual_seed(1)
    assert evaluation.accuracy(net, victim, images, draws=4) == pytest.approx(sum(looks) / 4, rel=1e-6)
    assert len(set(looks)) > 1


@pytest.mark.parametrize("name", ["0.0.weight", "0.1.running_mean", "0.1.num_batches_tracked", "1.bias"])
def test_the_hash_sees_every_weight_and_buffer(name):
    victim = small_victim()
    before = state_hash(victim.encoder)
    victim.features(pictures(3, 0).x)
    assert state_hash(victim.encoder) == before
    tensor = victim.encoder.state_dict()[name].flatten()
    if tensor.dtype.is_floating_point:
        tensor[0] = torch.nextafter(tensor[0], torch.tensor(math.inf))  # the least possible change
    else:
        tensor[0] += 1
    assert state_hash(victim.encoder) != before


# ------------------------------------------------------------ the decoder


def test_the_papers_decoder():
    decoder = Decoder((8, 8, 8), 32, blocks=8, channels=64)
    conv_bn = lambda a, b: 9 * a * b + 2 * b
    conv = lambda a, b: 9 * a * b + b
    by_hand = conv_bn(8, 64) + 8 * 2 * conv_bn(64, 64) + conv(64, 128) + 2 * conv_bn(32, 32) + conv(32, 12)
    assert sum(p.numel() for p in decoder.layers.parameters()) == by_hand == pytest.approx(0.71e6, rel=0.03)
    assert sum(p.numel() for p in decoder.coarse.parameters()) == 8 * 8 * 8 * 3 * 8 * 8 + 3 * 8 * 8
    out = decoder(torch.randn(2, 8, 8, 8))
    assert out.shape == (2, 3, 32, 32) and (out > 0).all() and (out < 1).all()


@pytest.mark.parametrize(
    "shape, size", [((3, 16, 16), 16), ((3, 8, 8), 16), ((5, 2, 2), 32), ((4, 9, 9), 36)]
)
@pytest.mark.parametrize("blocks", [1, 3])
def test_decoder_reaches_the_image_with_all_its_blocks(shape, size, blocks):
    decoder = Decoder(shape, size, blocks, 4)
    assert decoder(torch.randn(1, *shape)).shape == (1, 3, size, size)
    doublings = (size // shape[1]).bit_length() - 1  # each but the last is followed by one more block
    assert sum(isinstance(m, ResidualBlock) for m in decoder.modules()) == blocks + max(0, doublings - 1)


@pytest.mark.parametrize("side, size, advice", [(8, 36, 32), (8, 33, 32), (9, 40, 36)])
def test_decoder_says_which_size_it_can_reach(side, size, advice):
    with pytest.raises(UserError, match=rf"--image-size {size}.*{side}x{side}.*use {advice}\.$"):
        Decoder((8, side, side), size)
    Decoder((8, side, side), advice, 1, 2)


def test_residual_adds_its_body():
    block, x = ResidualBlock(3, 3).eval(), torch.randn(1, 3, 5, 5)
    assert torch.allclose(block(x), torch.relu(x + block.second(block.first(x))))
    assert not torch.allclose(block(x), torch.relu(x))
    nn.init.zeros_(block.second[-1].weight), nn.init.zeros_(block.second[-1].bias)
    assert torch.equal(block(x), torch.relu(x))


def test_decoder_sees_squeezed_features_as_large_as_any():
    torch.manual_seed(0)
    decoder, z = Decoder((4, 8, 8), 32, 1, 8).eval(), torch.rand(50, 4, 8, 8)
    decoder.observe(z)
    standard = (z - decoder.mean) / decoder.std
    assert torch.allclose(standard.mean((0, 2, 3)), torch.zeros(4), atol=1e-5)
    assert torch.allclose(standard.std((0, 2, 3)), torch.ones(4), atol=1e-5)
    plain = decoder(z)
    decoder.observe(0.5 + 1e-3 * z)
    assert torch.allclose(decoder(0.5 + 1e-3 * z), plain, atol=1e-2)


def test_decoder_knows_what_was_dropped_on_the_wire():
    """An exact 0 says nothing: neither about a channel's mean and deviation nor about the picture."""
    torch.manual_seed(0)
    decoder, z = Decoder((4, 8, 8), 32, 1, 8).eval(), 0.5 + 0.1 * torch.randn(50, 4, 8, 8)
    nn.init.normal_(decoder.coarse[1].weight)
    kept = torch.rand_like(z) > 0.4
    decoder.observe(z * kept)
    for c in range(4):
        there = z[:, c][kept[:, c]]
        assert decoder.mean[c].item() == pytest.approx(there.mean().item(), rel=1e-5)
        assert decoder.std[c].item() == pytest.approx(there.std().item(), rel=1e-4)
    assert torch.allclose(decoder(z * kept), decoder(torch.where(kept, z, decoder.mean)), atol=1e-5)
    assert not torch.allclose(decoder(z * kept), decoder(z), atol=1e-2)


def test_decoder_finds_what_is_spread_over_all_of_z():
    """Pictures rotated as vectors, so that every number of z' has a little of every place: no small window
    sees anything in it, a linear attacker does. The decoder comes close to the best linear estimate; without
    its coarse picture it does not."""
    torch.manual_seed(0)
    x = draw_shapes(800, seed=5, size=16).float()
    coarse = F.avg_pool2d(x, 2).flatten(1)  # [N, 192]
    rotation = torch.linalg.qr(torch.randn(192, 192)).Q
    z = ((coarse - coarse.mean(0)) @ rotation).view(-1, 3, 8, 8)
    send = lambda z: z + 0.05 * torch.randn_like(z)
    fit, test = slice(0, 600), slice(600, 800)
    ones = lambda z: torch.cat([z.flatten(1), torch.ones(len(z), 1)], 1)
    a, b = ones(send(z[fit])), x[fit].flatten(1)
    estimate = torch.linalg.solve(a.T @ a + torch.eye(193), a.T @ b)
    linear = F.mse_loss(ones(send(z[test])) @ estimate, x[test].flatten(1)).item()

    def attacked(coarse_learns):
        torch.manual_seed(1)
        decoder = Decoder((3, 8, 8), 16, 1, 8)
        decoder.observe(send(z[fit]))
        decoder.coarse.requires_grad_(coarse_learns)
        pairs = lambda: ((send(z[i]), x[i]) for i in torch.randperm(600).split(40))
        fit_decoder(decoder, pairs, lambda: [(send(z[test]), x[test])], 20, 15, 1e-2)
        with torch.no_grad():
            return F.mse_loss(decoder(send(z[test])), x[test]).item()

    with_coarse, without = attacked(True), attacked(False)
    assert with_coarse < 1.15 * linear < 0.5 * x.var(), (with_coarse, linear)
    assert without > 1.5 * linear, (without, linear)


# ------------------------------------------------------------ its training


@pytest.mark.parametrize("rows, columns", [(8, 8), (4, 8), (12, 8)])
def test_a_linear_decoder_reaches_the_mmse(rows, columns):
    """x ~ N(0, I), z' = Ax + n: the error of an estimate Wz' + b is known, its least value is the MMSE."""
    torch.manual_seed(0)
    sigma, d = 0.5, columns
    A = torch.randn(rows, columns) / 2
    least = torch.linalg.inv(torch.eye(d) + A.T @ A / sigma**2).trace().item() / d

    def pairs(count=20, size=500):
        for _ in range(count):
            x = torch.randn(size, d)
            yield x @ A.T + sigma * torch.randn(size, rows), x

    decoder = nn.Linear(rows, d)

    def exact():
        W, b = decoder.weight.detach(), decoder.bias.detach()
        error = (torch.eye(d) - W @ A).square().sum() + sigma**2 * W.square().sum() + b.square().sum()
        return error.item() / d

    assert exact() > 1.2 * least
    facts = fit_decoder(decoder, pairs, lambda: pairs(4), epochs=10, steps=20, lr=0.05)
    assert least * (1 - 1e-5) <= exact() < 1.05 * least
    assert facts["stop_mse"] == pytest.approx(exact(), rel=0.05)


class Point(nn.Module):
    """Answers one number, whatever it is sent."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))
        self.register_buffer("looks", torch.zeros(()))

    def forward(self, sent):
        self.looks += self.training
        return self.value.expand(len(sent), 1)


def test_the_best_epoch_on_stop_is_kept(monkeypatch):
    """Pulled towards 1 for three epochs and away to 5 afterwards; the stopping images say 1."""
    history, epoch, forward = [], [0], Point.forward

    def seen_by(point, sent):
        if not point.training and len(sent) == 3:  # the first batch of a look at the stopping images
            history.append((point.value.item(), point.looks.item()))
        return forward(point, sent)

    monkeypatch.setattr(Point, "forward", seen_by)

    def pairs():
        epoch[0] += 1
        return [(torch.zeros(4, 1), torch.full((4, 1), 1.0 if epoch[0] <= 3 else 5.0))] * 20

    stop_pairs = lambda: [(torch.zeros(3, 1), torch.ones(3, 1)), (torch.zeros(1, 1), torch.full((1, 1), 2.0))]
    decoder = Point()
    facts = fit_decoder(decoder, pairs, stop_pairs, epochs=8, steps=20, lr=0.1)
    errors = [(3 * (v - 1) ** 2 + (v - 2) ** 2) / 4 for v, _ in history]  # over images, not over batches
    assert facts["epochs"] == len(history) == 8 and facts["converged"] is None
    assert facts["history"] == pytest.approx(errors, rel=1e-5)
    assert facts["best_epoch"] == 1 + int(np.argmin(errors)) < 8
    assert facts["stop_mse"] == pytest.approx(min(errors), rel=1e-5) and min(errors) < 0.5 * errors[-1]
    kept = history[facts["best_epoch"] - 1]
    assert (decoder.value.item(), decoder.looks.item()) == kept  # weights and buffers of that epoch


def test_the_rate_rises_and_falls_and_progress_counts_every_step(monkeypatch):
    """Up over a tenth of the first epoch, constant for two thirds of all, down along a cosine."""
    rates, seen = [], []
    step = torch.optim.Adam.step
    note = lambda self, *args: (rates.append(self.param_groups[0]["lr"]), step(self, *args))[1]
    monkeypatch.setattr(torch.optim.Adam, "step", note)
    pairs = lambda: [(torch.zeros(2, 1), torch.zeros(2, 1))] * 20
    fit_decoder(Point(), pairs, pairs, epochs=6, steps=20, lr=0.1, progress=seen.append)
    assert seen == pytest.approx([(i + 1) / 120 for i in range(120)])
    fall = [0.05 * (1 + math.cos(math.pi * i / 40)) for i in range(40)]
    assert rates == pytest.approx([0.05] + [0.1] * 79 + fall)


@pytest.mark.parametrize("epochs, steps", [(1, 1), (2, 1), (10, 1), (1, 10), (5, 2)])
def test_short_attacks_run(epochs, steps):
    decoder = Point()
    pairs = lambda: [(torch.zeros(2, 1), torch.ones(2, 1))] * steps
    facts = fit_decoder(decoder, pairs, pairs, epochs, steps, lr=0.01)
    assert 1 <= facts["best_epoch"] <= epochs and facts["stop_mse"] < 1
    assert facts["stop_mse"] == pytest.approx((decoder.value.item() - 1) ** 2, rel=1e-5)


def test_a_diverged_attacker_is_not_reported():
    pairs = lambda: [(torch.full((2, 4, 8, 8), math.nan), torch.rand(2, 3, 32, 32))]
    with pytest.raises(UserError, match="diverged in its epoch 1"):
        fit_decoder(Decoder((4, 8, 8), 32, 1, 8), pairs, pairs, 1, 1, 0.1)


@pytest.mark.parametrize(
    "history, is_flat",
    [
        ([1.0], False),
        ([1.0] * 7, False),  # a quarter of them is one epoch: too early to say
        ([1.0] * 8, True),
        ([9, 5, 2, 1, 1, 1, 1, 1, 1, 0.995, 0.995, 0.995], True),  # half a percent in the last quarter
        ([9, 5, 2, 1, 1, 1, 1, 1, 1, 0.98, 0.98, 0.98], False),
        ([9, 5, 2, 1, 1, 1, 1, 1, 1, 3, 2, 4], True),  # what counts is the best so far
        ([12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1], False),
    ],
)
def test_flat_means_less_than_one_percent_in_the_last_quarter(history, is_flat):
    assert flat(history) is is_flat


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (4, 4), (1, 5)])
def test_a_step_of_muon_has_the_directions_of_the_gradient_and_one_length_for_all(shape):
    """The polynomial on the singular values themselves: s ← 3.4445 s − 4.775 s³ + 2.0315 s⁵, five times."""
    M = torch.randn(shape, dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(M, full_matrices=False)
    s = S / S.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonal(M), U * s @ Vh, atol=1e-10, rtol=0)
    assert 0.6 < s.min() and s.max() < 1.3
    assert orthogonal(torch.zeros(shape)).abs().max() == 0  # a dead layer stays where it is


def test_two_steps_of_muon_are_nesterovs():
    weight = torch.nn.Parameter(torch.randn(2, 1, 2, 2, dtype=torch.float64))
    first, optimizer = weight.detach().clone(), Muon([weight], lr=0.1)
    a, b = torch.randn(2, 2, 1, 2, 2, dtype=torch.float64)
    for g in (a, b):
        weight.grad = g.clone()
        optimizer.step()
    m1 = 0.05 * a
    m2 = 0.95 * m1 + 0.05 * b
    steps = [orthogonal((0.05 * g + 0.95 * m).flatten(1)).view(2, 1, 2, 2) for g, m in ((a, m1), (b, m2))]
    torch.testing.assert_close(weight.detach(), first - 0.1 * (steps[0] + steps[1]), atol=1e-12, rtol=0)


def test_an_automatic_attack_ends_when_it_is_flat_and_is_the_mean_of_its_weights():
    """Pulled to 1 by noisy pairs: the point itself trembles, its mean over the last steps hardly does."""
    torch.manual_seed(0)
    pairs = lambda: [(torch.zeros(20, 1), 1 + torch.randn(20, 1)) for _ in range(8)]
    stop, point, seen = [(torch.zeros(1, 1), torch.ones(1, 1))], Point(), []
    facts = fit_decoder(point, pairs, lambda: seen.append(point.value.item()) or stop, "auto", 8, 0.2)
    history = facts["history"]
    fell_from = next(n for n in range(1, len(history)) if flat(history[:n]))
    assert facts["converged"] is True
    assert facts["epochs"] == len(history) == math.ceil(1.5 * fell_from) < decoder_module.CEILING
    assert facts["stop_mse"] == min(history) == pytest.approx((point.value.item() - 1) ** 2)
    trembling = [(value - 1) ** 2 for value in seen[fell_from // 2 : fell_from]]
    assert min(history[:fell_from]) < 0.2 * sum(trembling) / len(trembling)


def test_the_mean_and_the_rate_of_an_automatic_attack():
    """θ̄ ← θ̄ + 9 / (t + 9) (θ − θ̄) in a loop of its own; never flat, it says so"""
    rates, path, step = [], [], torch.optim.Adam.step
    with pytest.MonkeyPatch.context() as patch:

        def remember(self, *args):
            step(self, *args)
            rates.append(self.param_groups[0]["lr"]), path.append(self.param_groups[0]["params"][0].item())

        patch.setattr(torch.optim.Adam, "step", remember)
        patch.setattr(decoder_module, "CEILING", 3)
        pairs = lambda: [(torch.zeros(2, 1), torch.full((2, 1), 100.0))] * 20
        point = Point()
        facts = fit_decoder(point, pairs, pairs, "auto", 20, 0.5)
    mean = path[0]
    for t, value in enumerate(path[1:], 1):
        mean = mean + 9 / (t + 9) * (value - mean)
    assert point.value.item() == pytest.approx(mean, rel=1e-5)
    assert facts["converged"] is False and facts["epochs"] == 5 == facts["best_epoch"]
    # up over a tenth of the first epoch, constant for three, down along a cosine for half as many
    fall = [0.25 * (1 + math.cos(math.pi * i / 40)) for i in range(40)]
    assert rates == pytest.approx([0.25] + [0.5] * 59 + fall)


# ------------------------------------------------------------ the images


def joined(*parts):
    return Images(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))


def hashes(images):
    return set(image_hashes(images))


@pytest.mark.parametrize("where", ["fit", "stop"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_an_overlap_is_refused(where, split):
    parts = {"fit": pictures(10, 1), "stop": pictures(5, 2), "train": pictures(4, 3), "test": pictures(4, 4)}
    make = lambda p: AttackImages(p["fit"], p["stop"], {"train": p["train"], "test": p["test"]})
    make(parts).check()
    parts[where] = joined(parts[where], parts[split][torch.tensor([2])])
    for refused in (make(parts).check, lambda: attack.attack(small_victim(), make(parts), options())):
        with pytest.raises(UserError, match=f"1 of the reported {split}"):
            refused()


def splits(train=60, test=12, aux=30):
    return Splits(pictures(train, 1), pictures(6, 2), pictures(test, 3), pictures(aux, 4), list("abc"))


@pytest.mark.parametrize("which", ["train", "aux"])
def test_attacker_images_are_a_partition(which):
    s = splits()
    images = attacker_images(s, which, seed=0)
    images.check()
    fit, stop, members = (hashes(part) for part in (images.fit, images.stop, images.report["train"]))
    assert len(images.fit) == len(fit) and len(images.stop) == len(stop) and not fit & stop
    assert members < hashes(s.train) and len(members) == 6  # a tenth of the victim's training images
    assert torch.equal(images.report["test"].x, s.test.x)
    if which == "train":
        assert fit | stop | members == hashes(s.train)
    else:
        assert fit | stop == hashes(s.aux) and not (fit | stop) & hashes(s.train)
    assert not (fit | stop) & hashes(s.val)


def test_members_follow_the_seed():
    s = splits()
    members = [hashes(attacker_images(s, "train", seed).report["train"]) for seed in (0, 0, 1)]
    assert members[0] == members[1] != members[2]
    # the same members for both attackers: their figures compare
    assert hashes(attacker_images(s, "aux", 0).report["train"]) == members[0]


@pytest.mark.parametrize("which", ["train", "aux"])
def test_the_attacker_loses_its_copies_of_reported_images(which):
    """Every training image three times, some test images among the training and the aux images."""
    s = splits(train=20, aux=20)
    s.train = joined(s.train, s.train, s.train, s.test[torch.arange(4)])
    s.aux = joined(s.aux, s.test[torch.arange(4)], s.train[torch.arange(20)])
    images = attacker_images(s, which, seed=0)
    images.check()
    kept, members = hashes(images.fit) | hashes(images.stop), hashes(images.report["train"])
    pool = hashes(s.train if which == "train" else s.aux)
    assert kept == pool - members - hashes(s.test)  # and nothing else is lost
    assert members <= hashes(s.train)


@pytest.mark.parametrize("which", ["train", "aux"])
def test_stopping_images_are_of_every_class(which):
    """A folder's images come class by class: the first tenth of them would be of one class."""
    s = splits(train=300, aux=300)
    for part in (s.train, s.aux):
        part.y = part.y.sort().values
    images = attacker_images(s, which, seed=0)
    assert set(images.stop.y.tolist()) == {0, 1, 2} and set(images.fit.y.tolist()) == {0, 1, 2}


def test_no_images_for_the_attacker():
    with pytest.raises(UserError, match="--attacker-data aux: 0 images"):
        attacker_images(splits(aux=0), "aux")
    with pytest.raises(UserError, match="--attacker-data train"):
        attacker_images(splits(train=2), "train")
    s = splits(train=10)
    s.test = s.train  # all that the attacker has is reported
    with pytest.raises(UserError, match="--attacker-data train"):
        attacker_images(s, "train")


# ------------------------------------------------------------ attackers that are good


def test_the_decoder_approaches_the_identity_where_nothing_is_hidden():
    """An orthogonal map of each 2x2 block of pixels, no noise: all of x is in z. Images it never saw."""
    torch.manual_seed(0)
    turn = torch.linalg.qr(torch.randn(12, 12)).Q
    victim = Victim(Linear(lambda x: torch.einsum("ij,bjhw->bihw", turn, F.pixel_unshuffle(x, 2))), 0.0)
    args = options(attack_size=[1, 24], attack_epochs=20)
    results, _, _ = attack.attack(victim, attack_images(smooth, fit=320), args)
    found = results["decoder"]
    assert found["test"]["nmse"] < 0.02 and found["train"]["nmse"] < 0.02 and found["test"]["ssim"] > 0.9


@pytest.mark.parametrize("spread", [1.0, 0.01], ids=["as sent", "squeezed"])
def test_squeezing_takes_nothing_from_the_decoder(spread):
    """0.5 + 0.01 (z − 0.5) says as much about x as z does. A surrogate squeezes features, so an attacker
    that cannot see small differences would make every surrogate look good."""
    torch.manual_seed(0)
    encoder = SplitNet("vgg11", width=8, cut=1, bottleneck=0).encoder.train()
    with torch.no_grad():
        for _ in range(50):
            encoder(smooth(50, 9).float())  # BatchNorm gets to know the images
    victim = Victim(encoder, 0.0, wire=lambda z: 0.5 + spread * (z - 0.5))
    results, _, _ = attack.attack(victim, attack_images(smooth, fit=200), options(attack_epochs=12))
    assert results["decoder"]["test"]["nmse"] < 0.6 and results["decoder"]["train"]["nmse"] < 0.6


def test_more_looks_lower_the_error_of_every_attacker(monkeypatch):
    """What one noisy look hides, many do not: noise of σ/√R, in training, stopping and report."""
    monkeypatch.setattr(attack, "WHITEBOX_STEPS", 60)
    victim = Victim(Linear(lambda x: F.avg_pool2d(x, 2)), 0.5)
    errors = {}
    for looks in (1, 25):
        args = options(attack=["decoder", "whitebox"], attack_epochs=6, looks=looks)
        results, _, _ = attack.attack(victim, attack_images(smooth, fit=160), args)
        errors[looks] = {name: found["test"]["mse"] for name, found in results.items()}
    for name in ("decoder", "whitebox"):
        assert errors[25][name] < 0.7 * errors[1][name], name


def test_the_decoder_sees_fresh_noise_in_every_epoch_and_in_what_is_reported():
    """All images are one grey, so that mirroring changes nothing: what differs between looks is the noise."""
    looks, sigma = [], 0.1

    def wire(z):
        looks.append(z.detach().clone())
        return z

    victim = small_victim(sigma, wire=wire)
    grey = lambda n: Images(torch.full((n, 3, 16, 16), 128, dtype=torch.uint8), torch.zeros(n).long())
    torch.manual_seed(0)
    decoder_attack(victim, AttackImages(grey(64), grey(4), {}), options(), quiet, {})
    noise = (torch.cat(looks) - victim.features(grey(1).x)).flatten(1)
    assert len(noise) >= 2 * (64 + 4) and noise.std().item() == pytest.approx(sigma, rel=0.05)
    apart = torch.cdist(noise, noise) + 1e9 * torch.eye(len(noise))
    assert apart.min() > 0.5 * sigma * (2 * noise.shape[1]) ** 0.5  # no noise is seen twice
    looks.clear()
    ramp = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, 3, 1, 1)
    reported = {"test": Images(ramp, torch.zeros(2).long())}
    attack.attack(victim, AttackImages(grey(64), grey(4), reported), options())
    assert not torch.equal(looks[0][0], looks[0][1])  # two equal pictures that are reported do not look equal


def test_the_decoder_learns_from_mirrored_pictures_as_well(monkeypatch):
    """A picture and what was sent for it are mirrored together, about half of the time."""
    seen = []
    fit = lambda decoder, pairs, *rest: [seen.extend(zip(*pair)) for _ in range(4) for pair in pairs()]
    monkeypatch.setattr(attack, "fit_decoder", lambda *a: (fit(*a), {"epochs": 4})[1])
    victim = Victim(Linear(lambda x: x), 0.0)
    images = attack_images(fit=64)
    decoder_attack(victim, images, options(attack_size=[1, 4]), quiet, {})
    straight, flipped = {(x * 255).round().numpy().tobytes() for x in images.fit.float()}, 0
    for sent, x in seen:
        assert torch.equal(sent, x)
        flipped += (x * 255).round().contiguous().numpy().tobytes() not in straight
    assert len(seen) == 4 * 64 and 0.3 < flipped / len(seen) < 0.7


def test_the_stopping_images_are_sent_once(monkeypatch):
    """Else a decoder that stands still would seem to get better and worse."""
    looks = []
    fit = lambda decoder, pairs, stop, *rest: looks.extend([stop(), stop()]) or {"epochs": 1}
    monkeypatch.setattr(attack, "fit_decoder", fit)
    victim, images = Victim(Linear(lambda x: x), 0.1), attack_images(fit=64)
    decoder_attack(victim, images, options(attack_size=[1, 4]), quiet, {})
    (sent, x), (again, _) = (map(torch.cat, zip(*pairs)) for pairs in looks)
    assert torch.equal(sent, again) and torch.equal(x, images.stop.float())
    assert 0.08 < (sent - x).std() < 0.12


def test_an_epoch_of_many_images_is_a_fresh_draw_of_some_of_them(monkeypatch):
    """So all of them come in time, and an epoch stays as long as it was."""
    epochs, told = [], {}

    def fit(decoder, pairs, stop_pairs, number, steps, *rest):
        told["steps"] = steps
        for _ in range(12):
            x = torch.cat([x for _, x in pairs()])
            epochs.append([min(v.tolist(), v.flip(-1).tolist()) for v in (x * 255).round()])
        return {"epochs": 12}

    monkeypatch.setattr(attack, "fit_decoder", fit)
    monkeypatch.setattr(attack, "EPOCH_MAX", 9)
    monkeypatch.setattr(attack, "BATCH", 4)
    images = attack_images(fit=16)
    _, facts = decoder_attack(small_victim(), images, options(), quiet, {})
    distinct = lambda pictures: {str(v) for v in pictures}
    assert told["steps"] == 2 and facts["fit_images"] == 16
    assert all(len(distinct(epoch)) == len(epoch) == 8 for epoch in epochs)
    assert len(distinct(sum(epochs, []))) == 16


def test_critic_learns_a_slope_of_one_and_the_generator_pays_its_score():
    """On two points at distance d a critic of slope g loses −g d + 10 (g − 1)², least at g = 1 + d/20."""
    torch.manual_seed(0)
    critic = attack.Critic(16, "cpu", 4)
    for group in critic.optimizer.param_groups:
        group["lr"] = 3e-3
    real, fake = torch.full((16, 3, 16, 16), 0.6), torch.full((16, 3, 16, 16), 0.4)
    distance = (real[0] - fake[0]).norm().item()
    for _ in range(150):
        fake_in = fake.clone().requires_grad_()
        term = critic.term(fake_in, real)
    with torch.no_grad():
        gap = (critic.layers(real) - critic.layers(fake)).mean().item()
        score = critic.layers(fake).mean().item()
    assert gap == pytest.approx(distance * (1 + distance / (2 * attack.GAN_PENALTY)), rel=0.05)
    assert term.item() == pytest.approx(-attack.GAN_WEIGHT * score, rel=1e-4)
    (slope,) = torch.autograd.grad(term, fake_in)
    assert (slope * (real - fake)).sum() < 0  # descending the term moves the fake towards the real
    assert all(p.requires_grad for p in critic.layers.parameters())


def test_the_gan_is_the_decoder_with_a_critic(monkeypatch):
    """Without weight it is the decoder, but for the random numbers of the critic."""
    victim, images = small_victim(), attack_images(fit=64)
    errors = {}
    for weight in (0.0, 1e-3):
        monkeypatch.setattr(attack, "GAN_WEIGHT", weight)
        torch.manual_seed(0)
        errors[weight] = gan_attack(victim, images, options(), quiet, {})[1]["stop_mse"]
    torch.manual_seed(0)
    alone = decoder_attack(victim, images, options(), quiet, {})[1]["stop_mse"]
    assert errors[0.0] == pytest.approx(alone, rel=0.1) and errors[0.0] != errors[1e-3]


def test_total_variation_by_loops():
    x = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    for i in range(2):
        rows = [abs(x[i, c, a + 1, b] - x[i, c, a, b]) for c in range(3) for a in range(3) for b in range(5)]
        cols = [abs(x[i, c, a, b + 1] - x[i, c, a, b]) for c in range(3) for a in range(4) for b in range(4)]
        want = sum(rows) / len(rows) + sum(cols) / len(cols)
        assert attack.total_variation(x)[i].item() == pytest.approx(want.item(), abs=1e-12)


def test_whitebox_inverts_an_invertible_encoder(monkeypatch):
    """Through an orthogonal map of the colours and without noise the image itself is the only minimum."""
    monkeypatch.setattr(attack, "WHITEBOX_STEPS", 200)
    torch.manual_seed(0)
    mix = torch.linalg.qr(torch.randn(3, 3)).Q
    victim = Victim(Linear(lambda x: torch.einsum("ij,bjhw->bihw", mix, x)), 0.0)
    part = draw_shapes(6, size=16)
    images, x = AttackImages(part, part, {"test": part}), part.float()
    reconstruct, facts = whitebox_attack(victim, images, options(), quiet, {})
    found = reconstruct(victim.send(victim.features(part.x)))
    assert mse(found, x) < 2e-3 < 0.05 * x.var()  # near black and white the sigmoid is slow to get there
    assert facts["starts"] == 2 and victim.encoder.scale.grad is None
    # a start from another attacker's reconstruction is used, and the better start is taken image by image
    monkeypatch.setattr(attack, "WHITEBOX_STEPS", 1)
    known = {"decoder": (lambda sent: x, {"stop_mse": 1.0})}
    reconstruct, facts = whitebox_attack(victim, images, options(), quiet, known)
    assert facts["starts"] == 3 and mse(reconstruct(victim.features(part.x)), x) < 5e-3


@pytest.mark.parametrize("sigma, looks", [(0.0, 1), (0.05, 1), (0.15, 9)])
def test_whitebox_with_a_decoders_guess_finds_the_most_probable_image(monkeypatch, sigma, looks):
    """z' = mean of 2x2 pixels + noise, x̂ from elsewhere: ‖Fx − z'‖²/D + ρ‖x − x̂‖²/d has its minimum at
    x̂ + Fᵀ(z' − Fx̂) / (FFᵀ + ρD/d), FFᵀ = 1/4, D/d = 1/4. It lies nearer to x than x̂ does."""
    monkeypatch.setattr(attack, "WHITEBOX_TV", 0.0)
    monkeypatch.setattr(attack, "WHITEBOX_TV_NOISE", 0.0)
    monkeypatch.setattr(attack, "WHITEBOX_STEPS", 400)
    torch.manual_seed(0)
    victim = Victim(Linear(lambda x: F.avg_pool2d(x, 2)), sigma)
    part = Images(torch.randint(60, 196, (4, 3, 16, 16), dtype=torch.uint8), torch.zeros(4).long())
    x = part.float()
    guess = (x + 0.05 * torch.randn_like(x)).clamp(0.1, 0.9)
    error = mse(guess, x).item()
    sent = victim.send(victim.features(part.x), looks)
    known = {"decoder": (lambda sent: guess, {"stop_mse": error})}
    images = AttackImages(part, part, {"test": part})
    reconstruct, _ = whitebox_attack(victim, images, options(looks=looks), quiet, known)
    rho = attack.WHITEBOX_NEAR + 4 * sigma**2 / looks / error
    upsampled = F.interpolate(sent - F.avg_pool2d(guess, 2), scale_factor=2) / 4  # Fᵀ of the residual
    best = guess + upsampled / (1 / 4 + rho / 4)
    found = reconstruct(sent)
    assert torch.allclose(found, best, atol=2e-3) and mse(found, x) < 0.97 * error


# ------------------------------------------------------------ what is reported


def test_the_decoder_attack_leaves_the_victim_and_reports_its_reconstructions():
    victim, images, seen = small_victim(), attack_images(fit=40), []
    before = state_hash(victim.encoder)
    note = lambda name, done: seen.append((name, done))
    results, strongest, shown = attack.attack(victim, images, options(), note)
    assert state_hash(victim.encoder) == before and not victim.encoder.training
    assert all(p.grad is None for p in victim.encoder.parameters())
    found, decoder = results["decoder"], Decoder((3, 8, 8), 16, 1, 8)
    assert found["params"] == sum(p.numel() for p in decoder.parameters()) and found["fit_images"] == 40
    convolutions = (3 * 8 + 8 * 8 + 8 * 8 + 8 * 12) * 9 * 8 * 8  # multiply-adds
    assert found["operations"] == 2 * (convolutions + 192 * 192) * 3 * 40 * 2  # two epochs
    assert found["best_epoch"] in (1, 2) and strongest == "decoder" and seen[-1] == ("decoder", 1.0)
    by_hand = metrics(images.report["test"].float(), shown["decoder"])
    assert found["test"] == {**by_hand, "images": 6}
    assert attack.attack(victim, images, options())[0] == results
    assert attack.attack(victim, images, options(seed=1))[0] != results


def constant_attack(values, also=lambda victim: None):
    """Answers values["stop"] on the 7 stop images and values["test"] on others."""

    def build(victim, images, args, progress, known):
        also(victim)
        value = lambda sent: values["stop" if len(sent) == len(images.stop) else "test"]
        return lambda sent: torch.full((len(sent), 3, 16, 16), value(sent)), {"note": 7}

    return build


def test_every_attack_is_scored_on_every_split(monkeypatch):
    monkeypatch.setitem(attack.ATTACKS, "half", constant_attack({"stop": 0.5, "test": 0.5}))
    monkeypatch.setitem(attack.ATTACKS, "black", constant_attack({"stop": 0.0, "test": 0.0}))
    images = attack_images()
    results, strongest, shown = attack.attack(small_victim(), images, options(attack=["black", "half"]))
    assert sorted(results) == sorted(shown) == ["black", "half"] and strongest == "half"
    for name, value in (("half", 0.5), ("black", 0.0)):
        assert results[name]["note"] == 7
        for split, part in images.report.items():
            by_hand = ((part.x.double() / 255 - value) ** 2).mean().item()
            assert results[name][split]["mse"] == pytest.approx(by_hand, rel=1e-6)
        assert shown[name].shape == images.report["test"].x.shape
    assert attack.attack(small_victim(), images, options(attack=[])) == ({}, None, {})


def test_the_strongest_is_chosen_on_the_stop_images(monkeypatch):
    """An attacker that is lucky on what is reported does not become the strongest by it."""
    monkeypatch.setitem(attack.ATTACKS, "honest", constant_attack({"stop": 0.5, "test": 0.4}))
    monkeypatch.setitem(attack.ATTACKS, "lucky", constant_attack({"stop": 0.9, "test": 0.5}))
    args = options(attack=["honest", "lucky"])
    results, strongest, _ = attack.attack(small_victim(0.01), attack_images(), args)
    assert results["lucky"]["test"]["mse"] < results["honest"]["test"]["mse"] and strongest == "honest"


def nudge_weight(victim):
    with torch.no_grad():
        victim.encoder[0][0].weight[0, 0, 0, 0] += 1e-6


def move_buffers(victim):
    victim.encoder.train()
    with torch.no_grad():
        victim.encoder(torch.rand(4, 3, 16, 16))
    victim.encoder.eval()


@pytest.mark.parametrize("harm", [nudge_weight, move_buffers])
def test_an_attack_that_changes_the_victim_is_found_out(monkeypatch, harm):
    monkeypatch.setitem(attack.ATTACKS, "harmful", constant_attack({"stop": 0.5, "test": 0.5}, harm))
    with pytest.raises(RuntimeError, match="changed the victim"):
        attack.attack(small_victim(), attack_images(), options(attack=["harmful"]))


# ------------------------------------------------------------ the command line


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run that was attacked by all three."""
    folder = tmp_path_factory.mktemp("three")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attack, "WHITEBOX_IMAGES", 6)
        patch.setattr(attack, "WHITEBOX_STEPS", 8)
        flags = ["--attack", "decoder,gan,whitebox", "--runs-dir", folder, "--name", "run"]
        assert go(*TINY, *flags) == 0
    return folder / "run"


def read(path):
    return json.loads(path.read_text())


def test_three_attackers(three):
    results = read(three / "results.json")
    found = results["attacks"]
    assert list(found) == ["decoder", "gan", "whitebox"]
    assert found["whitebox"]["test"]["images"] == 6 and found["gan"]["test"]["images"] == 30
    errors = {name: r["stop_common_mse"] for name, r in found.items()}
    assert results["strongest"] == min(errors, key=errors.get)
    assert found["decoder"]["test"]["mse_common"] > 0 and found["whitebox"]["starts"] == 3
    seen, both = found["whitebox"]["test"], ("mse", "ssim")  # it saw no others
    assert [seen[f"{key}_common"] for key in both] == [seen[key] for key in both]
    with Image.open(three / "reconstructions.png") as picture:
        assert picture.size[1] == 4 * 3 * 32


def test_a_checkpoint_is_attacked_again(three, tmp_path, capsys):
    """The decoder alone: the same victim, random numbers and figures; the run's own files stay."""
    run = shutil.copytree(three, tmp_path / "run")
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    assert go(run, "--attack", "decoder", main=attack.main) == 0
    first, again = read(run / "results.json"), read(run / "attack.json")
    assert {name: (run / name).read_bytes() for name in before} == before
    assert again["accuracy"] == first["accuracy"] and again["leakage"] == first["leakage"]
    assert again["seconds"]["train"] == first["seconds"]["train"]
    for split in ("train", "test"):
        assert again["attacks"]["decoder"][split]["mse"] == first["attacks"]["decoder"][split]["mse"]
    assert again["environment"]["command"] == f"python attack.py {run} --attack decoder"
    with Image.open(run / "attack.png") as picture:
        assert picture.size[1] == 2 * 3 * 32
    assert f"-> {run}/" in capsys.readouterr().out
    # with other flags, the rest as trained
    assert go(run, "--looks", 4, "--attack-size", "1x4", "--attack", "decoder", main=attack.main) == 0
    more = read(run / "attack.json")
    assert (more["config"]["looks"], more["config"]["attack_size"]) == (4, [1, 4])
    assert more["config"]["sigma"] == first["config"]["sigma"]
    assert more["attacks"]["decoder"]["params"] < again["attacks"]["decoder"]["params"]


def test_a_run_without_an_attack_is_attacked_by_the_decoder(trained, tmp_path):
    run = shutil.copytree(trained("--attack none --defense dropout"), tmp_path / "run")
    assert read(run / "results.json")["attacks"] == {} and read(run / "results.json")["strongest"] is None
    assert go(run, "--attack-epochs", "auto", main=attack.main) == 0
    found = read(run / "attack.json")
    assert list(found["attacks"]) == ["decoder"] and found["config"]["defense"] == "dropout"
    assert found["attacks"]["decoder"]["converged"] in (True, False)
    assert found["attacks"]["decoder"]["epochs"] > 12
    assert go(run, "--attack", "none", main=attack.main) == 0  # unless it is told not to
    assert read(run / "attack.json")["attacks"] == {}


def test_an_attacker_that_did_not_converge_is_named(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decoder_module, "CEILING", 2)
    run = shutil.copytree(trained("--attack none --defense dropout"), tmp_path / "run")
    assert go(run, "--attack-epochs", "auto", main=attack.main) == 0
    assert "decoder was still improving when it reached its limit of 3 epochs" in capsys.readouterr().out
