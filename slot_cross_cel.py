"""Slot attention and gated cross attention as a surrogate of H(Z|Y): a class is a mixture of slots, spread is counted per slot.

Claim: slots are learnable mixture components of a class (004 §1.5); keeping the spread inside every slot below τ keeps
H(z'|Y) small even when a class has several modes. As with any learned weighting this holds only as far as the slots are
an honest mixture of the samples: see "Known failures" and `attention`.

Legend: B batch, G classes of the batch with at least two samples, M samples of a class (padded to the largest), D feature size,
S slots, d_s slot size, D' size of the space in which the spread is measured (D or d_s).

    x_m = LayerNorm(z_m);  t_m = E x_m, E [d_s, D] fixed, orthonormal rows
1.  slots = μ + exp(log σ) ⊙ N(0, I); T times:
        a = softmax over slots of (W_k LN(t))·(W_q LN(slots)) d_s^(−3/4);  a = (a + ε_a) / Σ_m (a + ε_a)
        slots = GRU(aᵀ W_v LN(t), slots);  slots = slots + MLP(LN(slots))
2.  y = t + tanh(α_attn) CrossAttn(LN(t), slots);  y = y + tanh(α_ffn) FFN(LN(y))
3.  r_ms = softmax_s(β cos(y_m, s_s));  mass_s = Σ_m r_ms;  μ_s, σ_s² = r-weighted mean and variance;  σ_s² ≤ max_variance
4.  g_dim = sigmoid(MLP(LN(log σ_s²)));  g_snr = sigmoid(κ (σ_s² / (μ_s² + ε) − τ_snr))
5.  L_base = (1/β') log(1 + exp(β' (log(σ_s² + ε) − log(τ + ε) − m)))
6.  w_s ∝ (mass_s / M)^ρ,  Σ_s w_s = 1
7.  g_c = sigmoid(a (M/B − b));  L = Σ_c (M/B) g_c mean_d Σ_s w_s g_dim g_snr L_base

Gradient with r, w and the gates held fixed, which is all that z gets under "detached" and "fit":
    ∂L/∂z_m = (M/B) g_c (1/D') Σ_s w_s g_dim g_snr sigmoid(β'(log σ_s² − log τ − m)) / (σ_s² + ε) · 2 (r_ms/mass_s) (z_m − μ_s)

Known failures. (a) The authors' shutoff (SNR gate mean > 0.5) fired on every call they printed: the run had no defence. Here it is off
unless `shutoff_snr` is set, and stats["shutoff"] says which rule fired. (b) Trained on L, g_dim closes and L falls to 0 while the
spread stays. `attention` says where the gradient of everything with parameters goes; the value is L in all four:
    "joint"        to all parameters and through r, w and the gates to z, as documented; collapses
    "detached"     r, w and the gates are constants
    "adversarial"  z as in joint, but the parameters ascend L (the reversal sits on the parameters); with measure_on="layernorm" what
                   cross attention adds to y is a constant, since ascent would inflate y without limit
    "fit"          r, w and the gates are constants in L; the parameters of 1-3 minimise the negative log-likelihood of the class's
                   (detached) samples under Σ_s w_s N(μ_s, σ_s² + σ²), in nats per dimension. Samples are those that leave the
                   device: E_n is taken inside the exponent, by Jensen an upper bound of the expected −log. The gates do not
                   enter a likelihood, so g_dim keeps its start, 1/2. The samples are those that made the slots, so σ_s² comes out
                   low in small classes (D = 512, three modes of variance 0.0088, M ≈ 13, S = 8: 0.0081; one mode: 0.0074).

    cel = SlotCrossCEL(dim=512, tau=0.125 * 0.05 ** 2, sigma=0.05)       # τ is per dimension
    optimizer = torch.optim.SGD([*encoder.parameters(), *cel.parameters()], lr=0.05)
    loss = cel(encoder(x), y)
    loss.backward()
    optimizer.step()
    print({k: float(v) for k, v in cel.stats.items()})

Reference: 003 "Slot Attention Core" to "Training Integration"; 002 items 1-7; 004 §2.2. Locatello et al. 2020, Alayrac et al. 2022.
Differs from the documents in: the choice of `attention`. measure_on="sent" (default) takes μ_s, σ_s² of z itself, and cross attention
acts through r; measure_on="layernorm" is the documents' variant: r from cos(t, s), and μ_s, σ_s² of y, in the d_s dimensions of t (E is
fixed and the LayerNorm of x has no gain, so that neither can shrink the loss; τ = var_threshold·σ² has no meaning there). The SNR
gate is on by default only for "layernorm": bounded features have σ_s² ≪ μ_s², and it would damp the loss by 1/30. The lower
clip of σ_s² is the floor ε inside both logs, as in the other surrogates; the upper one, max_variance, is open by default (features in
(0,1) stay below 1/4, and a clipped slot gets no gradient). slot_mass=False means ρ = 1, the plain mixture weights. In
eval mode the slots start from a stored noise (equal starts would give equal slots), and the delay does not apply.
Rows with NaN or Inf are left out and weigh zero; B stays the whole batch. Labels are >= 0.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

ATTENTIONS = ("joint", "detached", "adversarial", "fit")
MEASURES = ("sent", "layernorm")
SHUTOFF_NONE, SHUTOFF_DELAY, SHUTOFF_SNR, SHUTOFF_EMPTY = 0, 1, 2, 3   # stats["shutoff"]; EMPTY: no class has two samples
GATE_START = 0.1                    # α_attn, α_ffn, 002
ATTENTION_EPS = 1e-8                # ε_a, Locatello et al.
COSINE_EPS = 1e-6                   # added to squared norms: a constant row has the token 0
MASS_FLOOR = 1e-20
ROUNDING = 1e-6                     # relative error of σ_s² = E[z²] − E[z]² about the class mean, in float32
REFERENCE_VAR_THRESHOLD = 0.125     # σ² = τ / var_threshold when no sigma is given
LEFT_OUT = -1                       # label of rows with NaN or Inf


class GradReverse(torch.autograd.Function):
    """The identity, with the gradient's sign turned: descent on the loss becomes ascent for what lies behind it."""

    @staticmethod
    def forward(ctx, w):
        return w.view_as(w)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class SlotAttention(nn.Module):
    """Item 1. forward(tokens [G, M, d], mask [G, M], noise [G, S, d_s]) -> slots [G, S, d_s], a [G, S, M] (Σ_m a = 1)."""

    def __init__(self, dim, slot_dim, iters=3):
        super().__init__()
        self.iters = iters
        self.mu = nn.Parameter(torch.randn(slot_dim) / math.sqrt(slot_dim))
        self.log_sigma = nn.Parameter(torch.zeros(slot_dim))
        self.W_k, self.W_v = nn.Linear(dim, slot_dim, bias=False), nn.Linear(dim, slot_dim, bias=False)
        self.W_q = nn.Linear(slot_dim, slot_dim, bias=False)
        self.gru = nn.GRUCell(slot_dim, slot_dim)
        self.norm_tokens, self.norm_slots, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(slot_dim), nn.LayerNorm(slot_dim)
        self.mlp = nn.Sequential(nn.Linear(slot_dim, 2 * slot_dim), nn.ReLU(), nn.Linear(2 * slot_dim, slot_dim))

    def forward(self, tokens, mask, noise):
        scale = noise.shape[-1] ** -0.75
        tokens = self.norm_tokens(tokens)
        k, v = self.W_k(tokens), self.W_v(tokens)                           # [G, M, d_s]
        # slots = μ + exp(log σ) ⊙ N(0, I)
        slots = self.mu + self.log_sigma.exp() * noise                      # [G, S, d_s]
        for _ in range(self.iters):
            q = self.W_q(self.norm_slots(slots))
            # a = softmax over slots of k·q d_s^(−3/4)
            a = (q @ k.transpose(1, 2) * scale).softmax(1)                  # [G, S, M]
            # a = (a + ε_a) / Σ_m (a + ε_a)
            a = (a + ATTENTION_EPS) * mask[:, None]
            a = a / a.sum(2, keepdim=True)
            # slots = GRU(aᵀ v, slots);  slots = slots + MLP(LN(slots))
            slots = self.gru((a @ v).flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
            slots = slots + self.mlp(self.norm_mlp(slots))
        return slots, a


class GatedCrossAttention(nn.Module):
    """Item 2, no dropout. forward(q [G, M, d], slots [G, S, d_s]) -> y [G, M, d]; the identity when both gates are 0."""

    def __init__(self, dim, slot_dim, heads=4):
        super().__init__()
        self.heads = heads
        self.norm_q, self.norm_ffn = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.W_q, self.W_o = nn.Linear(dim, slot_dim, bias=False), nn.Linear(slot_dim, dim, bias=False)
        self.W_k, self.W_v = nn.Linear(slot_dim, slot_dim, bias=False), nn.Linear(slot_dim, slot_dim, bias=False)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.alpha_attn, self.alpha_ffn = nn.Parameter(torch.tensor(GATE_START)), nn.Parameter(torch.tensor(GATE_START))

    def forward(self, q, slots):
        split = lambda x: x.unflatten(-1, (self.heads, -1)).transpose(1, 2)                  # [G, heads, ·, d_s/heads]
        attended = F.scaled_dot_product_attention(
            split(self.W_q(self.norm_q(q))), split(self.W_k(slots)), split(self.W_v(slots)))
        # y = q + tanh(α_attn) CrossAttn(q, slots);  y = y + tanh(α_ffn) FFN(LN(y))
        y = q + torch.tanh(self.alpha_attn) * self.W_o(attended.transpose(1, 2).flatten(2))  # [G, M, d]
        return y + torch.tanh(self.alpha_ffn) * self.ffn(self.norm_ffn(y))


class DimGate(nn.Module):
    """Item 4: sigmoid(MLP(LN(log σ_s²))) over the last dimension; starts at 1/2 everywhere."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        nn.init.zeros_(self.fc2.weight), nn.init.zeros_(self.fc2.bias)

    def forward(self, log_var):
        return torch.sigmoid(self.fc2(F.relu(self.fc1(F.layer_norm(log_var, log_var.shape[-1:])))))


def gather_classes(y, finite):
    """Rows of the classes with at least two finite samples: index [G, M], mask [G, M], count [G]; and how many classes have only one."""
    # unique, max and the boolean index wait for the device (at no cost on a CPU): their results decide shapes
    labels, inverse, count = torch.where(finite, y, LEFT_OUT).unique(return_inverse=True, return_counts=True)
    order, start = inverse.argsort(stable=True), count.cumsum(0) - count
    seen = labels >= 0
    keep = seen & (count > 1)
    place = torch.arange(int(torch.where(keep, count, 1).max()), device=y.device)            # [M]
    index = order[(start[keep, None] + place).clamp(max=len(y) - 1)]
    return index, place < count[keep, None], count[keep], (seen & ~keep).sum()


def responsibilities(x, slots, beta):
    """r_ms = softmax_s(β cos(x_m, s_s)): x [G, M, d], slots [G, S, d] -> [G, M, S]."""
    unit = lambda a: a * (a.square().sum(-1, keepdim=True) + COSINE_EPS).rsqrt()
    return (beta * unit(x) @ unit(slots).transpose(1, 2)).softmax(-1)


def slot_moments(share, x):
    """μ_s, σ_s² [G, S, D'] of x [G, M, D'] (centred on the class: E[x²] − E[x]² cancels) under share = r_ms / mass_s [G, M, S]."""
    mean = share.transpose(1, 2) @ x
    return mean, (share.transpose(1, 2) @ x.square() - mean.square()).clamp(min=0)


class SlotCrossCEL(nn.Module):
    """forward(z [B, D] or [B, C, H, W], y [B]) -> L. One set of parameters for all classes; see the module docstring."""

    def __init__(self, dim, tau, slots=8, iters=3, heads=4, slot_dim=64, num_classes=None, attention="fit", measure_on="sent",
                 sigma=None, cross_attention=True, per_dim_gate=True, snr_gate=None, slot_mass=True, class_gate=True,
                 gate_hidden=64, beta=12.0, rho=2.5, kappa=14.0, snr_threshold=0.25, softplus_beta=1.5, margin=0.05,
                 class_a=12.0, class_b=0.04, learnable_scalars=False, delay_calls=100, shutoff_snr=None, max_variance=math.inf, eps=1e-6):
        super().__init__()
        if min(dim, slots, iters, heads, slot_dim, gate_hidden) < 1 or slot_dim % heads:
            raise ValueError("dim, slots, iters, heads, slot_dim and gate_hidden must be at least 1, and heads must divide slot_dim.")
        if not min(tau, eps, beta, rho, softplus_beta) > 0 or not max_variance > tau or delay_calls < 0:
            raise ValueError("tau, eps, beta, rho and softplus_beta must be > 0, max_variance > tau and delay_calls >= 0: "
                             "pass tau = var_threshold*sigma^2.")
        if sigma is not None and not sigma > 0:
            raise ValueError(f"sigma must be > 0, got {sigma}: pass the standard deviation of the channel noise, or None.")
        for name, value, known in (("attention", attention, ATTENTIONS), ("measure_on", measure_on, MEASURES)):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(known)}.")
        self.dim, self.tau, self.eps, self.num_classes = dim, tau, eps, num_classes
        self.attention, self.measure_on = attention, measure_on
        self.noise_var = sigma ** 2 if sigma else tau / REFERENCE_VAR_THRESHOLD
        self.slot_mass, self.class_gate = slot_mass, class_gate
        self.snr_gate = measure_on == "layernorm" if snr_gate is None else snr_gate
        self.kappa, self.snr_threshold, self.softplus_beta, self.margin = kappa, snr_threshold, softplus_beta, margin
        self.class_a, self.class_b, self.max_variance = class_a, class_b, max_variance
        self.delay_calls, self.shutoff_snr = delay_calls, shutoff_snr
        self.slot_attention = SlotAttention(slot_dim, slot_dim, iters)
        self.cross_attention = GatedCrossAttention(slot_dim, slot_dim, heads) if cross_attention else None
        self.dim_gate = DimGate(dim if measure_on == "sent" else slot_dim, gate_hidden) if per_dim_gate else None
        register = self.register_parameter if learnable_scalars else self.register_buffer
        wrap = nn.Parameter if learnable_scalars else (lambda value: value)
        register("log_beta", wrap(torch.tensor(math.log(beta))))
        register("log_rho", wrap(torch.tensor(math.log(rho))))
        self.register_buffer("E", nn.init.orthogonal_(torch.empty(slot_dim, dim)))
        self.register_buffer("eval_noise", torch.randn(slots, slot_dim))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.stats = {}

    def _call(self, part, *args):
        """part(*args), with the gradient of its parameters (never of args) reversed under "adversarial"."""
        if self.attention != "adversarial":
            return part(*args)
        return functional_call(part, {name: GradReverse.apply(p) for name, p in part.named_parameters()}, args)

    def _scalar(self, log_value):
        return (GradReverse.apply(log_value) if self.attention == "adversarial" else log_value).exp()

    def forward(self, z, y):
        z = z.flatten(1)                                                    # [B, D]
        if z.shape[1] != self.dim or y.shape != z.shape[:1]:
            raise ValueError(f"expected z [B, {self.dim}] and y [B], got {tuple(z.shape)} and {tuple(y.shape)}.")
        if y.device.type == "cpu" and (y.min() < 0 or self.num_classes is not None and y.max() >= self.num_classes):
            raise ValueError("labels must be in 0..num_classes-1: check y and num_classes.")
        B = len(z)
        finite = z.isfinite().all(1)
        z = torch.where(finite[:, None], z, 0.0)
        index, mask, M, skipped = gather_classes(y, finite)
        M, G, through = M.to(z.dtype), len(M), self.attention in ("joint", "adversarial")
        live = lambda a: a if through else a.detach()

        # x_m = LayerNorm(z_m);  t_m = E x_m
        t = (F.layer_norm(z, z.shape[1:]) @ self.E.T)[index]                # [G, M, d_s]
        noise = self.eval_noise.expand(G, -1, -1)
        noise = torch.randn_like(noise) if self.training else noise         # [G, S, d_s]
        slots, _ = self._call(self.slot_attention, live(t), mask, noise)    # [G, S, d_s]
        out = live(t) if self.cross_attention is None else self._call(self.cross_attention, live(t), slots)
        # r_ms = softmax_s(β cos(y_m, s_s));  mass_s = Σ_m r_ms
        sent = self.measure_on == "sent"
        r = responsibilities(out if sent else live(t), slots, self._scalar(self.log_beta)) * mask[..., None]  # [G, M, S]
        mass = r.sum(1)                                                     # [G, S]
        share = r / mass.clamp(min=MASS_FLOOR)[:, None]
        # w_s ∝ (mass_s / M)^ρ
        w = (mass / M[:, None]).clamp(min=MASS_FLOOR)                        # at 0 the slope of w^ρ is infinite for ρ < 1
        w = w ** self._scalar(self.log_rho) if self.slot_mass else w
        w = w / w.sum(1, keepdim=True)                                      # [G, S]

        # measured is z, or y = t + what cross attention adds: a constant except in joint, ascent would inflate it without limit
        added = out - t if self.attention == "joint" else (out - t).detach()
        x = z[index] if sent else t + added                                 # [G, M, D']
        centre = ((x * mask[..., None]).sum(1) / M[:, None])[:, None].detach()              # [G, 1, D']
        x = (x - centre) * mask[..., None]
        mean, var = slot_moments(live(share), x)                            # [G, S, D']
        loss, log = self._penalty(live(w), mean + centre, var, M, B)
        shutoff = self._shutoff(G, log["snr_gate"])
        loss = loss * (shutoff == SHUTOFF_NONE)
        self._record(loss, log, var, w, M, shutoff, finite, skipped)
        if self.attention == "fit":
            sample = ((z[index] if sent else t) - centre).detach() * mask[..., None]
            model = x.detach() if sent else (out - centre) * mask[..., None]
            nll = self._nll(sample, w, *slot_moments(share, model), mask) / B
            loss = loss + (nll - nll.detach())
        return loss

    def _penalty(self, w, mean, var, M, B):
        """Items 4, 5 and 7 from the weights w [G, S] and the moments [G, S, D'] -> L, gate means."""
        fixed = self.attention in ("detached", "fit")
        gate, dim_gate, snr_gate, class_gate = 1.0, w.new_ones(1), w.new_ones(1), w.new_ones(1)
        var = var.clamp(max=self.max_variance)
        log_var = torch.log(var + self.eps)
        # L_base = (1/β') log(1 + exp(β' (log σ_s² − log τ − m)))
        excess = log_var - math.log(self.tau + self.eps) - self.margin
        base = F.softplus(excess, beta=self.softplus_beta)                  # [G, S, D']
        with torch.set_grad_enabled(torch.is_grad_enabled() and not fixed):
            if self.dim_gate is not None:
                # g_dim = sigmoid(MLP(LN(log σ_s²)))
                gate = dim_gate = self._call(self.dim_gate, log_var)
            if self.snr_gate or self.shutoff_snr is not None:
                # g_snr = sigmoid(κ (σ_s² / (μ_s² + ε) − τ_snr))
                snr_gate = torch.sigmoid(self.kappa * (var / (mean.square() + self.eps) - self.snr_threshold))
                gate = gate * snr_gate if self.snr_gate else gate
            if self.class_gate:
                # g_c = sigmoid(a (M/B − b))
                class_gate = torch.sigmoid(self.class_a * (M / B - self.class_b))            # [G]
        # L = Σ_c β_c g_c mean_d Σ_s w_s g_dim g_snr L_base
        per_class = ((gate * base).mean(2) * w).sum(1)                      # [G]
        loss = (M / B * class_gate * per_class).sum()
        average = lambda a: a.detach().sum() / max(a.numel(), 1)
        return loss, {"dim_gate": average(dim_gate), "snr_gate": average(snr_gate), "class_gate": average(class_gate),
                      "above": ((excess > 0) & (var < self.max_variance)).detach()}

    def _nll(self, x, w, mean, var, mask):
        """Σ over samples of −log Σ_s w_s exp(E_n log N(x_m + n; μ_s, σ_s² + σ²)), per dimension; reaches parameters only."""
        class_var = (x.square().sum(1) / mask.sum(1, keepdim=True))[:, None]                 # [G, 1, D']
        var = var + self.noise_var + ROUNDING * class_var                   # [G, S, D']
        weight = 1 / var
        # Σ_d (x − μ)² / V = Σ x²/V − 2 Σ x μ/V + Σ μ²/V
        square = x.square() @ weight.transpose(1, 2) - 2 * x @ (mean * weight).transpose(1, 2)           # [G, M, S]
        constant = (torch.log(2 * math.pi * var) + (mean.square() + self.noise_var) * weight).sum(2)     # [G, S]
        log_mix = torch.log(w.clamp(min=MASS_FLOOR))[:, None] - 0.5 * (square + constant[:, None])
        return -(log_mix.logsumexp(2) * mask).sum() / x.shape[2]

    @torch.no_grad()
    def _shutoff(self, G, snr_mean):
        """Which rule silences this call, as a tensor: no wait for the device."""
        code = torch.where(snr_mean > (math.inf if self.shutoff_snr is None else self.shutoff_snr), SHUTOFF_SNR, SHUTOFF_NONE)
        if self.training:
            code = torch.where(self.calls < self.delay_calls, SHUTOFF_DELAY, code)
            self.calls += 1
        return code if G else torch.full_like(code, SHUTOFF_EMPTY)

    @torch.no_grad()
    def _record(self, loss, log, var, w, M, shutoff, finite, skipped):
        above, G = log.pop("above"), max(len(M), 1)
        self.stats = {
            "loss": loss.detach(), "active": (above.any() & (shutoff == SHUTOFF_NONE)).float(),
            "nonfinite": (~finite).sum(), "skipped_classes": skipped, "skipped": skipped,
            "shutoff": shutoff, "calls": self.calls.clone(), **log,
            "variance": (w * var.mean(2)).sum() / G,                        # mean over classes of Σ_s w_s mean_d σ_s²
            "above_tau": (w * above.to(w.dtype).mean(2)).sum() / G,         # share of dimensions where L_base is past its bend
            "slots_used": (1 / w.square().sum(1)).sum() / G,                # effective number of slots, 1 to S
        }
