"""Conditional entropy maximisation (CEM): what training with any surrogate needs. It imports torch alone.

An encoder on the device sends z' = z + n, z = F_e(x) in (0, 1)^D, n ~ N(0, σ²I). An attacker who sees z'
wants x. With differential entropies in nats, d pixels and ξ the least possible squared error per pixel,

    H(x|z') = H(x) − I(x;z')            I(x;z') = H(z') − H(n)            H(z') ≤ H(Y) + H(z'|Y)
    ξ ≥ exp(2 H(x|z') / d) / (2πe)                                                          [E §1.4]

so squeezing the spread of z within each class, against a fixed noise, raises the floor under every attacker's
error. A surrogate is a conditional-entropy loss (CEL), L_CEL(z, y), that measures this spread. Here are the
channel, the bound, the two gradient stashes, and two figures about a trained encoder that need no attacker.

The gradient stash [A §3.3 step 5]. L_D is the task's loss and the defence's own terms.

    (i)   back-propagate L_CEL and put the encoder's gradient g_CEL aside
    (ii)  back-propagate L_D
    (iii) θ ← θ − η (g_D + λ·r(η)·γ·g_CEL)         r(η) = min(1, η_ref/η)
    (iv)  the server gets g_D only; the surrogate's own parameters get γ·g_CEL

Back-propagating L_D + λ·r(η)·γ·L_CEL gives encoder and server the same step, as L_CEL does not depend on the
server. Kept apart, the two gradients can be clipped, averaged, weighed and guarded against NaN on their own.
λ weighs privacy against accuracy, r(η) holds the regulariser back while the learning rate is high, γ is the
loss scale [A §4.5]; γ = 0 in the warm-up, but not for the surrogate's own parameters: theirs is constant.
`stash_params` does this to the letter. `stash_at_cut` lets the two gradients meet at z
and goes through the encoder once: back-propagation is linear in the gradient at z, so the step is the same,
and it is what a split deployment does, where the server returns ∂L_D/∂z' and the rest is the client's.

The leakage audit bounds I(x;z') for every attacker, known or not: for any density q of z' fitted on other
samples, I(x;z') ≤ E[−log q(z')] − (D/2) log(2πe σ²), because a cross-entropy is at least the entropy.
Fisher information (dFIL, Maeng et al. 2023) is a second figure to compare encoders by.

Differs from the documents in: r(η), which they name and do not define; the stash at the cut; audit and dFIL.
Reference: Xia et al., CVPR 2025.
"""

import math

import torch

SHRINKAGE = (0.0, 0.1, 0.3, 0.6, 1.0)  # how far a class's covariance in the audit may leave the pooled one
FULL_DIM = 1024  # above this many features the audit's covariances are diagonal
MAX_CHOOSE = 2000  # features on which that is chosen, at most
MAX_CLASSES = 64  # above this many classes the audit has one pooled covariance


def channel(z, sigma, generator=None):
    # z' = z + n,  n ~ N(0, σ²I)
    return z + sigma * torch.empty_like(z).normal_(generator=generator)


def mse_floor(entropy, d):
    """Least mean squared error per pixel of any estimate of x, from H(x|z') in nats."""
    # ξ ≥ exp(2 H(x|z') / d) / (2πe)
    return math.exp(2 * entropy / d) / (2 * math.pi * math.e)


def lr_ratio(lr, eta_ref=1e-3):
    # r(η) = min(1, η_ref / η); 1 where the rescaling is switched off
    return min(1.0, eta_ref / lr) if eta_ref and lr else 1.0


# ------------------------------------------------------------------------------------------ gradient stash
# Both stashes leave in .grad what one optimiser step needs and return ∂L_D/∂z.
#   z              the encoder's output, with its graph
#   z_cut          z.detach().requires_grad_(): what server, defence and surrogate saw instead of z
#   loss_d         L_D as a function of z_cut
#   g_z            λ·r·γ·∂L_CEL/∂z from `cel_gradient`: at z, and with its weights inside
#   encoder_terms  terms of L_D that depend on the encoder directly, not through z


def cel_gradient(z_cut, losses, weights, own_scale, clip=0.0):
    """Step (i), stopped at z. Returns g_z = Σ weight·∂L_CEL/∂z, and 1 if all of it is finite, else 0.

    `losses` is [(L_CEL, its surrogate)], `weights` their λ·r·γ. The surrogates' own parameters get
    own_scale·g_CEL as .grad, in the place of what is there. `clip` is the longest ‖∂L_CEL/∂z‖, 0 for no
    limit. A gradient with NaN or Inf in it counts as zero.
    """
    total, all_finite = torch.zeros_like(z_cut), z_cut.new_ones(())
    for (loss, surrogate), weight in zip(losses, weights):
        own = [p for p in surrogate.parameters() if p.requires_grad]
        g, *g_own = torch.autograd.grad(loss, [z_cut, *own], allow_unused=True)
        g = torch.zeros_like(z_cut) if g is None else g
        # a NaN or Inf stays one in a sum
        finite = torch.stack([t.sum() for t in (loss, g, *g_own) if t is not None]).isfinite().all()
        if clip:
            g = g * (clip / g.norm().clamp_min(torch.finfo(g.dtype).tiny)).clamp(max=1)
        total = total + torch.where(finite, weight * g, 0)
        for p, g_p in zip(own, g_own):
            if g_p is not None:  # in p's memory format: a fused Adam takes the numbers as they lie in memory
                g_p = torch.empty_like(p).copy_(torch.where(finite, own_scale * g_p, 0))
            p.grad = g_p
        all_finite = all_finite * finite
    return total, all_finite


def stash_params(z, z_cut, loss_d, g_z, encoder, encoder_terms=(), average=None, decay=0.0):
    """As documented: L_CEL and L_D pass through the encoder one after the other.

    decay > 0: what is put aside is an exponential average over the steps ([A §7.2] momentum decay), kept in
    the list `average`. It begins at 0, so L_CEL comes in over some 1/(1 − decay) steps. At the cut there is
    none: the rows of two batches are different images.
    """
    params = [p for p in encoder.parameters() if p.requires_grad]
    # (i) λ·r·γ·g_CEL, put aside
    stashed = torch.autograd.grad(z, params, g_z, retain_graph=True, allow_unused=True)
    stashed = [torch.zeros_like(p) if g is None else g for p, g in zip(params, stashed)]
    if decay:
        before = average or [torch.zeros_like(p) for p in params]
        average[:] = stashed = [decay * old + (1 - decay) * new for old, new in zip(before, stashed)]
    # (ii) g_D: for the server, and for the encoder
    loss_d.backward()
    torch.autograd.backward([z, *encoder_terms], [z_cut.grad, *map(torch.ones_like, encoder_terms)])
    # (iii) g_D + λ·r·γ·g_CEL for the encoder; (iv) the server has g_D only
    for p, g in zip(params, stashed):
        p.grad = g if p.grad is None else p.grad + g
    return z_cut.grad


def stash_at_cut(z, z_cut, loss_d, g_z, encoder_terms=()):
    """The same step with one pass through the encoder: the two gradients meet at z."""
    # (ii) g_D: for the server, and ∂L_D/∂z
    loss_d.backward()
    # (iii) ∂L_D/∂z + λ·r·γ·∂L_CEL/∂z goes through the encoder; (iv) the server has g_D only
    torch.autograd.backward([z, *encoder_terms], [z_cut.grad + g_z, *map(torch.ones_like, encoder_terms)])
    return z_cut.grad


# ------------------------------------------------------------------------------------------ leakage audit


def leakage_bits(z_fit, y_fit, z_test, sigma, generator=None):
    """Upper bound on I(x;z') in bits, and its standard error over the test samples.

    z_fit, y_fit and z_test are clean features (before noise, before any dropout on the wire: later
    processing cannot leak more) of disjoint images. q is the marginal density Σ_c p(c) N(μ_c, Σ_c + σ²I),
    never the density given the test sample's own label, which would leave H(Y) out. How far Σ_c leaves the
    pooled covariance is chosen on a fifth of the fit features, MAX_CHOOSE at most. So is the weight of a
    control variate, the noise's own −log p(n) − H(n): its mean is 0, so subtracting it shrinks the error
    alone.
    """
    if sigma <= 0:
        raise ValueError("sigma must be positive: without noise the information is infinite.")
    z_fit, z_test = z_fit.flatten(1).double(), z_test.flatten(1).double()
    D = z_fit.shape[1]

    def transmit(z):
        """z', and −log p(n) − H(n) = ‖n‖²/(2σ²) − D/2 of each row."""
        n = torch.randn(z.shape, generator=generator, dtype=z.dtype).to(z.device)
        return z + sigma * n, (n.square().sum(1) - D) / 2

    order = torch.randperm(len(z_fit), generator=generator).to(z_fit.device)
    n_choose = max(1, min(MAX_CHOOSE, len(order) // 5))
    choose, rest = order[:n_choose], order[n_choose:]
    sent, of_noise = transmit(z_fit[choose])
    candidates = SHRINKAGE if y_fit.max() < MAX_CLASSES else SHRINKAGE[:1]
    moments = class_moments(z_fit[rest], y_fit[rest], len(candidates) > 1)
    scores = [cross_entropies(moments, sent, sigma, a) for a in candidates]
    best = min(range(len(candidates)), key=lambda i: scores[i].mean())
    centred = scores[best] - scores[best].mean()
    weight = (centred * of_noise).mean() / of_noise.square().mean().clamp(min=1e-12)

    # I(x;z') ≤ E[−log q(z')] − (D/2) log(2πe σ²)
    sent, of_noise = transmit(z_test)
    moments = class_moments(z_fit, y_fit, candidates[best] > 0)
    nats = cross_entropies(moments, sent, sigma, candidates[best])  # [N_test]
    nats = nats - D / 2 * math.log(2 * math.pi * math.e * sigma**2) - weight * of_noise
    return (nats.mean() / math.log(2)).item(), (nats.std() / math.log(2) / len(nats) ** 0.5).item()


def class_moments(z, y, each=True):
    """-> log p(c) [C], μ_c [C, D], Σ_pooled [D, D] and a list of the Σ_c (None unless `each`) of clean
    features; above FULL_DIM features the diagonals of the Σ alone."""
    full = z.shape[1] <= FULL_DIM
    classes, index, count = y.unique(return_inverse=True, return_counts=True)
    means = z.new_zeros(len(classes), z.shape[1]).index_add_(0, index, z) / count[:, None]
    centred = z - means[index]
    covariance = lambda r: r.T @ r / len(r) if full else r.square().mean(0)
    own = [covariance(centred[index == c]) for c in range(len(classes))] if each else None
    return (count.to(z.dtype) / len(z)).log(), means, covariance(centred), own


def cross_entropies(moments, z, sigma, shrinkage):
    """−log q of each row, q(z) = Σ_c p(c) N(z; μ_c, (1−a) Σ_pooled + a Σ_c + σ²I), a = shrinkage. -> [N]"""
    log_p, means, pooled, own = moments
    log_q, log_density = [], None
    for c in range(len(means)):
        if shrinkage or log_density is None:
            log_density = gaussian(pooled.lerp(own[c], shrinkage) if shrinkage else pooled, sigma)
        log_q.append(log_p[c] + log_density(z - means[c]))
    return -torch.logsumexp(torch.stack(log_q), 0)


def gaussian(cov, sigma):
    """x -> log N(x; 0, Σ + σ²I) of each row, for Σ [D, D] or its diagonal [D]; factored once."""
    if cov.dim() == 2:
        eye = torch.eye(len(cov), dtype=cov.dtype, device=cov.device)
        factor = torch.linalg.cholesky(cov + sigma**2 * eye)
        whiten = torch.linalg.solve_triangular(factor, eye, upper=False)
        white, logdet = lambda x: x @ whiten.T, 2 * factor.diagonal().log().sum()
    else:
        white, logdet = lambda x: x * (cov + sigma**2).rsqrt(), (cov + sigma**2).log().sum()
    # log N = −½ (xᵀ(Σ+σ²I)⁻¹x + log|Σ+σ²I| + D log 2π)
    return lambda x: -0.5 * (white(x).square().sum(1) + logdet + x.shape[1] * math.log(2 * math.pi))


# ----------------------------------------------------------------------------------- Fisher information


def fisher_information(encoder, x, sigma, generator=None):
    """dFIL = tr(JᵀJ) / (d σ²), J = ∂F_e/∂x, mean over the images x [N, 3, H, W]; and its standard error.

    For the Gaussian channel JᵀJ/σ² is the Fisher information about x in z'. 1/dFIL bounds the squared error
    per pixel of every *unbiased* attacker from below. With D < d no such attacker has a finite variance, so
    dFIL compares encoders and promises nothing. The encoder is in eval mode.
    """
    if sigma <= 0:
        return math.inf, 0.0
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        z = encoder(x)
    # E‖Jᵀv‖² = tr(JJᵀ) for v ~ N(0, I): one v an image
    v = torch.randn(z.shape, generator=generator, dtype=z.dtype).to(z.device)
    (g,) = torch.autograd.grad(z, x, v)  # Jᵀv of each image
    values = g.flatten(1).square().sum(1) / (x[0].numel() * sigma**2)
    return values.mean().item(), (values.std() / len(values) ** 0.5).item() if len(values) > 1 else 0.0
