"""Oracles for attack.py: metrics by literal loops, the MMSE of a linear-Gaussian channel, splits with constructed overlaps."""
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attack
import data
from attack import AttackImages, Victim, attacker_images, row_hashes, strongest
from data import Images, Splits
from decoder import Decoder, Residual, fit_decoder
from metrics import metrics, mse, psnr, ssim
from report import UserError
from split_net import SplitNet

OPTIONS = SimpleNamespace(attack_blocks=2, attack_channels=8, attack_batch=8, attack_epochs=2, attack_lr=2e-3)


def gen(seed):
    return torch.Generator().manual_seed(seed)


def pictures(n, seed, size=16):
    """uint8 images that are all different, with labels."""
    x = torch.randint(0, 256, (n, 3, size, size), generator=gen(seed), dtype=torch.uint8)
    return Images(x.contiguous(memory_format=torch.channels_last), torch.arange(n) % 3)


def pair(n=2, height=14, width=13, seed=0):
    g = gen(seed)
    a = torch.rand(n, 3, height, width, generator=g, dtype=torch.float64)
    return a, (a + 0.2 * torch.randn(a.shape, generator=g, dtype=torch.float64)).clamp(0, 1)


# ------------------------------------------------------------------------------------------------ metrics

def literal_mse(a, b):
    total, count = 0.0, 0
    for u, v in zip(a.flatten().tolist(), b.flatten().tolist()):
        total, count = total + (u - v) ** 2, count + 1
    return total / count


def literal_ssim(a, b):
    """Every 11x11 window of every channel: weighted means, variances and covariance about them, in plain loops."""
    weights = np.array([[math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / (2 * 1.5 ** 2)) for j in range(11)] for i in range(11)])
    weights /= weights.sum()
    c1, c2, values = 0.01 ** 2, 0.03 ** 2, []
    for u, v in zip(a.flatten(0, 1).numpy(), b.flatten(0, 1).numpy()):
        for top in range(u.shape[0] - 10):
            for left in range(u.shape[1] - 10):
                p, q = u[top:top + 11, left:left + 11], v[top:top + 11, left:left + 11]
                mp, mq = (weights * p).sum(), (weights * q).sum()
                vp, vq = (weights * (p - mp) ** 2).sum(), (weights * (q - mq) ** 2).sum()
                cov = (weights * (p - mp) * (q - mq)).sum()
                values.append((2 * mp * mq + c1) * (2 * cov + c2) / ((mp ** 2 + mq ** 2 + c1) * (vp + vq + c2)))
    return sum(values) / len(values)


def test_mse_and_psnr_are_the_literal_loop():
    a, b = pair()
    assert mse(a, b).item() == pytest.approx(literal_mse(a, b), rel=1e-12)
    assert psnr(a, b).item() == pytest.approx(10 * math.log10(1 / literal_mse(a, b)), rel=1e-12)
    assert psnr(torch.zeros(1, 3, 4, 4), torch.full((1, 3, 4, 4), 0.1)).item() == pytest.approx(20, rel=1e-5)  # MSE 0.01


@pytest.mark.parametrize("height, width, seed", [(14, 13, 0), (11, 11, 1), (12, 17, 2)])
def test_ssim_is_the_literal_loop(height, width, seed):
    a, b = pair(2, height, width, seed)
    assert ssim(a, b).item() == pytest.approx(literal_ssim(a, b), rel=1e-9)
    assert ssim(a.float(), b.float()).item() == pytest.approx(literal_ssim(a, b), abs=1e-4)
    assert ssim(b, a).item() == pytest.approx(ssim(a, b).item(), rel=1e-12)
    strided = a.contiguous(memory_format=torch.channels_last)
    assert ssim(strided, b).item() == pytest.approx(ssim(a, b).item(), rel=1e-12)


def test_ssim_of_known_pairs():
    a, _ = pair()
    assert ssim(a, a).item() == pytest.approx(1, abs=1e-12)
    u, v = torch.full((1, 3, 12, 12), 0.3).double(), torch.full((1, 3, 12, 12), 0.6).double()
    assert ssim(u, v).item() == pytest.approx((2 * 0.18 + 1e-4) / (0.09 + 0.36 + 1e-4), rel=1e-6)
    assert ssim(a, 1 - a).item() < 0  # the negative is anticorrelated
    with pytest.raises(ValueError, match="11x11"):
        ssim(a[..., :10, :], a[..., :10, :])


def test_metrics_are_the_pure_functions_whatever_the_batch(monkeypatch):
    a, b = pair(7)
    a, b = a.float(), b.float()
    want = {"mse": mse(a.double(), b.double()).item(), "psnr": psnr(a.double(), b.double()).item(), "ssim": ssim(a.double(), b.double()).item()}
    pixels = a.double().flatten().tolist()
    mean = sum(pixels) / len(pixels)
    variance = sum((p - mean) ** 2 for p in pixels) / len(pixels)
    for batch in (500, 7, 3, 1):  # 3 leaves a last batch of one
        monkeypatch.setattr("metrics.EVAL_BATCH", batch)
        got = metrics(a, b)
        assert set(got) == {"mse", "nmse", "psnr", "ssim"} and all(type(v) is float for v in got.values())
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=1e-9), name
        assert got["nmse"] == pytest.approx(want["mse"] / variance, rel=2 / len(pixels))


def test_metrics_of_perfect_and_of_mean_reconstruction():
    a, _ = pair(3)
    perfect = metrics(a, a)
    assert perfect["mse"] == 0 and perfect["nmse"] == 0 and perfect["psnr"] == math.inf and perfect["ssim"] == pytest.approx(1)
    assert metrics(a, torch.full_like(a, a.mean().item()))["nmse"] == pytest.approx(1, rel=1e-3)  # the mean explains nothing


# ------------------------------------------------------------------------------------------------ victim

def small_victim(sigma=0.1, **kwargs):
    torch.manual_seed(0)
    net = SplitNet("vgg11", num_classes=3, width=4, cut=1, bottleneck=3)
    with torch.no_grad():
        net.encoder(torch.rand(8, 3, 16, 16))  # BatchNorm buffers away from their start
    return Victim(net.encoder, sigma, **kwargs)


def test_fresh_noise_on_every_look():
    victim = small_victim(0.2)
    z = torch.zeros(100, 3, 8, 8)
    looks = torch.stack([victim.send(z) for _ in range(4)])
    assert len(torch.unique(looks.flatten(1), dim=0)) == 4
    assert looks.std().item() == pytest.approx(0.2, rel=0.02) and abs(looks.mean()) < 4 * 0.2 / looks.numel() ** 0.5
    assert abs((looks[0] * looks[1]).mean()) < 4 * 0.04 / looks[0].numel() ** 0.5
    assert torch.equal(small_victim(0.0).send(z), z)


def test_the_wire_acts_behind_the_noise():
    victim = small_victim(0.2, wire=lambda z: (z > 0).float())
    sent = victim.send(torch.zeros(50, 3, 8, 8))
    assert set(sent.unique().tolist()) == {0.0, 1.0} and sent.mean().item() == pytest.approx(0.5, abs=0.03)


def test_features_are_the_encoder_in_eval_mode_whatever_the_batch(monkeypatch):
    victim = small_victim()
    images = pictures(7, 0)
    with torch.no_grad():
        want = victim.encoder(images.x.double().div(255).float())
    for batch in (500, 2):
        monkeypatch.setattr(attack, "FEATURE_BATCH", batch)
        assert torch.allclose(victim.features(images.x), want, atol=1e-6)
    assert not victim.features(images.x).requires_grad and not victim.encoder.training


@pytest.mark.parametrize("name", ["0.0.weight", "0.1.running_mean", "0.1.num_batches_tracked", "1.bias"])
def test_fingerprint_sees_every_weight_and_buffer(name):
    victim = small_victim()
    before = victim.fingerprint()
    victim.features(pictures(3, 0).x)
    assert victim.fingerprint() == before
    tensor = victim.encoder.state_dict()[name].flatten()
    if tensor.dtype.is_floating_point:
        tensor[0] = torch.nextafter(tensor[0], torch.tensor(math.inf))  # the least possible change
    else:
        tensor[0] += 1
    assert victim.fingerprint() != before


# ------------------------------------------------------------------------------------------------ decoder

def test_the_papers_decoder():
    decoder = Decoder((8, 8, 8), 32, blocks=8, channels=64)
    conv_bn = lambda a, b: 9 * a * b + 2 * b
    conv = lambda a, b: 9 * a * b + b
    by_hand = conv_bn(8, 64) + 8 * 2 * conv_bn(64, 64) + conv(64, 128) + 2 * conv_bn(32, 32) + conv(32, 12)
    assert sum(p.numel() for p in decoder.layers.parameters()) == by_hand == pytest.approx(0.71e6, rel=0.03)
    assert sum(p.numel() for p in decoder.coarse.parameters()) == 8 * 8 * 8 * 3 * 8 * 8 + 3 * 8 * 8
    out = decoder(torch.randn(2, 8, 8, 8))
    assert out.shape == (2, 3, 32, 32) and (out > 0).all() and (out < 1).all()


@pytest.mark.parametrize("shape, size", [((3, 16, 16), 16), ((3, 8, 8), 16), ((5, 2, 2), 32), ((4, 9, 9), 36)])
@pytest.mark.parametrize("blocks", [1, 3, 4])
def test_decoder_reaches_the_image_with_all_its_blocks(shape, size, blocks):
    decoder = Decoder(shape, size, blocks, 4)
    assert decoder(torch.randn(1, *shape)).shape == (1, 3, size, size)
    doublings = (size // shape[1]).bit_length() - 1  # each but the last is followed by one more block
    assert sum(isinstance(m, Residual) for m in decoder.modules()) == blocks + max(0, doublings - 1)


@pytest.mark.parametrize("side, size, advice", [(8, 36, 32), (8, 33, 32), (9, 40, 36)])
def test_decoder_says_which_size_it_can_reach(side, size, advice):
    with pytest.raises(UserError, match=rf"--image-size {size}.*{side}x{side}.*use {advice}\.$"):
        Decoder((8, side, side), size)
    Decoder((8, side, side), advice, 1, 2)


def test_residual_adds_its_body():
    block = Residual(3).eval()
    x = torch.randn(1, 3, 5, 5)
    assert torch.allclose(block(x), torch.relu(x + block.body(x))) and not torch.allclose(block(x), torch.relu(x))
    nn.init.zeros_(block.body[-1].weight), nn.init.zeros_(block.body[-1].bias)
    assert torch.equal(block(x), torch.relu(x))


def test_decoder_sees_squeezed_features_as_large_as_any():
    torch.manual_seed(0)
    decoder, z = Decoder((4, 8, 8), 32, 1, 8).eval(), torch.rand(50, 4, 8, 8)
    decoder.observe(z)
    assert torch.allclose(((z - decoder.mean) / decoder.std).mean((0, 2, 3)), torch.zeros(4), atol=1e-5)
    assert torch.allclose(((z - decoder.mean) / decoder.std).std((0, 2, 3)), torch.ones(4), atol=1e-5)
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


def test_a_diverged_attacker_is_not_reported():
    decoder = Decoder((4, 8, 8), 32, 1, 8)
    pairs = lambda: [(torch.full((2, 4, 8, 8), math.nan), torch.rand(2, 3, 32, 32))]
    with pytest.raises(UserError, match="--attack-lr 0.1.*diverged"):
        fit_decoder(decoder, pairs, pairs, 1, 1, 0.1)


def test_decoder_finds_what_is_spread_over_all_of_z():
    """Pictures rotated as vectors, so that every number of z' has a little of every place: no small window sees anything
    in it, a linear attacker does. The decoder must come close to the best linear estimate; without its coarse picture it does not."""
    torch.manual_seed(0)
    x = data.draw_shapes(800, seed=5, size=16).float()
    coarse = F.avg_pool2d(x, 2).flatten(1)  # [N, 192]
    rotation = torch.linalg.qr(torch.randn(192, 192)).Q
    z = ((coarse - coarse.mean(0)) @ rotation).view(-1, 3, 8, 8)
    send = lambda z: z + 0.05 * torch.randn_like(z)
    fit, test = slice(0, 600), slice(600, 800)
    ones = lambda z: torch.cat([z.flatten(1), torch.ones(len(z), 1)], 1)
    a, b = ones(send(z[fit])), x[fit].flatten(1)
    linear = F.mse_loss(ones(send(z[test])) @ torch.linalg.solve(a.T @ a + torch.eye(193), a.T @ b), x[test].flatten(1)).item()

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
    assert with_coarse < 1.15 * linear < 0.5 * x.var() and without > 1.5 * linear, (with_coarse, without, linear)


# ------------------------------------------------------------------------------------------------ attack.py's own loop

@pytest.mark.parametrize("rows, columns", [(8, 8), (4, 8), (12, 8)])
def test_a_linear_decoder_reaches_the_mmse(rows, columns):
    """x ~ N(0, I), z' = Ax + n: the MSE of a linear estimate Wz' + b is known exactly, and its least value is the MMSE."""
    torch.manual_seed(0)
    sigma, d = 0.5, columns
    A = torch.randn(rows, columns) / 2
    least = torch.linalg.inv(torch.eye(d) + A.T @ A / sigma ** 2).trace().item() / d

    def pairs(count=20, size=500):
        for _ in range(count):
            x = torch.randn(size, d)
            yield x @ A.T + sigma * torch.randn(size, rows), x
    decoder = nn.Linear(rows, d)

    def exact():
        W, b = decoder.weight.detach(), decoder.bias.detach()
        return ((torch.eye(d) - W @ A).square().sum() + sigma ** 2 * W.square().sum() + b.square().sum()).item() / d
    assert exact() > 1.2 * least
    _, error = fit_decoder(decoder, pairs, lambda: pairs(4), epochs=10, steps=20, lr=0.05)
    assert least * (1 - 1e-5) <= exact() < 1.05 * least
    assert error == pytest.approx(exact(), rel=0.05)


class Point(nn.Module):
    """Answers one number, whatever it is sent."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))
        self.register_buffer("looks", torch.zeros(()))

    def forward(self, sent):
        if self.training:
            self.looks += 1
        return self.value.expand(len(sent), 1)


def test_the_best_epoch_on_stop_is_kept():
    """Pulled towards 1 for three epochs and away to 5 afterwards; the stopping images say 1."""
    decoder, history, epoch = Point(), [], [0]

    def pairs():
        epoch[0] += 1
        return [(torch.zeros(4, 1), torch.full((4, 1), 1.0 if epoch[0] <= 3 else 5.0))] * 20

    def stop_pairs():
        assert not decoder.training
        history.append((decoder.value.item(), decoder.looks.item()))
        return [(torch.zeros(3, 1), torch.ones(3, 1)), (torch.zeros(1, 1), torch.full((1, 1), 2.0))]
    best_epoch, error = fit_decoder(decoder, pairs, stop_pairs, epochs=8, steps=20, lr=0.1)
    errors = [(3 * (v - 1) ** 2 + (v - 2) ** 2) / 4 for v, _ in history]  # a mean over images, not over batches
    assert len(history) == 8
    assert best_epoch == 1 + int(np.argmin(errors)) < 8 and error == pytest.approx(min(errors), rel=1e-5)
    assert (decoder.value.item(), decoder.looks.item()) == history[best_epoch - 1]  # weights and buffers of that epoch
    assert min(errors) < 0.5 * errors[-1]


def test_progress_counts_every_step():
    seen = []
    pairs = lambda: [(torch.zeros(2, 1), torch.zeros(2, 1))] * 4
    fit_decoder(Point(), pairs, pairs, epochs=3, steps=4, lr=0.1, progress=seen.append)
    assert seen == pytest.approx([(i + 1) / 12 for i in range(12)])


@pytest.mark.parametrize("epochs, steps", [(1, 1), (2, 1), (10, 1), (1, 10), (5, 2), (11, 1)])
def test_short_attacks_run(epochs, steps):
    """10 steps in all is what the default 10 epochs make of an attacker with less than two batches of images."""
    decoder = Point()
    pairs = lambda: [(torch.zeros(2, 1), torch.ones(2, 1))] * steps
    best_epoch, error = fit_decoder(decoder, pairs, pairs, epochs, steps, lr=0.01)
    assert 1 <= best_epoch <= epochs and error == pytest.approx((decoder.value.item() - 1) ** 2, rel=1e-5) and error < 1


# ------------------------------------------------------------------------------------------------ the images

def joined(*parts):
    return Images(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))


@pytest.mark.parametrize("where", ["fit", "stop"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_an_overlap_is_refused(where, split):
    parts = {"fit": pictures(10, 1), "stop": pictures(5, 2), "train": pictures(4, 3), "test": pictures(4, 4)}
    make = lambda p: AttackImages(p["fit"], p["stop"], {"train": p["train"], "test": p["test"]})
    make(parts).check()
    parts[where] = joined(parts[where], parts[split][torch.tensor([2])])
    with pytest.raises(UserError, match=f"1 of the reported {split}"):
        make(parts).check()
    with pytest.raises(UserError, match=f"1 of the reported {split}"):  # and no attack is run
        attack.run(["no such attack"], small_victim(), make(parts), OPTIONS)


def test_row_hashes_do_not_depend_on_the_memory_layout():
    images = pictures(5, 0)
    assert row_hashes(images) == row_hashes(Images(images.x.contiguous(), images.y)) and len(row_hashes(images)) == 5


def splits(train=60, test=12, aux=30):
    return Splits(pictures(train, 1), pictures(6, 2), pictures(test, 3), pictures(aux, 4), list("abc"))


@pytest.mark.parametrize("which", ["train", "aux"])
def test_attacker_images_are_a_partition(which):
    s = splits()
    images = attacker_images(s, which, seed=0)
    images.check()
    fit, stop, members = row_hashes(images.fit), row_hashes(images.stop), row_hashes(images.report["train"])
    assert len(images.fit) == len(fit) and len(images.stop) == len(stop) and not fit & stop
    assert members < row_hashes(s.train) and len(members) == 6  # a tenth of the victim's training images
    assert torch.equal(images.report["test"].x, s.test.x)
    if which == "train":
        assert fit | stop | members == row_hashes(s.train)
    else:
        assert fit | stop == row_hashes(s.aux) and not (fit | stop) & row_hashes(s.train)
    assert not (fit | stop) & row_hashes(s.val)


def test_members_follow_the_seed():
    s = splits()
    members = [attacker_images(s, "train", seed).report["train"].x for seed in (0, 0, 1)]
    assert torch.equal(members[0], members[1]) and row_hashes(Images(members[0], None)) != row_hashes(Images(members[2], None))
    aux = attacker_images(s, "aux", 0).report["train"].x  # the same members for both attackers: their figures compare
    assert torch.equal(aux, members[0])


@pytest.mark.parametrize("which", ["train", "aux"])
def test_the_attacker_loses_its_copies_of_reported_images(which):
    """Every training image three times, some test images among the training and the aux images."""
    s = splits(train=20, aux=20)
    s.train = joined(s.train, s.train, s.train, s.test[torch.arange(4)])
    s.aux = joined(s.aux, s.test[torch.arange(4)], s.train[torch.arange(20)])
    images = attacker_images(s, which, seed=0)
    images.check()
    kept, members = row_hashes(images.fit) | row_hashes(images.stop), row_hashes(images.report["train"])
    reported = members | row_hashes(s.test)
    assert kept == row_hashes(s.train if which == "train" else s.aux) - reported  # and nothing else is lost
    assert members <= row_hashes(s.train)


@pytest.mark.parametrize("which", ["train", "aux"])
def test_stopping_images_are_of_every_class(which):
    """A folder's images come class by class: the first tenth of them would be of one class."""
    s = splits(train=300, aux=300)
    for part in (s.train, s.aux):
        part.y = part.y.sort().values
    images = attacker_images(s, which, seed=0)
    assert set(images.stop.y.tolist()) == {0, 1, 2} and set(images.fit.y.tolist()) == {0, 1, 2}


def test_no_images_for_the_attacker():
    s = splits(aux=0)
    with pytest.raises(UserError, match="--attacker-data aux: 0 images"):
        attacker_images(s, "aux")
    s = splits(train=2)
    with pytest.raises(UserError, match="--attacker-data train"):
        attacker_images(s, "train")


def test_no_images_left_without_the_copies():
    """All that the attacker has is reported."""
    s = splits(train=10)
    s.test = s.train
    with pytest.raises(UserError, match="--attacker-data train"):
        attacker_images(s, "train")


# ------------------------------------------------------------------------------------------------ attacks

def attack_images(size=16):
    return AttackImages(pictures(16, 1, size), pictures(4, 2, size), {"train": pictures(5, 3, size), "test": pictures(6, 4, size)})


def test_the_decoder_attack_leaves_the_victim_and_reports_its_reconstructions():
    victim, images = small_victim(), attack_images()
    before, seen = victim.fingerprint(), []
    results, shown = attack.run(["decoder"], victim, images, OPTIONS, progress=lambda name, done: seen.append((name, done)))
    assert victim.fingerprint() == before and not victim.encoder.training
    assert all(p.grad is None for p in victim.encoder.parameters())
    result = results["decoder"]
    decoder = Decoder((3, 8, 8), 16, OPTIONS.attack_blocks, OPTIONS.attack_channels)
    assert result["params"] == sum(p.numel() for p in decoder.parameters()) and result["fit_images"] == 16 and result["best_epoch"] in (1, 2)
    by_hand = metrics(images.report["test"].float(), shown["decoder"])
    assert result["test"] == {**by_hand, "images": len(images.report["test"]), "mse_common": by_hand["mse"]}
    assert seen[-1] == ("decoder", 1.0)
    again, _ = attack.run(["decoder"], victim, images, OPTIONS)
    other, _ = attack.run(["decoder"], victim, images, OPTIONS, seed=1)
    assert again == results and other != results


@pytest.mark.parametrize("spread", [1.0, 0.01], ids=["as sent", "squeezed"])
def test_the_decoder_attack_learns(spread):
    """No noise, no bottleneck, one unit: far better than the mean, whose NMSE is 1, on images it never saw.

    Squeezed features, 0.5 + 0.01 (z − 0.5), say as much about x as z does. A surrogate squeezes them, so an attacker
    that cannot see small differences would make every surrogate look good.
    """
    def smooth(n, seed):
        colours = torch.rand(n, 3, 2, 2, generator=gen(seed))
        return Images((torch.nn.functional.interpolate(colours, 16, mode="bilinear") * 255).to(torch.uint8), torch.zeros(n, dtype=torch.int64))
    torch.manual_seed(0)
    encoder = SplitNet("vgg11", width=8, cut=1, bottleneck=0).encoder.train()
    with torch.no_grad():
        for _ in range(50):
            encoder(smooth(50, 9).float())  # BatchNorm gets to know the images
    victim = Victim(encoder, 0.0, wire=lambda z: 0.5 + spread * (z - 0.5))
    images = AttackImages(smooth(200, 1), smooth(20, 2), {"train": smooth(20, 3), "test": smooth(20, 4)})
    options = SimpleNamespace(**{**vars(OPTIONS), "attack_epochs": 12, "attack_batch": 20, "attack_lr": 5e-3})
    results, _ = attack.run(["decoder"], victim, images, options)
    assert results["decoder"]["test"]["nmse"] < 0.6 and results["decoder"]["train"]["nmse"] < 0.6


def test_the_decoder_sees_fresh_noise_in_every_epoch_and_in_what_is_reported():
    """All images are one grey, so that cropping and mirroring change nothing: what differs between looks is the noise."""
    looks = []

    def wire(z):
        looks.append(z.detach().clone())
        return z
    sigma = 0.1
    victim = small_victim(sigma, wire=wire)
    grey = lambda n: Images(torch.full((n, 3, 16, 16), 128, dtype=torch.uint8), torch.zeros(n, dtype=torch.int64))
    images = AttackImages(grey(16), grey(4), {})
    torch.manual_seed(0)
    attack.decoder_attack(victim, images, OPTIONS, lambda done: None, {})
    clean = victim.features(grey(1).x)
    noise = (torch.cat(looks) - clean).flatten(1)
    assert len(noise) >= OPTIONS.attack_epochs * (16 + 4)
    assert noise.std().item() == pytest.approx(sigma, rel=0.05)
    apart = torch.cdist(noise, noise) + 1e9 * torch.eye(len(noise))
    assert apart.min() > 0.5 * sigma * (2 * noise.shape[1]) ** 0.5  # no noise is seen twice
    looks.clear()
    attack.run(["decoder"], victim, AttackImages(grey(16), grey(4), {"test": Images(torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, 3, 1, 1), torch.zeros(2))}), OPTIONS)
    assert not torch.equal(looks[0][0], looks[0][1])  # two equal pictures that are reported do not look equal


def constant_attack(value, also=lambda victim: None):
    def build(victim, images, options, progress, known):
        also(victim)
        return lambda sent: torch.full((len(sent), 3, 16, 16), value), {"note": value}
    return build


def test_run_scores_every_attack_on_every_split(monkeypatch):
    monkeypatch.setitem(attack.ATTACKS, "half", constant_attack(0.5))
    monkeypatch.setitem(attack.ATTACKS, "black", constant_attack(0.0))
    images = attack_images()
    results, shown = attack.run(["black", "half"], small_victim(), images, OPTIONS)
    assert sorted(results) == sorted(shown) == ["black", "half"]
    for name, value in (("half", 0.5), ("black", 0.0)):
        assert results[name]["note"] == value
        for split, part in images.report.items():
            by_hand = ((part.x.double() / 255 - value) ** 2).mean().item()
            assert results[name][split]["mse"] == pytest.approx(by_hand, rel=1e-6)
        assert shown[name].shape == images.report["test"].x.shape
    assert strongest(results) == {"train": "half", "test": "half"}
    assert attack.run([], small_victim(), images, OPTIONS) == ({}, {}) and strongest({}) == {}


def test_strongest_is_the_least_mse_per_split():
    results = {"a": {"train": {"mse_common": 0.1}, "test": {"mse_common": 0.4}}, "b": {"train": {"mse_common": 0.2}, "test": {"mse_common": 0.3}}}
    assert strongest(results) == {"train": "a", "test": "b"}


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
    monkeypatch.setitem(attack.ATTACKS, "harmful", constant_attack(0.5, harm))
    with pytest.raises(RuntimeError, match="changed the victim"):
        attack.run(["harmful"], small_victim(), attack_images(), OPTIONS)


# ------------------------------------------------------------------------------------------------ gan and whitebox

def test_critic_learns_a_slope_of_one_and_the_generator_pays_its_score():
    """On two point masses at distance d the critic of slope g loses −g d + 10 (g − 1)², least at g = 1 + d/20."""
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
    assert gap == pytest.approx(distance * (1 + distance / (2 * attack.GAN_PENALTY)), rel=0.05)
    assert term.item() == pytest.approx(-attack.GAN_WEIGHT * critic.layers(fake).mean().item(), rel=1e-4)
    slope, = torch.autograd.grad(term, fake_in)
    assert (slope * (real - fake)).sum() < 0  # descending the term moves the fake towards the real
    assert all(p.requires_grad for p in critic.layers.parameters())


def test_total_variation_by_loops():
    x = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    for i in range(2):
        rows = sum(abs(x[i, c, a + 1, b] - x[i, c, a, b]) for c in range(3) for a in range(3) for b in range(5)) / (3 * 3 * 5)
        cols = sum(abs(x[i, c, a, b + 1] - x[i, c, a, b]) for c in range(3) for a in range(4) for b in range(4)) / (3 * 4 * 4)
        assert attack.total_variation(x)[i].item() == pytest.approx((rows + cols).item(), abs=1e-12)


def test_whitebox_inverts_an_invertible_encoder():
    """Through an orthogonal map of the pixels and no noise the image itself is the only minimum."""
    torch.manual_seed(0)
    mix = torch.linalg.qr(torch.randn(3, 3)).Q

    class Orthogonal(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(mix)

        def forward(self, x):
            return torch.einsum("ij,bjhw->bihw", self.mix, x)

    victim = attack.Victim(Orthogonal(), 0.0)
    part = data.draw_shapes(6, size=16)
    images = attack.AttackImages(part, part, {"test": part})
    options = type("Options", (), dict(whitebox_steps=200))
    reconstruct, facts = attack.whitebox_attack(victim, images, options, lambda done: None, {})
    x = part.float()
    found = reconstruct(victim.send(victim.features(part.x)))
    assert mse(found, x) < 2e-3 < 0.05 * x.var()  # near black and white the sigmoid is slow to get there
    assert facts["starts"] == 2 and victim.encoder.mix.grad is None
    # a start from another attacker's reconstruction is used, and the better start is taken image by image
    reconstruct, facts = attack.whitebox_attack(victim, images, type("Options", (), dict(whitebox_steps=1)), lambda done: None,
                                                 {"decoder": (lambda sent: x, {"stop_mse": 1.0})})
    assert facts["starts"] == 3 and mse(reconstruct(victim.features(part.x)), x) < 5e-3


@pytest.mark.parametrize("sigma", [0.0, 0.05])
def test_whitebox_with_a_decoders_guess_finds_the_most_probable_image(monkeypatch, sigma):
    """z' = mean of 2x2 pixels + noise, x̂ from elsewhere: ‖Fx − z'‖²/D + ρ‖x − x̂‖²/d has its minimum at
    x̂ + Fᵀ(z' − Fx̂) / (FFᵀ + ρD/d), FFᵀ = 1/4, D/d = 1/4. It lies nearer to x than x̂ does."""
    monkeypatch.setattr(attack, "WHITEBOX_TV", 0.0)
    monkeypatch.setattr(attack, "WHITEBOX_TV_NOISE", 0.0)
    torch.manual_seed(0)

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.scale * F.avg_pool2d(x, 2)

    victim = attack.Victim(Half(), sigma)
    part = Images(torch.randint(60, 196, (4, 3, 16, 16), dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    x = part.float()
    guess = (x + 0.05 * torch.randn_like(x)).clamp(0.1, 0.9)
    error = mse(guess, x).item()
    sent = victim.send(victim.features(part.x))
    images = attack.AttackImages(part, part, {"test": part})
    reconstruct, _ = attack.whitebox_attack(victim, images, SimpleNamespace(whitebox_steps=400), lambda done: None,
                                            {"decoder": (lambda sent: guess, {"stop_mse": error})})
    rho = attack.WHITEBOX_NEAR + 4 * sigma ** 2 / error
    upsampled = F.interpolate(sent - F.avg_pool2d(guess, 2), scale_factor=2) / 4  # Fᵀ of the residual
    best = guess + upsampled / (1 / 4 + rho / 4)
    found = reconstruct(sent)
    assert torch.allclose(found, best, atol=2e-3) and mse(found, x) < 0.97 * error
