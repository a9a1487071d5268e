"""Oracles for slot_cross_cel.py: items 1-7 and the cross-fit as loops, memory, image, collapse, bad input."""

import copy
import functools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F

import slot_cross_cel
from slot_cross_cel import (
    ALLOWED,
    BETA,
    CLASS_A,
    CLASS_B,
    COSINE_EPS,
    DELAYED,
    HEADS,
    KAPPA,
    MARGIN,
    PARTS,
    ROUNDING,
    SHUT_OFF,
    SOFTPLUS_BETA,
    SPOKE,
    TAU_SNR,
    GatedCrossAttention,
    SlotAttention,
    SlotCrossCEL,
    ssim,
)

D, DS, S, C, SIGMA = 10, 8, 3, 13, 0.3
UNEVEN = torch.tensor([7, 0, 3, 3, 0, 9, 0, 9, 0, 9, 0, 7, 0, 12])  # classes of 0, 1, 2, 3 and 6 samples
CLASS_MODES = ("mixture", "documented")


def features(seed, B=14, dim=D, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return scale * torch.sigmoid(torch.randn(B, dim, generator=g, dtype=torch.float64))


def make(mode="documented", seed=0, shake=0.3, dim=D, **kwargs):
    """float64, eval mode (stored noise), slots of size 8, parameters moved off their symmetric start."""
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_cross_cel, "SLOT_DIM", DS)
        cel = (
            SlotCrossCEL(C, dim, SIGMA, mode, **{"slots": S, "tau": 0.01, "eps": 1e-4, **kwargs})
            .double()
            .eval()
        )
    with torch.no_grad():
        for p in cel.parameters():
            p.add_(shake * torch.randn_like(p))
    return cel


def grads_of(cel, loss, *leaves):
    names, params = zip(*cel.named_parameters())
    found = torch.autograd.grad(loss, [*leaves, *params], allow_unused=True)
    return found[: len(leaves)], dict(zip(names, found[len(leaves) :]))


# --- items 1 to 7 with plain loops -------------------------------------------------------------------------


def norm(x, layer=None):
    x = (x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
    return x if layer is None else x * layer.weight + layer.bias


def slot_attention_loop(sa, tokens, noise):
    """Item 1 for one class: tokens [M, d_s], noise [S, d_s]."""
    d_s = noise.shape[1]
    k = [sa.W_k.weight @ norm(x, sa.norm_tokens) for x in tokens]
    v = [sa.W_v.weight @ norm(x, sa.norm_tokens) for x in tokens]
    slots = [sa.mu + torch.exp(sa.log_sigma) * n for n in noise]
    for _ in range(sa.iterations):
        q = [sa.W_q.weight @ norm(s, sa.norm_slots) for s in slots]
        a = []
        for km in k:
            e = [torch.exp((km * qs).sum() * d_s**-0.5 * d_s**-0.25) for qs in q]
            a.append([ei / sum(e) + 1e-8 for ei in e])  # softmax over slots, + ε_a
        new = []
        for s in range(len(slots)):
            column = [row[s] for row in a]
            u = sum(c / sum(column) * vm for c, vm in zip(column, v))  # renormalised over samples
            gi, gh = sa.gru.weight_ih @ u + sa.gru.bias_ih, sa.gru.weight_hh @ slots[s] + sa.gru.bias_hh
            reset = torch.sigmoid(gi[:d_s] + gh[:d_s])
            update = torch.sigmoid(gi[d_s : 2 * d_s] + gh[d_s : 2 * d_s])
            candidate = torch.tanh(gi[2 * d_s :] + reset * gh[2 * d_s :])
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
        width = len(q) // HEADS
        for h in range(HEADS):
            part = slice(h * width, (h + 1) * width)
            e = [torch.exp((q[part] * (ca.W_k.weight @ s)[part]).sum() / math.sqrt(width)) for s in slots]
            heads.append(sum(ei / sum(e) * (ca.W_v.weight @ s)[part] for ei, s in zip(e, slots)))
        y = t + torch.tanh(ca.alpha_attn) * (ca.W_o.weight @ torch.cat(heads))
        out.append(y + torch.tanh(ca.alpha_ffn) * ca.ffn(norm(y, ca.norm_ffn)))
    return torch.stack(out)


def attend_loop(cel, zc):
    """Items 1 and 2 of one class (or half of one): t, slots, y."""
    t = torch.stack([cel.E @ norm(zi) for zi in zc])
    slots = slot_attention_loop(cel.slot_attention, t, cel.slot_attention.eval_noise)
    return t, slots, t if cel.cross_attention is None else cross_attention_loop(cel.cross_attention, t, slots)


def r_loop(cel, asked, slots):
    rows = []
    for p in asked:
        cos = [(p @ s) / (p.norm().clamp(min=COSINE_EPS) * s.norm().clamp(min=COSINE_EPS)) for s in slots]
        e = [torch.exp(cel.log_beta.exp() * c) for c in cos]
        rows.append(torch.stack(e) / sum(e))
    return torch.stack(rows)  # [M, S]


def base(cel, var):
    power = torch.exp(SOFTPLUS_BETA * (torch.log(var + cel.eps) - math.log(cel.tau + cel.eps) - MARGIN))
    return torch.log(1 + power) / SOFTPLUS_BETA


def documented_loop(cel, z, y):
    """Items 1-7 as printed, class by class and slot by slot."""
    total, B = torch.zeros((), dtype=z.dtype), len(y)
    rho = cel.log_rho.exp() if "slot_mass" in cel.on else 1.0
    for c in y.unique():
        zc, M = z[y == c], int((y == c).sum())
        if M <= 1:
            continue
        t, slots, out = attend_loop(cel, zc)
        r = r_loop(cel, t, slots)
        w, inner = (r.sum(0) / M) ** rho, 0.0
        for s in range(len(slots)):
            share = r[:, s] / r[:, s].sum()
            mean = share @ out
            var = share @ (out - mean) ** 2
            gate = 1.0
            if "per_dim_gate" in cel.on:
                first, last = cel.dim_gate[1], cel.dim_gate[3]
                hidden = torch.clamp(first.weight @ norm(torch.log(var + cel.eps)) + first.bias, min=0)
                gate = gate * torch.sigmoid(last.weight @ hidden + last.bias)
            if "snr_gate" in cel.on:
                gate = gate * torch.sigmoid(KAPPA * (var / (mean**2 + cel.eps) - TAU_SNR))
            inner = inner + w[s] / w.sum() * (gate * base(cel, var)).mean()
        g_c = 1 / (1 + math.exp(-CLASS_A * (M / B - CLASS_B))) if "class_gate" in cel.on else 1.0
        total = total + M / B * g_c * inner
    return total


def mixture_loop(cel, z, y, remembered=None):
    """The cross-fit, class by class and half by half: L, a function of z, and −log likelihood a dimension."""
    loss, nll, B = torch.zeros((), dtype=z.dtype), torch.zeros((), dtype=z.dtype), len(y)
    for c in y.unique():
        zc, old = z[y == c], z[:0] if remembered is None else remembered[int(c)]
        M, n_all = len(zc), len(zc) + len(old)
        if n_all <= 1:
            continue
        even, odd = torch.cat([zc[0::2], old[1::2]]), torch.cat([zc[1::2], old[0::2]])
        for fit, held in ((even, odd), (odd, even)):
            _, slots, out = attend_loop(cel, fit.detach())
            r = r_loop(cel, out, slots)  # [n, S]
            mean, V, n, log_joint = [], [], [], []
            for s in range(len(slots)):
                share = r[:, s] / r[:, s].sum()
                mean.append(share @ fit.detach())
                V.append(share @ (fit.detach() - mean[s]) ** 2)
                n.append(1 / (share**2).sum())
            size = sum(v + (m - zc[0]) ** 2 for v, m in zip(V, mean)).detach() / len(slots)
            for s in range(len(slots)):
                V[s] = V[s] + SIGMA**2 + ROUNDING * size
                log_n = torch.distributions.Normal(mean[s], V[s].sqrt()).log_prob(held.detach())
                log_n = (log_n - 0.5 * SIGMA**2 / V[s]).sum(1)  # the mean over the noise of the channel
                log_joint.append(torch.log(r[:, s].mean()) + log_n)
            log_joint = torch.stack(log_joint, 1)  # [n held, S]
            share_of_batch = M / B * len(held) / n_all
            nll = nll - share_of_batch * log_joint.logsumexp(1).mean() / z.shape[1]
            p = log_joint.softmax(1).detach()
            for s in range(len(slots)):
                var = (p[:, s] @ (held - mean[s].detach()) ** 2) / p[:, s].sum() / (1 + 1 / n[s].detach())
                loss = loss + share_of_batch * p[:, s].mean() * base(cel, var).mean()
    return loss, nll


def test_slot_attention_equals_plain_loops_and_ignores_padding():
    torch.manual_seed(0)
    sa, tokens = SlotAttention(DS, S, 3).double().eval(), torch.randn(2, 5, DS).double()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    slots = sa(tokens, mask)
    for g, m in enumerate((5, 3)):
        assert torch.allclose(slots[g], slot_attention_loop(sa, tokens[g, :m], sa.eval_noise), atol=1e-10)
    sa.eval_noise = sa.eval_noise[[2, 0, 1]]  # slots have no order of their own
    assert torch.allclose(sa(tokens, mask), slots[:, [2, 0, 1]], atol=1e-12)


def test_cross_attention_equals_plain_loops_and_is_the_identity_when_closed():
    torch.manual_seed(0)
    ca = GatedCrossAttention(DS).double()
    tokens, slots = torch.randn(1, 5, DS).double(), torch.randn(1, S, DS).double()
    assert ca.alpha_attn.item() == pytest.approx(0.1) == ca.alpha_ffn.item()
    y = ca(tokens, slots)
    assert torch.allclose(y[0], cross_attention_loop(ca, tokens[0], slots[0]), atol=1e-10)
    assert not torch.allclose(y, tokens)
    with torch.no_grad():
        ca.alpha_attn.zero_(), ca.alpha_ffn.zero_()
    assert torch.equal(ca(tokens, slots), tokens)


@pytest.mark.parametrize(
    "off", [(), *((part,) for part in PARTS), PARTS], ids=lambda off: "+".join(off) or "all on"
)
def test_documented_equals_a_loop_over_classes(off):
    cel, z = make(off=off), features(1).requires_grad_()
    loss, literal = cel(z, UNEVEN), documented_loop(cel, z, UNEVEN)
    (at_z,), at_p = grads_of(cel, loss, z)
    (expected_z,), expected_p = grads_of(cel, literal, z)
    assert loss.item() > 0.01 and abs((loss - literal).item()) < 1e-10
    assert torch.allclose(at_z, expected_z, atol=1e-10) and at_z.abs().max() > 1e-4
    assert all(torch.allclose(at_p[name], expected_p[name], atol=1e-10) for name in at_p)
    assert (
        float(cel.stats["skipped"]) == pytest.approx(1 / 14) and not at_z[13].any()
    )  # the only one of its class


@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_documented_changes_the_loss(part):
    on, off = make(), make(off=(part,))
    off.load_state_dict(on.state_dict(), strict=False)
    assert abs((on(features(2), UNEVEN) - off(features(2), UNEVEN)).item()) > 1e-6


@pytest.mark.parametrize("remembered", [False, True])
def test_mixture_equals_a_loop_over_classes_and_halves(remembered):
    cel, z = make("mixture", memory=3 if remembered else 0), features(3).requires_grad_()
    kept = None
    if remembered:
        kept = {c: features(20 + c, c % 4) for c in range(C)}  # 0 to 3 of them
        for c in range(C):
            cel.memory[c, : c % 4], cel.stored[c] = kept[c], c % 4
    loss = cel(z, UNEVEN)
    (at_z,), at_p = grads_of(cel, loss, z)
    literal, nll = mixture_loop(cel, z, UNEVEN, kept)
    expected_z = torch.autograd.grad(literal, z)[0]
    for c in UNEVEN.unique() if remembered else ():  # the batch's gradient stands for the memory's as well
        M = int((UNEVEN == c).sum())
        expected_z[c == UNEVEN] *= (M + int(c) % 4) / M
    expected_p = grads_of(cel, nll)[1]
    assert abs((loss - literal).item()) < 1e-10 and loss.item() > 0.1
    assert torch.allclose(at_z, expected_z, atol=1e-10) and at_z.abs().max() > 1e-4
    assert all(torch.allclose(at_p[name], expected_p[name], atol=1e-10) for name in at_p)
    assert cel.stats["skipped"].item() == pytest.approx(1 / 14)  # class 12 has one sample and remembers none


def test_gradcheck_of_documented():
    cel = make(dim=5, slots=2)
    names, params = zip(*((n, p.detach().clone().requires_grad_()) for n, p in cel.named_parameters()))
    y = torch.tensor([0, 1, 0, 1, 1])
    f = lambda z, *p: torch.func.functional_call(cel, dict(zip(names, p)), (z, y))
    assert torch.autograd.gradcheck(f, (features(4, 5, 5).requires_grad_(), *params), fast_mode=True)


def test_permuting_classes_changes_nothing_and_samples_only_the_halves():
    z, order = features(5), torch.randperm(14, generator=torch.Generator().manual_seed(0))
    relabelled = (UNEVEN + 5) % C
    for mode in CLASS_MODES:
        cel = make(mode)
        assert abs((cel(z, UNEVEN) - cel(z, relabelled)).item()) < 1e-12
    cel = make("documented")
    assert abs((cel(z, UNEVEN) - cel(z[order], UNEVEN[order])).item()) < 1e-12


# --- where the gradient goes, the collapse, and what cross-fitting buys ------------------------------------


@pytest.mark.parametrize("mode", (*CLASS_MODES, "image"))
def test_every_parameter_has_a_gradient_in_its_mode(mode):
    torch.manual_seed(0)
    more = {"shape": (8, 4, 4), "image_size": 16} if mode == "image" else {}
    cel = SlotCrossCEL(4, 128, 0.1, mode, **more)
    cel(torch.rand(24, 128, requires_grad=True), torch.arange(24) % 4, torch.rand(24, 3, 16, 16)).backward()
    late = {"dim_gate.1.weight", "dim_gate.1.bias"}  # behind weights that start at 0
    for name, p in cel.named_parameters():
        assert p.requires_grad and p.grad is not None, name
        assert p.grad.abs().max() > 0 or name in late, name


def test_documented_collapses_on_frozen_features():
    g = torch.Generator().manual_seed(0)
    y = torch.arange(4).repeat_interleave(16)
    z = torch.sigmoid(
        torch.randn(4, 32, generator=g)[y] + 0.7 * torch.randn(64, 32, generator=g)
    ).requires_grad_()
    torch.manual_seed(1)
    cel = SlotCrossCEL(4, 32, 0.05, "documented", slots=4)
    optimizer, seen = torch.optim.Adam(cel.parameters(), lr=0.01, fused=True), []
    for _ in range(100):
        optimizer.zero_grad()
        cel(z, y).backward()
        optimizer.step()
        seen.append({k: float(v) for k, v in cel.stats.items()})
    assert seen[0]["loss"] > 1 and seen[-1]["loss"] < 0.01 and seen[-1]["spread"] > seen[0]["spread"]
    assert seen[0]["per_dim_gate"] == 0.5 and seen[-1]["per_dim_gate"] < 0.01


@functools.cache
def trained_mixture(modes, seed=0, steps=300, B=128, classes=10, dim=64, var=0.0225, apart=0.5, **kwargs):
    g = torch.Generator().manual_seed(seed)
    centres = 0.5 + apart * torch.randn(classes, modes, dim, generator=g)

    def draw(y):
        k = torch.randint(0, modes, y.shape, generator=g)
        return centres[y, k] + var**0.5 * torch.randn(*y.shape, dim, generator=g), k

    torch.manual_seed(seed)
    cel = SlotCrossCEL(classes, dim, 0.1, **kwargs)
    optimizer = torch.optim.Adam(cel.parameters(), lr=3e-3, fused=True)
    for _ in range(steps):
        y = torch.randint(0, classes, (B,), generator=g)
        optimizer.zero_grad()
        cel(draw(y)[0].requires_grad_(), y).backward()
        optimizer.step()
    return cel, draw


def test_one_true_mode_is_measured_as_it_is():
    """Frozen features, fresh batches: the held-out likelihood of one Gaussian, and the true spread, .0225."""
    cel, draw = trained_mixture(modes=1)
    spread, mixture, gaussian = [], [], []
    with torch.no_grad():
        for _ in range(20):
            y = torch.randint(0, 10, (128,))
            z, _ = draw(y)
            cel(z, y)
            spread.append(cel.stats["spread"]), mixture.append(cel.stats["nll"])
            total = 0.0
            for c in range(10):
                zc = z[y == c]
                for fit, held in ((zc[0::2], zc[1::2]), (zc[1::2], zc[0::2])):
                    V = fit.var(0, unbiased=False) + 0.01
                    total += (
                        (0.5 * (torch.log(2 * math.pi * V) + ((held - fit.mean(0)) ** 2 + 0.01) / V))
                        .mean(1)
                        .sum()
                    )
            gaussian.append(total / 128)
    mean = lambda figures: float(sum(figures) / len(figures))
    assert 0.019 < mean(spread) < 0.026
    assert mean(mixture) < mean(gaussian) + 0.01


def mutual_information(a, b):
    """Normalised by the mean of the two entropies."""
    joint = torch.zeros(int(a.max()) + 1, int(b.max()) + 1)
    joint.index_put_((a, b), torch.ones(len(a)), accumulate=True)
    entropy = lambda p: -(p[p > 0] / p.sum() * torch.log(p[p > 0] / p.sum())).sum()
    H_a, H_b = entropy(joint.sum(1)), entropy(joint.sum(0))
    return float((H_a + H_b - entropy(joint.flatten())) / (0.5 * (H_a + H_b)))


def test_three_modes_are_found_and_with_memory_measured():
    cel, draw = trained_mixture(modes=3)
    found, posterior = [], []
    original = slot_cross_cel.weights

    def spy(r, mask):
        posterior.append(r)
        return original(r, mask)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_cross_cel, "weights", spy)
        for c in range(10):  # 120 samples of a class, halves of 60
            z, k = draw(torch.full((120,), c))
            cel(z, torch.full((120,), c))
            found += [mutual_information(k[h::2], posterior[-1][0, h].argmax(0)) for h in (0, 1)]
    assert sum(found) / 20 >= 0.95
    cel, draw = trained_mixture(modes=3, steps=80, memory=32)
    spread = []
    for _ in range(10):
        y = torch.randint(0, 10, (128,))
        with torch.no_grad():
            cel(draw(y)[0], y)
        spread.append(cel.stats["spread"].item())
    assert sum(spread) / 10 == pytest.approx(0.0225, rel=0.15)  # the class as a whole: 0.19


def test_a_small_mode_is_not_starved():
    """A sample of a 10 % mode is pulled as hard as one of the majority; with ρ = 2.5 it was 0.07 of that."""
    cel, draw = trained_mixture(modes=3, steps=80, memory=32)
    y = torch.zeros(400, dtype=torch.int64)
    z, k = draw(y)
    rows = torch.cat([(k == 0).nonzero()[:108, 0], (k == 1).nonzero()[:12, 0]])
    rows = rows[torch.randperm(120, generator=torch.Generator().manual_seed(0))]
    z, small = z[rows].requires_grad_(), k[rows] == 1
    cel = copy.deepcopy(cel).eval()
    cel.memory, cel.stored = cel.memory[:, :0], torch.zeros_like(cel.stored)
    cel(z, y[:120]).backward()
    pull = z.grad.norm(dim=1)
    assert 0.7 < float(pull[small].mean() / pull[~small].mean()) < 1.4


def test_default_gradient_shrinks_the_spread():
    y = torch.arange(3).repeat_interleave(10)
    raw = torch.randn(30, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(0)
    cel = SlotCrossCEL(3, 16, 0.3)
    spread = lambda: torch.stack([torch.sigmoid(raw.detach()[y == c]).var(0).mean() for c in range(3)])
    before, optimizer = spread(), torch.optim.Adam([raw], lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        cel(torch.sigmoid(raw), y).backward()
        optimizer.step()
    assert (spread() < 0.3 * before).all()


# --- the memory --------------------------------------------------------------------------------------------


def test_memory_keeps_the_last_samples_of_each_class_and_survives_a_restart():
    cel = make("mixture", memory=3).train()
    seen = {c: [] for c in range(C)}
    for call in range(4):
        z = features(30 + call)
        cel(z.requires_grad_(), UNEVEN)
        for row, c in zip(z.detach(), UNEVEN.tolist()):
            seen[c].append(row)
    for c, rows in seen.items():
        kept = cel.memory[c][: min(3, len(rows))]
        assert int(cel.stored[c]) == len(rows)
        assert {tuple(r.tolist()) for r in kept} == {tuple(r.tolist()) for r in rows[-3:]}
    twin = make("mixture", seed=9, memory=3).train()
    twin.load_state_dict(copy.deepcopy(cel.state_dict()))
    for _ in range(2):
        losses = []
        for module in (cel, twin):
            torch.manual_seed(5)
            losses.append(module(features(40).requires_grad_(), UNEVEN).item())
        assert losses[0] == losses[1] and torch.equal(cel.memory, twin.memory)


def test_many_classes_are_counted_with_memory_and_not_without():
    g = torch.Generator().manual_seed(0)
    centres, spread = torch.rand(200, 24, generator=g), {}
    for memory, steps in ((0, 1), (32, 50)):  # 50 batches: 6400 samples, about 32 of each class
        torch.manual_seed(0)
        cel = SlotCrossCEL(200, 24, 0.1, slots=2, memory=memory)
        optimizer = torch.optim.Adam(cel.parameters(), lr=3e-3, fused=True)
        for _ in range(steps):
            y = torch.randint(0, 200, (128,), generator=g)
            z = centres[y] + 0.15 * torch.randn(128, 24, generator=g)
            optimizer.zero_grad()
            cel(z.requires_grad_(), y).backward()
            optimizer.step()
        spread[memory] = {k: float(v) for k, v in cel.stats.items()}
    assert spread[0]["skipped"] > 0.3 and spread[32]["skipped"] == 0
    assert spread[32]["spread"] == pytest.approx(0.0225, rel=0.15)


# --- on the image ------------------------------------------------------------------------------------------


def picture_cel(seed=0, **kwargs):
    torch.manual_seed(seed)
    return SlotCrossCEL(4, 8 * 4 * 4, 0.1, "image", shape=(8, 4, 4), image_size=16, **kwargs)


def pictures(B=16, seed=0):
    """Smooth pictures and features that hold them: the means of 2x2 blocks of each 4x4 patch, and noise."""
    g = torch.Generator().manual_seed(seed)
    x = F.interpolate(torch.rand(B, 3, 4, 4, generator=g), size=16, mode="bicubic").clamp(0, 1)
    z = F.pixel_unshuffle(F.avg_pool2d(x.mean(1, keepdim=True), 2), 2)  # [B, 4, 4, 4]
    return torch.cat([z, F.avg_pool2d(x, 4), z[:, :1]], 1), torch.zeros(B, dtype=torch.int64), x


def test_ssim_equals_its_definition_window_by_window():
    g = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 3, 13, 13, generator=g).double(), torch.rand(2, 3, 13, 13, generator=g).double()
    at = torch.arange(11, dtype=torch.float64) - 5
    w = torch.exp(-at.square() / (2 * 1.5**2))
    w = w[:, None] * w / w.sum() ** 2
    for n in range(2):
        values = []
        for c in range(3):
            for i in range(3):
                for j in range(3):
                    p, q = a[n, c, i : i + 11, j : j + 11], b[n, c, i : i + 11, j : j + 11]
                    mp, mq = (w * p).sum(), (w * q).sum()
                    vp, vq, cov = (
                        (w * (p - mp) ** 2).sum(),
                        (w * (q - mq) ** 2).sum(),
                        (w * (p - mp) * (q - mq)).sum(),
                    )
                    top = (2 * mp * mq + 1e-4) * (2 * cov + 9e-4)
                    values.append(top / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4)))
        assert float(ssim(a, b)[n]) == pytest.approx(float(sum(values) / 27), abs=1e-6)
    assert torch.allclose(ssim(a, a), torch.ones(2).double(), atol=1e-12)


def test_image_gives_each_side_its_own_gradient_in_one_backward():
    z, y, x = pictures()
    cel = picture_cel().double().eval()
    z, x = z.double().requires_grad_(), x.double()
    torch.manual_seed(3)
    cel(z, y, x)
    allowed = float(cel.stats["ssim"] - cel.stats["spread"])  # the mean of q: about half of the images pay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_cross_cel, "ALLOWED", allowed)
        torch.manual_seed(3)
        loss = cel(z, y, x)
    (at_z,), at_p = grads_of(cel, loss, z)
    torch.manual_seed(3)
    sent = F.pad(z + 0.1 * torch.randn_like(z.detach().flatten(1)).view_as(z), [1, 1, 1, 1])
    cells = [sent[:, :, i : i + 3, j : j + 3].flatten(1) for i in range(4) for j in range(4)]  # [B, 9c] each
    tokens = torch.stack(cells, 1) @ cel.embed.weight.flatten(1).T + cel.embed.bias + cel.position
    painted = cel.head(cel.cross_attention(tokens, cel.slot_attention(tokens, torch.ones(len(z), 16))))
    patches = torch.sigmoid(painted).view(
        -1, 4, 4, 3, 4, 4
    )  # row, column, colour, row and column of the patch
    guess = patches.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, 16, 16)
    likeness, error = ssim(guess, x), (guess - x).square().mean((1, 2, 3))
    pays, own = (likeness - error - allowed).relu().mean(), error.mean() + 1 - likeness.mean()
    assert loss.item() == pytest.approx(pays.item(), abs=1e-12)  # the value is what the encoder pays
    assert torch.allclose(at_z, torch.autograd.grad(pays, z, retain_graph=True)[0], atol=1e-12) and at_z.any()
    assert 0 < at_z.flatten(1).any(1).sum() < len(z)  # an image below s pays nothing
    expected = grads_of(cel, own)[1]
    assert all(torch.allclose(at_p[name], expected[name], atol=1e-12) for name in at_p)
    assert float(cel.stats["ssim"]) == pytest.approx(likeness.mean().item())
    assert float(cel.stats["spread"]) == pytest.approx((guess - x).square().mean().item())


def test_image_learns_to_paint_and_then_the_encoder_pays_and_escapes():
    z, y, x = pictures()
    z.requires_grad_()
    cel = picture_cel()
    own, before = torch.optim.Adam(cel.parameters(), lr=5e-3, fused=True), z.detach().clone()
    history = []
    for _ in range(100):  # frozen features: only the parameters move
        own.zero_grad()
        cel(z, y, x).backward()
        own.step()
        history.append({k: float(v) for k, v in cel.stats.items()})
    assert torch.equal(z, before)
    first, last = history[0], history[-1]
    assert last["spread"] < 0.5 * first["spread"] and last["ssim"] > ALLOWED + 0.1 > first["ssim"] + 0.1
    assert first["loss"] == 0 < last["loss"] and last["above_tau"] > 0.8
    encoder = torch.optim.Adam([z], lr=0.05)
    for _ in range(40):  # frozen parameters: z descends what it pays
        encoder.zero_grad()
        cel(z, y, x).backward()
        encoder.step()
    assert float(cel.stats["ssim"]) < last["ssim"] - 0.05 and float(cel.stats["loss"]) < 0.6 * last["loss"]


def test_image_fits_its_parameters_where_z_has_no_gradient_and_the_reverse():
    z, y, x = pictures()
    cel = picture_cel().eval()  # in training mode a z without gradient is refused
    cel(z, y, x).backward()
    assert all(p.grad.any() for p in cel.parameters()) and not z.requires_grad
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_cross_cel, "ALLOWED", -1.0)
        cel.requires_grad_(False)(z.requires_grad_(), y, x).backward()
    assert z.grad.any()
    with torch.no_grad():
        assert not cel(z, y, x).requires_grad


def test_image_leaves_bad_rows_out():
    z, y, x = pictures()
    cel = picture_cel()
    z[2], x[5] = math.nan, math.inf
    z.requires_grad_()
    loss = cel(z, y, x)
    loss.backward()
    assert loss.isfinite() and float(cel.stats["skipped"]) == pytest.approx(2 / 16)
    assert z.grad.isfinite().all() and not z.grad[[2, 5]].any()
    assert all(p.grad.isfinite().all() for p in cel.parameters())


@pytest.mark.parametrize(
    "x", [None, torch.rand(16, 3, 8, 8), torch.rand(15, 3, 16, 16), torch.ones(16, 3, 16, 16).long()]
)
def test_image_says_what_x_it_needs(x):
    with pytest.raises(ValueError, match="image_size"):
        picture_cel()(pictures()[0].requires_grad_(), torch.zeros(16, dtype=torch.int64), x)


# --- delay, shutoff, silence -------------------------------------------------------------------------------


def test_delay_is_zero_at_first_and_the_slots_are_fitted_meanwhile():
    cel, z = make("mixture", delay=2).train(), features(6).requires_grad_()
    for call in range(4):
        loss = cel(z, UNEVEN)
        (at_z,), at_p = grads_of(cel, loss, z)
        silent = call < 2
        assert int(cel.stats["silent"]) == (DELAYED if silent else SPOKE) and (loss.item() == 0) == silent
        assert bool(at_z.any()) != silent and at_p["slot_attention.mu"].any()
        assert float(cel.stats["skipped"]) == pytest.approx(1 if silent else 1 / 14)
    assert int(cel.state_dict()["calls"]) == 4
    fresh = make("mixture", delay=2)
    assert fresh(z, UNEVEN).item() > 0 and int(fresh.calls) == 0  # eval mode neither waits nor counts
    assert SlotCrossCEL(3, 4, 0.1).delay == 0


def test_the_documents_shutoff_makes_documented_silent_and_says_so():
    """g_snr of LayerNormed features is near 1, so a threshold of 0.5 is passed on every call."""
    z, y = torch.rand(64, 32, requires_grad=True), torch.arange(64) % 4
    torch.manual_seed(0)
    cel = SlotCrossCEL(4, 32, 0.1, "documented", shutoff=0.5)
    loss = cel(z, y)
    loss.backward()
    assert float(cel.stats["snr_gate"]) > 0.5 and int(cel.stats["silent"]) == SHUT_OFF
    assert loss.item() == 0 and not z.grad.any() and float(cel.stats["skipped"]) == 1
    cel.shutoff = 1.0
    assert cel(z, y).item() > 0 and int(cel.stats["silent"]) == SPOKE
    without = SlotCrossCEL(4, 32, 0.1, "documented", shutoff=0.5, off=("snr_gate",))  # no gate, no shutoff
    assert without(z, y).item() > 0 and "snr_gate" not in without.stats


@pytest.mark.parametrize(
    "mode, more, words",
    [
        ("mixture", {}, "two samples"),
        ("documented", {"shutoff": 0.0}, "shutoff"),
        ("documented", {"shutoff": 0.0, "delay": 7}, "first 107 calls"),
        ("documented", {"delay": 100}, ""),  # it speaks behind its delay
    ],
)
def test_a_hundred_silent_calls_are_reported_once(mode, more, words):
    y = torch.zeros(4, dtype=torch.int64) if more else torch.arange(4)
    cel, z = make(mode, **more).train(), features(7, 4).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(110):
            cel(z, y)
    assert [words in str(warning.message) for warning in caught] == [True] * bool(words)


# --- hostile input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", CLASS_MODES)
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e6, 1e12])
def test_finite_at_every_scale_in_float32(mode, scale):
    z = features(8, dim=32, scale=scale).float().requires_grad_()
    cel = SlotCrossCEL(C, 32, 0.05, mode)
    loss = cel(z, UNEVEN)
    loss.backward()
    assert loss.isfinite() and loss >= 0 and z.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in cel.parameters())
    assert all(torch.isfinite(s) and not s.requires_grad and s.dim() == 0 for s in cel.stats.values())


@pytest.mark.parametrize("kind", ["fp16", "bf16", "autocast fp16", "autocast bf16", "half module"])
@pytest.mark.parametrize("mode", (*CLASS_MODES, "image"))
def test_half_precision_agrees_with_float32(mode, kind):
    """Features of ±20, which overflow in half precision when they are squared there."""
    torch.manual_seed(0)
    more = {"shape": (8, 4, 4), "image_size": 16} if mode == "image" else {}
    cel, y = SlotCrossCEL(4, 128, 0.1, mode, **more).eval(), torch.arange(32) % 4
    x, z = pictures(32)[2], (20 * torch.rand(32, 128).mul(2).sub(1)).half().bfloat16().float()
    patch = pytest.MonkeyPatch()
    patch.setattr(slot_cross_cel, "ALLOWED", -1.0)
    run = lambda module, z: (torch.manual_seed(1), module(z, y, x))[1]
    a = z.clone().requires_grad_()
    full = run(cel, a)
    full.backward()
    dtype = torch.float16 if "fp16" in kind else torch.bfloat16
    b = (z if "autocast" in kind else z.to(dtype)).clone().requires_grad_()
    twin = copy.deepcopy(cel).half() if kind == "half module" else cel
    with torch.autocast("cpu", dtype, enabled="autocast" in kind):
        loss = run(twin, b)
    loss.backward()
    patch.undo()
    assert loss.dtype == torch.float32 and float(loss.detach()) == pytest.approx(
        float(full.detach()), rel=0.01
    )
    assert F.cosine_similarity(a.grad.flatten(), b.grad.float().flatten(), 0) > 0.99


@pytest.mark.parametrize("mode", CLASS_MODES)
def test_nonfinite_rows_are_left_out(mode):
    z, bad = features(9), torch.tensor([2, 5, 12])
    dirty = z.clone()
    dirty[bad] = torch.tensor([math.nan, math.inf, -math.inf]).double()[:, None]
    dirty.requires_grad_()
    cel = make(mode, **({"off": ("class_gate",)} if mode == "documented" else {}))
    loss = cel(dirty, UNEVEN)
    loss.backward()
    good = torch.ones(14, dtype=torch.bool)
    good[bad] = False
    assert not dirty.grad[bad].any() and dirty.grad.isfinite().all() and dirty.grad.any()
    assert float(cel.stats["skipped"]) == pytest.approx(5 / 14)  # and two classes that keep one sample
    rest = cel(z[good].requires_grad_(), UNEVEN[good])
    assert float(loss.detach()) == pytest.approx(
        float(rest.detach()) * 11 / 14, abs=1e-12
    )  # B is the whole batch


@pytest.mark.parametrize("mode", CLASS_MODES)
@pytest.mark.parametrize(
    "rows, y, empty",
    [
        (torch.ones(1, D), [3], True),
        (torch.rand(4, D), [0, 1, 2, 3], True),
        (torch.full((3, D), math.nan), [0, 0, 1], True),
        (torch.ones(5, D), [1] * 5, False),
        (torch.ones(2, D) / 3, [1, 1], False),
    ],
)
def test_degenerate_batches(mode, rows, y, empty):
    z = rows.clone().requires_grad_()
    cel = SlotCrossCEL(C, D, SIGMA, mode, tau=0.01, eps=1e-6)
    loss = cel(z, torch.tensor(y))
    loss.backward()
    assert loss.isfinite() and z.grad.isfinite().all() and loss.item() < 1e-4
    assert all(p.grad.isfinite().all() for p in cel.parameters())
    assert (float(cel.stats["skipped"]) == 1) == empty
    if empty:
        assert loss.item() == 0 and not z.grad.any()


def test_noise_is_fresh_per_row_and_call_in_training_and_fixed_in_eval():
    cel, seen = make().train(), []
    cel.slot_attention.iterations = 0  # slots = μ + exp(log σ) ⊙ N(0, I)
    cel.slot_attention.register_forward_hook(lambda module, args, slots: seen.append(slots[:, 0].detach()))
    z = features(10).requires_grad_()
    cel(z, UNEVEN), cel(z, UNEVEN)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[0][0], seen[0][1])
    assert cel.eval()(z, UNEVEN).item() == cel(z, UNEVEN).item()


@pytest.mark.parametrize("mode", CLASS_MODES)
def test_state_dict_deepcopy_and_feature_maps(mode):
    z = features(11, dim=12).requires_grad_()
    cel, other = make(mode, dim=12), make(mode, seed=5, dim=12)
    assert other(z, UNEVEN).item() != cel(z, UNEVEN).item()
    other.load_state_dict(copy.deepcopy(cel.state_dict()))
    maps = z.view(14, 3, 2, 2).to(memory_format=torch.channels_last)
    assert other(maps, UNEVEN).item() == cel(z, UNEVEN).item() == copy.deepcopy(cel)(z, UNEVEN).item()


def test_stats_say_what_they_say():
    """One slot: the spread of two samples is half their squared distance, the unbiased variance."""
    z = torch.tensor([[0.0, 0.0, 1.0], [0.2, 0.0, 1.0], [0.5, 0.5, 0.5]]).double()
    cel = make("mixture", dim=3, slots=1)
    loss = cel(z, torch.tensor([0, 0, 1]))
    s = {k: float(v) for k, v in cel.stats.items()}
    assert s["spread"] == pytest.approx(0.02 / 3) and s["above_tau"] == pytest.approx(1 / 3)
    assert s["slots_used"] == pytest.approx(1) and s["skipped"] == pytest.approx(1 / 3)
    var = torch.tensor([0.02, 0.0, 0.0]).double()
    assert s["loss"] == pytest.approx(float(2 / 3 * base(cel, var).mean())) == pytest.approx(loss.item())


def test_beta_and_rho_are_learned_where_they_act():
    names = lambda **k: {n for n, _ in SlotCrossCEL(3, 8, 0.1, **k).named_parameters() if "." not in n}
    assert names(mode="documented") == {"log_beta", "log_rho"} and names() == {"log_beta"}
    assert SlotCrossCEL(3, 8, 0.1).log_beta.exp().item() == pytest.approx(BETA)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"tau": 0}, "tau"), ({"mode": "joint"}, "mode"), ({"sigma": -1, "tau": 1, "eps": 1}, "sigma"),
        ({"slots": 0}, "slots"), ({"delay": -1}, "delay"), ({"eps": 0}, "eps"), ({"memory": -1}, "memory"),
        ({"off": ("snr_gate",)}, "change nothing"), ({"shutoff": 0.5}, "change nothing"),
        ({"mode": "documented", "off": ("gate",)}, "any of"), ({"mode": "image"}, "needs shape"),
        ({"shape": (4, 1, 1), "image_size": 16}, "alone"),
        ({"mode": "image", "shape": (1, 2, 2), "image_size": 16, "memory": 3}, 'memory not "image"'),
        ({"mode": "image", "shape": (1, 2, 2), "image_size": 8}, "11 pixels"),
        ({"mode": "image", "shape": (1, 2, 2), "image_size": 17}, "divide"),
        ({"mode": "image", "shape": (2, 2, 2), "image_size": 16}, "must be dim"),
    ],
)  # fmt: skip
def test_constructor_refuses(kwargs, words):
    with pytest.raises(ValueError, match=words):
        SlotCrossCEL(**{"num_classes": 3, "dim": 4, "sigma": 0.1, **kwargs})


@pytest.mark.parametrize(
    "z, y, words",
    [
        (torch.rand(3, 5), [0, 0, 0], "row of 4 floats"),
        (torch.ones(3, 4).long(), [0, 0, 0], "row of 4 floats"),
        (torch.rand(0, 4), [], "at least one row"), (torch.rand(3, 4), [0, 0, 5], "drop those rows"),
        (torch.rand(3, 4), [0, 0, -100], "drop those rows"),
        (torch.rand(3, 4), [0.1, 0.2, 0.7], "class number"),
        (torch.rand(3, 4), [0, 0], "class number"),
    ],
)  # fmt: skip
def test_forward_refuses(z, y, words):
    with pytest.raises(ValueError, match=words):
        SlotCrossCEL(5, 4, 0.1)(z.requires_grad_() if z.is_floating_point() else z, torch.tensor(y))


def test_features_without_gradient_are_refused_in_training_only():
    z, y = torch.rand(4, 4), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="no gradient"):
        SlotCrossCEL(5, 4, 0.1)(z, y)
    with torch.no_grad():
        assert SlotCrossCEL(5, 4, 0.1)(z, y).item() > 0
