"""Oracles for slot_cross_cel.py: plain loops for every item 1-7, gradients, the collapse, the shutoff that cannot hide."""
import ast
import copy
import inspect
import math
import textwrap

import pytest
import torch
import torch.nn.functional as F

from slot_cross_cel import (ATTENTIONS, MEASURES, SHUTOFF_DELAY, SHUTOFF_EMPTY, SHUTOFF_NONE, SHUTOFF_SNR, DimGate,
                            GatedCrossAttention, SlotAttention, SlotCrossCEL, gather_classes, responsibilities, slot_moments)

D, DS, S = 10, 8, 3
UNEVEN = torch.tensor([7, 0, 3, 3, 0, 9, 0, 9, 0, 9, 0, 7, 0, 12])        # classes of 0, 1, 2, 3 and 6 samples


def features(seed, B=14, dim=D, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return scale * torch.sigmoid(torch.randn(B, dim, generator=g, dtype=torch.float64))


def make(seed=0, shake=0.3, **kwargs):
    """float64, eval mode (stored noise), parameters moved off their symmetric start."""
    torch.manual_seed(seed)
    cel = SlotCrossCEL(**{"dim": D, "tau": 0.01, "slots": S, "slot_dim": DS, "heads": 2, "gate_hidden": 5, "attention": "joint",
                          "sigma": 0.3, **kwargs}).double().eval()
    with torch.no_grad():
        for p in cel.parameters():
            p.add_(shake * torch.randn_like(p))
    return cel


# --- plain loops ---------------------------------------------------------------------------------------------------------

def norm(x, layer=None):
    x = (x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
    return x if layer is None else x * layer.weight + layer.bias


def slot_attention_loop(sa, tokens, noise):
    """Item 1 for one class: tokens [M, d], noise [S, d_s]."""
    d_s = noise.shape[1]
    k = [sa.W_k.weight @ norm(x, sa.norm_tokens) for x in tokens]
    v = [sa.W_v.weight @ norm(x, sa.norm_tokens) for x in tokens]
    slots = [sa.mu + torch.exp(sa.log_sigma) * n for n in noise]
    for _ in range(sa.iters):
        q = [sa.W_q.weight @ norm(s, sa.norm_slots) for s in slots]
        a = []
        for km in k:
            e = [torch.exp((km * qs).sum() * d_s ** -0.5 * d_s ** -0.25) for qs in q]
            a.append([ei / sum(e) + 1e-8 for ei in e])                      # softmax over slots, + ε_a
        new = []
        for s in range(len(slots)):
            column = [row[s] for row in a]
            u = sum(c / sum(column) * vm for c, vm in zip(column, v))       # renormalised over samples
            gi, gh = sa.gru.weight_ih @ u + sa.gru.bias_ih, sa.gru.weight_hh @ slots[s] + sa.gru.bias_hh
            reset = torch.sigmoid(gi[:d_s] + gh[:d_s])
            update = torch.sigmoid(gi[d_s:2 * d_s] + gh[d_s:2 * d_s])
            candidate = torch.tanh(gi[2 * d_s:] + reset * gh[2 * d_s:])
            h = (1 - update) * candidate + update * slots[s]
            first, _, second = sa.mlp
            inner = torch.clamp(first.weight @ norm(h, sa.norm_mlp) + first.bias, min=0)
            new.append(h + second.weight @ inner + second.bias)
        slots = new
    return torch.stack(slots)


def cross_attention_loop(ca, tokens, slots):
    """Item 2 for one class, head by head."""
    out = []
    for t in tokens:
        q, heads = ca.W_q.weight @ norm(t, ca.norm_q), []
        width = len(q) // ca.heads
        for h in range(ca.heads):
            part = slice(h * width, (h + 1) * width)
            e = [torch.exp((q[part] * (ca.W_k.weight @ s)[part]).sum() / math.sqrt(width)) for s in slots]
            heads.append(sum(ei / sum(e) * (ca.W_v.weight @ s)[part] for ei, s in zip(e, slots)))
        y = t + torch.tanh(ca.alpha_attn) * (ca.W_o.weight @ torch.cat(heads))
        out.append(y + torch.tanh(ca.alpha_ffn) * ca.ffn(norm(y, ca.norm_ffn)))
    return torch.stack(out)


def literal_loss(cel, z, y):
    """Items 1-7, class by class and slot by slot."""
    total, B = torch.zeros((), dtype=z.dtype), len(y)
    beta, rho = cel.log_beta.exp(), cel.log_rho.exp() if cel.slot_mass else 1.0
    for c in y.unique():
        zc = z[y == c]
        M = len(zc)
        if M <= 1:
            continue
        t = torch.stack([cel.E @ norm(zi) for zi in zc])
        slots = slot_attention_loop(cel.slot_attention, t, cel.eval_noise)
        out = t if cel.cross_attention is None else cross_attention_loop(cel.cross_attention, t, slots)
        compared, x = (out, zc) if cel.measure_on == "sent" else (t, out)
        r = []
        for p in compared:
            e = [torch.exp(beta * (p @ s) / torch.sqrt((p @ p + 1e-6) * (s @ s + 1e-6))) for s in slots]
            r.append([ei / sum(e) for ei in e])
        mass = [sum(row[s] for row in r) for s in range(len(slots))]
        w = [(m / M) ** rho for m in mass]
        inner = 0.0
        for s in range(len(slots)):
            mean = sum(r[m][s] * x[m] for m in range(M)) / mass[s]
            var = sum(r[m][s] * (x[m] - mean) ** 2 for m in range(M)) / mass[s]
            var = torch.clamp(var, max=cel.max_variance)
            log_var = torch.log(var + cel.eps)
            gate = 1.0
            if cel.dim_gate is not None:
                hidden = torch.clamp(cel.dim_gate.fc1.weight @ norm(log_var) + cel.dim_gate.fc1.bias, min=0)
                gate = gate * torch.sigmoid(cel.dim_gate.fc2.weight @ hidden + cel.dim_gate.fc2.bias)
            if cel.snr_gate:
                gate = gate * torch.sigmoid(cel.kappa * (var / (mean ** 2 + cel.eps) - cel.snr_threshold))
            power = torch.exp(cel.softplus_beta * (log_var - math.log(cel.tau + cel.eps) - cel.margin))
            inner = inner + w[s] / sum(w) * (gate * torch.log(1 + power) / cel.softplus_beta).mean()
        g_class = 1 / (1 + math.exp(-cel.class_a * (M / B - cel.class_b))) if cel.class_gate else 1.0
        total = total + M / B * g_class * inner
    return total


# --- 2, 3. gradients and equality with the loops --------------------------------------------------------------------------

def test_slot_attention_equals_plain_loops_and_ignores_padding():
    torch.manual_seed(0)
    sa = SlotAttention(6, DS).double()
    tokens, noise = torch.randn(2, 5, 6).double(), torch.randn(2, S, DS).double()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    slots, a = sa(tokens, mask, noise)
    for g, m in enumerate((5, 3)):
        assert torch.allclose(slots[g], slot_attention_loop(sa, tokens[g, :m], noise[g]), atol=1e-10)
    assert torch.allclose(a.sum(2), torch.ones(2, S).double(), atol=1e-12) and not a[1, :, 3:].any()


def test_cross_attention_equals_plain_loops_and_is_the_identity_when_closed():
    torch.manual_seed(0)
    ca = GatedCrossAttention(6, DS, heads=4).double()
    tokens, slots = torch.randn(1, 5, 6).double(), torch.randn(1, S, DS).double()
    assert float(ca.alpha_attn.detach()) == pytest.approx(0.1) == float(ca.alpha_ffn.detach())
    y = ca(tokens, slots)
    assert torch.allclose(y[0], cross_attention_loop(ca, tokens[0], slots[0]), atol=1e-10) and not torch.allclose(y, tokens)
    with torch.no_grad():
        ca.alpha_attn.zero_(), ca.alpha_ffn.zero_()
    assert torch.equal(ca(tokens, slots), tokens)


OFF = [{}, {"cross_attention": False}, {"per_dim_gate": False}, {"snr_gate": False}, {"snr_gate": True}, {"slot_mass": False},
       {"class_gate": False}, {"max_variance": 0.02}, {"learnable_scalars": True, "rho": 1.3, "beta": 4.0}]


@pytest.mark.parametrize("measure_on", MEASURES)
@pytest.mark.parametrize("kwargs", OFF, ids=lambda k: "-".join(k) or "default")
def test_equals_a_loop_over_classes(measure_on, kwargs):
    cel, z = make(measure_on=measure_on, **kwargs), features(1)
    a, b = z.clone().requires_grad_(), z.clone().requires_grad_()
    literal = literal_loss(cel, b, UNEVEN)
    literal.backward()
    expected = {n: p.grad.clone() for n, p in cel.named_parameters()}
    cel.zero_grad()
    loss = cel(a, UNEVEN)
    loss.backward()
    assert float(loss.detach()) > 0.01 and abs((loss - literal).item()) < 1e-10
    assert torch.allclose(a.grad, b.grad, atol=1e-10) and a.grad.abs().max() > 1e-4
    for name, p in cel.named_parameters():
        assert torch.allclose(p.grad, expected[name], atol=1e-10), name
    assert int(cel.stats["skipped_classes"]) == int(cel.stats["skipped"]) == 1 and not a.grad[13].any()


@pytest.mark.parametrize("measure_on", MEASURES)
@pytest.mark.parametrize("part", ["cross_attention", "per_dim_gate", "snr_gate", "slot_mass", "class_gate"])
def test_every_part_has_an_effect_and_can_be_switched_off(measure_on, part):
    z, y = features(2), UNEVEN
    on, off = make(measure_on=measure_on, snr_gate=True), make(measure_on=measure_on, **{"snr_gate": True, part: False})
    off.load_state_dict(on.state_dict(), strict=False)
    assert abs((on(z, y) - off(z, y)).item()) > 1e-6


@pytest.mark.parametrize("measure_on", MEASURES)
def test_closed_cross_attention_equals_none(measure_on):
    closed, none = make(measure_on=measure_on), make(measure_on=measure_on, cross_attention=False)
    none.load_state_dict(closed.state_dict(), strict=False)
    with torch.no_grad():
        closed.cross_attention.alpha_attn.zero_(), closed.cross_attention.alpha_ffn.zero_()
    z = features(3)
    assert abs((closed(z, UNEVEN) - none(z, UNEVEN)).item()) < 1e-12


@pytest.mark.parametrize("measure_on", MEASURES)
def test_gradcheck(measure_on):
    cel = make(dim=5, slots=2, slot_dim=4, gate_hidden=3, iters=2, measure_on=measure_on, learnable_scalars=True, snr_gate=True)
    names, params = zip(*((n, p.detach().clone().requires_grad_()) for n, p in cel.named_parameters()))
    y = torch.tensor([0, 1, 0, 1, 1])
    f = lambda z, *p: torch.func.functional_call(cel, dict(zip(names, p)), (z, y))
    assert torch.autograd.gradcheck(f, (features(4, 5, 5).requires_grad_(), *params), fast_mode=True)


def test_gradient_at_z_of_the_docstring():
    cel, z, y = make(attention="detached", snr_gate=True), features(5).requires_grad_(), UNEVEN
    cel(z, y).backward()
    expected = torch.zeros_like(z)
    with torch.no_grad():
        for c in y.unique():
            rows = (y == c).nonzero()[:, 0]
            zc, M = z[rows], len(rows)
            if M <= 1:
                continue
            t = torch.stack([cel.E @ norm(zi) for zi in zc])
            slots = slot_attention_loop(cel.slot_attention, t, cel.eval_noise)
            r = responsibilities(cross_attention_loop(cel.cross_attention, t, slots)[None], slots[None], cel.log_beta.exp())[0]
            w = (r.sum(0) / M) ** cel.log_rho.exp()
            g_class = torch.sigmoid(torch.tensor(cel.class_a * (M / len(y) - cel.class_b)).double())
            for s in range(S):
                share = r[:, s] / r[:, s].sum()
                mean = share @ zc
                var = share @ (zc - mean) ** 2
                log_var = torch.log(var + cel.eps)
                gate = cel.dim_gate(log_var) * torch.sigmoid(cel.kappa * (var / (mean ** 2 + cel.eps) - cel.snr_threshold))
                slope = torch.sigmoid(cel.softplus_beta * (log_var - math.log(cel.tau + cel.eps) - cel.margin)) / (var + cel.eps)
                expected[rows] += M / len(y) * g_class / D * w[s] / w.sum() * gate * slope * 2 * share[:, None] * (zc - mean)
    assert torch.allclose(z.grad, expected, atol=1e-10) and expected.abs().max() > 1e-3


def test_permuting_slots_permutes_responsibilities_and_not_the_loss():
    cel, order = make(), torch.tensor([2, 0, 1])
    z = features(6)
    t = (F.layer_norm(z, (D,)) @ cel.E.T)[None]
    mask = torch.ones(1, 14, dtype=torch.bool)
    slots, a = cel.slot_attention(t, mask, cel.eval_noise[None])
    moved, a_moved = cel.slot_attention(t, mask, cel.eval_noise[order][None])
    r, r_moved = responsibilities(t, slots, 12.0), responsibilities(t, moved, 12.0)
    assert torch.allclose(r[..., order], r_moved, atol=1e-12) and torch.allclose(a[:, order], a_moved, atol=1e-12)
    assert torch.allclose(r.sum(-1), torch.ones(1, 14).double(), atol=1e-12) and not torch.allclose(r, r_moved)
    before = cel(z, UNEVEN).item()
    cel.eval_noise.copy_(cel.eval_noise[order].clone())
    assert cel(z, UNEVEN).item() == pytest.approx(before, abs=1e-12)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_permuting_the_batch_changes_nothing(attention, training):
    cel, z, order = make(attention=attention, delay_calls=0).train(training), features(7), torch.randperm(14)
    a, b = z.clone().requires_grad_(), z[order].clone().requires_grad_()
    torch.manual_seed(3)                                # the noise belongs to (class, slot), not to samples
    la = cel(a, UNEVEN)
    torch.manual_seed(3)
    lb = cel(b, UNEVEN[order])
    la.backward(), lb.backward()
    assert abs((la - lb).item()) < 1e-12 and torch.allclose(a.grad[order], b.grad, atol=1e-12)


def test_moments_and_gathering_against_brute_force():
    z, finite = features(8), torch.ones(14, dtype=torch.bool)
    finite[2] = False                                   # class 3 keeps one sample
    index, mask, count, skipped = gather_classes(UNEVEN, finite)
    rows = [sorted(i[m].tolist()) for i, m in zip(index, mask)]
    assert rows == [[1, 4, 6, 8, 10, 12], [0, 11], [5, 7, 9]] and count.tolist() == [6, 2, 3] and int(skipped) == 2
    r = torch.rand(1, 14, S).double()
    share = r / r.sum(1, keepdim=True)
    x = z[None] - z.mean(0)
    mean, var = slot_moments(share, x)
    for s in range(S):
        m = share[0, :, s] @ x[0]
        assert torch.allclose(mean[0, s], m, atol=1e-12)
        assert torch.allclose(var[0, s], share[0, :, s] @ (x[0] - m) ** 2, atol=1e-12)


# --- 4. where the gradient goes, and the collapse --------------------------------------------------------------------------

@pytest.mark.parametrize("measure_on", MEASURES)
def test_attention_modes_share_the_value_and_differ_in_the_gradient(measure_on):
    z, out = features(9), {}
    for attention in ATTENTIONS:
        cel, a = make(attention=attention, measure_on=measure_on, learnable_scalars=True), z.clone().requires_grad_()
        loss = cel(a, UNEVEN)
        loss.backward()
        out[attention] = loss.item(), a.grad, {n: p.grad for n, p in cel.named_parameters()}
    assert all(out[a][0] == pytest.approx(out["joint"][0], abs=1e-12) for a in ATTENTIONS)
    assert torch.equal(out["fit"][1], out["detached"][1]) and not torch.allclose(out["joint"][1], out["detached"][1])
    assert all(g is None or not g.any() for g in out["detached"][2].values())
    for name, g in out["joint"][2].items():
        assert g.abs().max() > 0, name
        adversarial, fit = out["adversarial"][2][name], out["fit"][2][name]
        if measure_on == "layernorm" and name.startswith("cross_attention"):
            assert adversarial is None or not adversarial.any()
        elif measure_on == "sent":
            assert torch.allclose(adversarial, -g, atol=1e-14), name
        assert (fit is None or not fit.any()) if name.startswith("dim_gate") else fit.abs().max() > 0, name
    if measure_on == "sent":
        assert torch.equal(out["adversarial"][1], out["joint"][1])


def test_fit_gradient_is_that_of_the_slots_mixture():
    cel, z = make(attention="fit"), features(10)
    cel(z, UNEVEN).backward()
    got = {n: p.grad.clone() for n, p in cel.named_parameters() if p.grad is not None}
    cel.zero_grad()
    sigma2, total = cel.noise_var, 0.0
    for c in UNEVEN.unique():
        zc = z[UNEVEN == c]
        if len(zc) <= 1:
            continue
        t = torch.stack([cel.E @ norm(zi) for zi in zc])
        slots = slot_attention_loop(cel.slot_attention, t, cel.eval_noise)
        r = responsibilities(cross_attention_loop(cel.cross_attention, t, slots)[None], slots[None], cel.log_beta.exp())[0]
        w = (r.sum(0) / len(zc)) ** cel.log_rho.exp()
        logs = []
        for s in range(S):
            share = r[:, s] / r[:, s].sum()
            mean = share @ zc
            V = share @ (zc - mean) ** 2 + sigma2 + 1e-6 * zc.var(0, unbiased=False)
            log_n = torch.distributions.Normal(mean, V.sqrt()).log_prob(zc) - 0.5 * sigma2 / V           # E_n log N(z + n)
            logs.append(torch.log(w[s] / w.sum()) + log_n.sum(1))
        total = total - torch.logsumexp(torch.stack(logs), 0).sum() / D / len(z)
    total.backward()
    for name, p in cel.named_parameters():
        if not name.startswith("dim_gate"):
            assert torch.allclose(got[name], p.grad, atol=1e-10), name


def frozen_run(attention, measure_on, steps=120):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(4).repeat_interleave(16)
    z = torch.sigmoid(torch.randn(4, 32, generator=g)[y] + 0.7 * torch.randn(64, 32, generator=g)).requires_grad_()
    torch.manual_seed(1)
    cel = SlotCrossCEL(32, 0.125 * 0.05 ** 2, slots=4, slot_dim=16, attention=attention, measure_on=measure_on, sigma=0.05,
                       snr_gate=False, delay_calls=0)
    optimizer = torch.optim.Adam(cel.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        cel(z, y).backward()
        optimizer.step()
    cel(z, y)
    with torch.no_grad():                               # L of the whole class as one slot, all gates but the class gate open
        x = z if measure_on == "sent" else F.layer_norm(z, (32,)) @ cel.E.T
        v = torch.stack([x[y == c].var(0, unbiased=False) for c in range(4)])
        base = F.softplus(torch.log(v + cel.eps) - math.log(cel.tau + cel.eps) - cel.margin, beta=cel.softplus_beta)
        true = float(base.mean() * torch.sigmoid(torch.tensor(cel.class_a * (0.25 - cel.class_b))))
    return {k: float(s) for k, s in cel.stats.items()}, true


@pytest.mark.parametrize("measure_on", MEASURES)
def test_joint_collapses_on_frozen_features(measure_on):
    stats, true = frozen_run("joint", measure_on)
    assert true > 3 and stats["loss"] < 0.01 and stats["dim_gate"] < 0.01 and stats["variance"] > 0.01


@pytest.mark.parametrize("measure_on", MEASURES)
@pytest.mark.parametrize("attention, gate, low, high", [("adversarial", 1.0, 0.9, 1.2), ("fit", 0.5, 0.8, 1.05)])
def test_the_other_modes_stay_at_the_true_spread(measure_on, attention, gate, low, high):
    """Band as a factor of gate × (loss of the class's spread as one slot): ascent opens the gates to 1, fit leaves them at 1/2."""
    stats, true = frozen_run(attention, measure_on)
    assert abs(stats["dim_gate"] - gate) < 0.01 and low <= stats["loss"] / (gate * true) <= high and stats["active"] == 1


def test_fit_makes_the_slots_components_of_the_class():
    """Three modes per class: σ_s² falls from the spread of the class to about that of one mode, on batches never seen before."""
    g = torch.Generator().manual_seed(0)
    modes = torch.randn(4, 3, 32, generator=g)
    torch.manual_seed(0)
    cel = SlotCrossCEL(32, 0.125 * 0.1 ** 2, sigma=0.1, slot_dim=32, delay_calls=0)
    optimizer, variances = torch.optim.Adam(cel.parameters(), lr=3e-3), []
    for _ in range(150):
        y, mode = torch.randint(0, 4, (64,), generator=g), torch.randint(0, 3, (64,), generator=g)
        z = torch.sigmoid(modes[y, mode] + 0.4 * torch.randn(64, 32, generator=g))
        optimizer.zero_grad()
        cel(z, y).backward()
        optimizer.step()
        variances.append(float(cel.stats["variance"]))
    within = torch.sigmoid(modes[:, :, None] + 0.4 * torch.randn(4, 3, 500, 32, generator=g)).var(2).mean().item()
    assert variances[0] > 2.5 * within and 0.7 * within < sum(variances[-10:]) / 10 < 1.3 * within


# --- 5. the shutoff --------------------------------------------------------------------------------------------------------

def test_delay_is_on_for_the_first_calls_then_off_in_the_default_run():
    cel, y = SlotCrossCEL(D, 0.01, slots=2, slot_dim=4, iters=1, attention="fit"), UNEVEN
    assert cel.delay_calls == 100 and cel.shutoff_snr is None
    z = features(11).float().requires_grad_()
    for call in range(103):
        z.grad = None
        loss = cel(z, y)
        assert int(cel.stats["shutoff"]) == (SHUTOFF_DELAY if call < 100 else SHUTOFF_NONE), call
        assert float(cel.stats["active"]) == float(call >= 100) and (loss.item() > 0) == (call >= 100)
        if call in (0, 99, 100):
            loss.backward()
            assert bool(z.grad.any()) == (call >= 100)
    assert int(cel.stats["calls"]) == 103 and int(cel.state_dict()["calls"]) == 103
    assert cel.slot_attention.mu.grad.abs().max() > 0   # fit goes on while L is held back


@pytest.mark.parametrize("measure_on", MEASURES)
def test_documents_snr_rule_is_reported(measure_on):
    z = features(12)
    cel = make(measure_on=measure_on, delay_calls=0, shutoff_snr=0.5, snr_threshold=-1.0).train()         # gate near 1
    z.requires_grad_()
    loss = cel(z, UNEVEN)
    loss.backward()
    assert loss.item() == 0 and not z.grad.any() and int(cel.stats["shutoff"]) == SHUTOFF_SNR
    assert float(cel.stats["active"]) == 0 and float(cel.stats["snr_gate"]) > 0.5
    cel.snr_threshold = 100.0
    cel(z, UNEVEN)
    assert int(cel.stats["shutoff"]) == SHUTOFF_NONE and float(cel.stats["snr_gate"]) < 0.5


def test_delay_counts_training_calls_only():
    cel = make(delay_calls=2)
    for _ in range(5):
        cel(features(13), UNEVEN)
    assert int(cel.calls) == 0 and int(cel.stats["shutoff"]) == SHUTOFF_NONE


def test_default_gradient_shrinks_the_spread():
    """Descending the default loss on the features themselves takes every class below its starting spread."""
    y = torch.arange(3).repeat_interleave(10)
    raw = torch.randn(30, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    cel = SlotCrossCEL(16, 0.125 * 0.3 ** 2, slot_dim=16, sigma=0.3, delay_calls=0)
    spread = lambda: torch.stack([torch.sigmoid(raw.detach()[y == c]).var(0).mean() for c in range(3)])
    before, optimizer = spread(), torch.optim.Adam([raw], lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        cel(torch.sigmoid(raw), y).backward()
        optimizer.step()
    assert (spread() < 0.3 * before).all()


# --- robustness -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("measure_on", MEASURES)
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e6, 1e12])
def test_finite_at_every_scale_in_float32(attention, measure_on, scale):
    z = features(14, dim=32, scale=scale).float().requires_grad_()
    cel = SlotCrossCEL(32, 1e-3, slot_dim=16, attention=attention, measure_on=measure_on, sigma=0.05, snr_gate=True, delay_calls=0)
    loss = cel(z, UNEVEN)
    loss.backward()
    assert loss.isfinite() and loss >= 0 and z.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in cel.parameters())
    assert all(torch.isfinite(s) and not s.requires_grad and s.dim() == 0 for s in cel.stats.values())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_nonfinite_rows_are_left_out(attention):
    z, bad = features(15), torch.tensor([2, 5, 12])
    dirty = z.clone()
    dirty[bad] = torch.tensor([math.nan, math.inf, -math.inf]).double()[:, None]
    dirty.requires_grad_()
    cel = make(attention=attention, class_gate=False)
    loss = cel(dirty, UNEVEN)
    loss.backward()
    assert int(cel.stats["nonfinite"]) == 3 and int(cel.stats["skipped_classes"]) == 2
    assert not dirty.grad[bad].any() and dirty.grad.isfinite().all() and dirty.grad.any()
    good = torch.ones(14, dtype=torch.bool)
    good[bad] = False
    assert loss.item() == pytest.approx(cel(z[good], UNEVEN[good]).item() * 11 / 14, abs=1e-12)          # B is the whole batch


@pytest.mark.parametrize("rows, y, code", [(torch.ones(1, D), [3], SHUTOFF_EMPTY), (torch.rand(4, D), [0, 1, 2, 3], SHUTOFF_EMPTY),
                                           (torch.full((3, D), math.nan), [0, 0, 1], SHUTOFF_EMPTY),
                                           (torch.ones(5, D), [1] * 5, SHUTOFF_NONE), (torch.rand(2, D)[[0, 0]], [1, 1], SHUTOFF_NONE)])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_degenerate_batches(rows, y, code, attention):
    z = rows.clone().requires_grad_()
    cel = SlotCrossCEL(D, 0.01, slots=2, slot_dim=4, attention=attention, delay_calls=0)
    loss = cel(z, torch.tensor(y))
    loss.backward()
    assert loss.isfinite() and z.grad.isfinite().all() and float(cel.stats["active"]) == 0 and int(cel.stats["shutoff"]) == code
    assert loss.item() < 1e-4                           # the softplus of log ε − log τ; exactly 0 when nothing is measured
    if code == SHUTOFF_EMPTY:
        assert loss.item() == 0 and not z.grad.any()


def test_noise_is_fresh_per_class_and_call_in_training_and_fixed_in_eval():
    cel, seen = make(delay_calls=0).train(), []
    cel.slot_attention.register_forward_pre_hook(lambda module, args: seen.append(args[2].clone()))
    for _ in range(2):
        cel(features(16), UNEVEN)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[0][0], seen[0][1])
    cel.eval()
    assert cel(features(16), UNEVEN).item() == cel(features(16), UNEVEN).item()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_state_dict_deepcopy_and_feature_maps(attention):
    z = features(17, dim=12).requires_grad_()
    cel, other = make(dim=12, attention=attention, learnable_scalars=True), make(seed=5, dim=12, attention=attention, learnable_scalars=True)
    cel.calls += 7
    assert other(z, UNEVEN).item() != cel(z, UNEVEN).item()
    other.load_state_dict(copy.deepcopy(cel.state_dict()))
    maps = z.view(14, 3, 2, 2).to(memory_format=torch.channels_last)
    assert other(maps, UNEVEN).item() == cel(z, UNEVEN).item() == copy.deepcopy(cel)(z, UNEVEN).item() and int(other.calls) == 7
    cel(z, UNEVEN).backward(), other(z, UNEVEN).backward()
    twin = copy.deepcopy(cel)
    twin.zero_grad()
    twin(z, UNEVEN).backward()
    assert all(p.grad is None or torch.equal(p.grad, q.grad) for p, q in zip(twin.parameters(), cel.parameters()))


def test_learnable_scalars_are_an_option():
    fixed, learnable = (dict(SlotCrossCEL(D, 0.01, learnable_scalars=on).named_parameters()) for on in (False, True))
    assert "log_beta" not in fixed and {"log_beta", "log_rho"} == set(learnable) - set(fixed)
    assert learnable["log_beta"].exp().item() == pytest.approx(12) and learnable["log_rho"].exp().item() == pytest.approx(2.5)


def test_dim_gate_starts_half_open():
    assert torch.equal(DimGate(6, 4)(torch.randn(3, 6)), torch.full((3, 6), 0.5))


@pytest.mark.parametrize("kwargs", [{"tau": 0}, {"attention": "none"}, {"measure_on": "y"}, {"sigma": -1}, {"slots": 0}, {"heads": 3},
                                    {"beta": 0}, {"delay_calls": -1}, {"max_variance": 1e-9}, {"eps": 0}])
def test_constructor_refuses(kwargs):
    with pytest.raises(ValueError):
        SlotCrossCEL(**{"dim": 4, "tau": 0.1, **kwargs})


@pytest.mark.parametrize("z, y", [(torch.rand(3, 5), [0, 0, 0]), (torch.rand(3, 4), [0, 0, 5]), (torch.rand(3, 4), [0, 0, -1])])
def test_forward_refuses(z, y):
    with pytest.raises(ValueError):
        SlotCrossCEL(4, 0.1, num_classes=5)(z, torch.tensor(y))


def test_forward_has_no_loop_over_classes_or_samples():
    parts = [SlotCrossCEL.forward, SlotCrossCEL._penalty, SlotCrossCEL._nll, SlotCrossCEL._record, GatedCrossAttention.forward,
             gather_classes, responsibilities, slot_moments]
    for part in parts:                                  # SlotAttention.forward loops over its T iterations, nothing else
        nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(part))))
        assert not any(isinstance(n, (ast.For, ast.While, ast.comprehension)) for n in nodes), part
