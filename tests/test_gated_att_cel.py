"""What gated_att_cel.py computes: [A §6.3] and its errata, the gradients of [A §4.4] and appendix B,
a literal loop over (3a)-(3f) and (2), [B]'s form, where each mode sends the gradient and what the attention
makes of it, memory, mixed precision, and inputs that are not nice."""

import contextlib
import copy
import math
import warnings
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gated_att_cel import GatedAttCEL

MODES, VARIANCES = ("fit", "adversarial", "documented"), ("per_dim", "trace")
both = pytest.mark.parametrize("variance", VARIANCES)
every_mode = pytest.mark.parametrize("mode", MODES)


def batch(seed, B=24, D=6, C=5, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, C, (B,), generator=g)
    return scale * torch.randn(B, D, generator=g, dtype=torch.float64), y


def make(dim=6, num_classes=5, sigma=0.5, seed=0, **kwargs):
    """In float64 and with parameters three times as large as at the start: away from equal weights."""
    torch.manual_seed(seed)
    cel = GatedAttCEL(num_classes, dim, sigma, **{"hidden": 7, **kwargs}).double()
    with torch.no_grad():
        for p in cel.parameters():
            p.mul_(3)
    return cel


def grads(cel, z, y):
    """(value, gradient of z, gradients of the parameters) of one call."""
    z = z.detach().clone().requires_grad_()
    cel.zero_grad()
    loss = cel(z, y)
    loss.backward()
    return loss.detach(), z.grad, [p.grad.clone() for p in cel.parameters()]


def value(cel, z, y):
    with torch.no_grad():
        return float(cel(z, y))


def layer_norm(z):
    m = sum(z) / len(z)
    return (z - m) / torch.sqrt(sum((z - m) ** 2) / len(z) + 1e-5)


def attention(cel, z):
    """α' of one sample, one hidden unit at a time."""
    z = layer_norm(z) if isinstance(cel.norm, nn.LayerNorm) else z  # (3a)
    logit = 0.0
    for j in range(len(cel.w)):
        v = torch.tanh((cel.W_V[j] * z).sum())  # (3b)
        u = torch.sigmoid((cel.W_U[j] * z).sum())  # (3c)
        logit = logit + cel.w[j] * v * u  # (3d), (3e)
    return torch.tanh(logit) if cel.mode == "adversarial" else logit


def softmax(logits):
    e = [torch.exp(a) for a in logits]
    return [a / sum(e) for a in e]  # (3f)


def weights(cel, samples):
    return softmax([attention(cel, z) for z in samples])


def weighted(alpha, samples):
    mean = sum(a * z for a, z in zip(alpha, samples))
    return mean, sum(a * (z - mean) ** 2 for a, z in zip(alpha, samples))


def literal(cel, z, y, past=None):
    """What `grads` returns, by loops over classes and samples. past: the remembered samples of each class.

    Neither they nor their α' have a gradient; that of the batch's M is (M + m)/M times as large.
    """
    z = z.detach().clone().requires_grad_()
    parameters = tuple(cel.parameters())
    value, of_z, of_parameters = 0.0, torch.zeros_like(z), [torch.zeros_like(p) for p in parameters]
    for c in range(cel.num_classes):
        rows = [i for i in range(len(y)) if y[i] == c]
        old = list(past[c]) if past else []
        if not rows or len(rows) + len(old) < 2:
            continue
        new = [z[i] for i in rows]
        beta, share = len(rows) / len(y), (len(rows) + len(old)) / len(rows)
        logits = [attention(cel, s.detach() if cel.mode == "fit" else s) for s in new]
        alpha = softmax(logits + [attention(cel, s).detach() for s in old])

        samples = new + old
        if cel.mode == "documented" and cel.variance == "per_dim":
            samples = [layer_norm(s) for s in samples]
        _, v = weighted([a.detach() for a in alpha] if cel.mode == "fit" else alpha, samples)
        v = v if cel.variance == "per_dim" else v.sum()[None]
        loss = beta * torch.clamp(torch.log(v + cel.eps) - math.log(cel.tau + cel.eps), min=0).mean()
        value = value + loss.detach()
        of_z += share * torch.autograd.grad(loss, z, retain_graph=True)[0]

        if cel.mode == "fit":
            loss, samples = 0.0, [s.detach() for s in samples]
            mean, v = weighted(alpha, samples)
            v = (v if cel.variance == "per_dim" else v.mean().expand(cel.dim)) + cel.sigma**2
            for s in samples:  # E over n of (z + n − z̄)² is (z − z̄)² + σ²
                log_density = -0.5 * torch.log(2 * math.pi * v) - 0.5 * ((s - mean) ** 2 + cel.sigma**2) / v
                loss = loss - beta * log_density.mean() / len(samples)
        for total, g in zip(of_parameters, torch.autograd.grad(loss, parameters)):
            total += (-share if cel.mode == "adversarial" else share) * g
    return value, of_z, of_parameters


def assert_same(ours, expected, tolerance=1e-10):
    assert abs(ours[0] - expected[0]) < tolerance and ours[0] > 0
    for a, b in zip([ours[1], *ours[2]], [expected[1], *expected[2]]):
        assert b.abs().max() > 1e-6 and torch.allclose(a, b, rtol=0, atol=tolerance)


# ----- the worked example of [A §6.3] and its errata

Z = torch.tensor(
    [
        [[0.0, 0.0], [0.2, 0.1], [-0.1, 0.05], [0.15, -0.05]],
        [[1.0, 1.0], [1.2, 1.1], [0.8, 0.9], [1.1, 0.95]],
        [[1.0, -1.0], [0.8, -0.9], [1.1, -1.2], [0.9, -1.05]],
    ],
    dtype=torch.float64,
)  # [A §6.1]
Y = torch.arange(3).repeat_interleave(4)
TAU, EPS = 0.002, 1e-6


def example(tau=TAU, **kwargs):
    cel = GatedAttCEL(3, 2, 0.1, "documented", "trace", hidden=2, tau=tau, eps=EPS, **kwargs).double().eval()
    cel.norm = nn.Identity()
    with torch.no_grad():
        cel.W_V.copy_(torch.eye(2)), cel.W_U.copy_(torch.eye(2)), cel.w.fill_(1.0)
    return cel


def test_example_the_first_sample_is_as_printed():
    z = torch.tensor([0.2, 0.1], dtype=torch.float64)
    v, u = torch.tanh(z), torch.sigmoid(z)
    assert v.tolist() == pytest.approx([0.197, 0.0995], abs=5e-4)
    assert u.tolist() == pytest.approx([0.55, 0.525], abs=5e-4)
    assert float((v * u).sum()) == pytest.approx(0.160, abs=1e-3)


def test_example_weights_and_mean_of_class_1():
    alpha = [a.detach() for a in weights(example(), Z[0])]
    printed_order = [float(alpha[i]) for i in (1, 3, 0, 2)]  # (0.2, 0.1), (0.15, −0.05), (0, 0), (−0.1, 0.05)
    true = [0.2790, 0.2511, 0.2375, 0.2324]  # printed 0.28, 0.26, 0.23, 0.23
    assert printed_order == pytest.approx(true, abs=5e-5)
    mean, _ = weighted(alpha, Z[0])
    assert mean.tolist() == pytest.approx([0.0702, 0.0270], abs=5e-5)  # printed (0.088, 0.016)
    cel = example()
    cel(Z[0], Y[:4])
    ess = 1 / sum(float(a) ** 2 for a in alpha) / 4
    assert float(cel.stats["ess"]) == pytest.approx(ess, abs=1e-12)  # the module has these weights


def test_example_variances_and_penalties():
    cel = example()
    printed_v, true_v, true_R = (0.0058, 0.0061, 0.0072), (0.01747, 0.0265, 0.0243), (2.1671, 2.5834, 2.4981)
    for c in range(3):
        R = value(cel, Z[c], torch.full((4,), c))  # this class alone: β = 1
        v = 2 * float(cel.stats["spread"])  # the trace is D times the mean over dimensions
        assert v == pytest.approx(true_v[c], abs=5e-5) and abs(v - printed_v[c]) > 0.01
        assert R == pytest.approx(true_R[c], abs=5e-5)
    own = math.log((0.0058 + EPS) / (TAU + EPS))  # not even the printed v₁ gives the printed R(1) = 0.405
    assert own == pytest.approx(1.065, abs=1e-3)
    assert value(cel, Z.flatten(0, 1), Y) == pytest.approx(2.4162, abs=5e-5)


def test_example_is_silent_at_the_threshold_of_section_6_1():
    loss, of_z, _ = grads(example(tau=0.05), Z.flatten(0, 1), Y)
    assert loss == 0 and not of_z.any()


def test_example_layer_norm_is_not_nearly_the_identity():
    z = Z.flatten(0, 1)
    normed = F.layer_norm(100 * z, (2,))  # times 100: LayerNorm's own 1e-5 no longer matters
    unequal = z[:, 0] != z[:, 1]
    assert torch.allclose(normed[unequal].abs(), torch.ones(2).double(), atol=1e-5)  # only a sign is left
    assert torch.allclose(normed[unequal].sum(1), torch.zeros(1).double(), atol=1e-9)
    assert not normed[~unequal].any()
    with_norm = example()
    with_norm.norm = nn.LayerNorm(2, elementwise_affine=False)
    assert max(abs(a - b) for a, b in zip(weights(with_norm, Z[0]), weights(example(), Z[0]))) > 0.02


# ----- the analytic gradients of [A §4.4] and appendix B


def test_softmax_jacobian_and_the_term_of_appendix_b_that_is_always_zero():
    torch.manual_seed(0)
    logits, z = torch.randn(6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    alpha = logits.softmax(0)
    J = torch.autograd.functional.jacobian(lambda a: a.softmax(0), logits)
    assert torch.allclose(J, torch.diag(alpha) - alpha[:, None] * alpha, atol=1e-12)

    spread = lambda a: (a * (z - a @ z).square().sum(1)).sum()
    distance = (z - alpha @ z).square().sum(1)
    second_term = -2 * (alpha @ (z - alpha @ z)) @ (z - alpha @ z).T
    assert second_term.abs().max() < 1e-14
    of_alpha = torch.autograd.functional.jacobian(spread, alpha)
    assert torch.allclose(of_alpha, distance + second_term, atol=1e-10)

    of_logit = torch.autograd.functional.jacobian(lambda a: spread(a.softmax(0)), logits)
    assert torch.allclose(of_logit, J.T @ of_alpha, atol=1e-10)
    assert torch.allclose(of_logit, alpha * (distance - spread(alpha)), atol=1e-10)


def test_a_descent_step_takes_weight_from_the_farthest_sample():
    """[A §6.3] and appendix B say that it gains. Class 1 of the example, one step on w, W_V and W_U."""
    cel = example()
    before = weights(cel, Z[0])
    mean, _ = weighted(before, Z[0])
    farthest = int((Z[0] - mean).square().sum(1).argmax())
    _, _, of_parameters = grads(cel, Z[0], Y[:4])
    with torch.no_grad():
        for p, g in zip(cel.parameters(), of_parameters):
            p.sub_(0.1 * g)
    assert weights(cel, Z[0])[farthest] < before[farthest] - 1e-5


@pytest.mark.parametrize("tau", [1e-3, 1e3])
def test_gradient_of_z_with_the_weights_held_fixed(tau):
    """∂R/∂v = 1/(v + ε) above τ, else 0; ∂v/∂z_i = 2 α_i (z_i − z̄)."""
    z, y = batch(1, B=8, C=1)
    cel = make(variance="trace", tau=tau)
    _, of_z, _ = grads(cel, z, y)
    alpha = torch.stack(weights(cel, z)).detach()
    away = z - alpha @ z
    v = (alpha * away.square().sum(1)).sum()
    slope = 1 / (v + cel.eps) if v > tau else 0.0
    assert torch.allclose(of_z, slope * 2 * alpha[:, None] * away, atol=1e-10)


def test_gradient_of_W_V_W_U_and_w_assembled_by_hand():
    z, y = batch(2)
    cel = make(mode="documented", variance="trace", tau=0.5, eps=1e-6)
    _, _, ours = grads(cel, z, y)
    expected = [torch.zeros_like(p) for p in cel.parameters()]
    with torch.no_grad():
        for c in y.unique():
            zc = z[y == c]
            zt = F.layer_norm(zc, zc.shape[1:])
            v, u = torch.tanh(zt @ cel.W_V.T), torch.sigmoid(zt @ cel.W_U.T)
            alpha = ((v * u) @ cel.w).softmax(0)
            distance = (zc - alpha @ zc).square().sum(1)
            spread = (alpha * distance).sum()
            if len(zc) <= 1 or spread <= cel.tau:
                continue
            of_logit = len(zc) / len(z) / (spread + cel.eps) * alpha * (distance - spread)  # [M]
            expected[0] += (of_logit[:, None] * cel.w * u * (1 - v**2)).T @ zt
            expected[1] += (of_logit[:, None] * cel.w * v * u * (1 - u)).T @ zt
            expected[2] += of_logit @ (v * u)
    for a, b in zip(ours, expected):
        assert b.abs().max() > 1e-3 and torch.allclose(a, b, atol=1e-10)


@both
def test_gradcheck(variance):
    z, y = batch(3, B=9, D=5, C=3)
    cel = make(5, 3, mode="documented", variance=variance, hidden=3, tau=0.05, eps=1e-3)
    names = [n for n, _ in cel.named_parameters()]
    f = lambda z, *p: torch.func.functional_call(cel, dict(zip(names, p)), (z, y))
    parameters = [p.detach().clone().requires_grad_() for p in cel.parameters()]
    assert torch.autograd.gradcheck(f, (z.requires_grad_(), *parameters))


# ----- a literal loop over (3a)-(3f), [A §4.3] and (2)


@every_mode
@both
def test_equals_a_loop_over_classes_and_samples(mode, variance):
    z, _ = batch(4, B=14)
    y = torch.tensor([7, 0, 3, 3, 0, 9, 0, 9, 0, 9, 0, 7, 0, 12])  # classes of 0, 1, 2, 3 and 6 samples
    cel = make(6, 13, mode=mode, variance=variance)
    ours = grads(cel, z, y)
    assert_same(ours, literal(cel, z, y))
    assert not ours[1][13].any()  # the only sample of class 12
    assert float(cel.stats["skipped"]) == pytest.approx(1 / 14)


@every_mode
def test_the_order_of_the_batch_does_not_matter(mode):
    z, y = batch(6)
    cel, order = make(mode=mode), torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    one, other = grads(cel, z, y), grads(cel, z[order], y[order])
    assert_same((one[0], one[1][order], one[2]), other, 1e-12)


def test_threshold_of_report_b():
    """σ_thr² = max(var_thr·σ², 1e-8) + g0, on the LayerNormed features in each dimension."""
    z, y = batch(5)
    for sigma, var_threshold, g0 in ((0.3, 0.125, 0.01), (1e-5, 0.125, 1e-6)):
        cel = make(sigma=sigma, mode="documented", var_threshold=var_threshold, eps=g0)
        threshold = max(var_threshold * sigma**2, 1e-8) + g0
        total = 0.0
        for c in y.unique():
            x = F.layer_norm(z[y == c], (6,))
            a = torch.stack(weights(cel, z[y == c])).detach()[:, None]
            var = (a * (x - (a * x).sum(0)) ** 2).sum(0)
            if len(x) > 1:
                total += len(x) / len(z) * torch.relu(torch.log(var + g0) - math.log(threshold)).mean()
        assert value(cel, z, y) == pytest.approx(float(total), abs=1e-10)


@both
def test_thresholds_follow_the_noise(variance):
    """τ = var_threshold·σ², ε = floor·σ² of a dimension: features and σ scaled alike give the same loss."""
    z, y = batch(7)
    one = make(sigma=0.2, variance=variance)
    ten = make(sigma=2.0, variance=variance)
    terms = 6 if variance == "trace" else 1
    assert one.tau == pytest.approx(terms * 0.125 * 0.2**2) and one.eps == pytest.approx(terms * 0.2**2)
    one.norm.eps = ten.norm.eps = 0.0  # LayerNorm's own constant does not scale
    assert value(one, z, y) == pytest.approx(value(ten, 10 * z, y), abs=1e-10)


# ----- where the gradient goes, and what the attention does with it


def test_fit_and_documented_have_the_same_value_and_adversarial_only_caps_the_logits():
    z, y = batch(8)
    fit, adversarial, documented = (grads(make(mode=m, variance="trace"), z, y) for m in MODES)
    assert fit[0] == documented[0] != adversarial[0]
    assert not torch.allclose(fit[1], documented[1])  # α is a constant for z only in "fit"
    small = [make(mode=m, variance="trace") for m in MODES]
    for cel in small:
        cel.w.data.mul_(1e-4)  # logits far below the cap
    fit, adversarial, documented = (grads(cel, z, y) for cel in small)
    assert adversarial[0] == pytest.approx(float(documented[0]), abs=1e-10)
    for a, d in zip(adversarial[2], documented[2]):
        assert d.abs().max() > 0 and torch.allclose(a, -d, rtol=1e-5)
    assert torch.allclose(adversarial[1], documented[1], atol=1e-8)


def frozen(mode, variance="trace", steps=200, outlier=0.0):
    """Trains the attention alone: four classes of twelve fixed samples. Returns cel, z, y."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(4).repeat_interleave(12)
    z = torch.sigmoid(torch.randn(4, 16, generator=g)[y] + 0.7 * torch.randn(48, 16, generator=g))
    z[::12] += outlier * torch.randn(4, 16, generator=g)
    torch.manual_seed(1)
    cel = GatedAttCEL(4, 16, 0.05, mode, variance)
    optimizer = torch.optim.Adam(cel.parameters(), lr=0.03)
    z.requires_grad_()  # a leaf that no optimiser moves
    for _ in range(steps):
        optimizer.zero_grad()
        cel(z, y).backward()
        optimizer.step()
    z.grad = None
    cel(z, y).backward()
    return cel, z, y


def plain(cel, z, y):
    """L with equal weights."""
    zero = copy.deepcopy(cel)
    zero.w.data.zero_()
    return value(zero, z, y)


@both
def test_documented_collapses_on_frozen_features(variance):
    cel, z, y = frozen("documented", variance)
    assert plain(cel, z, y) > 1.5  # the spread is there,
    assert max(cel.stats["loss"], cel.stats["above_tau"]) < 0.01  # the loss does not see it,
    assert float(cel.stats["ess"]) < 1.05 / 12  # one sample has all the weight,
    assert z.grad.abs().max() < 1e-4  # and the encoder learns nothing


@both
def test_fit_keeps_equal_weights_so_that_it_is_the_plain_class_variance(variance):
    cel, z, y = frozen("fit", variance)
    assert float(cel.stats["ess"]) > 0.95
    assert float(cel.stats["loss"]) == pytest.approx(plain(cel, z, y), abs=0.05)
    of_z, _ = z.grad.clone(), cel.w.data.zero_()
    z.grad = None
    cel(z, y).backward()
    assert F.cosine_similarity(of_z.flatten(), z.grad.flatten(), dim=0) > 0.99


@both
def test_adversarial_ascends_within_its_bound(variance):
    cel, z, y = frozen("adversarial", variance)
    assert float(cel.stats["loss"]) > plain(cel, z, y) + 0.1
    ratio = math.exp(2)  # of the largest weight to the least: 1/(n Σα²) is then at least
    assert float(cel.stats["ess"]) > 4 * ratio / (1 + ratio) ** 2
    for c in range(4):
        alpha = weights(cel, z[y == c])
        assert max(alpha) / min(alpha) < ratio * (1 + 1e-6)


def test_adversarial_an_outlier_cannot_take_all_the_weight():
    cel, z, y = frozen("adversarial", outlier=3.0)
    for c in range(4):
        alpha = weights(cel, z[y == c])
        assert max(alpha) == alpha[0] > 2 / 12  # the ascent looks for it
        assert alpha[0] < math.exp(2) / (math.exp(2) + 11) * (1 + 1e-6)


# ----- memory


def lists(num_classes, m):
    return [deque(maxlen=m) for _ in range(num_classes)]


@every_mode
@both
def test_memory_equals_a_loop_over_batch_and_memory(mode, variance):
    cel, past = make(6, 7, mode=mode, variance=variance, memory=3), lists(7, 3)
    for step in range(6):
        z, y = batch(20 + step, B=10, C=7)
        y = y // (1 + step % 2)  # more than three of some classes, none of others
        expected = literal(cel, z, y, past)
        assert_same(grads(cel, z, y), expected)
        for zi, c in zip(z, y.tolist()):
            past[c].append(zi)


def test_the_ring_holds_the_last_m_samples_of_each_class():
    cel, past = make(6, 4, memory=3), lists(4, 3)
    for step in range(12):
        z, y = batch(40 + step, B=1 + 2 * step, C=4)
        z[::5] = math.nan  # rows that are left out are not remembered
        cel(z.requires_grad_(), y)
        for zi, c in zip(z.detach(), y.tolist()):
            if zi.isfinite().all():
                past[c].append(zi)
        for c in range(4):
            held = cel.memory[c, : int(cel.stored[c])]
            assert sorted(map(tuple, held.tolist())) == sorted(map(tuple, (s.tolist() for s in past[c])))
    assert cel.memory.shape == (4, 3, 6) and not cel.memory.requires_grad


@every_mode
def test_the_batches_of_an_epoch_average_to_the_gradient_of_the_whole_class(mode):
    """What (M + m)/M is for: batches of 3 that remember the 9 others give the gradient of all 12 samples."""
    x, _ = batch(9, B=12, C=1)
    y = torch.zeros(12, dtype=torch.int64)
    theta = torch.ones(6, dtype=torch.float64, requires_grad=True)  # an encoder z = theta x

    def gradients(memory, first, then):
        cel = make(num_classes=1, mode=mode, variance="trace", memory=memory)
        if memory:
            value(cel, x[first], y[first])
        return torch.autograd.grad(cel(theta * x[then], y[then]), (theta, *cel.parameters()))

    parts = torch.arange(12).view(4, 3).tolist()
    batches = [gradients(9, [i for i in range(12) if i not in part], part) for part in parts]
    for whole, *quarters in zip(gradients(0, [], range(12)), *batches):
        assert whole.abs().max() > 1e-3 and torch.allclose(sum(quarters) / 4, whole, atol=1e-10)


def many_classes(memory, steps=120, C=200, B=128, D=64, sd=0.15):
    g = torch.Generator().manual_seed(0)
    means = torch.rand(C, D, generator=g)
    cel = GatedAttCEL(C, D, 0.1, memory=memory)
    for _ in range(steps):
        y = torch.randint(0, C, (B,), generator=g)
        cel((means[y] + sd * torch.randn(B, D, generator=g)).requires_grad_(), y)
    assert memory == 0 or int(cel.stored.min()) > 0  # every class was seen
    return float(cel.stats["skipped"]), float(cel.stats["spread"]) / sd**2


def test_many_classes_need_the_memory():
    """200 classes in batches of 128."""
    skipped, spread = many_classes(memory=0)
    assert skipped > 0.4 and 0.4 < spread < 0.65
    skipped, spread = many_classes(memory=32)
    assert skipped == pytest.approx(0, abs=1e-6) and abs(spread - 1) < 0.15


def test_eval_reads_the_memory_and_does_not_write_it():
    cel = make(memory=3)
    cel(batch(10)[0].requires_grad_(), batch(10)[1])
    before = copy.deepcopy(cel.state_dict())
    lone = batch(11, B=1)[0]
    assert cel.eval()(lone, torch.tensor([2])) > 0  # one sample has a spread beside the remembered ones
    assert all(torch.equal(a, b) for a, b in zip(before.values(), cel.state_dict().values()))


@pytest.mark.parametrize("memory", [0, 3])
def test_a_resumed_run_is_bit_equal(memory):
    def steps(cel, optimizer, numbers):
        for i in numbers:
            z, y = batch(60 + i)
            optimizer.zero_grad()
            cel(z.requires_grad_(), y).backward()
            optimizer.step()

    def build(seed):
        cel = make(memory=memory, seed=seed)
        return cel, torch.optim.Adam(cel.parameters(), 0.01)

    whole = build(0)
    steps(*whole, range(5))
    saved = copy.deepcopy([part.state_dict() for part in whole])
    steps(*whole, range(5, 10))
    resumed = build(1)
    for part, state in zip(resumed, saved):
        part.load_state_dict(state)
    steps(*resumed, range(5, 10))
    assert set(whole[0].state_dict()) == {"W_V", "W_U", "w", "memory", "stored"}
    for a, b in zip(whole[0].state_dict().values(), resumed[0].state_dict().values()):
        assert torch.equal(a, b)


# ----- mixed precision


@every_mode
@pytest.mark.parametrize("memory", [0, 4])
@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("form", ["float16", "bfloat16", "autocast"])
def test_half_precision_costs_no_more_than_its_rounding(mode, memory, scale, form):
    def run(convert, autocast):
        torch.manual_seed(0)
        cel = GatedAttCEL(5, 32, 0.1, mode, memory=memory)
        for step in range(2):  # the second call sees the first one's samples
            z, y = batch(70 + step, B=64, D=32, scale=scale)
            z = convert(z.float()).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = cel(z, y)
            loss.backward()
        assert loss.dtype == cel.memory.dtype == torch.float32 and z.grad.dtype == z.dtype
        return float(loss.detach()), z.grad.float().flatten()

    expected = run(lambda z: z, False)
    ours = run(lambda z: z if form == "autocast" else z.to(getattr(torch, form)), form == "autocast")
    assert ours[0] == pytest.approx(expected[0], rel=0.01)
    assert F.cosine_similarity(ours[1], expected[1], dim=0) > 0.99


def test_half_on_the_module_leaves_float32():
    cel = GatedAttCEL(5, 6, 0.1, memory=2)
    for change in (cel.half, cel.bfloat16, lambda: nn.Sequential(cel).half(), lambda: cel.to(torch.float16)):
        change()
        assert all(t.dtype in (torch.float32, torch.int64) for t in cel.state_dict().values())
    assert cel.double().w.dtype == torch.float64


# ----- a loss that stays silent says so


@pytest.mark.parametrize(
    "y, kwargs, reason",
    [([0, 1, 2, 3], {}, "memory=32"), ([0, 0, 1, 1], {"tau": 1e6}, "below the threshold")],
)
def test_one_warning_after_100_silent_calls(y, kwargs, reason):
    cel, z = GatedAttCEL(4, 6, 0.1, **kwargs), batch(12, B=4)[0].requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in range(300):
            cel(z, torch.tensor(y))
            assert len(caught) == (call >= 99)
    sentence = str(caught[0].message)
    assert "GatedAttCEL was 0 in its first 100 calls" in sentence and reason in sentence


def test_no_warning_if_it_acted_once_or_was_only_measured():
    z = batch(12, B=4)[0].requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cel = GatedAttCEL(4, 6, 0.1)
        cel(z, torch.tensor([0, 0, 1, 1]))
        for _ in range(150):
            cel(z, torch.tensor([0, 1, 2, 3]))
        cel = GatedAttCEL(4, 6, 0.1).eval()
        for _ in range(150):
            cel(z, torch.tensor([0, 1, 2, 3]))


@pytest.mark.parametrize("variance, v", [("trace", 4.0), ("per_dim", 2.0)])
def test_stats_say_what_they_say(variance, v):
    """Three samples with spread v, two without spread, and one alone, which is left out."""
    z = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0], [1.0, 1.0], [1.0, 1.0], [9.0, 9.0]])
    cel = GatedAttCEL(3, 2, 0.1, variance=variance, tau=1.0, eps=1e-6).eval()
    cel.w.data.zero_()  # equal weights
    loss = 3 / 6 * math.log((v + 1e-6) / (1 + 1e-6))
    expected = {"loss": loss, "spread": 3 / 5 * 2, "above_tau": 3 / 5, "skipped": 1 / 6, "ess": 1}
    assert value(cel, z, torch.tensor([0, 0, 0, 1, 1, 2])) == pytest.approx(loss, rel=1e-5)
    assert {k: float(v) for k, v in cel.stats.items()} == pytest.approx(expected, rel=1e-5)
    assert all(v.dim() == 0 and not v.requires_grad for v in cel.stats.values())


# ----- other people's loops


@every_mode
@pytest.mark.parametrize("memory", [0, 3])
def test_compiles_to_one_graph(mode, memory):
    torch._dynamo.reset()
    eager = make(mode=mode, memory=memory)
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, fullgraph=True, backend="eager")
    for step in range(3):
        z, y = batch(80 + step)
        expected = grads(eager, z, y)
        other.zero_grad()
        z = z.clone().requires_grad_()
        loss = compiled(z, y)
        loss.backward()
        assert_same((loss.detach(), z.grad, [p.grad for p in other.parameters()]), expected, 1e-12)
    assert torch.equal(eager.memory, other.memory) and torch.equal(eager.stored, other.stored)


@every_mode
@pytest.mark.parametrize("memory", [0, 3])
def test_a_step_never_waits_for_the_device(mode, memory, monkeypatch):
    """Tensors on "meta" have no values: a step that asked for one (.item(), a mask's size) would fail."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())  # has no "meta"
    cel = GatedAttCEL(5, 6, 0.1, mode, memory=memory).to("meta")
    z = torch.rand(24, 6, device="meta", requires_grad=True)
    for _ in range(2):
        cel(z, torch.zeros(24, dtype=torch.int64, device="meta")).backward()
    assert z.grad.shape == z.shape and cel.stats["ess"].device.type == "meta"


def test_feature_maps_in_any_memory_layout_and_copies():
    z, y = batch(13, D=12)
    cel = make(12).eval()
    maps = z.view(24, 3, 2, 2)
    expected = value(cel, z, y)
    assert value(cel, maps, y) == value(cel, maps.to(memory_format=torch.channels_last), y) == expected
    assert copy.deepcopy(cel)(z, y, x=maps) == expected  # x is for the surrogates that look at it
    other = make(12, seed=5).eval()
    assert value(other, z, y) != expected
    other.load_state_dict(cel.state_dict())
    assert value(other, z, y) == expected


# ----- inputs that are not nice


@pytest.mark.parametrize(
    "z, y, sentence",
    [
        (torch.ones(4, 6, dtype=torch.int64), torch.zeros(4).long(), "rows? of 6 floats"),
        (torch.rand(4, 5), torch.zeros(4).long(), "rows? of 6 floats"),
        (torch.rand(6), torch.zeros(1).long(), "rows? of 6 floats"),
        (torch.rand(0, 6), torch.zeros(0).long(), "at least one row"),
        (torch.rand(4, 6), torch.zeros(4), "one class number, int64"),
        (torch.rand(4, 6), torch.zeros(4, dtype=torch.int32), "one class number, int64"),
        (torch.rand(4, 6), torch.rand(4, 5), "one class number, int64"),
        (torch.rand(4, 6), torch.zeros(4, 5).long(), "one class number, int64"),
        (torch.rand(4, 6), torch.zeros(3).long(), "one class number, int64"),
        (torch.rand(4, 6), torch.tensor([0, 1, -100, 1]), r"outside 0\.\.4"),
        (torch.rand(4, 6), torch.tensor([0, 1, 5, 1]), r"outside 0\.\.4"),
    ],
)
def test_refuses_in_one_sentence(z, y, sentence):
    cel = GatedAttCEL(5, 6, 0.1, memory=2)
    with pytest.raises(ValueError, match=sentence):
        cel(z.requires_grad_() if z.is_floating_point() else z, y)
    assert int(cel.stored.sum()) == 0


def test_z_without_gradient_is_a_mistake_in_training_only():
    cel, (z, y) = make(), batch(14)
    with pytest.raises(ValueError, match="z has no gradient"):
        cel(z, y)
    assert cel.eval()(z, y) == value(cel.train(), z, y) > 0


BAD = {"num_classes": 0, "dim": 0, "sigma": 0, "mode": "joint", "variance": "diag", "hidden": 0, "memory": -1}
BAD = [*BAD.items(), ("sigma", math.nan), ("floor", 0), ("tau", 0), ("eps", -1)]


@pytest.mark.parametrize("name, value", BAD)
def test_constructor_refuses(name, value):
    with pytest.raises(ValueError, match="use one of|must be >= 1"):
        GatedAttCEL(**{"num_classes": 3, "dim": 4, "sigma": 0.1, name: value})


@every_mode
@pytest.mark.parametrize("memory", [0, 3])
def test_rows_with_nan_or_inf_disturb_nobody(mode, memory):
    z, y = batch(15)
    bad = torch.tensor([2, 5, 17])
    good = [i for i in range(24) if i not in bad]
    dirty = z.clone()
    dirty[bad, :4] = torch.tensor([math.nan, math.inf, -math.inf]).double()[:, None]
    cel, clean = make(mode=mode, memory=memory), make(mode=mode, memory=memory)
    for _ in range(2):
        ours, expected = grads(cel, dirty, y), grads(clean, z[good], y[good])
        part = 21 / 24  # β_c = M_c / B, and B is the whole batch
        expected = part * expected[0], part * expected[1], [part * g for g in expected[2]]
        assert_same((ours[0], ours[1][good], ours[2]), expected, 1e-12)
        assert not ours[1][bad].any() and float(cel.stats["skipped"]) == pytest.approx(1 - part)
    assert torch.equal(cel.memory, clean.memory) and torch.equal(cel.stored, clean.stored)


@every_mode
@pytest.mark.parametrize("memory", [0, 3])
@pytest.mark.parametrize(
    "z, y",
    [
        (torch.ones(1, 6), [3]),
        (torch.ones(5, 6), [1] * 5),
        (torch.rand(4, 6), [0, 1, 2, 3]),
        (torch.full((3, 6), math.nan), [0, 0, 1]),
    ],
    ids=["one sample", "constant", "one a class", "all NaN"],
)
def test_degenerate_batches_give_zero_and_a_gradient_of_zero(mode, memory, z, y):
    cel, z = GatedAttCEL(5, 6, 0.1, mode, memory=memory), z.clone().requires_grad_()
    loss = cel(z, torch.tensor(y))
    loss.backward()
    assert loss == 0 and not z.grad.any()
    assert all(p.grad.isfinite().all() for p in cel.parameters())
    assert all(v.isfinite() for v in cel.stats.values())


@every_mode
@both
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e6, 1e12])
def test_finite_at_every_scale_in_float32(mode, variance, scale):
    z, y = batch(16, B=16, D=32, C=4, scale=scale)
    cel, z = GatedAttCEL(4, 32, 0.05, mode, variance, memory=2), z.float().requires_grad_()
    for _ in range(2):
        loss = cel(z, y)
        loss.backward()
        assert loss.isfinite() and loss >= 0 and z.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in cel.parameters())
        assert all(v.isfinite() for v in cel.stats.values())


@every_mode
def test_huge_logits_of_a_trained_attention_stay_finite(mode):
    cel, (z, y) = make(mode=mode), batch(17)
    cel.w.data.mul_(1e4)
    loss, of_z, of_parameters = grads(cel.float(), z.float(), y)
    assert all(t.isfinite().all() for t in (loss, of_z, *of_parameters))
