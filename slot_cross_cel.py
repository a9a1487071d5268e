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
B batch, C classes, G those in the batch, H = 2 halves of each in "mixture", else 1, M samples of a class,
N those of a half with padding, S slots, d_s their size.

"mixture" (default): the slots are the components of Σ_s w_s N(μ_s, σ_s² + σ²), a density of the class.
  Cross-fitted: w, μ_s, σ_s² come from one half of the class's samples. The parameters raise the likelihood of
  the other half; L measures the other half's spread about μ_s, split by the density's posterior, divided by
  1 + 1/n with n the effective samples behind μ_s; then the reverse. z gets the gradient of that spread alone.
  No gates: g_dim and g_snr would be constants, ρ = 2.5 starves small modes, and g_c damps a class for being
  rare, which the two halves and the memory already answer.
"documented": as printed. Spread of y, all gates, β and ρ learned, gradients to everything, L = 0 while the
  mean of g_snr exceeds `shutoff` (the documents: 0.5). It collapses: g_dim closes, the spread stays.
  `off` names what to leave out: cross_attention, per_dim_gate, snr_gate (and with it the shutoff), slot_mass,
  class_gate.
"image", [E] objective 1: a token is a cell of what one image sends, z + n, with the 8 cells around it and a
  learned position. Each asks the slots (2) and paints the patch under it: x̂. Of q = SSIM(x̂, x) − ‖x̂ − x‖²
  the parameters get the most; z pays max(0, q − s). This is adversarial reconstruction with an attention
  decoder, kin to Noise-ARL: no bound follows. `spread` is ‖x̂ − x‖², `above_tau` the share that pays.

    cel = SlotCrossCEL(num_classes=10, dim=512, sigma=0.1)    # "image": and shape=(8, 8, 8), image_size=32
    own = torch.optim.Adam(cel.parameters(), lr=2e-3)         # "image" needs an Adam of its own
    loss = cel(encoder(x), y, x)    # z [B, D] or [B, c, h, w], y [B] int64; "image": x [B, 3, H, W] in [0, 1]

memory=m counts the last m samples of each class beside the batch's own. They have no gradient; the batch's is
(M + m)/M times as large. Few samples of several modes need it: a half that lacks a mode measures too much.
Differs from the documents in: the modes; E; ε = floor·σ² instead of a clip of σ_s². torch.compile breaks the
graph in by_class, whose shapes follow the labels, and where "image" takes its two gradients. Left out, with
gradient 0: rows with NaN or Inf, and classes with fewer than two samples.
"""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn

MODES = ("mixture", "documented", "image")
PARTS = ("cross_attention", "per_dim_gate", "snr_gate", "slot_mass", "class_gate")  # what `off` may name
SLOT_DIM, ITERATIONS, HEADS, GATE_START = 32, 3, 4, 0.1  # d_s, T, α_attn and α_ffn at the start
BETA, RHO, KAPPA, TAU_SNR = 12.0, 2.5, 14.0, 0.25  # β and ρ at the start, κ, τ_snr
SOFTPLUS_BETA, MARGIN, CLASS_A, CLASS_B = 1.5, 0.05, 12.0, 0.04  # β', m, a, b
IMAGE_ITERATIONS, ALLOWED = 1, 0.2  # T and s of "image"; a second round painted no better
SSIM_REACH, SSIM_SIGMA, SSIM_C1, SSIM_C2 = 5, 1.5, 0.01**2, 0.03**2  # a window of 11 x 11 pixels
ATTENTION_EPS, COSINE_EPS, MASS_FLOOR = 1e-8, 1e-3, 1e-20  # in a; least ‖t‖, as t of a constant row is 0
ROUNDING = 1e-6  # relative error of a variance from float32 squares
SPOKE, DELAYED, SHUT_OFF = 0, 1, 2  # stats["silent"]


class SlotCrossCEL(nn.Module):
    """loss = cel(z, y, x), one set of parameters for all classes; items and modes at the top of the file."""

    def __init__(self, num_classes, dim, sigma, mode="mixture", slots=8, memory=0, var_threshold=0.125,
                 floor=1.0, tau=None, eps=None, delay=0, shutoff=math.inf, off=(),
                 shape=None, image_size=None):  # fmt: skip
        super().__init__()
        self.num_classes, self.dim, self.sigma, self.mode, self.stats = num_classes, dim, sigma, mode, {}
        self.tau = var_threshold * sigma**2 if tau is None else tau
        self.eps = floor * sigma**2 if eps is None else eps
        self.delay, self.shutoff, self.shape, self.image_size = delay, shutoff, shape, image_size
        if mode not in MODES or set(off) - set(PARTS):
            raise ValueError(f"mode {mode!r}, off {off!r}: use one of {MODES} and any of {PARTS}.")
        if mode != "documented" and (off or shutoff < math.inf) or mode == "image" and memory:
            raise ValueError('off, shutoff change nothing but "documented", memory not "image": drop it.')
        if {shape is None, image_size is None} != {mode != "image"}:
            raise ValueError('mode "image" needs shape=(c, h, w) of z and image_size; they are for it alone.')
        if min(num_classes, dim, slots, memory + 1, delay + 1) < 1 or not min(sigma, self.tau, self.eps) > 0:
            raise ValueError("num_classes, dim, slots must be >= 1, memory, delay >= 0, sigma, tau, eps > 0.")
        self.on = set(PARTS) - set(off) if mode == "documented" else {"cross_attention"}
        size, rounds = SLOT_DIM, IMAGE_ITERATIONS if mode == "image" else ITERATIONS
        self.slot_attention = SlotAttention(size, slots, rounds)
        self.cross_attention = GatedCrossAttention(size) if "cross_attention" in self.on else None
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))  # in training mode
        if mode == "image":
            (c, h, w), patch = shape, image_size // shape[1]
            if c * h * w != dim or {patch * h, patch * w} != {image_size} or image_size <= 2 * SSIM_REACH:
                raise ValueError(f"c·h·w must be dim {dim}, h = w divide image_size, SSIM needs 11 pixels.")
            self.embed, self.head = nn.Conv2d(c, size, 3, padding=1), nn.Linear(size, 3 * patch**2)
            self.embed.to(memory_format=torch.channels_last)  # faster
            self.position = nn.Parameter(torch.randn(h * w, size) / math.sqrt(size))
            return
        self.register_buffer("E", nn.init.orthogonal_(torch.empty(size, dim)))  # learned, it could shrink L
        self.log_beta = nn.Parameter(torch.tensor(math.log(BETA)))
        self.log_rho = nn.Parameter(torch.tensor(math.log(RHO))) if "slot_mass" in self.on else None
        if "per_dim_gate" in self.on:
            norm, first = nn.LayerNorm(size, elementwise_affine=False), nn.Linear(size, 2 * size)
            self.dim_gate = nn.Sequential(norm, first, nn.ReLU(), nn.Linear(2 * size, size), nn.Sigmoid())
            nn.init.zeros_(self.dim_gate[3].weight), nn.init.zeros_(self.dim_gate[3].bias)  # starts at 1/2
        self.register_buffer("memory", torch.zeros(num_classes, memory, dim))  # the last m samples, a ring
        self.register_buffer("stored", torch.zeros(num_classes, dtype=torch.int64))  # how many it ever got

    def forward(self, z, y, x=None):
        z, ok = usable_rows(self, z, y)  # [B, D], [B]
        with torch.autocast(z.device.type, enabled=False):
            if self.mode == "image":
                return self.on_image(z, ok, x)
            mixture, on, batch = self.mode == "mixture", self.on, (z, y, ok)
            z, old, mask, beta = self.by_class(*batch)  # [G, H, n, D], [G, H, m, D], [G, H, N], M/B [G, H]
            # t_m = E LayerNorm(z_m)
            both = torch.cat([z.detach() if mixture else z, old], 2)  # [G, H, N, D]
            t = F.layer_norm(both, (self.dim,)) @ self.E.T  # [G, H, N, d_s]
            # 1. slots = μ + exp(log σ) ⊙ N(0, I), then T rounds of attention
            slots = self.slot_attention(t, mask)  # [G, H, S, d_s]
            # 2. y = t + tanh(α_attn) CrossAttn(t, slots);  y = y + tanh(α_ffn) FFN(LN(y))
            y = self.cross_attention(t, slots) if "cross_attention" in on else t  # [G, H, N, d_s]
            # 3. r_ms = softmax_s(β cos(t_m, s_s)) as printed; of y_m in "mixture", which measures z instead
            unit = lambda a: F.normalize(a, dim=3, eps=COSINE_EPS)
            r = (self.log_beta.exp() * unit(slots) @ unit(y if mixture else t).mT).softmax(2)  # [G, H, S, N]
            #    mass_s = Σ_m r_ms;  μ_s = Σ_m r_ms y_m / mass_s;  σ_s² = Σ_m r_ms (y_m − μ_s)² / mass_s
            share, mass_M = weights(r, mask)  # r_ms / mass_s [G, H, S, N], mass_s / M [G, H, S]
            if mixture:
                var, mass_M, nll = self.cross_fit(z, both, mask, share, mass_M)  # [G, H, S, D], .., [G, H]
            else:
                mean = share @ y  # [G, H, S, d_s]
                var = (share @ y.square() - mean.square()).relu()
            # 4. g_dim = sigmoid(MLP(LN(log σ_s²)))
            log_var, one = torch.log(var + self.eps), torch.ones_like(beta)[:, :, None, None]
            g_dim = self.dim_gate(log_var) if "per_dim_gate" in on else one  # [G, H, S, d_s]
            #    g_snr = sigmoid(κ (σ_s² / (μ_s² + ε) − τ_snr))
            g_snr = torch.sigmoid(KAPPA * (var / (mean**2 + self.eps) - TAU_SNR)) if "snr_gate" in on else one
            # 5. L_base = (1/β') log(1 + exp(β' (log(σ_s² + ε) − log(τ + ε) − m)))
            L_base = F.softplus(log_var - (math.log(self.tau + self.eps) + MARGIN), beta=SOFTPLUS_BETA)
            # 6. w_s ∝ (mass_s / M)^ρ,  Σ_s w_s = 1
            w = mass_M ** (self.log_rho.exp() if "slot_mass" in on else 1)
            w = w / w.sum(2, keepdim=True)  # [G, H, S]
            # 7. g_c = sigmoid(a (M/B − b))
            g_c = torch.sigmoid(CLASS_A * (beta[..., None, None] - CLASS_B)) if "class_gate" in on else one
            #    L = Σ_c (M/B) g_c mean_d Σ_s w_s g_dim g_snr L_base
            loss = (beta * (w * (g_c * g_dim * g_snr * L_base).mean(3)).sum(2)).sum()

            gates = {"per_dim_gate": g_dim, "snr_gate": g_snr, "class_gate": g_c}
            figures = {name: gate.mean((2, 3)) for name, gate in gates.items() if name in on}
            figures |= {"slots_used": 1 / mass_M.square().sum(2), "spread": (w * var.mean(3)).sum(2)}
            figures["above_tau"] = (w * (var > self.tau).to(w.dtype).mean(3)).sum(2)
            loss = self.speak(loss, beta, figures | ({"nll": nll} if mixture else {}))
            fit = (beta * nll).sum() if mixture else torch.zeros_like(loss)
            loss = loss + (fit - fit.detach())  # the value stays L; the parameters get the gradient of fit
            if self.training and self.memory.numel():
                self.remember(*batch)
            return loss

    def cross_fit(self, z, x, mask, share, w):
        """Each half under the other's density: σ_s² about its μ_s, mass_s / M, −log likelihood [G, H]."""
        n, origin = z.shape[2], z[:, :1, :1].detach()  # about a sample of the class, squares round less
        z, x = z - origin, x - origin  # z, with a gradient, is the first n of x
        square = x.square()
        mean, V = share @ x, share @ square  # [G, H, S, D]; then V = σ_s² + σ², above its own rounding
        V = (V - mean.square()).relu() + (self.sigma**2 + ROUNDING * V.detach().mean(2, keepdim=True))
        # 1/n, n the effective samples behind μ_s, is Σ_m share²
        w, mean, P, one_nth = (a.flip(1) for a in (w, mean, 1 / V, share.detach().square().sum(3)))
        # log w_s N(z + n; μ_s, V), mean over n: log w_s − ½ Σ_d (log V + ((z − μ_s)² + σ²) / V) − ½ D log 2π
        mean_P = mean * P
        rest = (mean * mean_P - P.log()).sum(3) + self.sigma**2 * P.sum(3) - 2 * w.log()  # [G, H, S]
        log_joint = -0.5 * (P @ square.mT - 2 * (mean_P @ x.mT) + rest[..., None])  # [G, H, S, N]
        log_q = log_joint.logsumexp(2).where(mask, 0).sum(2) / mask.sum(2)  # [G, H]
        # p(s | z_m) = w_s N(z_m; μ_s, V) / Σ_s w_s N: the density's own r, a constant for z
        (share, w), mean = weights(log_joint.detach().softmax(2), mask), mean.detach()
        # Σ_m p (z_m − μ_s)² = Σ_m p z_m² − (2 Σ_m p z_m − μ_s) μ_s; its mean is σ_s² (1 + 1/n)
        total = lambda z, x: share[..., :n] @ z + share[..., n:] @ x[:, :, n:]
        var = (total(z.square(), square) - (2 * total(z, x) - mean) * mean).relu()
        return var / (1 + one_nth)[..., None], w, 0.5 * math.log(2 * math.pi) - log_q / self.dim

    def on_image(self, z, ok, x):
        if x is None or not x.is_floating_point() or x.shape != (len(z), 3, *2 * [self.image_size]):
            raise ValueError(f'mode "image" needs x, floats [{len(z)}, 3, image_size, image_size] in [0, 1].')
        ok = ok & x.flatten(1).sum(1).isfinite()  # a NaN or Inf stays one in a sum
        x = torch.where(ok[:, None, None, None], x, 0).to(z.dtype)
        leaves = [z.requires_grad_(), *(p for p in self.parameters() if p.requires_grad)]
        # z' = z + n, what leaves the device; a token for each cell, of the 3×3 cells around it
        sent = (z + self.sigma * torch.randn_like(z)).view(-1, *self.shape)  # [B, c, h, w]
        t = self.embed(sent).flatten(2).mT + self.position  # [B, h·w, d_s]
        # 1. and 2. as above; then each y paints the patch under its cell
        y = self.cross_attention(t, self.slot_attention(t, torch.ones_like(t[..., 0])))  # [B, h·w, d_s]
        patches = torch.sigmoid(self.head(y)).mT.unflatten(2, self.shape[1:])  # [B, 3·p·p, h, w]
        guess = F.pixel_shuffle(patches, self.image_size // self.shape[1])  # x̂ [B, 3, H, W]
        error, likeness = (guess - x).square().mean((1, 2, 3)), ssim(guess, x)  # [B]
        # q = SSIM(x̂, x) − ‖x̂ − x‖²: the parameters raise it, z pays max(0, q − s)
        q, share = likeness - error, ok.to(z.dtype) / len(z)
        figures = {"spread": error, "ssim": likeness, "above_tau": q > ALLOWED}
        loss = self.speak((share * F.relu(q - ALLOWED)).sum(), share, figures)
        if torch.is_grad_enabled():  # images do not mix: one gradient of q serves both sides
            pays = torch.autograd.grad(loss, q, retain_graph=True)[0][:, None]  # [B, 1]
            g_z, *g_own = torch.autograd.grad(q, leaves, -share)
            a, g = (torch.cat([v.flatten() for v in of]) for of in (leaves, [-len(z) * pays * g_z, *g_own]))
            loss = loss.detach() + (a - a.detach()) @ g
        return loss

    def by_class(self, z, y, ok):
        """Classes of two samples or more, dealt to H halves in "mixture" (else H = 1); memory apart."""
        m, H = self.memory.shape[1], 2 if self.mode == "mixture" else 1
        M, kept = torch.zeros_like(self.stored).index_add(0, y, ok.long()), self.stored.clamp(max=m)  # [C]
        c = ((M > 0) & (M + kept > 1)).nonzero()[:, :, None]  # [G, 1, 1]
        first, M, kept = (M.cumsum(0) - M)[c], M[c], kept[c]
        # [h, i] is the how many-th sample of its class, in turns; the memory begins with the other half
        deal = lambda n: torch.arange(-(-n // H) * H, device=z.device).view(-1, H).T  # [H, n / H]
        i, j = deal(max(M.flatten().tolist(), default=1)), deal(m).flip(0)
        order = y.masked_fill(~ok, self.num_classes).argsort(stable=True)  # class by class
        z, old = z[order[first + i.clamp(max=M - 1)]], self.memory[c, j.clamp(max=kept - 1)]
        mask, more = torch.cat([i < M, j < kept], 2), (M + kept).to(z.dtype) / M
        z = z.detach() + more[..., None] * (z - z.detach())  # the value is z, its gradient (M + m)/M times
        return z, old, mask, mask.sum(2) / more[..., 0] / len(y)  # M/B, split by the samples of the half

    @torch.no_grad()
    def remember(self, z, y, ok):
        same = (y[:, None] == y) & ok  # [B, B]
        turn, m = same.tril(-1).sum(1), self.memory.shape[1]  # how many of its class come before it
        last = ok & (same.sum(1) - turn <= m)  # of more than m samples only the last m stay
        self.memory[y[last], (self.stored[y] + turn)[last] % m] = z[last]
        self.stored.index_add_(0, y, ok.long())

    def speak(self, loss, share, figures):
        """The loss, or 0 in the first `delay` calls and while g_snr exceeds `shutoff`; and cel.stats."""
        share, counted = share / share.sum().clamp(min=MASS_FLOOR), share.sum()
        figures = {name: (share * figure.detach()).sum() for name, figure in figures.items()}
        shut = figures.get("snr_gate", 0 * counted) > self.shutoff
        silent = torch.where(self.calls < self.delay * self.training, DELAYED, shut * SHUT_OFF)
        self.calls += self.training
        loss, counted = loss * (silent == SPOKE), counted * (silent == SPOKE)
        why = "NaN or Inf, or no class had two samples (larger batches, memory=32), or see delay and shutoff"
        set_stats(self, loss, why, figures | {"skipped": (1 - counted).clamp(min=0), "silent": silent})
        return loss

    def _apply(self, fn, recurse=True):
        return super()._apply(never_half(fn), recurse)


class SlotAttention(nn.Module):
    """Item 1: tokens [..., N, d_s], mask [..., N] -> slots [..., S, d_s]."""

    def __init__(self, size, slots, iterations):
        super().__init__()
        self.iterations = iterations
        self.register_buffer("eval_noise", torch.randn(slots, size))  # equal starts would give equal slots
        self.mu, self.log_sigma = nn.Parameter(torch.randn(size) / size**0.5), nn.Parameter(torch.zeros(size))
        self.W_k, self.W_v, self.W_q = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.norm_tokens, self.norm_slots, self.norm_mlp = (nn.LayerNorm(size) for _ in range(3))
        self.gru = nn.GRUCell(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size))

    def forward(self, tokens, mask):
        tokens = self.norm_tokens(tokens)
        # slots = μ + exp(log σ) ⊙ N(0, I)
        noise = self.eval_noise.expand(*mask.shape[:-1], -1, -1)
        noise = torch.randn_like(noise) if self.training else noise
        slots = self.mu + self.log_sigma.exp() * noise  # [..., S, d_s]
        for _ in range(self.iterations):
            q = self.W_q(self.norm_slots(slots)) @ self.W_k.weight  # W_kᵀ W_q slots  [..., S, d_s]
            # a = softmax over slots of t·q d_s^(−1/2) d_s^(−1/4);  t·q = (W_k t)·(W_q slots), and less work
            a = (q @ tokens.mT * slots.shape[-1] ** -0.75).softmax(-2)  # [..., S, N]
            # a = (a + ε_a) / Σ_m (a + ε_a)
            a = (a + ATTENTION_EPS) * mask[..., None, :]
            a = a / a.sum(-1, keepdim=True)
            # slots = GRU(aᵀ W_v t, slots);  slots = slots + MLP(LN(slots))
            slots = self.gru(self.W_v(a @ tokens).flatten(0, -2), slots.flatten(0, -2)).view_as(slots)
            slots = slots + self.mlp(self.norm_mlp(slots))
        return slots


class GatedCrossAttention(nn.Module):
    """Item 2, without dropout: q [..., N, d_s], slots [..., S, d_s] -> y [..., N, d_s]."""

    def __init__(self, size):
        super().__init__()
        self.norm_q, self.norm_ffn = nn.LayerNorm(size), nn.LayerNorm(size)
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.ffn = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
        self.alpha_attn, self.alpha_ffn = (nn.Parameter(torch.tensor(GATE_START)) for _ in range(2))

    def forward(self, q, slots):
        split = lambda a: a.unflatten(-1, (HEADS, -1)).transpose(-2, -3)  # [..., heads, ·, d_s/heads]
        asked, key, value = split(self.W_q(self.norm_q(q))), split(self.W_k(slots)), split(self.W_v(slots))
        a = (key @ asked.mT * key.shape[-1] ** -0.5).softmax(-2)  # [..., heads, S, N]
        attended = (a.mT @ value).transpose(-2, -3).flatten(-2)  # [..., N, d_s]
        # y = q + tanh(α_attn) CrossAttn(q, slots);  y = y + tanh(α_ffn) FFN(LN(y))
        y = q + torch.tanh(self.alpha_attn) * self.W_o(attended)
        return y + torch.tanh(self.alpha_ffn) * self.ffn(self.norm_ffn(y))


def weights(r, mask):
    """r_ms / mass_s [G, H, S, N] and mass_s / M [G, H, S], over the samples of the mask [G, H, N]."""
    r = r * mask[:, :, None]
    mass = r.sum(3, keepdim=True).clamp(min=MASS_FLOOR)
    return r / mass, mass[..., 0] / mask.sum(2, keepdim=True)


def ssim(a, b):
    """Structural similarity of square images in [0, 1], one figure for each: [B]. Its maps are transposed."""
    g = torch.exp(-torch.arange(-SSIM_REACH, SSIM_REACH + 1).square() / (2 * SSIM_SIGMA**2))
    window = (torch.eye(a.shape[-1]).unfold(0, len(g), 1) @ (g / g.sum())).to(a)  # g at each place inside
    mean_a, mean_b, square, product = ((v @ window.T).mT @ window.T for v in (a, b, a * a + b * b, a * b))
    means, both = mean_a * mean_b, mean_a.square() + mean_b.square()
    top = (2 * means + SSIM_C1) * (2 * (product - means) + SSIM_C2)
    return (top / ((both + SSIM_C1) * (square - both + SSIM_C2))).mean((1, 2, 3))


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
    """cel.stats, and one warning if 100 training calls (behind a delay, if any) contributed nothing."""
    cel.stats = {"loss": loss.detach(), **figures}
    if cel.training and not torch.compiler.is_compiling():
        calls, active = getattr(cel, "heard", (0, 0))
        cel.heard = calls + 1, active + (loss.detach() > 0) * (figures["skipped"] < 1)
        if calls == 99 + getattr(cel, "delay", 0) and cel.heard[1] == 0:
            why = remedy if figures["skipped"] > 0.99 else "z is the same for all, or below the threshold"
            warnings.warn(f"{type(cel).__name__} was 0 in its first {calls + 1} calls: {why}.")


def never_half(fn):
    """For nn.Module._apply: .half() and .bfloat16() leave the module as it is, its sums need float32."""
    return lambda t: t.to(fn(t).device) if fn(t).dtype in (torch.float16, torch.bfloat16) else fn(t)
