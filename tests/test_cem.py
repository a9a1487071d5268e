"""Oracles for cem.py: the linear-Gaussian channel in closed form, the stash against one literal backward, exact mixtures."""
import math

import pytest
import torch
import torch.nn.functional as F

from cem import AUDIT_FULL_DIM, ETA_REF, channel, clip_norm, cross_entropies, entropy_of_mse, leakage_bits, lr_ratio, mse_floor, stash
from gated_att_cel import GatedAttCEL
from split_net import SplitNet


def gen(seed):
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------------------ channel, bound, r(η)

@pytest.mark.parametrize("sigma", [0.05, 2.0])
def test_channel_adds_noise_of_that_standard_deviation(sigma):
    z = torch.rand(400, 500, generator=gen(0), dtype=torch.float64)
    n = (channel(z, sigma, gen(1)) - z) / sigma  # 200,000 standard normals
    count = n.numel()
    assert abs(n.mean()) < 4 / count ** 0.5
    assert abs(n.var() - 1) < 4 * (2 / count) ** 0.5
    assert abs(n.pow(4).mean() - 3) < 4 * (96 / count) ** 0.5
    assert abs((n * z).mean()) < 4 / count ** 0.5  # independent of z
    assert abs((n[1:] * n[:-1]).mean()) < 4 / count ** 0.5  # and from row to row


def test_channel_is_reproducible_and_fresh():
    z = torch.rand(4, 5)
    assert torch.equal(channel(z, 0.1, gen(3)), channel(z, 0.1, gen(3)))
    g = gen(3)
    assert not torch.equal(channel(z, 0.1, g), channel(z, 0.1, g))
    z.requires_grad_()
    channel(z, 0.1).sum().backward()
    assert torch.equal(z.grad, torch.ones_like(z))


def test_floor_and_its_inverse():
    for d in (1, 8, 3072):
        for mse in (1e-6, 0.01, 0.3, 2.0):
            assert mse_floor(entropy_of_mse(mse, d), d) == pytest.approx(mse, rel=1e-9)
        for h in (-3.0 * d, 0.0, 0.7 * d):
            assert entropy_of_mse(mse_floor(h, d), d) == pytest.approx(h, rel=1e-9, abs=1e-9)


def test_floor_is_the_variance_of_a_gaussian_and_below_it_otherwise():
    """A Gaussian has the largest entropy of its variance, so only there is the floor reached."""
    for s in (0.1, 1.0, 3.0):
        gaussian = torch.distributions.Normal(0.0, s).entropy().item()
        assert mse_floor(5 * gaussian, 5) == pytest.approx(s ** 2, rel=1e-6)
    assert mse_floor(math.log(1.0), 1) == pytest.approx(1 / (2 * math.pi * math.e))  # uniform on [0, 1]: H = 0
    assert mse_floor(math.log(1.0), 1) < 1 / 12


def test_lr_ratio():
    assert ETA_REF == 1e-3
    assert lr_ratio(0.05) == pytest.approx(0.02) and lr_ratio(1e-3) == 1 and lr_ratio(1e-5) == 1
    assert lr_ratio(0.05, 0.025) == pytest.approx(0.5)
    assert lr_ratio(0.05, 0) == 1 and lr_ratio(0.0) == 1


def test_clip_norm():
    g = torch.tensor([[3.0, 0.0], [0.0, 4.0]])  # length 5
    assert torch.equal(clip_norm(g, 0), g) and torch.equal(clip_norm(g, 7), g)
    assert torch.allclose(clip_norm(g, 2), g * 0.4)
    zero = torch.zeros(3)
    assert torch.equal(clip_norm(zero, 2), zero)


# ------------------------------------------------------------------------------------------------ gradient stash

WEIGHT, SCALE, SIGMA, STEPS, DIM = 3.0, 0.4, 0.1, 3, 2 * 8 * 8


class Setting:
    """A small split network in double precision, a surrogate with parameters, momentum, three batches."""

    def __init__(self):
        torch.manual_seed(0)
        self.net = SplitNet("vgg11", num_classes=3, width=2, cut=2, bottleneck=2).double().train()
        self.cel = GatedAttCEL(DIM, tau=1e-4, hidden=5, attention="joint", sigma=SIGMA).double()
        self.optimizer = torch.optim.SGD([*self.net.parameters(), *self.cel.parameters()], lr=0.05, momentum=0.9)

    def batch(self, step):
        x = torch.rand(12, 3, 32, 32, generator=gen(10 + step), dtype=torch.float64)
        return x, torch.arange(12) % 3

    def terms(self, x):
        """Depend on the encoder directly: a weight penalty, and how far a nudge of x moves the encoder's output."""
        nudged = x + 0.05 * torch.randn(x.shape, generator=gen(99), dtype=x.dtype)
        moved = self.net.encoder(nudged) - self.net.encoder(x)
        return [0.3 * self.net.encoder[0][0].weight.square().sum(), 0.2 * moved.square().mean().sqrt()]

    def loss_d(self, z, y, step):
        return F.cross_entropy(self.net.server(channel(z, SIGMA, gen(step))), y)

    def tensors(self):
        return {**{"net." + k: v.clone() for k, v in self.net.state_dict().items()},
                **{"cel." + k: v.clone() for k, v in self.cel.state_dict().items()}}

    def grads(self):
        return {name: None if p.grad is None else p.grad.clone()
                for part, module in (("net.", self.net), ("cel.", self.cel)) for name, p in
                ((part + k, p) for k, p in module.named_parameters())}

    def stash_step(self, how, step, clip=0.0, with_terms=True, spoil=lambda loss: loss):
        x, y = self.batch(step)
        self.optimizer.zero_grad(set_to_none=True)
        z = self.net.encoder(x)
        z_cut = z.detach().requires_grad_()
        out = stash(how, z, z_cut, self.loss_d(z_cut, y, step), spoil(self.cel(z_cut, y)), self.net.encoder, self.cel,
                    WEIGHT, SCALE, clip, self.terms(x) if with_terms else ())
        self.optimizer.step()
        return out

    def literal_step(self, step, clip=0.0, with_terms=True, with_cel=True):
        """One backward of L_D + λ r γ c L_CEL for the encoder, c a constant: the share of ∂L_CEL/∂z that clipping leaves."""
        x, y = self.batch(step)
        z = self.net.encoder(x)
        loss_d = self.loss_d(z, y, step)
        loss_cel = self.cel(z, y)
        g_z, = torch.autograd.grad(loss_cel, z, retain_graph=True)
        g_d, = torch.autograd.grad(loss_d, z, retain_graph=True)
        c = min(1.0, clip / g_z.norm().item()) if clip else 1.0
        total = loss_d + (sum(self.terms(x)) if with_terms else 0) + (WEIGHT * SCALE * c * loss_cel if with_cel else 0)
        mine, servers, own = list(self.net.encoder.parameters()), list(self.net.server.parameters()), list(self.cel.parameters())
        grads = [*torch.autograd.grad(total, mine, retain_graph=True), *torch.autograd.grad(loss_d, servers, retain_graph=True),
                 *(SCALE * g for g in torch.autograd.grad(loss_cel, own))]
        for p, g in zip([*mine, *servers, *own], grads):
            p.grad = g
        self.optimizer.step()
        return {"ratio": WEIGHT * SCALE * c * g_z.norm() / g_d.norm(), "clipped": c < 1}


def run(step_of, steps=STEPS):
    """-> (setting, outputs of the steps) after so many optimiser steps from the same start."""
    setting = Setting()
    return setting, [step_of(setting, step) for step in range(steps)]


def assert_equal(a, b, tolerance=1e-9):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name].double(), b[name].double(), rtol=0, atol=tolerance), name


@pytest.mark.parametrize("with_terms", [True, False])
@pytest.mark.parametrize("clip", [0.0, 0.05, 1e6])
def test_both_stashes_equal_one_backward(clip, with_terms):
    """Parameters of encoder, server and surrogate and all BatchNorm buffers after 3 steps with noise and momentum."""
    literal, facts = run(lambda s, i: s.literal_step(i, clip, with_terms))
    assert all(f["clipped"] == (clip == 0.05) for f in facts)
    start = Setting().tensors()
    for how in ("cut", "params"):
        setting, outs = run(lambda s, i: s.stash_step(how, i, clip, with_terms))
        assert_equal(setting.tensors(), literal.tensors())
        for out, fact in zip(outs, facts):
            assert out["ratio"].item() == pytest.approx(fact["ratio"].item(), rel=1e-9) and out["finite"] == 1
    moved = {k for k, v in literal.tensors().items() if not torch.allclose(v.double(), start[k].double(), rtol=0, atol=1e-7)}
    idle = {"net.encoder.2.bias"}  # in front of BatchNorm, which takes it away
    assert moved | idle == start.keys() | idle  # nothing above was compared while standing still


def test_the_two_stashes_are_equal_to_each_other():
    a, _ = run(lambda s, i: s.stash_step("cut", i, clip=0.05))
    b, _ = run(lambda s, i: s.stash_step("params", i, clip=0.05))
    assert_equal(a.tensors(), b.tensors())


def test_the_encoder_runs_once_a_step():
    """BatchNorm's buffers move once: neither way repeats the forward pass."""
    for how in ("cut", "params"):
        setting, _ = run(lambda s, i: s.stash_step(how, i, with_terms=False))
        assert setting.net.encoder[0][1].num_batches_tracked == STEPS


@pytest.mark.parametrize("how", ["cut", "params"])
def test_the_server_gets_g_d_only_and_the_surrogate_gamma_g_cel(how):
    setting, plain = Setting(), Setting()
    setting.stash_step(how, 0)
    plain.literal_step(0, with_cel=False)
    got, want = setting.grads(), plain.grads()
    for name in got:
        same = torch.allclose(got[name], want[name], rtol=0, atol=1e-12)
        if name.startswith("net.server") or name.startswith("cel."):  # the literal step gives the surrogate γ g_CEL
            assert same, name
        elif name != "net.encoder.2.bias":
            assert not same, name  # L_CEL did reach the encoder
    assert all(want[name].abs().max() > 0 for name in want if name.startswith("cel."))


@pytest.mark.parametrize("how", ["cut", "params"])
@pytest.mark.parametrize("spoil", [lambda loss: loss * math.nan, lambda loss: loss * math.inf, lambda loss: loss + math.nan,
                                   lambda loss: loss + (loss - loss.detach()).sqrt()],
                         ids=["nan", "inf", "nan value, finite gradient", "finite value, infinite gradient"])
def test_a_non_finite_surrogate_leaves_a_plain_step(how, spoil):
    setting, plain = Setting(), Setting()
    out = setting.stash_step(how, 0, clip=0.05, spoil=spoil)
    plain.literal_step(0, with_cel=False)
    assert out["finite"] == 0 and out["ratio"] == 0
    got, want = setting.tensors(), plain.tensors()
    assert_equal({k: v for k, v in got.items() if k.startswith("net.")}, {k: v for k, v in want.items() if k.startswith("net.")})
    assert_equal({k: v for k, v in got.items() if k.startswith("cel.")}, {"cel." + k: v for k, v in Setting().cel.state_dict().items()})


@pytest.mark.parametrize("how", ["cut", "params"])
@pytest.mark.parametrize("loss", [lambda z: None, lambda z: torch.tensor(1.0, dtype=z.dtype), lambda z: (z * 0).sum()],
                         ids=["none", "constant", "zero with a live graph"])
def test_without_a_surrogates_gradient_the_step_is_plain(how, loss):
    setting, plain = Setting(), Setting()
    x, y = setting.batch(0)
    z = setting.net.encoder(x)
    z_cut = z.detach().requires_grad_()
    out = stash(how, z, z_cut, setting.loss_d(z_cut, y, 0), loss(z_cut), setting.net.encoder, weight=WEIGHT, scale=SCALE)
    plain.literal_step(0, with_terms=False, with_cel=False)
    got, want = setting.grads(), plain.grads()
    for name in got:
        if name.startswith("net."):
            assert torch.allclose(got[name], want[name], rtol=0, atol=1e-12), name
    assert out["ratio"] == 0 and out["finite"] == 1


@pytest.mark.parametrize("how", ["cut", "params"])
def test_a_worked_step(how):
    """z = θx, L_D = ½(z − 1)², L_CEL = 2z², θ = 2, x = 3: z = 6, ∂L_D/∂z = 5, ∂L_CEL/∂z = 24."""
    for clip, g_cel in ((0.0, 24.0), (6.0, 6.0)):
        encoder = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.constant_(encoder.weight, 2.0)
        z = encoder(torch.tensor([[3.0]], dtype=torch.float64))
        z_cut = z.detach().requires_grad_()
        out = stash(how, z, z_cut, 0.5 * (z_cut - 1).square().sum(), 2 * z_cut.square().sum(), encoder, weight=0.5, scale=0.1, clip=clip,
                    encoder_terms=[7 * encoder.weight.sum()])
        assert encoder.weight.grad.item() == pytest.approx(3 * (5 + 0.5 * 0.1 * g_cel) + 7, rel=1e-12)
        assert out["ratio"].item() == pytest.approx(0.05 * g_cel / 5, rel=1e-12)


# ------------------------------------------------------------------------------------------------ leakage audit

def orthogonal(rows, columns, seed=0):
    q, _ = torch.linalg.qr(torch.randn(max(rows, columns), max(rows, columns), generator=gen(seed), dtype=torch.float64))
    return q[:rows, :columns]


def information(A, sigma, s=1.0):
    # I = ½ log det(I + s² A Aᵀ / σ²), nats
    return 0.5 * torch.logdet(torch.eye(len(A), dtype=A.dtype) + s ** 2 * A @ A.T / sigma ** 2).item()


def mmse(A, sigma, s=1.0):
    # tr Cov(x|z') / d, Cov(x|z') = (I/s² + AᵀA/σ²)⁻¹
    d = A.shape[1]
    return torch.linalg.inv(torch.eye(d, dtype=A.dtype) / s ** 2 + A.T @ A / sigma ** 2).trace().item() / d


def entropy(d, s=1.0):
    return d / 2 * math.log(2 * math.pi * math.e * s ** 2)


def audit_linear(A, sigma, seed, s=1.0, n=10_000, labels=1):
    g = gen(seed)
    x = s * torch.randn(2 * n, A.shape[1], generator=g, dtype=torch.float64)
    z = x @ A.T
    y = torch.randint(0, labels, (n,), generator=g)
    return leakage_bits(z[:n], y, z[n:], sigma, g)


LINEAR = [("16 x 16", torch.randn(16, 16, generator=gen(1), dtype=torch.float64) / 4, 0.3),
          ("4 x 16", torch.randn(4, 16, generator=gen(2), dtype=torch.float64) / 4, 0.1),
          ("16 x 4", torch.randn(16, 4, generator=gen(3), dtype=torch.float64), 0.5),
          ("2 x 3", torch.randn(2, 3, generator=gen(4), dtype=torch.float64), 0.05)]


@pytest.mark.parametrize("A, sigma", [case[1:] for case in LINEAR], ids=[case[0] for case in LINEAR])
def test_audit_of_a_linear_gaussian_encoder(A, sigma):
    """Within 2 % of the closed form, never below it by more than four standard errors, over 20 seeds."""
    truth = information(A, sigma) / math.log(2)
    assert truth >= 5
    for seed in range(20):
        bits, stderr = audit_linear(A, sigma, seed)
        assert abs(bits / truth - 1) < 0.02
        assert bits > truth - 4 * stderr


def test_labels_that_say_nothing_change_nothing():
    """Ten random labels: the audit must find out that the classes are alike."""
    A, sigma = LINEAR[0][1:]
    truth = information(A, sigma) / math.log(2)
    bits, stderr = audit_linear(A, sigma, 0, labels=10)
    assert abs(bits / truth - 1) < 0.02 and bits > truth - 4 * stderr


def test_standard_error_is_the_spread_between_repetitions():
    A, sigma = LINEAR[1][1:]
    results = torch.tensor([audit_linear(A, sigma, seed, n=1000) for seed in range(60)])
    bits, stderr = results[:, 0], results[:, 1]
    # the fit's own spread adds a little, and 60 repetitions know a spread to about 10 %
    assert 0.7 < bits.std() / stderr.mean() < 1.4


@pytest.mark.parametrize("rows, bits, ratio", [(8, 14.393, 1.0), (4, 7.197, 0.531)])
def test_known_values(rows, bits, ratio):
    """DESIGN §2: s = 1, σ = 0.3, square orthogonal 8 and wide 4 x 8; the bound is equal to the MMSE only for the first."""
    A, sigma = orthogonal(rows, 8), 0.3
    nats = information(A, sigma)
    assert nats / math.log(2) == pytest.approx(bits, abs=5e-4)
    floor = mse_floor(entropy(8) - nats, 8)
    assert floor / mmse(A, sigma) == pytest.approx(ratio, abs=5e-4)
    audited, stderr = audit_linear(A, sigma, 0)
    assert audited == pytest.approx(bits, rel=0.02) and audited > bits - 4 * stderr
    assert mse_floor(entropy(8) - (audited + 4 * stderr) * math.log(2), 8) <= mmse(A, sigma)


def test_the_floor_never_exceeds_the_mmse_and_equals_it_for_tall_orthonormal_columns():
    sigma, s = 0.3, 0.7
    for seed in range(10):
        for rows, columns in ((8, 8), (4, 8), (12, 8), (1, 5)):
            A = torch.randn(rows, columns, generator=gen(seed), dtype=torch.float64)
            assert mse_floor(entropy(columns, s) - information(A, sigma, s), columns) < mmse(A, sigma, s)
        tall = 1.7 * orthogonal(12, 8, seed)
        assert mse_floor(entropy(8, s) - information(tall, sigma, s), 8) == pytest.approx(mmse(tall, sigma, s), rel=1e-9)


class Mixture:
    """Clean features z | c ~ N(m_c, S_c); z' has the exact density Σ_c p_c N(m_c, S_c + σ²I)."""

    def __init__(self, distance, sigma, classes=4, d=3, alike=False):
        g = gen(5)
        self.sigma, self.d = sigma, d
        self.p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)[:classes]
        self.p = self.p / self.p.sum()
        self.means = distance * orthogonal(8, 8)[:classes, :d]
        roots = torch.randn(1 if alike else classes, d, d, generator=g, dtype=torch.float64).expand(classes, d, d)
        self.cov = 0.1 * roots @ roots.mT

    def sample(self, n, g):
        y = torch.multinomial(self.p, n, True, generator=g)
        chol = torch.linalg.cholesky(self.cov)
        return self.means[y] + (chol[y] @ torch.randn(n, self.d, 1, generator=g, dtype=torch.float64)).squeeze(2), y

    def information_bits(self, n=200_000):
        """I(x;z') = H(z') − H(n) by brute force over the exact density; -> (bits, standard error)"""
        g = gen(1234)
        z, _ = self.sample(n, g)
        z = z + self.sigma * torch.randn(z.shape, generator=g, dtype=torch.float64)
        noisy = self.cov + self.sigma ** 2 * torch.eye(self.d, dtype=torch.float64)
        logs = [self.p[c].log() + torch.distributions.MultivariateNormal(self.means[c], noisy[c]).log_prob(z) for c in range(len(self.p))]
        nats = -torch.logsumexp(torch.stack(logs), 0) - entropy(self.d, self.sigma)
        return (nats.mean() / math.log(2)).item(), (nats.std() / math.log(2) / n ** 0.5).item()

    def bits_given_label(self):
        noisy = torch.eye(self.d, dtype=torch.float64) + self.cov / self.sigma ** 2
        return (self.p * 0.5 * torch.logdet(noisy)).sum().item() / math.log(2)

    def label_bits(self):
        return -(self.p * self.p.log2()).sum().item()


@pytest.mark.parametrize("alike", [True, False], ids=["equal covariances", "a covariance per class"])
@pytest.mark.parametrize("distance", [20.0, 1.5], ids=["far apart", "overlapping"])
def test_audit_of_a_mixture_counts_the_label(distance, alike):
    mixture = Mixture(distance, sigma=0.2, alike=alike)
    truth, truth_error = mixture.information_bits()
    if distance > 10:  # then I = H(Y) + I(x;z'|Y)
        assert truth == pytest.approx(mixture.label_bits() + mixture.bits_given_label(), abs=4 * truth_error)
    for seed in range(5):
        g = gen(seed)
        (z_fit, y_fit), (z_test, _) = mixture.sample(10_000, g), mixture.sample(10_000, g)
        bits, stderr = leakage_bits(z_fit, y_fit, z_test, mixture.sigma, g)
        assert bits > truth - 4 * math.hypot(stderr, truth_error)
        assert bits < 1.02 * truth + 4 * math.hypot(stderr, truth_error)
        if distance > 10:
            assert bits > mixture.bits_given_label() + 0.9 * mixture.label_bits()


def test_audit_is_a_bound_for_features_that_are_no_gaussian():
    """z uniform on [0, 1]: H(z') by quadrature. The audit's Gaussian is the wrong density, so it may only be above."""
    sigma, n = 0.05, 20_000
    t = torch.linspace(-1, 2, 300_001, dtype=torch.float64)
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), sigma)
    density = normal.cdf(t) - normal.cdf(t - 1)
    h = torch.trapezoid(-density * density.clamp_min(1e-300).log(), t).item()
    truth = (h - entropy(1, sigma)) / math.log(2)
    g = gen(0)
    z = torch.rand(2 * n, 1, generator=g, dtype=torch.float64)
    bits, stderr = leakage_bits(z[:n], torch.zeros(n, dtype=torch.int64), z[n:], sigma, g)
    assert truth < bits - 4 * stderr
    # against the entropy of a Gaussian of that variance: what the bound must come to
    assert bits == pytest.approx(0.5 * math.log2((1 / 12 + sigma ** 2) / sigma ** 2), abs=4 * stderr)


def test_cross_entropies_are_the_literal_sum():
    g = gen(0)
    z_fit, y, z = torch.randn(60, 3, generator=g).double(), torch.randint(0, 4, (60,), generator=g), torch.randn(7, 3, generator=g).double()
    y[y == 2] = 3  # a class that is not there
    for shrinkage in (0.0, 0.3, 1.0):
        got = cross_entropies(z_fit, y, z, 0.4, shrinkage)
        classes = sorted(set(y.tolist()))
        means = {c: z_fit[y == c].mean(0) for c in classes}
        scatter = {c: sum(torch.outer(r - means[c], r - means[c]) for r in z_fit[y == c]) for c in classes}
        pooled = sum(scatter.values()) / 60
        for i in range(7):
            q = 0.0
            for c in classes:
                n = int((y == c).sum())
                cov = (1 - shrinkage) * pooled + shrinkage * scatter[c] / n + 0.16 * torch.eye(3).double()
                q += n / 60 * torch.distributions.MultivariateNormal(means[c], cov).log_prob(z[i]).exp().item()
            assert got[i].item() == pytest.approx(-math.log(q), rel=1e-7)


def test_audit_above_the_full_covariance_limit_uses_the_diagonal(monkeypatch):
    """Independent features: the diagonal is exact, so the small limit changes next to nothing."""
    import cem
    assert AUDIT_FULL_DIM >= 512  # the default's z has a full covariance
    A = torch.diag(torch.linspace(0.5, 2, 6, dtype=torch.float64))
    truth = information(A, 0.2) / math.log(2)
    monkeypatch.setattr(cem, "AUDIT_FULL_DIM", 5)
    bits, stderr = audit_linear(A, 0.2, 0)
    assert bits == pytest.approx(truth, rel=0.02) and bits > truth - 4 * stderr
    mixed = orthogonal(6, 6) @ A
    bits, stderr = audit_linear(mixed, 0.2, 0)
    by_hand = 0.5 * torch.log2(1 + (mixed @ mixed.T).diagonal() / 0.04).sum().item()
    assert by_hand > truth and bits == pytest.approx(by_hand, rel=0.02)  # looser, still a bound


def test_audit_with_many_or_lone_classes():
    """More classes than it keeps covariances for, some with a single image: finite and still a bound."""
    A, sigma = LINEAR[0][1:]
    truth = information(A, sigma) / math.log(2)
    bits, stderr = audit_linear(A, sigma, 0, n=2000, labels=200)
    assert truth - 4 * stderr < bits < 1.5 * truth
    g = gen(0)
    z = torch.randn(4000, 16, generator=g, dtype=torch.float64) @ A.T
    y = torch.zeros(2000, dtype=torch.int64)
    y[:5] = torch.arange(1, 6)
    bits, stderr = leakage_bits(z[:2000], y, z[2000:], sigma, g)
    assert truth - 4 * stderr < bits < 1.1 * truth


def test_audit_is_reproducible_takes_feature_maps_and_leaves_them_alone():
    z = torch.rand(300, 2, 3, 3, generator=gen(0))
    z_fit, z_test, y = z[:200], z[200:], torch.arange(200) % 4
    before = z.clone()
    a = leakage_bits(z_fit, y, z_test, 0.1, gen(1))
    assert a == leakage_bits(z_fit, y, z_test, 0.1, gen(1)) == leakage_bits(z_fit.flatten(1), y, z_test.flatten(1), 0.1, gen(1))
    assert a != leakage_bits(z_fit, y, z_test, 0.1, gen(2)) and torch.equal(z, before)


def test_audit_falls_with_the_noise_and_refuses_none():
    z = torch.rand(2000, 4, generator=gen(0))
    y = torch.zeros(1000, dtype=torch.int64)
    bits = [leakage_bits(z[:1000], y, z[1000:], sigma, gen(1))[0] for sigma in (0.01, 0.1, 1.0)]
    assert bits[0] > bits[1] > bits[2]
    for sigma in (0.0, -0.1):
        with pytest.raises(ValueError, match="sigma"):
            leakage_bits(z[:1000], y, z[1000:], sigma)
