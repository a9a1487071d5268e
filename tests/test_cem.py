"""What cem.py computes: the channel, the bound in the linear-Gaussian case, the gradient stash against two
passes written by hand, the leakage audit against exact densities, dFIL against Jacobians."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import seeded
from torch import nn

import cem
from cem import (
    cel_gradient,
    channel,
    class_moments,
    cross_entropies,
    fisher_information,
    leakage_bits,
    lr_ratio,
    mse_floor,
    stash_at_cut,
    stash_params,
)
from harness.split_net import SplitNet


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


# -------------------------------------------------------------------------------- channel and bound


@pytest.mark.parametrize("sigma", [0.05, 2.0])
def test_the_channel_adds_normal_noise_of_that_standard_deviation(sigma):
    z = torch.rand(400, 500, generator=seeded(0), dtype=torch.float64)
    n = (channel(z, sigma, seeded(1)) - z) / sigma  # 200,000 standard normals
    four = 4 / n.numel() ** 0.5  # standard errors
    assert (
        abs(n.mean()) < four
        and abs(n.var() - 1) < four * 2**0.5
        and abs(n.pow(4).mean() - 3) < four * 96**0.5
    )
    assert abs((n * z).mean()) < four and abs((n[1:] * n[:-1]).mean()) < four  # of z, and from row to row


def test_the_channel_is_reproducible_and_fresh_and_lets_the_gradient_pass():
    z, g = torch.rand(4, 5, requires_grad=True), seeded(3)
    first = channel(z, 0.1, g)
    assert torch.equal(first, channel(z, 0.1, seeded(3))) and not torch.equal(first, channel(z, 0.1, g))
    first.sum().backward()
    assert torch.equal(z.grad, torch.ones_like(z))


def test_the_floor_is_the_variance_of_a_gaussian_and_below_that_of_anything_else():
    for s in (0.1, 1.0, 3.0):
        gaussian = torch.distributions.Normal(0.0, s).entropy().item()
        assert mse_floor(5 * gaussian, 5) == pytest.approx(s**2, rel=1e-6)
    assert (
        mse_floor(0.0, 1) == pytest.approx(1 / (2 * math.pi * math.e)) and mse_floor(0.0, 1) < 1 / 12
    )  # uniform


# x ~ N(0, s²I), z = Ax, z' = z + n


def information(A, sigma, s=1.0):
    # I = ½ log det(I + s² A Aᵀ / σ²), nats
    return 0.5 * torch.logdet(torch.eye(len(A), dtype=A.dtype) + s**2 * A @ A.T / sigma**2).item()


def mmse(A, sigma, s=1.0):
    # tr Cov(x|z') / d, Cov(x|z') = (I/s² + AᵀA/σ²)⁻¹
    d = A.shape[1]
    return torch.linalg.inv(torch.eye(d, dtype=A.dtype) / s**2 + A.T @ A / sigma**2).trace().item() / d


def entropy(d, s=1.0):
    return d / 2 * math.log(2 * math.pi * math.e * s**2)


def orthogonal(rows, columns, seed=0):
    return torch.linalg.qr(randn(max(rows, columns), max(rows, columns), seed=seed)).Q[:rows, :columns]


@pytest.mark.parametrize("rows, bits, ratio", [(8, 14.393, 1.0), (4, 7.197, 0.531)])
def test_known_values_of_the_linear_gaussian_channel(rows, bits, ratio):
    """s = 1, σ = 0.3, square orthogonal 8 and wide 4 x 8: the floor is the MMSE only for the first."""
    A, sigma = orthogonal(rows, 8), 0.3
    nats = information(A, sigma)
    assert nats / math.log(2) == pytest.approx(bits, abs=5e-4)
    assert mse_floor(entropy(8) - nats, 8) / mmse(A, sigma) == pytest.approx(ratio, abs=5e-4)
    audited, stderr = audit_linear(A, sigma, 0)
    assert audited == pytest.approx(bits, rel=0.02) and audited > bits - 4 * stderr
    assert mse_floor(entropy(8) - (audited + 4 * stderr) * math.log(2), 8) <= mmse(A, sigma)


def test_the_floor_never_exceeds_the_mmse_and_equals_it_for_tall_orthonormal_columns():
    sigma, s = 0.3, 0.7
    for seed in range(10):
        for rows, columns in ((8, 8), (4, 8), (12, 8), (1, 5)):
            A = randn(rows, columns, seed=seed)
            assert mse_floor(entropy(columns, s) - information(A, sigma, s), columns) < mmse(A, sigma, s)
        tall = 1.7 * orthogonal(12, 8, seed)
        floor = mse_floor(entropy(8, s) - information(tall, sigma, s), 8)
        assert floor == pytest.approx(mmse(tall, sigma, s), rel=1e-9)


def test_lr_ratio():
    assert lr_ratio(0.05) == pytest.approx(0.02) and lr_ratio(1e-3) == 1 and lr_ratio(1e-5) == 1
    assert lr_ratio(0.05, 0.025) == pytest.approx(0.5)
    assert lr_ratio(0.05, 0) == 1 and lr_ratio(0.0) == 1  # switched off; a rate of 0 moves nothing anyway
    for step in range(
        5
    ):  # the paper's rates, x0.2 from 0.05: as its released code, 0.001/η while η ≥ 0.00041
        eta = 0.05 * 0.2**step
        assert lr_ratio(eta) == pytest.approx(min(1, 0.001 / eta if eta >= 0.00041 else 1))


# -------------------------------------------------------------------------------- gradient stash

GAMMA, SIGMA, STEPS, DIM = 0.4, 0.1, 3, 2 * 8 * 8
LAMBDAS = (3.0, 0.7)  # λ·r of each surrogate
BOTH = pytest.mark.parametrize("how", ["cut", "params"])


class WeightedSpread(nn.Module):
    """Variance of z about its class means, with a learned weight of each dimension."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, DIM))

    def forward(self, z, y):
        z = z.flatten(1)
        spread = sum(((z[y == c] - z[y == c].mean(0)) ** 2).sum(0) for c in y.unique())
        return 40 * (F.softplus(self.w) * spread).sum() / len(z)


class Pull(nn.Module):
    """Without parameters of its own."""

    def forward(self, z, y):
        return (z - 0.3).pow(4).sum()


class Setting:
    """A small split network in double precision, two surrogates, momentum, a batch for each step."""

    def __init__(self, spoil=None):
        torch.manual_seed(0)
        self.net = SplitNet("vgg11", num_classes=3, width=2, cut=2, bottleneck=2).double().train()
        self.cels = nn.ModuleList([WeightedSpread(), Pull()]).double()
        self.spoil = spoil or (lambda loss: loss)  # what happens to the first surrogate's loss
        parameters = [*self.net.parameters(), *self.cels.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        self.average = []

    def batch(self, step):
        x = torch.rand(12, 3, 32, 32, generator=seeded(10 + step), dtype=torch.float64)
        return x, torch.arange(12) % 3

    def terms(self, x):
        """Depend on the encoder directly: a weight penalty, and how far a nudge of x moves what it sends."""
        nudged = x + 0.05 * torch.randn(x.shape, generator=seeded(99), dtype=x.dtype)
        moved = self.net.encoder(nudged) - self.net.encoder(x)
        return [0.3 * self.net.encoder[0][0].weight.square().sum(), 0.2 * moved.square().mean().sqrt()]

    def loss_d(self, z, y, step):
        return F.cross_entropy(self.net.server(channel(z, SIGMA, seeded(step))), y)

    def losses(self, z, y):
        first, second = (cel(z, y) for cel in self.cels)
        return [self.spoil(first), second]

    def stash_step(self, how, step, clip=0.0, with_terms=True, lambdas=LAMBDAS, decay=0.0):
        x, y = self.batch(step)
        self.optimizer.zero_grad(set_to_none=True)
        z = self.net.encoder(x)
        z_cut = z.detach().requires_grad_()
        loss_d, terms = self.loss_d(z_cut, y, step), self.terms(x) if with_terms else []
        weights = [lambd * GAMMA for lambd in lambdas]
        losses = list(zip(self.losses(z_cut, y), self.cels))
        g_cel, finite = cel_gradient(z_cut, losses, weights, GAMMA, clip)
        if how == "cut":
            g_d = stash_at_cut(z, z_cut, loss_d, g_cel, terms)
        else:
            g_d = stash_params(z, z_cut, loss_d, g_cel, self.net.encoder, terms, self.average, decay)
        self.optimizer.step()
        return g_d, g_cel, finite.item()

    def literal_step(self, step, clip=0.0, with_terms=True, lambdas=LAMBDAS, decay=0.0):
        """(i)-(iv) by hand: a backward pass for each loss, gradients added up parameter by parameter."""
        x, y = self.batch(step)
        self.optimizer.zero_grad(set_to_none=True)
        mine = list(self.net.encoder.parameters())
        z = self.net.encoder(x)
        # (i) put g_CEL aside; clipping at z scales all of a surrogate's gradient
        stashed, clipped = [torch.zeros_like(p) for p in mine], []
        for loss, cel, lambd in zip(self.losses(z, y), self.cels, lambdas):
            (g_z,) = torch.autograd.grad(loss, z, retain_graph=True)
            share = min(1.0, clip / g_z.norm().item()) if clip else 1.0
            clipped.append(share < 1)
            if not g_z.isfinite().all() or not loss.isfinite():
                for p in cel.parameters():
                    p.grad = torch.zeros_like(p)
                continue
            for s, g in zip(stashed, torch.autograd.grad(loss, mine, retain_graph=True)):
                s += lambd * GAMMA * share * g
            own = list(cel.parameters())
            for p, g in zip(own, torch.autograd.grad(loss, own, retain_graph=True) if own else []):
                p.grad = GAMMA * g
        if decay:
            before = self.average or [torch.zeros_like(p) for p in mine]
            self.average = stashed = [decay * a + (1 - decay) * s for a, s in zip(before, stashed)]
        # (ii) L_D, through server and encoder
        loss_d = self.loss_d(z, y, step)
        (g_d,) = torch.autograd.grad(loss_d, z, retain_graph=True)
        (loss_d + (sum(self.terms(x)) if with_terms else 0)).backward()
        # (iii) the encoder gets both, (iv) the server L_D's alone
        for p, s in zip(mine, stashed):
            p.grad += s
        self.optimizer.step()
        return g_d, clipped

    def tensors(self, part=""):
        found = {"net." + k: v for k, v in self.net.state_dict().items()}
        found |= {"cels." + k: v for k, v in self.cels.state_dict().items()}
        return {k: v.clone() for k, v in found.items() if k.startswith(part)}


def assert_equal(a, b, tolerance=1e-9):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name].double(), b[name].double(), rtol=0, atol=tolerance), name


def after(method, steps=STEPS, **how):
    """-> (setting, what the steps returned), from the same start."""
    setting = Setting()
    return setting, [getattr(setting, method)(step=step, **how) for step in range(steps)]


@BOTH
def test_a_worked_step(how):
    """z = θx, L_D = ½(z − 1)² + 7θ, L_CEL = 2z², θ = 2, x = 3: ∂L_D/∂z = 5, ∂L_CEL/∂z = 24; λrγ = 0.05."""
    for clip, g in ((0.0, 24.0), (6.0, 6.0), (100.0, 24.0)):
        encoder = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(encoder.weight, 2.0)
        z = encoder(torch.tensor([[3.0]], dtype=torch.float64))
        z_cut = z.detach().requires_grad_()
        g_cel, finite = cel_gradient(z_cut, [(2 * z_cut.square().sum(), nn.Identity())], [0.05], 0.1, clip)
        loss_d, terms = 0.5 * (z_cut - 1).square().sum(), [7 * encoder.weight.sum()]
        if how == "params":
            g_d = stash_params(z, z_cut, loss_d, g_cel, encoder, terms)
        else:
            g_d = stash_at_cut(z, z_cut, loss_d, g_cel, terms)
        assert encoder.weight.grad.item() == pytest.approx(3 * (5 + 0.05 * g) + 7, rel=1e-12)
        assert (g_d.item(), g_cel.item(), finite.item()) == (5, pytest.approx(0.05 * g), 1)


@pytest.mark.parametrize("with_terms", [True, False])
@pytest.mark.parametrize("clip", [0.0, 0.05, 1e6])
def test_both_stashes_are_the_two_passes_written_by_hand(clip, with_terms):
    """Parameters of encoder, server, surrogates and all buffers after 3 steps with noise and momentum."""
    literal, facts = after("literal_step", clip=clip, with_terms=with_terms)
    assert all(all(clipped) == (clip == 0.05) == any(clipped) for _, clipped in facts)
    for how in ("cut", "params"):
        setting, steps = after("stash_step", how=how, clip=clip, with_terms=with_terms)
        assert_equal(setting.tensors(), literal.tensors())
        assert all(torch.allclose(g, want, atol=1e-9) for (g, _, _), (want, _) in zip(steps, facts))
    start, end = Setting().tensors(), literal.tensors()
    still = {k for k in end if torch.allclose(end[k].double(), start[k].double(), rtol=0, atol=1e-7)}
    assert still <= {"net.encoder.2.bias"}  # in front of BatchNorm, which takes it away; all else did move


@BOTH
def test_the_encoder_runs_once_a_step(how):
    """BatchNorm's buffers move once: neither way repeats the forward pass."""
    setting, _ = after("stash_step", how=how, with_terms=False)
    assert setting.net.encoder[0][1].num_batches_tracked == STEPS


def test_own_gradients_lie_in_memory_as_their_parameters_do():
    """torch's fused Adam (2.13, CPU) pairs numbers by where they lie: of another layout they are shuffled."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, fused in zip(layers, (False, True)):
        z = torch.linspace(-1, 1, 2 * 3 * 5 * 5).view(2, 3, 5, 5).requires_grad_()
        loss = (layer.weight.contiguous().flatten() @ torch.linspace(-1, 2, 108)) + z.sum()
        cel_gradient(z, [(loss, layer)], [0.0], 2.0)
        assert layer.weight.grad.stride() == layer.weight.stride()
        assert torch.equal(layer.weight.grad.flatten(), 2 * torch.linspace(-1, 2, 108))
        torch.optim.Adam(layer.parameters(), 0.1, fused=fused).step()
    torch.testing.assert_close(layers[0].weight, layers[1].weight)


@BOTH
def test_each_surrogate_has_its_own_weight_and_the_server_sees_none_of_it(how):
    def first_step(lambdas):
        setting = Setting()
        setting.stash_step(how, 0, lambdas=lambdas)
        return {name: p.grad.clone() for name, p in setting.net.named_parameters()}, setting

    (none, _), (a, _), (b, _), (both, setting) = map(first_step, ((0, 0), (2, 0), (0, 5), (2, 5)))
    for name in both:
        if name.startswith("server"):
            assert torch.equal(both[name], none[name]), name
        else:
            assert torch.allclose(both[name], a[name] + b[name] - none[name], atol=1e-12), name
            assert name == "encoder.2.bias" or not torch.allclose(a[name], none[name], atol=1e-9), name
    # the surrogates' own parameters get γ·g_CEL whatever their λ, so that the warm-up (λ·r·γ = 0) fits them
    warm_up = Setting()
    warm_up.stash_step(how, 0, lambdas=(0, 0))
    assert (
        torch.equal(warm_up.cels[0].w.grad, setting.cels[0].w.grad) and warm_up.cels[0].w.grad.abs().min() > 0
    )


SPOILED = {
    "nan": lambda loss: loss * math.nan,
    "inf": lambda loss: loss * math.inf,
    "nan value, finite gradient": lambda loss: loss + math.nan,
    "finite value, infinite gradient": lambda loss: loss + (loss - loss.detach()).sqrt(),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
@BOTH
def test_a_non_finite_gradient_counts_as_zero_and_the_other_surrogate_goes_on(how, spoil):
    setting, literal = Setting(spoil), Setting(spoil)
    _, _, finite = setting.stash_step(how, 0, clip=0.05)
    literal.literal_step(0, clip=0.05)
    assert finite == 0
    assert_equal(setting.tensors(), literal.tensors())
    assert_equal(setting.tensors("cels."), Setting().tensors("cels."))  # it does not move itself either
    plain = Setting()
    plain.stash_step(how, 0, clip=0.05, lambdas=(0, LAMBDAS[1]))
    assert_equal(setting.tensors("net."), plain.tensors("net."))


@pytest.mark.parametrize("decay", [0.9, 0.3])
def test_momentum_decay_is_an_exponential_average_of_the_encoders_gradient(decay):
    literal, _ = after("literal_step", steps=4, decay=decay)
    setting, _ = after("stash_step", steps=4, how="params", decay=decay)
    assert_equal(setting.tensors(), literal.tensors())
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(setting.average, literal.average, strict=True))
    without, _ = after("stash_step", steps=4, how="params")
    assert without.average == [] and not torch.allclose(
        without.net.encoder[0][0].weight, setting.net.encoder[0][0].weight
    )


def test_momentum_decay_of_a_constant_gradient_by_hand():
    """z = θx, x = 1, g_CEL = 2 at every step: the average is 2 (1 − 0.5ⁿ)."""
    encoder, average = nn.Linear(1, 1, bias=False).double(), []
    for n in range(1, 5):
        encoder.zero_grad()
        z = encoder(torch.ones(1, 1, dtype=torch.float64))
        z_cut = z.detach().requires_grad_()
        stash_params(z, z_cut, 0 * z_cut.sum(), torch.full_like(z, 2.0), encoder, (), average, 0.5)
        assert encoder.weight.grad.item() == pytest.approx(2 * (1 - 0.5**n), rel=1e-12)


@BOTH
@pytest.mark.parametrize(
    "silent", [lambda z, cel: (z * 0).sum(), lambda z, cel: cel.w.sum()], ids=["zero", "not of z"]
)
def test_a_surrogate_without_a_gradient_at_z_leaves_a_plain_step(how, silent):
    setting, plain = Setting(), Setting()
    for cel in setting.cels:
        cel.w = nn.Parameter(torch.ones(1, dtype=torch.float64))
        cel.forward = lambda z, y, cel=cel: silent(z, cel)
    _, g_cel, finite = setting.stash_step(how, 0)
    plain.stash_step(how, 0, lambdas=(0, 0))
    assert finite == 1 and not g_cel.any()
    assert_equal(setting.tensors("net."), plain.tensors("net."))


def test_without_surrogates_there_is_nothing_to_add():
    z = torch.rand(3, 4, requires_grad=True)
    g_cel, finite = cel_gradient(z, [], [], 1.0)
    assert torch.equal(g_cel, torch.zeros(3, 4)) and finite == 1


# -------------------------------------------------------------------------------- leakage audit


def audit_linear(A, sigma, seed, n=10_000, labels=1):
    g = seeded(seed)
    z = torch.randn(2 * n, A.shape[1], generator=g, dtype=torch.float64) @ A.T
    return leakage_bits(z[:n], torch.randint(0, labels, (n,), generator=g), z[n:], sigma, g)


LINEAR = {
    "16 x 16": (randn(16, 16, seed=1) / 4, 0.3),
    "4 x 16": (randn(4, 16, seed=2) / 4, 0.1),
    "16 x 4": (randn(16, 4, seed=3), 0.5),
    "2 x 3": (randn(2, 3, seed=4), 0.05),
}


@pytest.mark.parametrize("A, sigma", LINEAR.values(), ids=LINEAR)
def test_audit_of_a_linear_gaussian_encoder(A, sigma):
    """Within 2 % of the closed form, never below it by more than four standard errors."""
    truth = information(A, sigma) / math.log(2)
    assert truth >= 5
    for seed in range(8):
        bits, stderr = audit_linear(A, sigma, seed)
        assert abs(bits / truth - 1) < 0.02 and bits > truth - 4 * stderr


def test_labels_that_say_nothing_change_nothing():
    """Ten random labels: the audit must find out that the classes are alike."""
    A, sigma = LINEAR["16 x 16"]
    truth = information(A, sigma) / math.log(2)
    bits, stderr = audit_linear(A, sigma, 0, labels=10)
    assert abs(bits / truth - 1) < 0.02 and bits > truth - 4 * stderr


def test_the_standard_error_is_the_spread_between_repetitions():
    A, sigma = LINEAR["4 x 16"]
    bits, stderr = torch.tensor([audit_linear(A, sigma, seed, n=1000) for seed in range(60)]).T
    assert 0.7 < bits.std() / stderr.mean() < 1.4  # the fit's own spread adds; 60 repetitions know it to 10 %


def plain_audit(z_fit, y_fit, z_test, sigma, g):
    """The same draws of `g`, the same density, without the control variate -> (bits, stderr)"""
    order = torch.randperm(len(z_fit), generator=g)
    choose, rest = order[: len(order) // 5], order[len(order) // 5 :]
    normal = lambda z: torch.randn(z.shape, generator=g, dtype=z.dtype)
    sent = z_fit[choose] + sigma * normal(z_fit[choose])
    score = lambda a: cross_entropies(class_moments(z_fit[rest], y_fit[rest]), sent, sigma, a).mean()
    best = min(cem.SHRINKAGE, key=score)
    nats = cross_entropies(class_moments(z_fit, y_fit), z_test + sigma * normal(z_test), sigma, best)
    nats = nats - entropy(z_fit.shape[1], sigma)
    return nats.mean().item() / math.log(2), nats.std().item() / math.log(2) / len(nats) ** 0.5


@pytest.mark.parametrize("scale", [0.03, 0.3, 3.0], ids=["all noise", "half and half", "all signal"])
def test_the_control_variate_shrinks_the_standard_error_and_leaves_the_mean(scale):
    """Over 40 repetitions: the more of z' is noise the more it takes away, and the mean stays."""
    A, sigma, n, rows = randn(8, 8, seed=5) / 8**0.5 * scale, 0.3, 500, []
    for seed in range(40):
        z = randn(2 * n, 8, seed=seed) @ A.T
        y = torch.zeros(n, dtype=torch.int64)
        rows.append(
            [
                *leakage_bits(z[:n], y, z[n:], sigma, seeded(seed)),
                *plain_audit(z[:n], y, z[n:], sigma, seeded(seed)),
            ]
        )
    bits, stderr, plain_bits, plain_stderr = torch.tensor(rows, dtype=torch.float64).T
    ratio = (
        stderr / plain_stderr
    )  # the coefficient is fitted on 100 other samples: +1/200 where it should be 0
    assert ratio.mean() < 1.006 and ratio.max() < 1.03
    moved = bits - plain_bits
    assert abs(moved.mean()) < 3 * moved.std() / len(moved) ** 0.5
    if scale == 0.03:
        assert stderr.mean() < 0.2 * plain_stderr.mean()


class Mixture:
    """Clean features z | c ~ N(m_c, S_c); z' has the exact density Σ_c p_c N(m_c, S_c + σ²I)."""

    def __init__(self, distance, sigma, alike, d=3):
        self.sigma, self.d = sigma, d
        self.p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
        self.means = distance * orthogonal(8, 8)[:4, :d]
        roots = randn(1 if alike else 4, d, d, seed=5).expand(4, d, d)
        self.cov = 0.1 * roots @ roots.mT

    def sample(self, n, g):
        y = torch.multinomial(self.p, n, True, generator=g)
        normal = torch.randn(n, self.d, 1, generator=g, dtype=torch.float64)
        return self.means[y] + (torch.linalg.cholesky(self.cov)[y] @ normal).squeeze(2), y

    def information_bits(self, n=200_000):
        """I(x;z') = H(z') − H(n) by brute force over the exact density; -> (bits, standard error)"""
        g = seeded(1234)
        z, _ = self.sample(n, g)
        z = z + self.sigma * torch.randn(z.shape, generator=g, dtype=torch.float64)
        noisy = self.cov + self.sigma**2 * torch.eye(self.d, dtype=torch.float64)
        normal = torch.distributions.MultivariateNormal
        logs = [self.p[c].log() + normal(self.means[c], noisy[c]).log_prob(z) for c in range(4)]
        nats = -torch.logsumexp(torch.stack(logs), 0) - entropy(self.d, self.sigma)
        return (nats.mean() / math.log(2)).item(), (nats.std() / math.log(2) / n**0.5).item()

    def bits_given_label(self):
        noisy = torch.eye(self.d, dtype=torch.float64) + self.cov / self.sigma**2
        return (self.p * 0.5 * torch.logdet(noisy)).sum().item() / math.log(2)

    def label_bits(self):
        return -(self.p * self.p.log2()).sum().item()


@pytest.mark.parametrize("alike", [True, False], ids=["equal covariances", "a covariance per class"])
@pytest.mark.parametrize("distance", [20.0, 1.5], ids=["far apart", "overlapping"])
def test_audit_of_a_mixture_counts_the_label(distance, alike):
    mixture = Mixture(distance, 0.2, alike)
    truth, truth_error = mixture.information_bits()
    if distance > 10:  # then I = H(Y) + I(x;z'|Y)
        assert truth == pytest.approx(mixture.label_bits() + mixture.bits_given_label(), abs=4 * truth_error)
    for seed in range(5):
        g = seeded(seed)
        (z_fit, y_fit), (z_test, _) = mixture.sample(10_000, g), mixture.sample(10_000, g)
        bits, stderr = leakage_bits(z_fit, y_fit, z_test, mixture.sigma, g)
        four = 4 * math.hypot(stderr, truth_error)
        assert truth - four < bits < 1.02 * truth + four
        if distance > 10:
            assert bits > mixture.bits_given_label() + 0.9 * mixture.label_bits()


def test_audit_is_a_bound_for_features_that_are_no_gaussian():
    """z uniform on [0, 1]: H(z') by quadrature. A Gaussian is the wrong density, so it may only be above."""
    sigma, n, g = 0.05, 20_000, seeded(0)
    t = torch.linspace(-1, 2, 300_001, dtype=torch.float64)
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), sigma)
    density = normal.cdf(t) - normal.cdf(t - 1)
    h = torch.trapezoid(-density * density.clamp_min(1e-300).log(), t).item()
    z = torch.rand(2 * n, 1, generator=g, dtype=torch.float64)
    bits, stderr = leakage_bits(z[:n], torch.zeros(n, dtype=torch.int64), z[n:], sigma, g)
    assert (h - entropy(1, sigma)) / math.log(2) < bits - 4 * stderr
    # against the entropy of a Gaussian of that variance: what the bound must come to
    assert bits == pytest.approx(0.5 * math.log2((1 / 12 + sigma**2) / sigma**2), abs=4 * stderr)


def test_cross_entropies_are_the_literal_sum():
    g = seeded(0)
    z_fit, y = randn(60, 3, seed=1), torch.randint(0, 4, (60,), generator=g)
    z = randn(7, 3, seed=2)
    y[y == 2] = 3  # a class that is not there
    for shrinkage in (0.0, 0.3, 1.0):
        got = cross_entropies(class_moments(z_fit, y), z, 0.4, shrinkage)
        classes = sorted(set(y.tolist()))
        means = {c: z_fit[y == c].mean(0) for c in classes}
        scatter = {c: sum(torch.outer(r - means[c], r - means[c]) for r in z_fit[y == c]) for c in classes}
        pooled = sum(scatter.values()) / 60
        for i in range(7):
            q = 0.0
            for c in classes:
                n = int((y == c).sum())
                cov = (1 - shrinkage) * pooled + shrinkage * scatter[c] / n + 0.16 * torch.eye(3).double()
                q += (
                    n / 60 * torch.distributions.MultivariateNormal(means[c], cov).log_prob(z[i]).exp().item()
                )
            assert got[i].item() == pytest.approx(-math.log(q), rel=1e-7)


def test_above_so_many_features_the_audit_uses_the_diagonal(monkeypatch):
    """Independent features: the diagonal is exact. Mixed ones: looser, and still a bound."""
    assert cem.FULL_DIM >= 512  # the default's z has a full covariance
    A = torch.diag(torch.linspace(0.5, 2, 6, dtype=torch.float64))
    truth = information(A, 0.2) / math.log(2)
    monkeypatch.setattr(cem, "FULL_DIM", 5)
    bits, stderr = audit_linear(A, 0.2, 0)
    assert bits == pytest.approx(truth, rel=0.02) and bits > truth - 4 * stderr
    mixed = orthogonal(6, 6) @ A
    by_hand = 0.5 * torch.log2(1 + (mixed @ mixed.T).diagonal() / 0.04).sum().item()
    assert by_hand > truth and audit_linear(mixed, 0.2, 0)[0] == pytest.approx(by_hand, rel=0.02)


def test_audit_with_many_or_lone_classes():
    """More classes than it keeps covariances for, some with a single image: finite and still a bound."""
    A, sigma = LINEAR["16 x 16"]
    truth = information(A, sigma) / math.log(2)
    bits, stderr = audit_linear(A, sigma, 0, n=2000, labels=3 * cem.MAX_CLASSES)
    assert truth - 4 * stderr < bits < 1.5 * truth
    z, y = randn(4000, 16, seed=0) @ A.T, torch.zeros(2000, dtype=torch.int64)
    y[:5] = torch.arange(1, 6)
    bits, stderr = leakage_bits(z[:2000], y, z[2000:], sigma, seeded(0))
    assert truth - 4 * stderr < bits < 1.1 * truth


def test_audit_is_reproducible_takes_feature_maps_and_leaves_them_alone():
    z = torch.rand(300, 2, 3, 3, generator=seeded(0))
    z_fit, z_test, y, before = z[:200], z[200:], torch.arange(200) % 4, z.clone()
    first = leakage_bits(z_fit, y, z_test, 0.1, seeded(1))
    assert first == leakage_bits(z_fit, y, z_test, 0.1, seeded(1))
    assert first == leakage_bits(z_fit.flatten(1), y, z_test.flatten(1), 0.1, seeded(1))
    assert first != leakage_bits(z_fit, y, z_test, 0.1, seeded(2)) and torch.equal(z, before)


def test_audit_falls_with_the_noise_and_refuses_none():
    z, y = torch.rand(2000, 4, generator=seeded(0)), torch.zeros(1000, dtype=torch.int64)
    bits = [leakage_bits(z[:1000], y, z[1000:], sigma, seeded(1))[0] for sigma in (0.01, 0.1, 1.0)]
    assert bits[0] > bits[1] > bits[2]
    for sigma in (0.0, -0.1):
        with pytest.raises(ValueError, match="sigma"):
            leakage_bits(z[:1000], y, z[1000:], sigma)


# -------------------------------------------------------------------------------- Fisher information


class Linear(nn.Module):
    """z = Ax of images [N, 3, 2, 2], d = 12."""

    def __init__(self, A):
        super().__init__()
        self.A = nn.Parameter(A)

    def forward(self, x):
        return x.flatten(1) @ self.A.T


@pytest.mark.parametrize("D", [4, 12, 20])
def test_dfil_of_a_linear_encoder_is_within_three_standard_errors(D):
    """J = A for every image: tr(AᵀA) / (d σ²)."""
    A, x, sigma = randn(D, 12), torch.rand(400, 3, 2, 2, generator=seeded(1), dtype=torch.float64), 0.3
    truth, off = A.square().sum().item() / (12 * sigma**2), []
    for seed in range(20):
        dfil, stderr = fisher_information(Linear(A), x, sigma, seeded(seed))
        assert abs(dfil - truth) < 3 * stderr
        # Var ‖Jᵀv‖² = 2 ‖AAᵀ‖² for v ~ N(0, I)
        known = ((2 * (A @ A.T).square().sum() / len(x)) ** 0.5).item() / (12 * sigma**2)
        assert stderr == pytest.approx(known, rel=0.35)
        off.append((dfil - truth) / stderr)
    assert 0.5 < torch.tensor(off).std() < 1.6  # the standard error is neither flattering nor timid


def test_dfil_of_a_network_is_that_of_its_jacobians():
    """The same v, applied to each image's whole Jacobian."""
    torch.manual_seed(0)
    encoder = SplitNet("vgg11", width=2, cut=1, bottleneck=1).double().eval().encoder
    x = torch.rand(3, 3, 8, 8, generator=seeded(1), dtype=torch.float64)
    jacobian = lambda image: torch.autograd.functional.jacobian(encoder, image[None])
    jacobians = [jacobian(image).reshape(-1, image.numel()) for image in x]
    v = torch.randn(encoder(x).shape, generator=seeded(2), dtype=torch.float64).flatten(1)
    by_hand = torch.stack([(J.T @ u).square().sum() / (x[0].numel() * 0.1**2) for J, u in zip(jacobians, v)])
    dfil, stderr = fisher_information(encoder, x, 0.1, seeded(2))
    assert dfil == pytest.approx(by_hand.mean().item(), rel=1e-9)
    assert stderr == pytest.approx(by_hand.std().item() / 3**0.5, rel=1e-9)


def test_one_over_dfil_is_the_least_error_of_an_unbiased_attacker():
    """x̂ = A⁻¹z' is unbiased with error σ² tr((AᵀA)⁻¹)/d: never less than 1/dFIL, equal for orthogonal A."""
    x, sigma = torch.rand(2000, 3, 2, 2, dtype=torch.float64), 0.3
    for seed in range(5):
        A = randn(12, 12, seed=seed)
        error = sigma**2 * torch.linalg.inv(A.T @ A).trace().item() / 12
        assert error > 1 / fisher_information(Linear(A), x, sigma, seeded(100 + seed))[0]
        Q = 2 * orthogonal(12, 12, seed)
        dfil, stderr = fisher_information(Linear(Q), x, sigma, seeded(100 + seed))
        assert abs(dfil - (2 / sigma) ** 2) < 4 * stderr < 0.05 * dfil


def test_dfil_without_noise_is_infinite():
    assert fisher_information(Linear(randn(4, 12)), torch.rand(2, 3, 2, 2).double(), 0.0) == (math.inf, 0.0)


def test_dfil_leaves_encoder_and_images_alone_also_without_gradients():
    encoder, x = Linear(randn(4, 12)), torch.rand(2, 3, 2, 2).double()
    before = copy.deepcopy(encoder.state_dict())
    with torch.no_grad():
        got = fisher_information(encoder, x, 0.1, generator=seeded(0))
    assert (
        got
        == fisher_information(encoder, x, 0.1, generator=seeded(0))
        != fisher_information(encoder, x, 0.1, generator=seeded(1))
    )
    assert (
        torch.equal(before["A"], encoder.A)
        and encoder.A.grad is None
        and not x.requires_grad
        and x.grad is None
    )
