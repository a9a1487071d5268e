"""What harness/defenses.py and pruning.py do: distance correlation by a double loop, each defence's claim,
pruning that changes nothing but the FLOPs, and how they combine."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import seeded, sentence
from torch import nn

import attack
from cem import channel
from harness import defenses
from harness.data import draw_shapes
from harness.decoder import Decoder
from harness.defenses import (
    DEFENSES,
    SSIM_THRESHOLD,
    distance_correlation,
    encoder_units,
    extra_cut,
    lipschitz_penalty,
    make_defense,
)
from harness.evaluation import Victim
from harness.metrics import mse, ssim
from harness.pruning import chains, channels_within, encoder_flops, prune
from harness.split_net import SplitNet, count_flops, feature_shape

SHAPE, SIZE, SIGMA = (4, 8, 8), 32, 0.05


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def images(n, seed=0):
    part = draw_shapes(n, seed)
    return part.float(), part.y


def small_net(cut=2, arch="vgg11", width=8, bottleneck=4):
    torch.manual_seed(0)
    return SplitNet(arch, 10, width, cut, bottleneck)


def plain_flops(**kwargs):
    return count_flops(small_net(**kwargs).encoder, SIZE)


def make(spec, *strengths, shape=SHAPE, seed=0, flops=1):
    return make_defense(spec, list(strengths) or None, seed, shape, SIZE, flops)


def train(defense, x, y, steps, task=1.0, batch=32, lr=2e-3, cut=2):
    """A plain joint training of encoder, server and the defence's terms. -> stats at every step"""
    net, stats = small_net(cut), []
    adam = torch.optim.Adam(net.parameters(), lr)
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
    return stats


# -------------------------------------------------------------------------------- distance correlation


def dcor_by_loops(x, z):
    n = len(x)

    def centred(x):
        a = [[math.dist(x[i], x[j]) for j in range(n)] for i in range(n)]
        rows, grand = [sum(row) / n for row in a], sum(map(sum, a)) / n**2
        return [[a[i][j] - rows[i] - rows[j] + grand for j in range(n)] for i in range(n)]

    def dcov2(A, B):
        return sum(A[i][j] * B[i][j] for i in range(n) for j in range(n)) / n**2

    A, B = centred(x.tolist()), centred(z.tolist())
    return math.sqrt(dcov2(A, B) / math.sqrt(dcov2(A, A) * dcov2(B, B)))


def test_dcor_equals_a_double_loop_over_pairs():
    x = randn(20, 3)
    for z in (randn(20, 2, seed=1), x[:, :2] ** 2 + 0.3 * randn(20, 2, seed=2), x[torch.arange(20) // 2 * 2]):
        expected = dcor_by_loops(x, z)
        assert distance_correlation(x, z).item() == pytest.approx(expected, abs=1e-10)
        assert distance_correlation(z, x).item() == pytest.approx(expected, abs=1e-10)
        assert expected**2 < expected - 0.01  # the square would be seen


def test_dcor_of_bernoulli_pairs_is_known():
    """0/1 variables: |Pearson's correlation|. Of 8 pairs 6 agree: (6 − 2)/8 = 1/2; squared: 1/4."""
    x = torch.tensor([[0.0], [0.0], [0.0], [0.0], [1.0], [1.0], [1.0], [1.0]], dtype=torch.float64)
    z = torch.tensor([[0.0], [0.0], [0.0], [1.0], [1.0], [1.0], [1.0], [0.0]], dtype=torch.float64)
    assert distance_correlation(x, z).item() == pytest.approx(0.5, abs=1e-12)


def test_dcor_is_one_for_every_similarity():
    x, rotation = randn(40, 3, 2, 2), torch.linalg.qr(randn(12, 12, seed=1)).Q
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


column = lambda *values: torch.tensor(values, dtype=torch.float64)[:, None]
COINCIDING = {
    "duplicated rows": (randn(6, 3)[[0, 0, 0, 1, 2, 2]], randn(6, 2, seed=1)[[0, 0, 1, 2, 3, 3]], False),
    "z does not vary": (randn(6, 3), torch.ones(6, 2, dtype=torch.float64), True),
    "x does not vary": (torch.ones(6, 3, dtype=torch.float64), randn(6, 2), True),
    "independent": (column(0, 0, 1, 1), column(0, 1, 0, 1), True),
    "one row": (torch.ones(1, 3), torch.ones(1, 2), True),
}


@pytest.mark.parametrize("x, z, is_zero", COINCIDING.values(), ids=COINCIDING)
def test_dcor_has_finite_gradients_where_points_coincide(x, z, is_zero):
    z = z.clone().requires_grad_()
    value = distance_correlation(x, z)
    value.backward()
    assert z.grad.isfinite().all() and 0 <= value <= 1
    assert is_zero == (value == 0).item() == (not z.grad.any())


def test_distcorr_adds_alpha_dcor_and_lowers_it():
    x, y = images(96)
    apart = make("distcorr", 5.0)
    mean = lambda rows: sum(row["distcorr.dcor"] for row in rows) / len(rows)
    stats, plain = train(apart, x, y, 24, batch=16), train(make("distcorr", 0.0), x, y, 24, batch=16)
    assert mean(stats[-4:]) < mean(stats[:4]) - 0.05 and mean(stats[-4:]) < mean(plain[-4:]) - 0.05
    z = torch.rand(8, *SHAPE, generator=seeded(0))
    assert apart.loss(x[:8], z, None).item() == pytest.approx(5 * distance_correlation(x[:8], z).item())


# -------------------------------------------------------------------------------- dropout


def test_dropout_removes_the_share_p_and_leaves_the_rest_alone():
    z = 1 + torch.rand(64, 8, 8, 8, generator=seeded(0))
    defense = make("dropout", 0.3).eval()  # on the wire there is no inference mode
    sent, again = defense.wire(z), defense.wire(z)
    kept = sent != 0
    assert torch.equal(sent[kept], z[kept]) and not torch.equal(sent, again)
    assert kept.float().mean().item() == pytest.approx(0.7, abs=4 * (0.21 / z.numel()) ** 0.5)
    assert torch.equal(make("dropout", 0.0).wire(z), z)


def test_dropout_raises_the_best_attackers_error_to_the_known_value():
    """x ~ N(0, I), z' = m ⊙ (x + n): E[x|z'] = z'/(1+σ²) where m = 1, else 0; MMSE = p + (1−p) σ²/(1+σ²)."""
    p, sigma = 0.4, 0.5
    x = torch.randn(4000, 16, generator=seeded(0))
    known = p + (1 - p) * sigma**2 / (1 + sigma**2)
    error = lambda wire: mse(Victim(nn.Identity(), sigma, wire).send(x) / (1 + sigma**2), x).item()
    assert error(make("dropout", p).wire) == pytest.approx(known, rel=0.02)
    assert error(make("none").wire) < known / 2


# -------------------------------------------------------------------------------- Noise-ARL and its proxy


def test_the_proxy_gets_worse_when_the_encoder_is_trained_against_it():
    x, y = images(32)

    def proxy_likeness(alpha):
        defense = make("noise_arl", alpha, shape=(4, 16, 16))
        stats = train(defense, x, y, 48, task=0.1, lr=5e-3, batch=8, cut=1)
        return sum(row["noise_arl.ssim"] for row in stats[-8:]) / 8

    assert proxy_likeness(30.0) < proxy_likeness(0.0) - 0.05


def test_the_proxys_term_is_the_hinge_and_spares_its_weights():
    x, _ = images(2)
    z = torch.rand(2, *SHAPE, generator=seeded(0)).requires_grad_()
    defense = make("noise_arl", 3.0)
    low = defense.loss(x, z, z)
    low.backward()
    assert low == 0 and not z.grad.any() and defense.stats["noise_arl.active"] == 0  # untrained: far below s
    defense.decoder.forward = lambda sent: x + 0 * sent.mean()  # a perfect one: α (1 − s)
    assert defense.loss(x, z, z).item() == pytest.approx(3 * (1 - SSIM_THRESHOLD), abs=1e-4)
    del defense.decoder.forward
    for _ in range(120):
        defense.after_step(x, z)
    defense.adam.zero_grad()
    z.grad = None
    term, likeness = defense.loss(x, z, z), ssim(defense.decoder(z), x).item()
    assert likeness > 0.5 and term.item() == pytest.approx(3 * (likeness - SSIM_THRESHOLD), abs=1e-4)
    term.backward()
    assert z.grad.any() and all(p.grad is None for p in defense.decoder.parameters())


def test_after_step_trains_the_proxy_and_nothing_else():
    x, _ = images(8)
    net, defense, errors = small_net(), make("noise_arl"), []
    sent = net.encoder(x)
    for _ in range(30):
        defense.after_step(x, sent)
        errors.append(defense.stats["noise_arl.proxy_mse"].item())
    assert errors[-1] < 0.7 * errors[0] and all(p.grad is None for p in net.parameters())


def test_the_proxy_is_not_the_evaluating_attacker():
    before = torch.get_rng_state()
    proxy = make("noise_arl", seed=3).decoder
    assert torch.equal(torch.get_rng_state(), before)  # building it draws nothing of the victim's numbers
    # even an attacker of the proxy's own architecture starts elsewhere
    torch.manual_seed(attack.ATTACKER_SEED + 3)
    attacker = Decoder(SHAPE, SIZE, defenses.PROXY_BLOCKS, defenses.PROXY_CHANNELS)
    for a, b in zip(proxy.parameters(), attacker.parameters()):
        assert a.dim() < 4 or not torch.equal(a, b)  # BatchNorm starts at ones and zeros everywhere
    first = lambda seed: make("noise_arl", seed=seed).decoder.layers[0][0].weight
    own = proxy.layers[0][0].weight
    assert torch.equal(first(3), own) and not torch.equal(first(4), own)


# -------------------------------------------------------------------------------- PATROL, the penalty


def test_lipschitz_of_linear_maps_is_the_known_ratio():
    x, delta = randn(5, 6), 0.1 * randn(5, 6, seed=1)
    rotation = torch.linalg.qr(randn(6, 6, seed=2)).Q
    scaled, general = nn.Linear(6, 6).double(), nn.Linear(6, 4).double()
    scaled.weight.data.copy_(3 * rotation)
    assert lipschitz_penalty([scaled], x, delta).item() == pytest.approx(3, abs=1e-9)
    assert lipschitz_penalty([scaled, nn.Sigmoid()], x, delta) < 3.25  # a sigmoid's slope is at most 1/4
    ratio = ((delta @ general.weight.T).norm(dim=1) / delta.norm(dim=1)).mean().item()
    assert lipschitz_penalty([general], x, delta).item() == pytest.approx(ratio, abs=1e-9)
    turned = 3 * delta @ rotation.T
    second = ((turned @ general.weight.T).norm(dim=1) / turned.norm(dim=1)).mean().item()
    assert lipschitz_penalty([scaled, general], x, delta).item() == pytest.approx(3 + second, abs=1e-9)


def test_lipschitz_is_finite_where_a_unit_is_dead():
    dead, live = nn.Linear(3, 3), nn.Linear(3, 3)
    dead.weight.data.zero_()
    penalty = lipschitz_penalty([dead, live], torch.rand(4, 3), torch.rand(4, 3))
    penalty.backward()
    parameters = [*dead.parameters(), *live.parameters()]
    assert penalty == 0 and all(p.grad is None or p.grad.isfinite().all() for p in parameters)


@pytest.mark.parametrize("arch, bottleneck", [("vgg11", 4), ("resnet20", 4), ("vgg11", 0)])
def test_the_penalty_covers_the_encoder_and_moves_no_buffer(arch, bottleneck):
    x, _ = images(8)
    net = small_net(3, arch, bottleneck=bottleneck)
    assert len(encoder_units(net.encoder)) == 4
    assert torch.equal(nn.Sequential(*encoder_units(net.encoder.eval()))(x), net.encoder(x))
    net.train()
    before = copy.deepcopy(dict(net.encoder.named_buffers()))
    [term] = make("patrol", shape=feature_shape(net.encoder, SIZE)).encoder_terms(net.encoder, x)
    term.backward()
    assert term > 0 and all(torch.equal(b, before[name]) for name, b in net.encoder.named_buffers())
    weights = [p for p in net.encoder.parameters() if p.dim() == 4]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in weights)


# -------------------------------------------------------------------------------- PATROL: pruning


def randomise_norms(net):
    g = seeded(0)
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            for t, low in ((m.weight, 0.5), (m.bias, -0.5), (m.running_mean, -0.5), (m.running_var, 0.5)):
                t.data.uniform_(low, low + 1, generator=g)


PRUNED = [
    ("vgg11", 3, 4, [5, 11, 20]),
    ("vgg11", 3, 0, [5, 11, 32]),
    ("resnet20", 3, 4, [5, 5, 5]),
    ("resnet20", 6, 4, [5, 5, 5, 5, 11, 11]),
]


@pytest.mark.parametrize("arch, cut, bottleneck, channels", PRUNED)
def test_pruning_dead_channels_changes_nothing(arch, cut, bottleneck, channels):
    """Channels with gain and bias 0 carry nothing: these must go, and the rest computes the same."""
    net, joined = small_net(cut, arch, bottleneck=bottleneck), None
    randomise_norms(net)
    for i, (unit, count) in enumerate(zip(net.encoder, channels)):
        ways = chains(unit)
        width = len(ways[0][-1][1].weight)
        if i == 0 or len(ways) == 2 or arch == "vgg11":  # a new set; identity shortcuts keep the old one
            joined = torch.randperm(width, generator=seeded(i))[count:]
        for way in ways:
            for j, layers in enumerate(way):
                inner = torch.randperm(width, generator=seeded(50 + i))[count:]
                off = joined if j == len(way) - 1 else inner
                layers[1].weight.data[off], layers[1].bias.data[off] = 0, 0
    net.eval()
    x, _ = images(4)
    before, server, flops = net.encoder(x), net.server(net.encoder(x)), count_flops(net.encoder, SIZE)
    prune(net, channels)
    assert torch.allclose(net.encoder(x), before, atol=1e-5) and count_flops(net.encoder, SIZE) < flops
    again = SplitNet(**net.config).eval()
    again.load_state_dict(net.state_dict())
    assert torch.equal(again.encoder(x), net.encoder(x))
    assert torch.allclose(again.server(again.encoder(x)), server, atol=1e-4)


@pytest.mark.parametrize("arch, bottleneck", [("vgg11", 4), ("vgg11", 0), ("resnet20", 4)])
def test_channels_within_a_budget_are_the_widest_there_are(arch, bottleneck):
    """Against a search over every common factor k / widest."""
    config = small_net(3, arch, width=4, bottleneck=bottleneck).config
    full = channels_within(config, math.inf, SIZE)
    free = len(full) if bottleneck else full.index(full[-1])  # what is sent keeps its width
    factors = [k / max(full) for k in range(1, max(full) + 1)]
    narrowed = [[math.ceil(n * factor) for n in full[:free]] + full[free:] for factor in factors]
    flops = [encoder_flops({**config, "channels": channels}, SIZE) for channels in narrowed]
    for share in (0.99, 0.7):
        within = [c for c, n in zip(narrowed, flops) if n <= share * flops[-1]]
        assert channels_within(config, share * flops[-1], SIZE) == within[-1]


@pytest.mark.parametrize("arch, bottleneck", [("vgg11", 4), ("vgg11", 0), ("resnet20", 4)])
@pytest.mark.parametrize("epochs", [1, 6])
def test_patrol_ends_at_most_at_the_plain_encoders_flops(arch, bottleneck, epochs):
    plain = plain_flops(arch=arch, width=16, bottleneck=bottleneck)
    net = small_net(2 + extra_cut("patrol"), arch, 16, bottleneck)
    shape = feature_shape(net.encoder, SIZE)
    defense, flops, replaced = make("patrol", shape=shape, flops=plain), [count_flops(net.encoder, SIZE)], []
    assert flops[0] > plain
    for epoch in range(epochs):
        old = list(net.encoder.parameters())
        replaced.append(defense.after_epoch(epoch, epochs, net))
        assert replaced[-1] == any(a is not b for a, b in zip(old, net.encoder.parameters()))
        flops.append(count_flops(net.encoder, SIZE))
        assert flops[-1] == encoder_flops(net.config, SIZE)
    assert 0.6 * plain < flops[-1] <= plain and feature_shape(net.encoder, SIZE) == shape
    assert flops == sorted(flops, reverse=True)
    if epochs == 6:  # step by step, then rest
        assert replaced == [True] * 3 + [False] * 3 and flops[0] > flops[1] > flops[2] > plain
    # the pruned net trains, and its state loads
    x, y = images(8)
    F.cross_entropy(net.server(net.encoder(x)), y).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in net.parameters())
    again = SplitNet(**net.config)
    again.load_state_dict(net.state_dict())
    assert torch.equal(again.eval().encoder(x), net.eval().encoder(x))


def test_pruning_resumes_from_the_checkpoint_alone():
    def narrow(epochs, net):
        defense = make("patrol", shape=feature_shape(net.encoder, SIZE), flops=plain_flops())
        for epoch in epochs:
            defense.after_epoch(epoch, 8, net)
        return net.config["channels"]

    half = small_net(3)
    narrow(range(2), half)
    assert narrow(range(2, 8), SplitNet(**half.config)) == narrow(range(8), small_net(3))


def test_patrol_says_when_nothing_can_be_pruned():
    net = small_net(3, "resnet20", bottleneck=0)
    plain = plain_flops(arch="resnet20", bottleneck=0)
    defense = make("patrol", shape=feature_shape(net.encoder, SIZE), flops=plain)
    sentence(lambda: defense.after_epoch(0, 1, net), "--defense patrol", "--bottleneck")


# -------------------------------------------------------------------------------- by name, together


def test_none_does_nothing():
    defense, net, z = make("none"), small_net(), torch.rand(4, *SHAPE)
    x, _ = images(4)
    assert defense.wire(z) is z and defense.loss(x, z, z) == 0 and defense.loss(x, z, z).dim() == 0
    assert defense.encoder_terms(net.encoder, x) == [] and defense.after_step(x, z) is None
    assert not defense.after_epoch(0, 1, net)
    assert defense.state_dict() == {} and defense.stats == {} and extra_cut("none") == 0


def test_together_the_wires_compose_and_the_terms_add_up():
    x, _ = images(8)
    z = torch.rand(8, *SHAPE, generator=seeded(0))
    both = make("dropout+distcorr+noise_arl+patrol", 0.5, 2.0, 1.0, 0.3)
    parts = {part.name: part for part in both.parts}
    torch.manual_seed(0)
    sent = both.wire(z)
    torch.manual_seed(0)
    assert torch.equal(sent, parts["dropout"].wire(z)) and 0.4 < (sent == 0).float().mean() < 0.6
    for _ in range(3):
        both.after_step(x, z)
    total = both.loss(x, z, sent)
    assert total.item() == pytest.approx(sum(part.loss(x, z, sent).item() for part in both.parts), abs=1e-6)
    assert total >= 2 * distance_correlation(x, z) and extra_cut("noise_arl+patrol") == 1
    assert len(both.encoder_terms(small_net(3).encoder, x)) == 1
    assert {"distcorr.dcor", "noise_arl.ssim", "patrol.ssim", "patrol.lipschitz"} <= set(both.stats)
    assert all(value.dim() == 0 and not value.requires_grad for value in both.stats.values())
    assert parts["patrol"].decoder is not parts["noise_arl"].decoder


@pytest.mark.parametrize("spec", [*DEFENSES, "dropout+noise_arl", "noise_arl+patrol"])
def test_state_dict_resumes_exactly(spec):
    """Through a file that runs no code, into a defence of another start."""
    x, _ = images(8)
    z, file = torch.rand(8, *SHAPE, generator=seeded(0)), io.BytesIO()
    first, second = make(spec), make(spec, seed=9)
    for _ in range(3):
        first.after_step(x, z)
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for defense in (first, second):
        for _ in range(3):
            defense.after_step(x, z)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


WRONG = [
    ("blur", (), "use one of none, dropout"),
    ("dropout+", (), "joined by"),
    ("dropout+dropout", (), "joined by"),
    ("none+dropout", (), "joined by"),
    ("dropout", (1.0,), "--strength 1: dropout needs at least 0 and below 1"),
    ("dropout", (-0.1,), "at least 0"),
    ("distcorr", (-1.0,), "--strength -1: distcorr"),
    ("noise_arl", (math.nan,), "--strength nan: noise_arl"),
    ("patrol", (math.inf,), "--strength inf: patrol"),
    ("distcorr+dropout", (0.3, 1.5), "--strength 1.5: dropout"),
]


@pytest.mark.parametrize("spec, strengths, words", WRONG)
def test_a_wrong_defence_is_one_sentence(spec, strengths, words):
    sentence(lambda: make(spec, *strengths), words)
