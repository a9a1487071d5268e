"""Conditional entropy maximisation: the noisy channel, the bound, the gradient stash, the leakage audit.

An encoder on the device sends z' = z + n with z = F_e(x) in (0, 1)^D and n ~ N(0, σ²I). An attacker who sees z' wants x.
With differential entropies in nats, d the number of pixels and ξ the least possible squared error per pixel,

    H(x|z') = H(x) − I(x;z')                  I(x;z') = H(z') − H(n)                  H(z') ≤ H(Y) + H(z'|Y)
    ξ ≥ exp(2 H(x|z') / d) / (2πe)                                                     (seed 004 §1.4)

so squeezing the spread of z within each class, against a fixed noise, raises the floor under every attacker's error. A
surrogate is a loss L_CEL(z, y) that measures this spread; this file is what all of them share.

The gradient stash (seed 000 §3.3 step 5) updates the encoder with

    θ ← θ − η (g_D + λ · r(η) · γ · g_CEL)        r(η) = min(1, η_ref / η)

while the server gets g_D only and the surrogate's own parameters get γ · g_CEL. λ weighs privacy, r holds the
regulariser back while the learning rate η is high, γ is the loss scale that ramps up after the warm-up.

The audit bounds I(x;z') for every attacker, known or not (cross-entropy ≥ entropy): for any density q of z' that
was fitted on other samples,

    I(x;z') ≤ E[−log q(z')] − (D/2) log(2πe σ²)

Differs from the documents in: r(η), which they mention and do not define; the stash at the cut; the audit.
Reference: Xia et al., CVPR 2025 (seed 004, [10]).
"""

import math

import torch

ETA_REF = 1e-3
AUDIT_SHRINKAGE = (0.0, 0.1, 0.3, 0.6, 1.0)  # how far a class's covariance may leave the pooled one
AUDIT_FULL_DIM = 1024  # above this many features the audit's covariances are diagonal
AUDIT_MAX_CLASSES = 64  # above this many classes the audit uses one pooled covariance
AUDIT_NUMBERS = 50_000_000  # at most this many features, samples times D, are held for the audit


def channel(z, sigma, generator=None):
    # z' = z + n,  n ~ N(0, σ²I)
    return z + sigma * torch.empty_like(z).normal_(generator=generator)


def mse_floor(entropy, d):
    """Least mean squared error per pixel of any estimate of x, from H(x|z') in nats."""
    # ξ ≥ exp(2 H(x|z') / d) / (2πe)
    return math.exp(2 * entropy / d) / (2 * math.pi * math.e)


def entropy_of_mse(mse, d):
    """The inverse: the conditional entropy (nats) at which `mse_floor` is `mse`."""
    # H = (d/2) log(2πe ξ)
    return d / 2 * math.log(2 * math.pi * math.e * mse)


def lr_ratio(lr, eta_ref=ETA_REF):
    # r(η) = min(1, η_ref / η); 1 where the rescaling is switched off
    return min(1.0, eta_ref / lr) if eta_ref and lr else 1.0


# ------------------------------------------------------------------------------------------------ gradient stash

def stash(how, z, z_cut, loss_d, loss_cel, encoder, surrogate=None, weight=1.0, scale=1.0, clip=0.0, encoder_terms=()):
    """Leave in .grad what one optimiser step needs; -> {"ratio", "finite"} as tensors.

    z              the encoder's output, with its graph
    z_cut          z.detach().requires_grad_(): what server, defence and surrogate saw instead of z
    loss_d         L_D as a function of z_cut;  loss_cel  L_CEL(z_cut, y), or None
    weight, scale  λ·r(η) and γ
    clip           longest allowed ‖∂L_CEL/∂z‖ (0: no limit)
    encoder_terms  terms of L_D that depend on the encoder directly, not through z
    how            "params": as documented, L_CEL and L_D pass through the encoder one after the other
                   "cut": the two gradients meet at z and pass through the encoder once. Backpropagation is linear in
                   the gradient at z, so the update is the same.

    A gradient of L_CEL with a NaN or Inf in it counts as zero for this step ("finite" is 0).
    "ratio" is ‖λ r γ ∂L_CEL/∂z‖ / ‖∂L_D/∂z‖.
    """
    own = [p for p in surrogate.parameters() if p.requires_grad] if surrogate is not None else []
    g_cel, finite = torch.zeros_like(z_cut), z.new_ones(())
    if loss_cel is not None and loss_cel.requires_grad:
        # (i) ∂L_CEL/∂z, and γ·g_CEL for the surrogate's own parameters
        g_cel, *g_own = torch.autograd.grad(loss_cel, [z_cut, *own], allow_unused=True)
        g_cel = torch.zeros_like(z_cut) if g_cel is None else g_cel
        finite = torch.stack([g.isfinite().all() for g in [loss_cel, g_cel, *g_own] if g is not None]).all().to(z.dtype)
        g_cel = clip_norm(torch.where(finite > 0, g_cel, 0), clip)
        for p, g in zip(own, g_own):
            p.grad = None if g is None else torch.where(finite > 0, scale * g, 0)

    # (ii) g_D: the server's gradient, and ∂L_D/∂z for the encoder
    loss_d.backward()
    g_d = z_cut.grad
    roots, term_grads = list(encoder_terms), [torch.ones_like(t) for t in encoder_terms]
    # (iii) g_D + λ·r·γ·g_CEL for the encoder; (iv) nothing of g_CEL went to the server
    if how == "cut":
        torch.autograd.backward([z, *roots], [g_d + weight * scale * g_cel, *term_grads])
    else:
        params = [p for p in encoder.parameters() if p.requires_grad]
        stashed = torch.autograd.grad(z, params, g_cel, retain_graph=True, allow_unused=True)
        torch.autograd.backward([z, *roots], [g_d, *term_grads])
        for p, g in zip(params, stashed):
            if g is not None:
                p.grad.add_(g, alpha=weight * scale)
    tiny = torch.finfo(z.dtype).tiny
    return {"ratio": weight * scale * g_cel.norm() / g_d.norm().clamp_min(tiny), "finite": finite}


def clip_norm(g, max_norm):
    # g · min(1, max_norm / ‖g‖)
    return g * (max_norm / g.norm().clamp_min(torch.finfo(g.dtype).tiny)).clamp(max=1) if max_norm else g


# ------------------------------------------------------------------------------------------------ leakage audit

def audit_sample(images, dim, seed=0):
    """The images, or as many of them as the audit can hold."""
    keep = max(1000, AUDIT_NUMBERS // dim)
    return images if len(images) <= keep else images[torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:keep]]


def leakage_bits(z_fit, y_fit, z_test, sigma, generator=None):
    """Upper bound on I(x;z') in bits, with its standard error over the test samples.

    z_fit, y_fit, z_test are clean features (before noise, before any dropout on the wire: later processing cannot
    leak more) of disjoint images. q is the marginal density Σ_c p(c) N(μ_c, Σ_c + σ²I), never the density given the
    test sample's own label, which would leave H(Y) out. How far each Σ_c leaves the pooled covariance is chosen on a
    fifth of the fit features, so the test features are used once.
    """
    if sigma <= 0:
        raise ValueError("sigma must be positive: without noise the information is infinite.")
    z_fit, z_test = z_fit.flatten(1).double(), z_test.flatten(1).double()
    noise = torch.randn(z_test.shape, generator=generator, dtype=z_test.dtype)
    z_test = z_test + sigma * noise.to(z_test.device)

    order = torch.randperm(len(z_fit), generator=generator).to(z_fit.device)
    choose, rest = order[:len(order) // 5], order[len(order) // 5:]
    z_choose = z_fit[choose] + sigma * torch.randn(len(choose), z_fit.shape[1], generator=generator, dtype=z_fit.dtype).to(z_fit.device)
    candidates = AUDIT_SHRINKAGE if y_fit.max() < AUDIT_MAX_CLASSES else AUDIT_SHRINKAGE[:1]
    scores = [cross_entropies(z_fit[rest], y_fit[rest], z_choose, sigma, a).mean() for a in candidates]
    best = candidates[int(torch.stack(scores).argmin())]

    # I(x;z') ≤ E[−log q(z')] − (D/2) log(2πe σ²)
    noise_entropy = z_fit.shape[1] / 2 * math.log(2 * math.pi * math.e * sigma ** 2)
    nats = cross_entropies(z_fit, y_fit, z_test, sigma, best) - noise_entropy  # [N_test]
    return (nats.mean() / math.log(2)).item(), (nats.std() / math.log(2) / len(nats) ** 0.5).item()


def cross_entropies(z_fit, y_fit, z, sigma, shrinkage):
    """−log q(z) of each row, q(z) = Σ_c p(c) N(z; μ_c, (1−a) Σ_pooled + a Σ_c + σ²I) with a = `shrinkage`. -> [N]"""
    full = z.shape[1] <= AUDIT_FULL_DIM
    classes, index, count = y_fit.unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(classes), z.shape[1], dtype=z.dtype, device=z.device).index_add_(0, index, z_fit) / count[:, None]
    centred = z_fit - means[index]
    pooled = covariance(centred, full)
    logs, density = [], None
    for c in range(len(classes)):
        if shrinkage or density is None:
            cov = (1 - shrinkage) * pooled + (shrinkage * covariance(centred[index == c], full) if shrinkage else 0)
            density = GaussianDensity(cov, sigma)
        logs.append(math.log(count[c] / len(z_fit)) + density.log(z - means[c]))
    return -torch.logsumexp(torch.stack(logs), 0)


def covariance(centred, full):
    return centred.T @ centred / len(centred) if full else centred.square().mean(0)


class GaussianDensity:
    """N(0, Σ + σ²I) with Σ [D, D], or its diagonal [D]; factored once."""

    def __init__(self, cov, sigma):
        self.full = cov.dim() == 2
        if self.full:
            eye = torch.eye(len(cov), dtype=cov.dtype, device=cov.device)
            chol = torch.linalg.cholesky(cov + sigma ** 2 * eye)
            self.whiten, self.logdet = torch.linalg.solve_triangular(chol, eye, upper=False), 2 * chol.diagonal().log().sum()
        else:
            self.whiten, self.logdet = (cov + sigma ** 2).rsqrt(), (cov + sigma ** 2).log().sum()

    def log(self, x):
        # log N(x; 0, Σ + σ²I) = −½ (xᵀ(Σ+σ²I)⁻¹x + log|Σ+σ²I| + D log 2π)
        white = x @ self.whiten.T if self.full else x * self.whiten  # [N, D]
        return -0.5 * (white.square().sum(1) + self.logdet + x.shape[1] * math.log(2 * math.pi))
