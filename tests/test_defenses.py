"""Oracles for defenses.py: distance correlation by a double loop, each defence's claim, pruning that changes nothing."""
import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attack
import defenses
from cem import channel
from data import draw_shapes
from metrics import mse, ssim
from report import UserError
from defenses import DEFENSES, build, distance_correlation, encoder_units, extra_cut, lipschitz_penalty, prune
from split_net import SplitNet, count_flops, feature_shape

SHAPE, SIZE, SIGMA = (4, 8, 8), 32, 0.05


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def images(n, seed=0):
    part = draw_shapes(n, seed)
    return part.float(), part.y


def small_net(cut=2, arch="vgg11", width=8, bottleneck=4, seed=0):
    torch.manual_seed(seed)
    return SplitNet(arch, 10, width, cut, bottleneck)


def plain_flops(**kwargs):
    return count_flops(small_net(**kwargs).encoder, SIZE)


def make(spec, shape=SHAPE, seed=0, flops=None, **strengths):
    return build(spec, strengths, seed, shape, SIZE, flops)


def train(defense, x, y, steps, task=1.0, batch=32, lr=2e-3, cut=2):
    """A plain joint training of encoder, server and the defence's terms. -> (net, stats at every step)"""
    net = small_net(cut)
    adam, stats = torch.optim.Adam(net.parameters(), lr), []
    for step in range(steps):
        rows = torch.arange(step * batch, (step + 1) * batch) % len(x)
        z = net.encoder(x[rows])
        sent = defense.wire(channel(z, SIGMA))
        loss = task * F.cross_entropy(net.server(sent), y[rows]) + defense.loss(x[rows], z, sent)
        adam.zero_grad()
        sum(defense.encoder_terms(net.encoder, x[rows]), loss).backward()
        adam.step()
        defense.after_step(x[rows], sent)
        stats.append({key: value.item() for key, value in defense.stats.items()})
    return net, stats


# ---------------------------------------------------------------------------------------------- distance correlation

def dcor_by_loops(x, z):
    n = len(x)

    def centred(x):
        a = [[math.dist(x[i], x[j]) for j in range(n)] for i in range(n)]
        rows, grand = [sum(row) / n for row in a], sum(map(sum, a)) / n ** 2
        return [[a[i][j] - rows[i] - rows[j] + grand for j in range(n)] for i in range(n)]

    def dcov2(A, B):
        return sum(A[i][j] * B[i][j] for i in range(n) for j in range(n)) / n ** 2

    A, B = centred(x.tolist()), centred(z.tolist())
    return math.sqrt(dcov2(A, B) / math.sqrt(dcov2(A, A) * dcov2(B, B)))


def test_dcor_equals_a_double_loop_over_pairs():
    x = randn(20, 3)
    for z in (randn(20, 2, seed=1), x[:, :2] ** 2 + 0.3 * randn(20, 2, seed=2), x[torch.arange(20) // 2 * 2]):
        expected = dcor_by_loops(x, z)
        assert distance_correlation(x, z).item() == pytest.approx(expected, abs=1e-10)
        assert distance_correlation(z, x).item() == pytest.approx(expected, abs=1e-10)
        assert expected ** 2 < expected - 0.01                      # the square would be seen


def test_dcor_of_bernoulli_pairs_is_known():
    # 0/1 variables: dCor is |Pearson's correlation|. Of 8 pairs, 6 agree: φ = (6 − 2)/8 = 1/2; its square would be 1/4.
    x = torch.tensor([[0.], [0.], [0.], [0.], [1.], [1.], [1.], [1.]], dtype=torch.float64)
    z = torch.tensor([[0.], [0.], [0.], [1.], [1.], [1.], [1.], [0.]], dtype=torch.float64)
    assert distance_correlation(x, z).item() == pytest.approx(0.5, abs=1e-12)


def test_dcor_is_one_for_every_similarity():
    x = randn(40, 3, 2, 2)
    rotation = torch.linalg.qr(randn(12, 12, seed=1)).Q
    for z in (x, x + 5, 1e-3 * x, -1e4 * x, 7 * (x.flatten(1) @ rotation) - 2):
        assert distance_correlation(x, z).item() == pytest.approx(1, abs=1e-9)
    assert distance_correlation(x.float(), x.float()).item() == pytest.approx(1, abs=1e-5)


def test_dcor_is_small_for_independent_rows_and_biased_in_high_dimensions():
    assert distance_correlation(randn(500, 2), randn(500, 2, seed=1)) < 0.12
    assert distance_correlation(randn(32, 500), randn(32, 500, seed=1)) > 0.9


def test_dcor_gradients():
    x, z = randn(7, 3), randn(7, 2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: distance_correlation(x, z), z)
    assert torch.autograd.gradcheck(lambda z: distance_correlation(z, x), z)


@pytest.mark.parametrize("x, z", [
    (randn(6, 3)[[0, 0, 0, 1, 2, 2]], randn(6, 2, seed=1)[[0, 0, 1, 2, 3, 3]]),   # duplicated rows
    (randn(6, 3), torch.ones(6, 2, dtype=torch.float64)),                         # z does not vary
    (torch.ones(6, 3, dtype=torch.float64), randn(6, 2)),                         # x does not vary
    (torch.tensor([[0.], [0.], [1.], [1.]]), torch.tensor([[0.], [1.], [0.], [1.]])),  # independent: exactly 0
    (torch.ones(1, 3), torch.ones(1, 2))])
def test_dcor_has_finite_gradients_where_points_coincide(x, z):
    z = z.clone().requires_grad_()
    value = distance_correlation(x, z)
    value.backward()
    assert z.grad.isfinite().all() and 0 <= value <= 1
    if len(x) != 6 or x.std(0).sum() == 0 or z.std(0).sum() == 0:
        assert value == 0 and not z.grad.any()


def test_distcorr_term_falls_in_training():
    x, y = images(96)
    apart = make("distcorr", distcorr=5.0)
    _, stats = train(apart, x, y, 24, batch=16)
    _, plain = train(make("distcorr", distcorr=0.0), x, y, 24, batch=16)
    mean = lambda rows: sum(row["distcorr.dcor"] for row in rows) / len(rows)
    assert mean(stats[-4:]) < mean(stats[:4]) - 0.05 and mean(stats[-4:]) < mean(plain[-4:]) - 0.05
    z = torch.rand(8, *SHAPE)
    assert apart.loss(x[:8], z, None).item() == pytest.approx(5 * distance_correlation(x[:8], z).item())


# ---------------------------------------------------------------------------------------------- dropout

def test_dropout_removes_the_share_p_and_leaves_the_rest_alone():
    z = 1 + torch.rand(64, 8, 8, 8, generator=seeded(0))
    defense = make("dropout", dropout=0.3).eval()                   # on the wire there is no inference mode
    sent, again = defense.wire(z), defense.wire(z)
    kept = sent != 0
    assert torch.equal(sent[kept], z[kept]) and not torch.equal(sent, again)
    assert kept.float().mean().item() == pytest.approx(0.7, abs=4 * (0.21 / z.numel()) ** 0.5)
    assert torch.equal(make("dropout", dropout=0.0).wire(z), z)


def test_dropout_raises_the_best_attackers_error_to_the_known_value():
    # x ~ N(0, I), z = x, z' = m ⊙ (x + n). E[x|z'] = z'/(1+σ²) where m = 1 and 0 elsewhere, so
    # MMSE = p + (1−p) σ²/(1+σ²)
    p, sigma = 0.4, 0.5
    torch.manual_seed(0)
    x = torch.randn(4000, 16)
    victim = attack.Victim(nn.Identity(), sigma, make("dropout", dropout=p).wire)
    known = p + (1 - p) * sigma ** 2 / (1 + sigma ** 2)
    assert mse(victim.send(x) / (1 + sigma ** 2), x).item() == pytest.approx(known, rel=0.02)
    assert mse(attack.Victim(nn.Identity(), sigma).send(x) / (1 + sigma ** 2), x) < known / 2


# ---------------------------------------------------------------------------------------------- Noise-ARL

def test_the_proxy_gets_worse_when_the_encoder_is_trained_against_it():
    x, y = images(32)

    def proxy_likeness(alpha):
        defense = make("noise_arl", (4, 16, 16), noise_arl=alpha)
        _, stats = train(defense, x, y, 48, task=0.1, lr=5e-3, batch=8, cut=1)
        return sum(row["noise_arl.ssim"] for row in stats[-8:]) / 8

    assert proxy_likeness(30.0) < proxy_likeness(0.0) - 0.05


def test_proxy_term_is_the_hinge_and_spares_the_proxys_weights():
    x, _ = images(2)
    z = torch.rand(2, *SHAPE, generator=seeded(0)).requires_grad_()
    defense = make("noise_arl")
    low = defense.loss(x, z, z)
    low.backward()
    assert low == 0 and not z.grad.any()                            # an untrained proxy is far below s
    defense.decoder.forward = lambda sent: x + 0 * sent.mean()      # a perfect one: α (1 − s)
    assert defense.loss(x, z, z).item() == pytest.approx(1 - 0.2, abs=1e-5)
    del defense.decoder.forward
    for _ in range(120):
        defense.after_step(x, z)
    assert all(p.grad is not None for p in defense.decoder.parameters())
    defense.adam.zero_grad()
    z.grad = None
    term = defense.loss(x, z, z)
    likeness = ssim(defense.decoder(z), x).item()
    assert likeness > 0.5 and term.item() == pytest.approx(likeness - 0.2, abs=1e-5)
    term.backward()
    assert z.grad.any() and all(p.grad is None for p in defense.decoder.parameters())


def test_after_step_trains_the_proxy_and_nothing_else():
    x, _ = images(8)
    net, defense = small_net(), make("noise_arl")
    sent = net.encoder(x)
    errors = []
    for _ in range(30):
        defense.after_step(x, sent)
        errors.append(defense.stats["noise_arl.proxy_mse"].item())
    assert errors[-1] < 0.7 * errors[0] and all(p.grad is None for p in net.parameters())


# ---------------------------------------------------------------------------------------------- the proxy's identity

def test_the_proxy_is_not_the_evaluating_attacker():
    before = torch.get_rng_state()
    proxy = make("noise_arl", seed=3).decoder
    assert torch.equal(torch.get_rng_state(), before)               # building it draws nothing of the victim's numbers
    assert defenses.PROXY_SEED != attack.ATTACKER_SEED
    # even an attacker of the proxy's own architecture starts elsewhere
    torch.manual_seed(attack.ATTACKER_SEED + 3)
    attacker = attack.Decoder(SHAPE, SIZE, defenses.PROXY_BLOCKS, defenses.PROXY_CHANNELS)
    for a, b in zip(proxy.parameters(), attacker.parameters()):
        assert a.dim() < 4 or not torch.equal(a, b)                 # BatchNorm starts at ones and zeros everywhere
    again, other = make("noise_arl", seed=3).decoder, make("noise_arl", seed=4).decoder
    assert torch.equal(again.layers[0].weight, proxy.layers[0].weight) and not torch.equal(other.layers[0].weight, proxy.layers[0].weight)


def test_the_attacker_starts_from_scratch_whatever_the_proxy_learned(monkeypatch):
    x, y = images(8)
    starts = []
    monkeypatch.setattr(attack, "fit_decoder", lambda decoder, *rest: starts.append(copy.deepcopy(decoder.state_dict())) or (0, 0.0))
    options = type("Options", (), dict(attack_blocks=2, attack_channels=16, attack_batch=4, attack_epochs=1, attack_lr=1e-3))
    part = draw_shapes(8)
    for steps in (0, 5):
        net, defense = small_net(), make("noise_arl")
        for _ in range(steps):
            defense.after_step(x, net.encoder(x))
        victim = attack.Victim(net.encoder, SIGMA, defense.wire)
        sets = attack.AttackImages(part, part, {})
        torch.manual_seed(attack.ATTACKER_SEED)
        attack.decoder_attack(victim, sets, options, lambda done: None, {})
    for name in [n for n in starts[0] if starts[0][n].dim() == 4]:  # every convolution
        assert torch.equal(starts[0][name], starts[1][name])        # the same start, with and without a trained proxy
        assert not torch.equal(starts[0][name], defense.decoder.state_dict()[name])


# ---------------------------------------------------------------------------------------------- PATROL

def test_lipschitz_of_linear_maps_is_the_known_ratio():
    x, delta = randn(5, 6), 0.1 * randn(5, 6, seed=1)
    rotation = torch.linalg.qr(randn(6, 6, seed=2)).Q
    scaled = nn.Linear(6, 6).double()
    with torch.no_grad():
        scaled.weight.copy_(3 * rotation)
    assert lipschitz_penalty([scaled], x, delta).item() == pytest.approx(3, abs=1e-9)
    assert lipschitz_penalty([scaled, nn.Sigmoid()], x, delta) < 3.25  # a sigmoid's slope is at most 1/4
    general = nn.Linear(6, 4).double()
    ratio = (delta @ general.weight.T).norm(dim=1) / delta.norm(dim=1)
    second = (3 * delta @ rotation.T @ general.weight.T).norm(dim=1) / (3 * delta).norm(dim=1)
    assert lipschitz_penalty([general], x, delta).item() == pytest.approx(ratio.mean().item(), abs=1e-9)
    assert lipschitz_penalty([scaled, general], x, delta).item() == pytest.approx(3 + second.mean().item(), abs=1e-9)


def test_lipschitz_is_finite_where_a_unit_is_dead():
    dead, live = nn.Linear(3, 3), nn.Linear(3, 3)
    with torch.no_grad():
        dead.weight.zero_()
    penalty = lipschitz_penalty([dead, live], torch.rand(4, 3), torch.rand(4, 3))
    penalty.backward()
    assert penalty == 0 and all(p.grad is None or p.grad.isfinite().all() for m in (dead, live) for p in m.parameters())


@pytest.mark.parametrize("arch, bottleneck", [("vgg11", 4), ("resnet20", 4), ("vgg11", 0)])
def test_the_penalty_covers_the_encoder_and_moves_no_buffer(arch, bottleneck):
    x, _ = images(8)
    net = small_net(3, arch, bottleneck=bottleneck)
    assert len(encoder_units(net.encoder)) == 4
    assert torch.equal(nn.Sequential(*encoder_units(net.encoder.eval()))(x), net.encoder(x))
    net.train()
    before = copy.deepcopy(dict(net.encoder.named_buffers()))
    [term] = make("patrol", feature_shape(net.encoder, SIZE), flops=1).encoder_terms(net.encoder, x)
    term.backward()
    assert term > 0 and all(torch.equal(b, before[name]) for name, b in net.encoder.named_buffers())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.encoder.parameters() if p.dim() == 4)


def randomise_norms(net, seed=0):
    g = seeded(seed)
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            for t, low in ((m.weight, 0.5), (m.bias, -0.5), (m.running_mean, -0.5), (m.running_var, 0.5)):
                t.data.uniform_(low, low + 1, generator=g)


@pytest.mark.parametrize("arch, cut, bottleneck, channels", [
    ("vgg11", 3, 4, [5, 11, 20]), ("vgg11", 3, 0, [5, 11, 32]), ("resnet20", 3, 4, [5, 5, 5]), ("resnet20", 6, 4, [5, 5, 5, 5, 11, 11])])
def test_pruning_dead_channels_changes_nothing(arch, cut, bottleneck, channels):
    # Channels with gain and bias 0 carry nothing: they have the smallest gains, must be the ones that go, and the
    # smaller encoder must compute the same.
    net = small_net(cut, arch, bottleneck=bottleneck)
    randomise_norms(net)
    joined = None
    for i, (unit, count) in enumerate(zip(net.encoder, channels)):
        chains = defenses.chains(unit)
        width = len(chains[0][-1][1].weight)
        if i == 0 or len(chains) == 2 or arch == "vgg11":           # a new set of channels; identity shortcuts keep the old one
            joined = torch.randperm(width, generator=seeded(i))[count:]
        for chain in chains:
            for j, layers in enumerate(chain):
                off = joined if j == len(chain) - 1 else torch.randperm(width, generator=seeded(50 + i))[count:]
                layers[1].weight.data[off] = 0
                layers[1].bias.data[off] = 0
    net.eval()
    x, _ = images(4)
    before, server = net.encoder(x), net.server(net.encoder(x))
    flops = count_flops(net.encoder, SIZE)
    prune(net, channels)
    assert torch.allclose(net.encoder(x), before, atol=1e-5) and count_flops(net.encoder, SIZE) < flops
    again = SplitNet(**net.config).eval()
    again.load_state_dict(net.state_dict())
    assert torch.equal(again.encoder(x), net.encoder(x)) and torch.allclose(again.server(again.encoder(x)), server, atol=1e-4)


@pytest.mark.parametrize("arch, bottleneck", [("vgg11", 4), ("vgg11", 0), ("resnet20", 4)])
@pytest.mark.parametrize("epochs", [1, 6])
def test_patrol_ends_at_most_at_the_plain_encoders_flops(arch, bottleneck, epochs, tmp_path):
    plain = plain_flops(arch=arch, width=16, bottleneck=bottleneck)
    net = small_net(2 + extra_cut("patrol"), arch, 16, bottleneck)
    shape = feature_shape(net.encoder, SIZE)
    defense = make("patrol", shape, flops=plain)
    flops, replaced = [count_flops(copy.deepcopy(net.encoder), SIZE)], []
    assert flops[0] > plain
    for epoch in range(epochs):
        old = list(net.encoder.parameters())
        replaced.append(defense.after_epoch(epoch, epochs, net))
        new = list(net.encoder.parameters())
        assert replaced[-1] == any(a is not b for a, b in zip(old, new))
        flops.append(count_flops(copy.deepcopy(net.encoder), SIZE))
        assert flops[-1] == defenses.encoder_flops(net.config, SIZE)
    assert 0.6 * plain < flops[-1] <= plain and feature_shape(net.encoder, SIZE) == shape
    assert flops == sorted(flops, reverse=True)
    if epochs == 6:
        assert replaced == [True] * 3 + [False] * 3 and flops[0] > flops[1] > flops[2] > plain  # step by step, then rest
    # the pruned net trains, and its checkpoint loads
    x, y = images(8)
    loss = F.cross_entropy(net.server(net.encoder(x)), y)
    loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in net.parameters())
    torch.save({"config": net.config, "weights": net.state_dict()}, tmp_path / "net.pt")
    state = torch.load(tmp_path / "net.pt", weights_only=True)
    again = SplitNet(**state["config"])
    again.load_state_dict(state["weights"])
    assert torch.equal(again.eval().encoder(x), net.eval().encoder(x))


def test_pruning_resumes_from_the_checkpoint_alone():
    def narrow(epochs, net):
        defense = make("patrol", feature_shape(net.encoder, SIZE), flops=plain_flops())
        for epoch in epochs:
            defense.after_epoch(epoch, 8, net)
        return net.config["channels"]

    half = small_net(3)
    narrow(range(2), half)
    resumed = SplitNet(**half.config)
    assert narrow(range(2, 8), resumed) == narrow(range(8), small_net(3))


def test_patrol_says_when_nothing_can_be_pruned():
    net = small_net(3, "resnet20", bottleneck=0)
    with pytest.raises(UserError, match="--bottleneck"):
        make("patrol", feature_shape(net.encoder, SIZE), flops=plain_flops(arch="resnet20", bottleneck=0)).after_epoch(0, 1, net)


# ---------------------------------------------------------------------------------------------- by name, together

def test_none_does_nothing():
    defense, net, z = make("none"), small_net(), torch.rand(4, *SHAPE)
    x, _ = images(4)
    assert type(defense) is DEFENSES["none"] and defense.wire(z) is z and defense.loss(x, z, z) == 0 and defense.loss(x, z, z).dim() == 0
    assert defense.encoder_terms(net.encoder, x) == [] and defense.after_step(x, z) is None and not defense.after_epoch(0, 1, net)
    assert defense.state_dict() == {} and defense.stats == {} and extra_cut("none") == 0


def test_together_the_wires_compose_and_the_terms_add_up():
    x, _ = images(8)
    z = torch.rand(8, *SHAPE, generator=seeded(0))
    both = make("dropout+distcorr+noise_arl+patrol", flops=1, dropout=0.5, distcorr=2.0)
    parts = {part.name: part for part in both.parts}
    torch.manual_seed(0)
    sent = both.wire(z)
    torch.manual_seed(0)
    assert torch.equal(sent, parts["dropout"].wire(z)) and 0.4 < (sent == 0).float().mean() < 0.6
    for _ in range(3):
        both.after_step(x, z)
    total = both.loss(x, z, sent)
    assert total.item() == pytest.approx(sum(part.loss(x, z, sent).item() for part in both.parts), abs=1e-6)
    assert total >= 2 * distance_correlation(x, z) and both.extra_cut == 1 == extra_cut("noise_arl+patrol")
    assert len(both.encoder_terms(small_net(3).encoder, x)) == 1
    assert {"distcorr.dcor", "noise_arl.ssim", "patrol.ssim", "patrol.lipschitz"} <= set(both.stats)
    assert all(value.dim() == 0 and not value.requires_grad for value in both.stats.values())
    assert parts["patrol"].decoder is not parts["noise_arl"].decoder


@pytest.mark.parametrize("spec", [*DEFENSES, "dropout+noise_arl", "noise_arl+patrol"])
def test_state_dict_resumes_exactly(spec):
    x, _ = images(8)
    z = torch.rand(8, *SHAPE, generator=seeded(0))
    first = make(spec, flops=1)
    for _ in range(3):
        first.after_step(x, z)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    second = make(spec, seed=9, flops=1)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for defense in (first, second):
        for _ in range(3):
            defense.after_step(x, z)
    for a, b in zip(first.parameters(), second.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("spec, strengths, words", [
    ("blur", {}, "use one of none, dropout"), ("dropout+", {}, "joined by"), ("dropout+dropout", {}, "different"),
    ("dropout", {"dropout": 1.0}, "--dropout 1.0"), ("dropout", {"dropout": -0.1}, "at least 0"),
    ("distcorr", {"distcorr": -1.0}, "--distcorr"), ("noise_arl", {"noise_arl": math.nan}, "--noise-arl nan"),
    ("patrol", {"patrol": math.inf}, "finite"), ("dropout", {"noise_arl": 0.3}, "not in --defense dropout")])
def test_build_refuses_in_one_sentence(spec, strengths, words):
    with pytest.raises(UserError, match=words) as error:
        make(spec, flops=1, **strengths)
    assert str(error.value).count("\n") == 0 and str(error.value).endswith(".")
    make("dropout", dropout=None, noise_arl=None)                   # None: the default, also for defences not in use
