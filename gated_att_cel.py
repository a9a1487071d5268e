"""Gated attention pooling as a surrogate of H(Z|Y): the spread of a class under learned weights, inside one batch.

Claim: keeping the weighted within-class spread of z below τ keeps H(z'|Y), and so I(x;z'), small. With equal weights
v_c is the trace of the class covariance and the claim follows from the Gaussian bound; under weights that are free to
minimise the same loss it does not (see "Known failure").

Legend: B batch, C classes, D feature size, h attention width, M samples of a class in the batch.

    z̃  = LayerNorm(z)                                        (3a)   [B, D]
    v  = tanh(W_V z̃)                                         (3b)   [B, h]
    u  = sigmoid(W_U z̃)                                      (3c)   [B, h]
    s  = v ⊙ u                                               (3d)   [B, h]
    α' = wᵀ s                                                (3e)   [B]
    α  = softmax of α' over the samples of the class         (3f)   [B]
    z̄_c = Σ_i α_i z_i,   v_c = Σ_i α_i ||z_i − z̄_c||²        (§4.3 steps 2, 3)
    R(c) = max(0, log(v_c + ε) − log(τ + ε))                 (§4.3 step 4)
    L = Σ_c β_c R(c),  β_c = M_c / B                         (2);  = mean over the samples of R(class of the sample)

Gradient where R(c) > 0 (§4.4, appendix B). The term of z̄ vanishes because Σ_k α_k (z_k − z̄) = 0:
    ∂v/∂α_i = ||z_i − z̄||²       ∂α_i/∂α'_j = α_i (δ_ij − α_j)       so  ∂v/∂α'_j = α_j (||z_j − z̄||² − v)
    ∂L/∂z_i = β_c · 2 α_i (z_i − z̄) / (v_c + ε)    with α held fixed
    ∂L/∂W_V = Σ_c β_c/(v_c+ε) Σ_j α_j (||z_j − z̄||² − v_c) (w ⊙ u_j ⊙ (1 − v_j²)) z̃_jᵀ

Known failure: descending ∂v/∂α'_j lowers the weight of every sample farther than average, until one sample per class has
all of it, v = 0, and the encoder gets no gradient. `attention` says where the gradient goes; the value is L in all four:
    "joint"        through α to W_V, W_U, w and z, as documented; collapses
    "detached"     α is a constant
    "adversarial"  z as in joint, but W_V, W_U, w ascend L (the reversal sits on the parameters, not on z → α)
    "fit"          α is a constant in L; W_V, W_U, w minimise the negative log-likelihood of the class's (detached) samples
                   under N(z̄_c, v_c + σ²) (trace: v_c/D per dimension), in nats per dimension. Samples are those that leave
                   the device, z + n with n ~ N(0, σ²I), the noise integrated out in closed form; without it, the best fit of a
                   class with spread below σ² would be v = 0. Equal weights are the optimum, the collapsed ones are not.

Forms: variance="trace" is 000 (τ = D · var_threshold · σ²); variance="per_dim" hinges every dimension and averages
(τ = var_threshold · σ²). measure_on="sent" takes the spread of z; measure_on="layernorm" that of LayerNorm(z), for which
this τ has no meaning. The implementation report 001 is variance="per_dim", measure_on="layernorm"; its σ_thr² is τ + ε.

    cel = GatedAttCEL(dim=512, tau=512 * 0.125 * 0.05 ** 2, sigma=0.05)
    optimizer = torch.optim.SGD([*encoder.parameters(), *cel.parameters()], lr=0.05)
    loss = cel(encoder(x), y)
    loss.backward()
    optimizer.step()
    print({k: float(v) for k, v in cel.stats.items()})

Reference: document 000 §4, §6.3, appendix B; 001; 003 "Gated Attention Pooling".
Differs from the documents in: the choice of `attention`; the spread is measured on what is transmitted unless asked otherwise;
LayerNorm has no gain or bias (a gain could shrink the loss by itself); ε is also g0 of 001 and γ of 003, one floor in both
logs; samples with NaN or Inf are left out and weigh zero (B stays the whole batch). With few samples per class v_c is
biased low by about (M−1)/M: small batches make it unreliable (000 §4.7).
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

VARIANCES = ("trace", "per_dim")
ATTENTIONS = ("joint", "detached", "adversarial", "fit")
MEASURES = ("sent", "layernorm")
MIN_HIDDEN, MAX_HIDDEN = 64, 512            # h = min(512, max(64, D/4)), 003
REFERENCE_VAR_THRESHOLD = 0.125             # σ² = τ / var_threshold when no sigma is given


class GradReverse(torch.autograd.Function):
    """The identity, with the gradient's sign turned: descent on the loss becomes ascent for what lies behind it."""

    @staticmethod
    def forward(ctx, w):
        return w.view_as(w)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class GatedAttention(nn.Module):
    """Eq. (3a)-(3f). forward(z [B, D], same [B, B]) -> P [B, B], u [B, h]; P_ij = α_j if same_ij, else 0. Needs same_ii = True."""

    def __init__(self, dim, hidden=None, layer_norm=True):
        super().__init__()
        hidden = hidden or min(MAX_HIDDEN, max(MIN_HIDDEN, dim // 4))
        self.layer_norm = layer_norm
        self.W_V = nn.Parameter(torch.empty(hidden, dim).uniform_(-1, 1) / math.sqrt(dim))
        self.W_U = nn.Parameter(torch.empty(hidden, dim).uniform_(-1, 1) / math.sqrt(dim))
        self.w = nn.Parameter(torch.empty(hidden).uniform_(-1, 1) / math.sqrt(hidden))

    def forward(self, z, same, reverse=False):
        W_V, W_U, w = (GradReverse.apply(p) if reverse else p for p in (self.W_V, self.W_U, self.w))
        # z̃ = LayerNorm(z)  (3a)
        z = F.layer_norm(z, z.shape[1:]) if self.layer_norm else z
        # v = tanh(W_V z̃)  (3b)
        v = torch.tanh(z @ W_V.T)                                           # [B, h]
        # u = sigmoid(W_U z̃)  (3c)
        u = torch.sigmoid(z @ W_U.T)                                        # [B, h]
        # s = v ⊙ u  (3d);  α' = wᵀ s  (3e)
        logits = (v * u) @ w                                                # [B]
        # α = softmax over the samples of the class  (3f); every row holds the weights of its own class
        P = logits.expand_as(same).masked_fill(~same, -math.inf).softmax(1)  # [B, B]
        return P, u


def weighted_spread(P, z, per_dim):
    """Squared distance of every sample to z̄ of its class, and its weighted mean v_c: both [B, 1], or [B, D] if per_dim."""
    # z̄_c = Σ_i α_i z_i
    mean = P @ z                                                            # [B, D]
    dist = (z - mean).square()                                              # [B, D]
    if not per_dim:
        dist = dist.sum(1, keepdim=True)                                    # [B, 1]
    # v_c = Σ_i α_i ||z_i − z̄_c||²
    return dist, P @ dist


class GatedAttCEL(nn.Module):
    """forward(z [B, D] or [B, C, H, W], y [B]) -> L. One attention for all classes; see the module docstring."""

    def __init__(self, dim, tau, hidden=None, variance="trace", attention="fit", measure_on="sent", sigma=None,
                 layer_norm=True, eps=1e-6):
        super().__init__()
        if dim < 1 or (hidden is not None and hidden < 1):
            raise ValueError(f"dim and hidden must be at least 1, got {dim} and {hidden}: pass the flattened feature size.")
        if not tau > 0 or not eps > 0:
            raise ValueError(f"tau and eps must be > 0, got {tau} and {eps}: pass tau = var_threshold*sigma^2 (times dim for trace).")
        if sigma is not None and not sigma > 0:
            raise ValueError(f"sigma must be > 0, got {sigma}: pass the standard deviation of the channel noise, or None.")
        for name, value, known in (("variance", variance, VARIANCES), ("attention", attention, ATTENTIONS),
                                   ("measure_on", measure_on, MEASURES)):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(known)}.")
        self.dim, self.tau, self.eps, self.attention, self.measure_on = dim, tau, eps, attention, measure_on
        self.per_dim = variance == "per_dim"
        self.terms = 1 if self.per_dim else dim                             # dimensions summed in one v_c
        self.noise_var = sigma ** 2 if sigma else tau / self.terms / REFERENCE_VAR_THRESHOLD
        self.pool = GatedAttention(dim, hidden, layer_norm)
        self.stats = {}

    def forward(self, z, y):
        z = z.flatten(1).contiguous()                                       # [B, D]; rounding is then the same for all strides
        if z.shape[1] != self.dim or y.shape != z.shape[:1]:
            raise ValueError(f"expected z [B, {self.dim}] and y [B], got {tuple(z.shape)} and {tuple(y.shape)}.")
        finite = z.isfinite().all(1)                                        # [B]
        z = torch.where(finite[:, None], z, 0.0)
        # a row that is left out is a class of its own, like any class of one sample: v_c = 0
        same = (y[:, None] == y) & finite & finite[:, None]                 # [B, B]
        same = same | torch.eye(len(y), dtype=torch.bool, device=z.device)
        M = same.sum(1)                                                     # [B]
        used = M > 1

        through = self.attention in ("joint", "adversarial")
        P, u = self.pool(z if through else z.detach(), same, reverse=self.attention == "adversarial")
        x = F.layer_norm(z, z.shape[1:]) if self.measure_on == "layernorm" else z
        dist, v = weighted_spread(P if through else P.detach(), x, self.per_dim)
        # R(c) = max(0, log(v_c + ε) − log(τ + ε))
        R = F.relu(torch.log(v + self.eps) - math.log(self.tau + self.eps))  # [B, 1] or [B, D]
        # L = Σ_c β_c R(c) = mean over the samples of R(class of the sample)  (2)
        loss = torch.where(used, R.mean(1), 0.0).sum() / len(y)
        self._record(loss, v, R, P, u, M, used, finite)
        if self.attention == "fit":
            nll = self._nll(P, x.detach(), used)
            loss = loss + (nll - nll.detach())
        return loss

    def _nll(self, P, x, used):
        """Mean over the batch of E_n[−log N(x + n; z̄_c, v_c + σ²)] / D; its gradient reaches W_V, W_U and w only."""
        dist, v = weighted_spread(P, x, self.per_dim)
        dist, v = dist / self.terms + self.noise_var, v / self.terms + self.noise_var
        # −log N = ½ log 2π(v + σ²) + ½ ((x − z̄)² + σ²) / (v + σ²)
        nll = 0.5 * (torch.log(2 * math.pi * v) + dist / v)                 # [B, 1] or [B, D]
        return torch.where(used, nll.mean(1), 0.0).sum() / len(used)

    @torch.no_grad()
    def _record(self, loss, v, R, P, u, M, used, finite):
        share = used / M                                                    # [B], sums to the number of classes used
        classes = share.sum().clamp(min=1)
        ess = 1 / P.square().sum(1)                                         # [B], 1 / Σ α² of the sample's class
        lone = (finite & ~used).sum()
        self.stats = {
            "loss": loss.detach(), "active": ((R > 0).any(1) & used).any().float(),
            "nonfinite": (~finite).sum(), "skipped_classes": lone, "skipped": lone,
            "variance": (share * v.mean(1)).sum() / classes,                # mean over classes of v_c, to compare with τ
            "variance_max": torch.where(used, v.mean(1), 0.0).max(),
            "above_tau": (share * (v > self.tau).to(v.dtype).mean(1)).sum() / classes,
            "ess": (share * ess).sum() / classes,                           # mean over classes of 1 / Σ α²
            "ess_share": (share * ess / M).sum() / classes,                 # 1 = equal weights, 1/M = collapsed
            "gate": u.mean(),
        }
        self.of_sample = {"variance": v.mean(1), "ess": ess}                # [B] each: v_c and 1 / Σ α² of the sample's own class
