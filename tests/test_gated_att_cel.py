"""Oracles for gated_att_cel.py: the worked example of 000 §6.3, appendix B, a literal per-class loop, the collapse."""
import ast
import copy
import inspect
import math
import textwrap

import pytest
import torch
import torch.nn.functional as F

from gated_att_cel import ATTENTIONS, GatedAttCEL, GatedAttention, weighted_spread

Z = torch.tensor([[[0.0, 0.0], [0.2, 0.1], [-0.1, 0.05], [0.15, -0.05]],
                  [[1.0, 1.0], [1.2, 1.1], [0.8, 0.9], [1.1, 0.95]],
                  [[1.0, -1.0], [0.8, -0.9], [1.1, -1.2], [0.9, -1.05]]], dtype=torch.float64)     # 000 §6.1
LABELS = torch.arange(3).repeat_interleave(4)
TAU, EPS = 0.002, 1e-6


def example(**kwargs):
    cel = GatedAttCEL(2, TAU, hidden=2, eps=EPS, **{"layer_norm": False, "attention": "joint", **kwargs}).double()
    with torch.no_grad():
        cel.pool.W_V.copy_(torch.eye(2)), cel.pool.W_U.copy_(torch.eye(2)), cel.pool.w.fill_(1.0)
    return cel


def random_batch(seed, B=24, D=6, C=5, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, C, (B,), generator=g)
    return scale * torch.randn(B, D, generator=g, dtype=torch.float64), y


def make(D, tau, seed=0, **kwargs):
    torch.manual_seed(seed)
    cel = GatedAttCEL(D, tau, **{"hidden": 7, "attention": "joint", **kwargs}).double()
    with torch.no_grad():
        for p in cel.parameters():
            p.mul_(3)                                   # away from equal weights
    return cel


def class_alpha(cel, zc):
    """Eq. (3a)-(3f) for the samples of one class, one sample and one unit at a time."""
    pool, logits = cel.pool, []
    for z in zc:
        if pool.layer_norm:
            m = sum(z) / len(z)
            z = (z - m) / torch.sqrt(sum((z - m) ** 2) / len(z) + 1e-5)
        total = 0.0
        for j in range(len(pool.w)):
            total = total + pool.w[j] * torch.tanh((pool.W_V[j] * z).sum()) * torch.sigmoid((pool.W_U[j] * z).sum())
        logits.append(total)
    e = [torch.exp(a) for a in logits]
    return torch.stack(e) / sum(e)


def literal_loss(cel, z, y):
    """§4.3 and eq. (2) with Python loops."""
    total = torch.zeros((), dtype=z.dtype)
    for c in y.unique():
        zc = z[y == c]
        if len(zc) <= 1:
            continue
        alpha = class_alpha(cel, zc)
        x = zc
        if cel.measure_on == "layernorm":
            x = (zc - zc.mean(1, keepdim=True)) / torch.sqrt(zc.var(1, unbiased=False, keepdim=True) + 1e-5)
        mean = sum(a * xi for a, xi in zip(alpha, x))
        v = sum(a * (xi - mean) ** 2 for a, xi in zip(alpha, x))
        v = v if cel.per_dim else v.sum()[None]
        R = torch.clamp(torch.log(v + cel.eps) - math.log(cel.tau + cel.eps), min=0).mean()
        total = total + len(zc) / len(y) * R
    return total


# --- 1. the worked example of 000 §6.3 against the errata --------------------------------------------------------------

def test_worked_example_alpha_mean_variance_penalty():
    cel, z = example(), Z.flatten(0, 1)
    same = LABELS[:, None] == LABELS
    P, _ = cel.pool(z, same)
    alpha = P.diagonal().view(3, 4)
    printed_order = [1, 3, 0, 2]                        # (0.2,0.1), (0.15,−0.05), (0,0), (−0.1,0.05)
    assert torch.allclose(alpha[0, printed_order], torch.tensor([.2790, .2511, .2375, .2324]).double(), atol=5e-5)
    assert torch.allclose((P @ z)[0], torch.tensor([0.0702, 0.0270]).double(), atol=5e-5)     # printed (0.088, 0.016)
    _, v = weighted_spread(P, z, per_dim=False)
    v = v[::4, 0]
    assert torch.allclose(v, torch.tensor([0.01747, 0.0265, 0.0243]).double(), atol=5e-5)     # printed 0.0058, 0.0061, 0.0072
    R = torch.log(v + EPS) - math.log(TAU + EPS)
    assert torch.allclose(R, torch.tensor([2.1671, 2.5834, 2.4981]).double(), atol=5e-5)      # printed R(1) = 0.405
    assert abs(cel(z, LABELS).item() - 2.4162) < 5e-5
    assert abs(math.log((0.0058 + EPS) / (TAU + EPS)) - 1.065) < 1e-3                         # not even its own v gives 0.405


def test_worked_example_printed_intermediates_of_the_first_sample():
    z = torch.tensor([0.2, 0.1], dtype=torch.float64)
    v, u = torch.tanh(z), torch.sigmoid(z)
    assert torch.allclose(v, torch.tensor([.197, .0995]).double(), atol=5e-4)
    assert torch.allclose(u, torch.tensor([.55, .525]).double(), atol=5e-4)
    assert abs(float((v * u).sum()) - 0.160) < 1e-3


def test_worked_example_is_silent_at_the_threshold_of_section_6_1():
    cel, z = example(), Z.flatten(0, 1).requires_grad_()
    cel.tau = 0.05
    loss = cel(z, LABELS)
    loss.backward()
    assert loss.item() == 0 and float(cel.stats["active"]) == 0 and not z.grad.any()


def test_layer_norm_in_two_dimensions_keeps_only_a_sign():
    z = F.layer_norm(100 * Z.flatten(0, 1), (2,))       # ×100: LayerNorm's own 1e-5 becomes negligible
    unequal = (Z.flatten(0, 1)[:, 0] != Z.flatten(0, 1)[:, 1])
    assert torch.allclose(z[unequal].abs(), torch.ones(2).double(), atol=1e-5)
    assert torch.allclose(z[unequal].sum(1), torch.zeros(1).double(), atol=1e-9)
    assert not z[~unequal].any()
    with_norm, without = (class_alpha(example(layer_norm=on), Z[0]) for on in (True, False))
    assert (with_norm - without).abs().max() > 0.02     # "LayerNorm ≈ identity" (§6.3) is false


# --- 2. analytic gradients ----------------------------------------------------------------------------------------------

def test_softmax_jacobian_and_dv_dalpha_of_appendix_b():
    torch.manual_seed(0)
    logits, z = torch.randn(6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    alpha = logits.softmax(0)
    J = torch.autograd.functional.jacobian(lambda a: a.softmax(0), logits)
    assert torch.allclose(J, torch.diag(alpha) - alpha[:, None] * alpha, atol=1e-12)

    spread = lambda a: (a * (z - a @ z).square().sum(1)).sum()
    dist = (z - alpha @ z).square().sum(1)
    second_term = -2 * (alpha @ (z - alpha @ z)) @ (z - alpha @ z).T            # appendix B, printed
    assert second_term.abs().max() < 1e-14
    dv = torch.autograd.functional.jacobian(spread, alpha)
    assert torch.allclose(dv, dist, atol=1e-10) and torch.allclose(dv, dist + second_term, atol=1e-10)

    dlogit = torch.autograd.functional.jacobian(lambda a: spread(a.softmax(0)), logits)
    assert torch.allclose(dlogit, J.T @ dv, atol=1e-10)
    assert torch.allclose(dlogit, alpha * (dist - spread(alpha)), atol=1e-10)
    stepped = (logits - 0.1 * dlogit).softmax(0)        # §6.3 and appendix B claim the opposite
    assert dlogit[dist.argmax()] > 0 and stepped[dist.argmax()] < alpha[dist.argmax()]


@pytest.mark.parametrize("tau", [1e-3, 1e3])
def test_dR_dv_is_the_hinge(tau):
    z, y = random_batch(1, B=8, C=1)
    cel = make(6, tau, attention="detached")
    z.requires_grad_()
    cel(z, y).backward()
    alpha = cel.pool(z.detach(), torch.ones(8, 8, dtype=torch.bool))[0][0]
    diff = z.detach() - alpha @ z.detach()
    v = (alpha * diff.square().sum(1)).sum()
    slope = 1 / (v + cel.eps) if v > tau else 0.0
    assert torch.allclose(z.grad, slope * 2 * alpha[:, None] * diff, atol=1e-10)


def test_gradient_of_W_V_assembled_by_hand():
    z, y = random_batch(2)
    cel = make(6, 0.5)
    cel(z, y).backward()
    pool, expected = cel.pool, torch.zeros_like(cel.pool.W_V)
    with torch.no_grad():
        for c in y.unique():
            zc = z[y == c]
            zt = F.layer_norm(zc, zc.shape[1:])
            v, u = torch.tanh(zt @ pool.W_V.T), torch.sigmoid(zt @ pool.W_U.T)
            alpha = ((v * u) @ pool.w).softmax(0)
            dist = (zc - alpha @ zc).square().sum(1)
            spread = (alpha * dist).sum()
            if len(zc) <= 1 or spread <= cel.tau:
                continue
            outer = alpha * (dist - spread)                                     # ∂v_c/∂α'
            expected += len(zc) / len(z) / (spread + cel.eps) * ((outer[:, None] * pool.w * u * (1 - v ** 2)).T @ zt)
    assert expected.abs().max() > 1e-3 and torch.allclose(pool.W_V.grad, expected, atol=1e-10)


@pytest.mark.parametrize("variance", ["trace", "per_dim"])
@pytest.mark.parametrize("measure_on", ["sent", "layernorm"])
def test_gradcheck(variance, measure_on):
    z, y = random_batch(3, B=9, D=5, C=3)
    cel = make(5, 0.05, hidden=3, variance=variance, measure_on=measure_on)
    params = [p.detach().clone().requires_grad_() for p in cel.parameters()]
    names = [n for n, _ in cel.named_parameters()]
    f = lambda z, *p: torch.func.functional_call(cel, dict(zip(names, p)), (z, y))
    assert torch.autograd.gradcheck(f, (z.requires_grad_(), *params))


# --- 3. vectorised = literal --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("variance", ["trace", "per_dim"])
@pytest.mark.parametrize("measure_on", ["sent", "layernorm"])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_equals_a_loop_over_classes(variance, measure_on, layer_norm):
    z, _ = random_batch(4, B=14)
    y = torch.tensor([7, 0, 3, 3, 0, 9, 0, 9, 0, 9, 0, 7, 0, 12])      # classes of 0, 1, 2, 3 and 6 samples
    cel = make(6, 0.3, variance=variance, measure_on=measure_on, layer_norm=layer_norm)
    a, b = z.clone().requires_grad_(), z.clone().requires_grad_()
    loss, literal = cel(a, y), literal_loss(cel, b, y)
    literal.backward()
    expected = [p.grad.clone() for p in cel.parameters()]
    cel.zero_grad()
    loss.backward()
    assert abs((loss - literal).item()) < 1e-10 and torch.allclose(a.grad, b.grad, atol=1e-10)
    assert all(torch.allclose(p.grad, e, atol=1e-10) for p, e in zip(cel.parameters(), expected))
    assert int(cel.stats["skipped_classes"]) == int(cel.stats["skipped"]) == 1
    assert not a.grad[13].any()                         # the lone sample of class 12


def test_report_001_by_name_with_its_threshold():
    z, y = random_batch(5)
    reg, var_thr, g0 = 0.3, 0.125, 0.01
    cel = make(6, var_thr * reg ** 2, variance="per_dim", measure_on="layernorm", eps=g0)
    x, total = F.layer_norm(z, (6,)), 0.0
    threshold = max(var_thr * reg ** 2, 1e-8) + g0
    for c in y.unique():
        xc = x[y == c]
        a = class_alpha(cel, z[y == c])[:, None]
        var = (a * (xc - (a * xc).sum(0)) ** 2).sum(0)
        total = total + len(xc) / len(x) * torch.relu(torch.log(var + g0) - math.log(threshold)).mean()
    assert abs((cel(z, y) - total).item()) < 1e-10


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_permuting_the_batch_changes_nothing(attention):
    z, y = random_batch(6)
    cel, order = make(6, 0.1, attention=attention), torch.randperm(len(y))
    a, b = z.clone().requires_grad_(), z[order].clone().requires_grad_()
    la, lb = cel(a, y), cel(b, y[order])
    la.backward(), lb.backward()
    assert abs((la - lb).item()) < 1e-12 and torch.allclose(a.grad[order], b.grad, atol=1e-12)


def test_weights_sum_to_one_over_the_samples_of_the_class():
    z, y = random_batch(7)
    same = y[:, None] == y
    P, u = GatedAttention(6).double()(z, same)
    assert torch.allclose(P.sum(1), torch.ones(24).double()) and not P[~same].any() and 0 < u.min() and u.max() < 1


# --- 4. where the gradient goes, and the collapse -----------------------------------------------------------------------

def grads(attention, z, y, **kwargs):
    cel = make(6, 0.1, attention=attention, **kwargs)
    z = z.clone().requires_grad_()
    loss = cel(z, y)
    loss.backward()
    return loss.item(), z.grad, [None if p.grad is None else p.grad for p in cel.parameters()]


def test_attention_modes_share_the_value_and_differ_in_the_gradient():
    z, y = random_batch(8)
    joint, detached, adversarial, fit = (grads(a, z, y, sigma=0.5) for a in ATTENTIONS)
    assert joint[0] == pytest.approx(detached[0], abs=1e-12) == pytest.approx(adversarial[0], abs=1e-12)
    assert joint[0] == pytest.approx(fit[0], abs=1e-12)
    assert torch.equal(adversarial[1], joint[1])
    assert all(torch.allclose(a, -j) and j.abs().max() > 0 for a, j in zip(adversarial[2], joint[2]))
    assert torch.equal(fit[1], detached[1]) and not torch.allclose(joint[1], detached[1])
    assert all(g is None or not g.any() for g in detached[2])
    assert all(g.abs().max() > 0 for g in fit[2])


@pytest.mark.parametrize("variance", ["trace", "per_dim"])
def test_fit_gradient_is_that_of_the_noisy_likelihood(variance):
    z, y = random_batch(9, B=10, D=4, C=2)
    sigma = 0.5
    cel = make(4, 0.1, attention="fit", variance=variance, sigma=sigma)
    cel(z, y).backward()
    got = [p.grad.clone() for p in cel.parameters()]
    cel.zero_grad()
    total = 0.0
    for c in y.unique():                                # Monte Carlo free: E_n (z + n − z̄)² = (z − z̄)² + σ²
        zc = z[y == c]
        alpha = class_alpha(cel, zc)
        mean = alpha @ zc
        v = (alpha[:, None] * (zc - mean) ** 2).sum(0)
        v = v if cel.per_dim else v.sum().expand(4) / 4
        q = torch.distributions.Normal(mean, (v + sigma ** 2).sqrt())
        total = total - (q.log_prob(zc) - 0.5 * sigma ** 2 / (v + sigma ** 2)).sum() / 4 / len(z)
    total.backward()
    assert all(torch.allclose(g, p.grad, atol=1e-10) for g, p in zip(got, cel.parameters()))


def frozen_run(attention, steps=300):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(4).repeat_interleave(12)
    z = torch.sigmoid(torch.randn(4, 16, generator=g)[y] + 0.7 * torch.randn(48, 16, generator=g))
    torch.manual_seed(1)
    cel = GatedAttCEL(16, 16 * 0.125 * 0.05 ** 2, attention=attention, sigma=0.05)
    z.requires_grad_()                                  # a leaf that no optimiser moves
    optimizer = torch.optim.Adam(cel.parameters(), lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        cel(z, y).backward()
        optimizer.step()
    cel(z, y)
    v = torch.stack([z.detach()[y == c].var(0, unbiased=False).sum() for c in range(4)])
    true = float((torch.log(v + cel.eps) - math.log(cel.tau + cel.eps)).mean())      # equal weights
    return {k: float(s) for k, s in cel.stats.items()}, true


def test_joint_collapses_on_frozen_features():
    stats, true = frozen_run("joint")
    assert true > 3 and stats["loss"] < 0.01 and stats["ess"] < 1.05 and stats["active"] == 0


@pytest.mark.parametrize("attention, low, high", [("detached", -0.2, 0.2), ("adversarial", 0.0, 0.7), ("fit", -0.05, 0.02)])
def test_the_other_modes_stay_at_the_true_spread(attention, low, high):
    """Band in nats around the loss of the unweighted spread. Adversarial may exceed it: a worst-case weighting at most doubles
    a one-dimensional variance for points of equal distance, about log 2."""
    stats, true = frozen_run(attention)
    assert low <= stats["loss"] - true <= high and stats["ess"] > 2 and stats["active"] == 1


# --- robustness ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("variance", ["trace", "per_dim"])
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e6, 1e12])
def test_finite_at_every_scale_in_float32(attention, variance, scale):
    z, y = random_batch(10, B=16, D=32, C=4, scale=scale)
    cel = GatedAttCEL(32, 1e-3, attention=attention, variance=variance, sigma=0.05)
    z = z.float().requires_grad_()
    loss = cel(z, y)
    loss.backward()
    assert loss.isfinite() and loss >= 0 and z.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in cel.parameters())
    assert all(torch.isfinite(s) and not s.requires_grad and s.dim() == 0 for s in cel.stats.values())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_nonfinite_rows_are_left_out(attention):
    z, y = random_batch(11)
    bad = torch.tensor([2, 5, 17])
    cel = make(6, 0.1, attention=attention)
    dirty = z.clone()
    dirty[bad] = torch.tensor([math.nan, math.inf, -math.inf]).double()[:, None]
    dirty.requires_grad_()
    loss = cel(dirty, y)
    loss.backward()
    good = torch.ones(24, dtype=torch.bool)
    good[bad] = False
    assert loss.item() == pytest.approx(cel(z[good], y[good]).item() * 21 / 24, abs=1e-12)   # B is the whole batch
    cel(dirty, y)
    assert int(cel.stats["nonfinite"]) == 3 and not dirty.grad[bad].any() and dirty.grad.isfinite().all()


@pytest.mark.parametrize("z, y", [(torch.ones(1, 6), [3]), (torch.ones(5, 6), [1] * 5), (torch.rand(4, 6), [0, 1, 2, 3]),
                                  (torch.full((3, 6), math.nan), [0, 0, 1])])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_degenerate_batches_give_zero_with_a_live_graph(z, y, attention):
    z = z.clone().requires_grad_()
    cel = GatedAttCEL(6, 0.1, attention=attention)
    loss = cel(z, torch.tensor(y))
    loss.backward()
    assert loss.item() == 0 and not z.grad.any() and float(cel.stats["active"]) == 0


def test_feature_maps_strides_state_dict_and_repeatability():
    z, y = random_batch(12, D=12)
    cel = make(12, 0.1, attention="fit")
    maps = z.view(24, 3, 2, 2)
    assert cel(maps, y).item() == cel(z, y).item()
    assert cel(maps.to(memory_format=torch.channels_last), y).item() == cel(z, y).item()
    other = make(12, 0.1, seed=5, attention="fit")
    assert other(z, y).item() != cel(z, y).item()
    other.load_state_dict(copy.deepcopy(cel.state_dict()))
    assert other(z, y).item() == cel(z, y).item()
    assert copy.deepcopy(cel)(z, y).item() == cel(z, y).item()


@pytest.mark.parametrize("kwargs", [{"tau": 0}, {"tau": -1}, {"variance": "diag"}, {"attention": "none"}, {"measure_on": "y"},
                                    {"sigma": 0}, {"hidden": 0}, {"dim": 0}, {"eps": 0}])
def test_constructor_refuses(kwargs):
    with pytest.raises(ValueError):
        GatedAttCEL(**{"dim": 4, "tau": 0.1, **kwargs})


def test_forward_refuses_another_feature_size():
    with pytest.raises(ValueError, match="expected z"):
        GatedAttCEL(4, 0.1)(torch.rand(3, 5), torch.zeros(3, dtype=torch.int64))


def test_stats_say_what_they_say():
    y = torch.tensor([0, 0, 0, 1, 1, 2])
    z = torch.tensor([[0., 0.], [3., 0.], [0., 3.], [1., 1.], [1., 1.], [9., 9.]])
    cel = GatedAttCEL(2, 1.0, attention="detached")
    with torch.no_grad():
        cel.pool.w.zero_()                              # equal weights
    loss = cel(z, y)
    s = {k: float(v) for k, v in cel.stats.items()}
    assert s["variance"] == pytest.approx((4 + 0) / 2) and s["variance_max"] == pytest.approx(4) and s["above_tau"] == 0.5
    assert s["ess"] == pytest.approx(2.5) and s["ess_share"] == pytest.approx(1) and s["skipped_classes"] == 1
    assert loss.item() == pytest.approx(0.5 * math.log((4 + 1e-6) / (1 + 1e-6)), rel=1e-5)


def test_forward_has_no_loop_over_classes_or_samples():
    for part in (GatedAttCEL.forward, GatedAttCEL._nll, GatedAttCEL._record, weighted_spread):
        nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(part))))
        assert not any(isinstance(n, (ast.For, ast.While, ast.comprehension)) for n in nodes), part


def test_variance_and_sample_size_of_every_class_are_kept():
    torch.manual_seed(0)
    y = torch.tensor([3, 0, 3, 0, 3, 7])
    z = torch.rand(6, 5, dtype=torch.float64)
    cel = GatedAttCEL(5, 1e-3).double()
    with torch.no_grad():
        cel.pool.w.zero_()  # equal weights: plain variances
    cel(z, y)
    for c in (0, 3):
        spread = z[y == c].var(0, unbiased=False).sum()
        assert torch.allclose(cel.of_sample["variance"][y == c], spread) and torch.allclose(cel.of_sample["ess"][y == c], (y == c).sum().double())
