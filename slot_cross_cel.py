"""Slot attention and gated cross attention as a CEL: a class is a mixture of slots, its spread is theirs.

Items 1-7 of [C] and [D], for each class of the batch; t_m is LayerNorm(z_m) times a fixed E [d_s, D]:
  1. slots = μ + exp(log σ) ⊙ N(0, I);  T times: slots = GRU(aᵀ W_v t, slots), slots += MLP(LN(slots)),
     a = softmax over slots of (W_k t)·(W_q slots) d_s^(−3/4), renormalised over samples
  2. y = t + tanh(α_attn) CrossAttn(t, slots);  y = y + tanh(α_ffn) FFN(LN(y))
  3. r_ms = softmax_s(β cos(·, s_s));  mass_s = Σ_m r_ms;  μ_s, σ_s² = mean and variance weighted by r
  4. g_dim = sigmoid(MLP(LN(log σ_s²)));  g_snr = sigmoid(κ (σ_s² / (μ_s² + ε) − τ_snr))
  5. L_base = (1/β') log(1 + exp(β' (log(σ_s² + ε) − log(τ + ε) − m)))
  6. w_s ∝ (mass_s / M)^ρ,  Σ_s w_s = 1
  7. g_c = sigmoid(a (M/B − b));  L = Σ_c (M/B) g_c mean_d Σ_s w_s g_dim g_snr L_base
B batch, C classes, G those in the batch, M samples of a class, N with padding, S slots, d_s their size.

"mixture" (default): the slots are the components of Σ_s w_s N(μ_s, σ_s² + σ²), a density of the class.
  Cross-fitted: w, μ_s, σ_s² come from one half of the class's samples. The parameters raise the likelihood of
  the other half; L measures the other half's spread about μ_s, split by the density's posterior, divided by
  1 + 1/n with n the effective samples behind μ_s; then the reverse. z gets the gradient of that spread alone.
  No gates: g_dim and g_snr would be constants, ρ = 2.5 starves small modes, and g_c damps a class for being
  rare, which the two halves and the memory already answer.
"documented": as printed. Spread of y, all gates, β and ρ learned, gradients to everything, L = 0 while the
  mean of g_snr exceeds `shutoff` (the documents: 0.5). It collapses: g_dim closes, the spread stays.
  `off` names what to leave out: cross_attention, per_dim_gate, snr_gate, slot_mass, class_gate.
"image", [E] objective 1: tokens are the h·w cells of what one image sends, z + n, with a learned position.
  Each cell asks the slots (2) and paints the patch under it: x̂. The parameters minimise ‖x̂ − x‖² + 1 −
  SSIM(x̂, x); z pays max(0, SSIM(x̂, x) − s). This is adversarial reconstruction with an attention decoder,
  kin to Noise-ARL: no bound follows. Its stats: `spread` is ‖x̂ − x‖², `above_tau` the share that pays.

    cel = SlotCrossCEL(num_classes=10, dim=512, sigma=0.1)    # "image": and shape=(8, 8, 8), image_size=32
    own = torch.optim.Adam(cel.parameters(), lr=2e-3)         # "image" needs an Adam of its own
    loss = cel(encoder(x), y, x)    # z [B, D] or [B, c, h, w], y [B] int64; "image": x [B, 3, H, W] in [0, 1]

memory=m counts the last m samples of each class beside the batch's own. They have no gradient; the batch's is
(M + m)/M times as large. Few samples of several modes need it: a half that lacks a mode measures too much.
Differs from the documents in: the modes; E; ε = floor·σ² instead of a clip of σ_s². torch.compile breaks the
graph in by_class, whose shapes follow the labels ("image": no break). Left out, with gradient 0: rows with
NaN or Inf, and classes with fewer than two samples.
"""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

MODES = ("mixture", "documented", "image")
PARTS = ("cross_attention", "per_dim_gate", "snr_gate", "slot_mass", "class_gate")  # what `off` may name
SLOT_DIM, ITERATIONS, HEADS = 64, 3, 4  # d_s, T
GATE_START, GATE_HIDDEN = 0.1, 64  # α_attn and α_ffn at the start; hidden width of g_dim
BETA, RHO = 12.0, 2.5  # β, ρ at the start
KAPPA, TAU_SNR = 14.0, 0.25  # κ, τ_snr
SOFTPLUS_BETA, MARGIN = 1.5, 0.05  # β', m
CLASS_A, CLASS_B = 12.0, 0.04  # a, b
IMAGE_SLOT_DIM, IMAGE_ITERATIONS, SSIM_ALLOWED = 48, 2, 0.2  # d_s, T and s of "image"
SSIM_WINDOW, SSIM_SIGMA, SSIM_C1, SSIM_C2 = 11, 1.5, 0.01**2, 0.03**2
ATTENTION_EPS = 1e-8  # in a, before it is renormalised over samples
COSINE_EPS = 1e-6  # added to squared norms: the token of a constant row is 0
MASS_FLOOR = 1e-20
ROUNDING = 1e-6  # relative error of σ_s² about the class mean in float32
SPOKE, DELAYED, SHUT_OFF = 0, 1, 2  # stats["silent"]


class SlotCrossCEL(nn.Module):
    """loss = cel(z, y, x), one set of parameters for all classes; items and modes at the top of the file."""

    # fmt: off
    def __init__(self, num_classes, dim, sigma, mode="mixture", slots=8, memory=0, var_threshold=0.125,
                 floor=1.0, tau=None, eps=None, delay=0, shutoff=None, off=(), shape=None, image_size=None):
        # fmt: on
        super().__init__()
        self.num_classes, self.dim, self.sigma, self.mode = num_classes, dim, sigma, mode
        self.tau = var_threshold * sigma**2 if tau is None else tau
        self.eps = floor * sigma**2 if eps is None else eps
        self.delay, self.shutoff, self.off = delay, shutoff, off
        if mode not in MODES or set(off) - set(PARTS):
            raise ValueError(f"mode {mode!r}, off {off!r}: use one of {MODES} and any of {PARTS}.")
        if mode != "documented" and (off or shutoff is not None):
            raise ValueError(f'off and shutoff change nothing in mode "{mode}": use them with "documented".')
        if {shape is None, image_size is None} != {mode != "image"}:
            raise ValueError('mode "image" needs shape=(c, h, w) of z and image_size; they are for it alone.')
        if mode == "image" and memory:
            raise ValueError('memory changes nothing in mode "image", which looks at one image at a time.')
        if min(num_classes, dim, slots, memory + 1, delay + 1) < 1 or not min(sigma, self.tau, self.eps) > 0:
            raise ValueError("num_classes, dim, slots must be >= 1, memory, delay >= 0, sigma, tau, eps > 0.")
        size = IMAGE_SLOT_DIM if mode == "image" else SLOT_DIM
        self.register_buffer("eval_noise", torch.randn(slots, size))  # equal starts would give equal slots
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))  # in training mode
        self.stats = {}
        if mode == "image":
            self.painter = Painter(dim, shape, image_size)
            self.register_buffer("window", ssim_window(image_size))
            return
        self.register_buffer("E", nn.init.orthogonal_(torch.empty(size, dim)))  # learned, it could shrink L
        self.slot_attention = SlotAttention(size, ITERATIONS)
        self.cross_attention = None if "cross_attention" in off else GatedCrossAttention(size)
        self.log_beta = nn.Parameter(torch.tensor(math.log(BETA)))
        if mode == "documented" and "slot_mass" not in off:
            self.log_rho = nn.Parameter(torch.tensor(math.log(RHO)))
        if mode == "documented" and "per_dim_gate" not in off:
            norm, first = nn.LayerNorm(size, elementwise_affine=False), nn.Linear(size, GATE_HIDDEN)
            self.dim_gate = nn.Sequential(norm, first, nn.ReLU(), nn.Linear(GATE_HIDDEN, size), nn.Sigmoid())
            nn.init.zeros_(self.dim_gate[3].weight), nn.init.zeros_(self.dim_gate[3].bias)  # starts at 1/2
        self.register_buffer("memory", torch.zeros(num_classes, memory, dim))  # the last m samples, a ring
        self.register_buffer("stored", torch.zeros(num_classes, dtype=torch.int64))  # how many it ever got

    def forward(self, z, y, x=None):
        z, ok = usable_rows(self, z, y)  # [B, D], [B]
        with torch.autocast(z.device.type, enabled=False):
            if self.mode == "image":
                return self.on_image(z, ok, x)
            mixture, batch = self.mode == "mixture", (z, y, ok)
            parts = 2 if mixture else 1  # a row is half a class, R = 2G, or a class, R = G
            z, mask, beta = self.by_class(*batch, parts)  # [R, N, D], [R, N], M/B [R]
            # t_m = E LayerNorm(z_m)
            t = F.layer_norm(z.detach() if mixture else z, (self.dim,)) @ self.E.T  # [R, N, d_s]

            # 1. slots = μ + exp(log σ) ⊙ N(0, I), then T rounds of attention
            slots = self.slot_attention(t, mask, self.noise(len(t)))  # [R, S, d_s]
            # 2. y = t + tanh(α_attn) CrossAttn(t, slots);  y = y + tanh(α_ffn) FFN(LN(y))
            out = t if self.cross_attention is None else self.cross_attention(t, slots)  # [R, N, d_s]
            # 3. r_ms = softmax_s(β cos(x_m, s_s)): x_m = t_m as printed; y_m where y is not what is measured
            cosine = unit(out if mixture else t) @ unit(slots).mT
            r = (self.log_beta.exp() * cosine).softmax(2)  # [R, N, S]
            #    mass_s = Σ_m r_ms;  μ_s = Σ_m r_ms z_m / mass_s;  σ_s² = Σ_m r_ms (z_m − μ_s)² / mass_s
            x, centre = centred(z if mixture else out, mask, parts)  # [R, N, D'], D' = D or d_s
            share, mass_M = weights(r, mask)  # r_ms / mass_s [R, N, S], mass_s / M [R, S]
            mean, var = slot_moments(share, x.detach() if mixture else x)  # [R, S, D']
            if mixture:
                var, mass_M, nll = self.on_other_half(x, mask, share, mass_M, mean, var)

            # 4. g_dim = sigmoid(MLP(LN(log σ_s²)))
            log_var, gates, g = torch.log(var + self.eps), {}, 1.0  # [R, S, D']
            if hasattr(self, "dim_gate"):
                g = gates["dim_gate"] = self.dim_gate(log_var)  # [R, S, D']
            #    g_snr = sigmoid(κ (σ_s² / (μ_s² + ε) − τ_snr))
            if not mixture:
                snr = var / ((mean + centre).square() + self.eps)
                gates["snr_gate"] = torch.sigmoid(KAPPA * (snr - TAU_SNR))  # [R, S, D']
                g = g if "snr_gate" in self.off else g * gates["snr_gate"]
            # 5. L_base = (1/β') log(1 + exp(β' (log(σ_s² + ε) − log(τ + ε) − m)))
            excess = log_var - math.log(self.tau + self.eps) - MARGIN
            L_base = F.softplus(excess, beta=SOFTPLUS_BETA)  # [R, S, D']
            # 6. w_s ∝ (mass_s / M)^ρ;  ρ = 1 where it is not learned
            w = mass_M.clamp(min=MASS_FLOOR)  # at 0 the slope of w^ρ is infinite for ρ < 1
            w = w ** self.log_rho.exp() if hasattr(self, "log_rho") else w
            w = w / w.sum(1, keepdim=True)  # [R, S]
            # 7. g_c = sigmoid(a (M/B − b))
            g_c = torch.ones_like(beta)
            if not mixture and "class_gate" not in self.off:
                g_c = gates["class_gate"] = torch.sigmoid(CLASS_A * (beta - CLASS_B))  # [R]
            #    L = Σ_c (M/B) g_c mean_d Σ_s w_s g_dim g_snr L_base
            loss = (beta * g_c * (w * (g * L_base).mean(2)).sum(1)).sum()

            silent = self.silence(gates.get("snr_gate"))
            loss = loss * (silent == SPOKE)
            self.note(loss, silent, beta, w, mass_M, var, gates, nll if mixture else None)
            if mixture:
                nll = (beta * nll).sum()
                loss = loss + (nll - nll.detach())  # the value stays L; nll has the parameters' gradient
            if self.training:
                self.remember(*batch)
            return loss

    def on_other_half(self, z, mask, share, w, mean, var):
        """σ_s² of each half about the other half's μ_s, mass_s / M, and −log likelihood a dimension [R]."""
        n = 1 / share.detach().square().sum(1).clamp(min=MASS_FLOOR)  # effective samples behind μ_s  [R, S]
        w, mean, var, n = (by_row(a, 2).flip(1).flatten(0, 1) for a in (w, mean, var, n))
        size = (var + mean.square()).mean(1, keepdim=True).detach()  # so that V stays above its rounding
        sample, V = z.detach(), var + self.sigma**2 + ROUNDING * size  # [R, N, D], [R, S, D]
        # mean over n of log N(z + n; μ_s, V) = −½ Σ_d (log 2πV + ((z − μ_s)² + σ²) / V), multiplied out
        square = sample.square() @ (1 / V).mT - sample @ (2 * mean / V).mT  # [R, N, S]
        rest = (torch.log(2 * math.pi * V) + (mean.square() + self.sigma**2) / V).sum(2)  # [R, S]
        log_joint = torch.log(w.clamp(min=MASS_FLOOR))[:, None] - 0.5 * (square + rest[:, None])  # [R, N, S]
        log_q = log_joint.logsumexp(2).where(mask, 0).sum(1) / mask.sum(1)  # [R]
        # p(s | z_m) = w_s N(z_m; μ_s, V) / Σ_s w_s N: the density's own r, a constant for z
        share, w = weights(log_joint.detach().softmax(2), mask)
        # E (z − μ_s)² = σ_s² (1 + 1/n), since μ_s is a mean of n other samples
        _, var = slot_moments(share, z, mean.detach())
        return var / (1 + 1 / n)[..., None], w, -log_q / self.dim

    def on_image(self, z, ok, x):
        if x is None or not x.is_floating_point() or x.shape != (len(z), 3, *2 * (self.window.shape[1],)):
            raise ValueError(f'mode "image" needs x, floats [{len(z)}, 3, image_size, image_size] in [0, 1].')
        x = x.to(z.dtype)
        ok = ok & x.flatten(1).isfinite().all(1)
        x = torch.where(ok[:, None, None, None], x, 0)
        # z' = z + n, what leaves the device
        sent = (z + self.sigma * torch.randn_like(z)).view(-1, *self.painter.shape)  # [B, c, h, w]
        noise = self.noise(len(z))
        # the encoder pays max(0, SSIM(x̂, x) − s), through parameters that stand still
        still = {name: p.detach() for name, p in self.painter.named_parameters()}
        guess = functional_call(self.painter, still, (sent, noise))  # x̂ [B, 3, H, W]
        likeness = ssim(guess, x, self.window)  # [B]
        silent = self.silence()
        loss = (F.relu(likeness - SSIM_ALLOWED) * ok).sum() / len(z) * (silent == SPOKE)

        share = ok.to(z.dtype) / ok.sum().clamp(min=1)
        error = (guess.detach() - x).square().mean((1, 2, 3))  # [B]
        set_stats(self, loss, "every row had NaN or Inf, or the delay is not over", {
            "spread": (share * error).sum(), "ssim": (share * likeness.detach()).sum(),
            "above_tau": (share * (likeness.detach() > SSIM_ALLOWED)).sum(),
            "skipped": torch.where(silent == SPOKE, 1 - ok.sum() / len(z), 1.0), "silent": silent,
        })  # fmt: skip
        if torch.is_grad_enabled():
            # the parameters minimise ‖x̂ − x‖² + 1 − SSIM(x̂, x), for a z that stands still
            guess = self.painter(sent.detach(), noise)
            own = (guess - x).square().mean((1, 2, 3)) + 1 - ssim(guess, x, self.window)
            own = (own * ok).sum() / len(z)
            loss = loss + (own - own.detach())
        return loss

    def noise(self, rows):
        start = self.eval_noise.expand(rows, -1, -1)  # [rows, S, d_s]
        return torch.randn_like(start) if self.training else start

    @torch.no_grad()
    def silence(self, snr_gate=None):
        """Which rule makes this call zero, as a tensor: no wait for the device."""
        silent = torch.full_like(self.calls, SPOKE)
        if self.shutoff is not None and snr_gate.numel():
            silent = torch.where(snr_gate.mean() > self.shutoff, SHUT_OFF, silent)
        if self.training:
            silent = torch.where(self.calls < self.delay, DELAYED, silent)
            self.calls += 1
        return silent

    def by_class(self, z, y, ok, parts):
        """Classes of the batch with two samples or more, memory last: z [R, N, D], mask [R, N], M/B [R].

        parts=2 puts sample 0, 2, ... of a class in one row and 1, 3, ... in the next, and splits M/B alike.
        """
        C, m, _ = self.memory.shape
        M, turn = count(y, ok, C)  # [C], [B]
        total = M + self.stored.clamp(max=m)
        present = (M > 0) & (total > 1)
        row = parts * (present.cumsum(0) - 1)  # [C]
        n = (total[present][:, None] + torch.arange(parts, 0, -1, device=z.device) - 1) // parts  # [G, parts]
        place = torch.arange(max(n.flatten().tolist(), default=1), device=z.device)
        mask = place < n.flatten()[:, None]  # [R, N]
        padded = z.new_zeros(*mask.shape, self.dim)
        if m:
            c, j = (present[:, None] & (torch.arange(m, device=z.device) < self.stored[:, None])).nonzero().T
            at = M[c] + j  # the how many-th of the class, after the batch's
            padded[row[c] + at % parts, at // parts] = self.memory[c, j]
            more = (total.to(z.dtype) / M.clamp(min=1))[y, None]
            z = z.detach() + more * (z - z.detach())  # the value is z, its gradient (M + m)/M times as large
        keep = ok & present[y]
        padded = padded.index_put(((row[y] + turn % parts)[keep], (turn // parts)[keep]), z[keep])
        beta = (M.to(z.dtype) / total)[present][:, None] * n / len(y)  # M/B, split by the samples of the row
        return padded, mask, beta.flatten()

    @torch.no_grad()
    def remember(self, z, y, ok):
        C, m, _ = self.memory.shape
        if m == 0:
            return
        M, turn = count(y, ok, C)
        last = ok & (turn >= (M - m)[y])  # [B] of more than m samples only the last m stay
        self.memory[y[last], (self.stored[y] + turn)[last] % m] = z.detach()[last]
        self.stored += M

    @torch.no_grad()
    def note(self, loss, silent, beta, w, mass_M, var, gates, nll):
        share = beta / beta.sum().clamp(min=MASS_FLOOR)  # [R]
        figures = {
            "spread": (share * (w * var.mean(2)).sum(1)).sum(),
            "above_tau": (share * (w * (var > self.tau).to(w.dtype).mean(2)).sum(1)).sum(),
            "skipped": torch.where(silent == SPOKE, 1 - beta.sum(), 1.0),
            "slots_used": (share / mass_M.square().sum(1).clamp(min=MASS_FLOOR)).sum(),
            "silent": silent,
            **{name: gate.sum() / max(gate.numel(), 1) for name, gate in gates.items()},
        }
        if nll is not None:
            figures["nll"] = (share * nll).sum()  # of held-out samples, nats a dimension
        why = "every class had fewer than two samples (larger batches, memory=32), or see delay and shutoff"
        set_stats(self, loss, why, figures)

    def _apply(self, fn, recurse=True):
        return super()._apply(never_half(fn), recurse)


class SlotAttention(nn.Module):
    """Item 1: tokens [R, N, d_s], mask [R, N], noise [R, S, d_s] -> slots [R, S, d_s]."""

    def __init__(self, size, iterations):
        super().__init__()
        self.iterations = iterations
        self.mu = nn.Parameter(torch.randn(size) / math.sqrt(size))
        self.log_sigma = nn.Parameter(torch.zeros(size))
        self.W_k, self.W_v, self.W_q = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.norm_tokens, self.norm_slots, self.norm_mlp = (nn.LayerNorm(size) for _ in range(3))
        self.gru = nn.GRUCell(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size))

    def forward(self, tokens, mask, noise):
        tokens = self.norm_tokens(tokens)
        k, v = self.W_k(tokens), self.W_v(tokens)  # [R, N, d_s]
        # slots = μ + exp(log σ) ⊙ N(0, I)
        slots = self.mu + self.log_sigma.exp() * noise  # [R, S, d_s]
        for _ in range(self.iterations):
            q = self.W_q(self.norm_slots(slots))
            # a = softmax over slots of k·q d_s^(−1/2) d_s^(−1/4)
            a = (q @ k.mT * slots.shape[2] ** -0.75).softmax(1)  # [R, S, N]
            # a = (a + ε_a) / Σ_m (a + ε_a)
            a = (a + ATTENTION_EPS) * mask[:, None]
            a = a / a.sum(2, keepdim=True)
            # slots = GRU(aᵀ v, slots);  slots = slots + MLP(LN(slots))
            slots = self.gru((a @ v).flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
            slots = slots + self.mlp(self.norm_mlp(slots))
        return slots


class GatedCrossAttention(nn.Module):
    """Item 2, without dropout: q [R, N, d_s], slots [R, S, d_s] -> y [R, N, d_s]."""

    def __init__(self, size):
        super().__init__()
        self.norm_q, self.norm_ffn = nn.LayerNorm(size), nn.LayerNorm(size)
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.ffn = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
        self.alpha_attn = nn.Parameter(torch.tensor(GATE_START))
        self.alpha_ffn = nn.Parameter(torch.tensor(GATE_START))

    def forward(self, q, slots):
        split = lambda a: a.unflatten(2, (HEADS, -1)).transpose(1, 2)  # [R, heads, ·, d_s/heads]
        asked, key, value = split(self.W_q(self.norm_q(q))), split(self.W_k(slots)), split(self.W_v(slots))
        a = (asked @ key.mT * asked.shape[3] ** -0.5).softmax(3)  # [R, heads, N, S]
        attended = (a @ value).transpose(1, 2).flatten(2)  # [R, N, d_s]
        # y = q + tanh(α_attn) CrossAttn(q, slots);  y = y + tanh(α_ffn) FFN(LN(y))
        y = q + torch.tanh(self.alpha_attn) * self.W_o(attended)
        return y + torch.tanh(self.alpha_ffn) * self.ffn(self.norm_ffn(y))


class Painter(nn.Module):
    """ "image": what was sent [B, c, h, w], noise [B, S, d_s] -> x̂ [B, 3, H, W]."""

    def __init__(self, dim, shape, image_size):
        super().__init__()
        (c, h, w), self.shape, self.patch = shape, tuple(shape), image_size // shape[1]
        if c * h * w != dim or (self.patch * h, self.patch * w) != (image_size, image_size):
            raise ValueError(
                f"shape {shape}: c·h·w must be dim {dim}, and h = w divide image_size {image_size}."
            )
        self.embed = nn.Linear(c, IMAGE_SLOT_DIM)
        self.position = nn.Parameter(torch.randn(h * w, IMAGE_SLOT_DIM) / math.sqrt(IMAGE_SLOT_DIM))
        self.slot_attention = SlotAttention(IMAGE_SLOT_DIM, IMAGE_ITERATIONS)
        self.cross_attention = GatedCrossAttention(IMAGE_SLOT_DIM)
        self.head = nn.Linear(IMAGE_SLOT_DIM, 3 * self.patch**2)

    def forward(self, sent, noise):
        t = self.embed(sent.flatten(2).transpose(1, 2)) + self.position  # [B, h·w, d_s]
        slots = self.slot_attention(t, torch.ones_like(t[..., 0]), noise)  # [B, S, d_s]
        y = self.cross_attention(t, slots)  # [B, h·w, d_s]
        patches = torch.sigmoid(self.head(y)).transpose(1, 2).unflatten(2, sent.shape[2:])  # [B, 3·p·p, h, w]
        return F.pixel_shuffle(patches, self.patch)


def unit(x):
    return x * (x.square().sum(2, keepdim=True) + COSINE_EPS).rsqrt()


def count(y, ok, num_classes):
    """Samples of each class [C], and the how many-th of its class a row is, from 0 [B]."""
    one_hot = F.one_hot(y, num_classes) * ok[:, None]  # [B, C]
    return one_hot.sum(0), one_hot.cumsum(0).gather(1, y[:, None])[:, 0] - 1


def by_row(a, parts):
    return a.unflatten(0, (len(a) // parts, parts))  # [G, parts, ...]


def centred(x, mask, parts):
    """x [R, N, D'] minus the mean of its class, so that squares round less, and that mean [R, 1, D']."""
    sums = ((x * mask[..., None]).sum(1), mask.sum(1, keepdim=True))
    total, n = (by_row(a, parts).sum(1).repeat_interleave(parts, 0) for a in sums)
    centre = (total / n)[:, None].detach()
    return x - centre, centre


def weights(r, mask):
    """r_ms / mass_s [R, N, S] and mass_s / M [R, S], over the samples of the mask [R, N]."""
    r = r * mask[..., None]
    mass = r.sum(1)
    return r / mass.clamp(min=MASS_FLOOR)[:, None], mass / mask.sum(1, keepdim=True)


def slot_moments(share, x, mean=None):
    """μ_s = Σ_m share_ms x_m unless given, and Σ_m share_ms (x_m − μ_s)²: both [R, S, D']."""
    own = share.mT @ x
    mean = own if mean is None else mean
    # Σ share (x − μ)² = Σ share x² − (2 Σ share x − μ) μ, without a tensor [R, N, S, D']
    return mean, (share.mT @ x.square() - (2 * own - mean) * mean).clamp(min=0)


def ssim_window(size):
    """The Gaussian window at each place where all of it is inside the image: [size − 10, size]."""
    if size < SSIM_WINDOW:
        raise ValueError(f"image_size {size}: SSIM needs {SSIM_WINDOW} pixels or more.")
    away = torch.arange(size) - torch.arange(size - SSIM_WINDOW + 1)[:, None] - SSIM_WINDOW // 2
    g = torch.exp(-away.square() / (2 * SSIM_SIGMA**2)) * (away.abs() <= SSIM_WINDOW // 2)
    return g / g.sum(1, keepdim=True)


def ssim(a, b, window):
    """Structural similarity of images in [0, 1], one figure for each: [B]."""
    blur = lambda image: (image @ window.T).mT @ window.T  # turned by 90°, which the mean does not see
    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b = blur(a * a) - mean_a.square(), blur(b * b) - mean_b.square()
    cov = blur(a * b) - mean_a * mean_b
    top = (2 * mean_a * mean_b + SSIM_C1) * (2 * cov + SSIM_C2)
    return (top / ((mean_a.square() + mean_b.square() + SSIM_C1) * (var_a + var_b + SSIM_C2))).mean((1, 2, 3))


# ----- what every surrogate needs. These lines end every *_cel.py; skip them at first reading.


def usable_rows(cel, z, y):
    """z as [B, D] in the module's precision, 0 in rows with NaN or Inf; and which rows are good, [B]."""
    if not z.is_floating_point() or z.dim() < 2 or len(z) == 0 or z[0].numel() != cel.dim:
        raise ValueError(f"z is {z.dtype} {list(z.shape)}: pass at least one row of {cel.dim} floats.")
    if y.dtype != torch.int64 or y.shape != z.shape[:1]:
        raise ValueError(f"y is {y.dtype} {list(y.shape)}: pass one class number, int64, for each row of z.")
    if cel.training and torch.is_grad_enabled() and not z.requires_grad:
        raise ValueError("z has no gradient: pass the encoder's output, or measure under torch.no_grad().")
    if y.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere it would wait for the device
        if not 0 <= int(y.min()) <= int(y.max()) < cel.num_classes:
            raise ValueError(f"y has labels outside 0..{cel.num_classes - 1}: drop those rows.")
    precise = next(t.dtype for t in (*cel.parameters(), *cel.buffers()) if t.is_floating_point())
    z = z.flatten(1).to(precise).contiguous()
    ok = z.isfinite().all(1)
    return torch.where(ok[:, None], z, 0), ok


def set_stats(cel, loss, remedy, figures):
    """cel.stats, and one warning when the first 100 training calls contributed nothing."""
    cel.stats = {"loss": loss.detach(), **figures}
    if cel.training and not torch.compiler.is_compiling():
        calls, active = getattr(cel, "heard", (0, 0))
        cel.heard = calls + 1, active + (loss.detach() > 0) * (figures["skipped"] < 1)
        if calls == 99 and cel.heard[1] == 0:
            why = remedy if figures["skipped"] > 0.99 else "its threshold was never exceeded, lower it"
            warnings.warn(f"{type(cel).__name__} was 0 in its first 100 calls: {why}.", stacklevel=4)


def never_half(fn):
    """For nn.Module._apply: .half() and .bfloat16() leave the module as it is, its sums need float32."""
    return lambda t: t.to(fn(t).device) if fn(t).dtype in (torch.float16, torch.bfloat16) else fn(t)
