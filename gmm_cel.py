"""GMM CEL: the mixture bound L_C on what the noisy features tell about the input.

z = F_e(x) leaves the device as z' = z + n, n ~ N(0, Σ_p), Σ_p = σ²I. Component i, over all C·K of them, has
weight π_i, Σπ = 1, and Σ_i is the covariance of the clean z in it. Then [E §1.4]

    I(x;z') ≤ L_C = Σ_i π_i ( −log π_i + ½ log |Σ_i + Σ_p| / |Σ_p| )        in nats

for z of any distribution: it is H(A) + H(z'|A) − H(n), A the component, and a Gaussian has the largest
entropy of its covariance. It is a bound with true moments, so right after refresh() for the samples given to
it; between refreshes it is an estimate. covariance="diag" keeps the diagonal of Σ_i: diag ≥ full ≥ I(x;z').

    j(z) = argmin_j ||z − μ_j||²                           over the K components of z's class
    Δ_j  = (1/n_j) Σ_{z in j} (z − μ_j)(z − μ_j)ᵀ          the gradient flows here; μ_j is a constant
    Σ_j  ← (1 − a_j) Σ_j + a_j Δ_j,    a_j = min(0.99, s n_j / (π_j N))
    π    ← (1 − b) π + b n / B,        b   = min(0.99, s B / N)
    L_C    of the new Σ and π, which stay if the module is in training mode

B batch, C classes, D features, K components per class, J = C·K, n_j members of j in the batch, N training
samples, s = update_scale (the paper 1, its released code 10).

rate_free=True (default): Δ_j enters the gradient with the weight n_j/(π_j B), not a_j; the value stays L_C.
    ∂L/∂z = (Σ_j + σ²I)⁻¹ (z − μ_j) / B, an unbiased estimate of the gradient over all N samples, so that λ
    does not depend on N and s. rate_free=False is about s·B/N of that. DOCUMENTS.md derives both.

    cel = GMMCEL(num_classes=10, dim=512, sigma=0.1)
    cel.refresh(z_all, y_all)          # K-means and EM of each class; before it L is 0. Once per epoch
    loss = cel(encoder(x), y)          # z [B, D] or [B, C, H, W], y [B] int64
    cel.stats["logdet_term"]           # Σ π ½ log |Σ + Σ_p| / |Σ_p|; "entropy_term" is the rest, H(A)
    cel.bound()                        # L_C of what is stored

Differs from the documents in: a mixture for each class, not one of all features; rate_free; no threshold: L_C
has no hinge, stats["above_tau"] compares with VAR_THRESHOLD·σ² only to be comparable with the other losses.
Left out, with gradient 0: rows with NaN or Inf, and classes that no refresh has seen. In the update of π, B
counts the others, so that Σπ stays 1.
"""

import warnings

import torch
from torch import nn

MAX_RATE = 0.99  # of a_j and b
VAR_THRESHOLD = 0.125  # of stats["above_tau"], in units of σ²; the loss does not use it
REG = 1e-6  # EM adds it to the covariances where it needs densities; the Σ that is stored has none
MIN_MASS = 0.5  # samples; EM stops before a component holds less
TOLERANCE = 5e-3  # EM stops when the mean change of a responsibility is below
JITTER = 8  # rounding makes a covariance indefinite by up to about JITTER · machine epsilon · trace
N_INIT = 20  # starts of K-means where no earlier centres are known; they see TRIAL_POINTS samples per cluster
TRIAL_POINTS, ROUNDS = 100, 50


class GMMCEL(nn.Module):
    """loss = cel(z, y); cel.refresh(z_all, y_all) fits the mixtures. Equations are at the top of the file."""

    def __init__(
        self, num_classes, dim, sigma, components=3, covariance="diag", update_scale=1.0, rate_free=True
    ):
        super().__init__()
        if covariance not in ("diag", "full"):
            raise ValueError(f'covariance {covariance!r}: use "diag" or "full".')
        if min(num_classes, dim, components) < 1 or not sigma > 0 or not update_scale > 0:
            raise ValueError("num_classes, dim, components must be >= 1, sigma and update_scale > 0.")
        self.num_classes, self.dim, self.sigma, self.components = num_classes, dim, sigma, components
        self.covariance, self.update_scale, self.rate_free = covariance, update_scale, rate_free
        shape = (dim,) if covariance == "diag" else (dim, dim)
        self.register_buffer("weights", torch.zeros(num_classes, components))  # π, 0 where there is none
        self.register_buffer("means", torch.zeros(num_classes, components, dim))  # μ
        self.register_buffer("covs", torch.zeros(num_classes, components, *shape))  # Σ of the clean z
        self.register_buffer("num_samples", torch.zeros(()))  # N
        self.stats = {}

    def forward(self, z, y, x=None):
        z, ok = usable_rows(self, z, y)  # [B, D], [B]
        with torch.autocast(z.device.type, enabled=False):
            B, s, tiny = len(z), self.update_scale, torch.finfo(z.dtype).tiny
            N = self.num_samples.clamp(min=1)
            pi, cov = self.weights.flatten(), self.covs.flatten(0, 1)  # [J], [J, D] or [J, D, D]
            ok = ok & (self.weights[y] > 0).any(1)  # [B] without the classes that no refresh has seen

            # j(z) = argmin_j ||z − μ_j||²
            d2 = (z.detach()[:, None] - self.means[y]).square().sum(2)  # [B, K]
            k = d2.masked_fill(self.weights[y] == 0, torch.inf).argmin(1)  # [B]
            member = z.new_zeros(len(pi), B).scatter(0, (y * self.components + k)[None], ok[None].to(z.dtype))
            n = member.sum(1)  # [J]
            # Δ_j = (1/n_j) Σ (z − μ_j)(z − μ_j)ᵀ
            share = member / n.clamp(min=1)[:, None]  # [J, B]
            r = torch.where(ok[:, None], z - self.means[y, k], 0)  # [B, D]
            delta = self.moment(share, r)  # [J, D] or [J, D, D]
            # Σ_j ← (1 − a_j) Σ_j + a_j Δ_j,   a_j = min(0.99, s n_j / (π_j N))
            per_component = (-1, *[1] * (cov.dim() - 1))
            a = (s * n / (pi * N).clamp(min=tiny)).clamp(max=MAX_RATE).view(per_component)
            cov = (1 - a) * cov + a * delta
            # π ← (1 − b) π + b n / B,   b = min(0.99, s B / N)
            b = (s * n.sum() / N).clamp(max=MAX_RATE)
            pi = (1 - b) * pi + b * n / n.sum().clamp(min=1)
            if self.training:
                self.weights.copy_(pi.view_as(self.weights))
                self.covs.copy_(cov.detach().view_as(self.covs))
            if self.rate_free:  # the value of Σ_j, with the gradient of n_j/(π_j B) Δ_j
                w = (n / (pi * B).clamp(min=tiny)).view(per_component)
                cov = cov.detach() + w * (delta - delta.detach())
            # L_C = Σ_j π_j ( −log π_j + ½ log |Σ_j + Σ_p| / |Σ_p| )           [E §1.4]
            entropy, logdet = self.terms(pi, cov)
            self.note(entropy, logdet, cov, r, n)
            return entropy + logdet

    def moment(self, share, r):
        """Σ_i share_ji r_i r_iᵀ, or its diagonal, of share [J, B] and r [B, D]."""
        return share @ r.square() if self.covariance == "diag" else (share[:, :, None] * r).mT @ r

    def terms(self, pi, cov):
        """The two sums of L_C, of pi [J] and cov [J, D] or [J, D, D]."""
        entropy = torch.special.entr(pi).sum().clamp(min=0)  # entr(0) = 0; a π may round to above 1
        ratio = cov / self.sigma**2  # |Σ + Σ_p| / |Σ_p| = |I + Σ/σ²|
        if self.covariance == "diag":
            return entropy, (pi * 0.5 * torch.log1p(ratio).sum(1)).sum()
        return entropy, (pi * cholesky(ratio, 1.0).diagonal(dim1=1, dim2=2).log().sum(1)).sum()

    @torch.no_grad()
    def bound(self):
        """L_C of the stored statistics, in nats."""
        return sum(self.terms(self.weights.flatten(), self.covs.flatten(0, 1)))

    @torch.no_grad()
    def note(self, entropy, logdet, cov, r, n):
        variance = cov if self.covariance == "diag" else cov.diagonal(dim1=1, dim2=2)  # [J, D]
        above = (variance > VAR_THRESHOLD * self.sigma**2).to(n.dtype).mean(1)  # [J]
        set_stats(self, entropy + logdet, "no refresh has seen its classes: call cel.refresh(z_all, y_all)", {
            "spread": r.square().mean(1).sum() / n.sum().clamp(min=1),
            "above_tau": (above * (n > 0)).sum() / (n > 0).sum().clamp(min=1),
            "skipped": 1 - n.sum() / len(r),
            "entropy_term": entropy.detach(),
            "logdet_term": logdet.detach(),
        })  # fmt: skip

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def refresh(self, z_all, y_all, num_samples=None, generator=None):
        """K-means, then EM, of each class over the epoch's features, on the CPU (`generator` too).

        num_samples: N, if z_all is a part of the training set. A class without a finite sample keeps μ, Σ, π;
        the others share the rest of π. A class seen for the first time gets its share of the larger N."""
        z, ok = usable_rows(self, z_all, y_all)
        mass, known = torch.zeros_like(self.weights), self.weights.sum(1) > 0  # [C, K] samples, [C]
        for c in range(self.num_classes):
            z_c = z[ok & (y_all == c)].cpu()  # [n, D]
            if len(z_c) > 0:
                init = self.means[c].cpu() if known[c] else None
                _, assign = kmeans(z_c, self.components, init, generator)
                mass[c], self.means[c], self.covs[c] = self.em(z_c.double(), assign)
        present = mass.sum(1, keepdim=True) > 0  # [C, 1]
        if present.any():
            N = float(ok.sum() if num_samples is None else num_samples)
            new = N * mass[~known].sum() / mass.sum()  # samples of classes seen for the first time
            room = self.num_samples / (self.num_samples + new).clamp(min=1)
            kept = room * torch.where(present, 0, self.weights)  # [C, K]
            self.weights.copy_(torch.where(present, (1 - kept.sum()).clamp(min=0) * mass / mass.sum(), kept))
            self.num_samples.fill_(N)

    def em(self, x, assign):
        """EM of x [n, D], from the clusters assign [n] -> samples [K], μ [K, D], Σ [K, D] or [K, D, D]."""
        x, origin = x - x[0], x[0]  # [n, D]; equal samples are exactly 0 and have Σ = 0
        x2 = x.square()  # [n, D]
        resp = nn.functional.one_hot(assign, self.components).to(x)  # [n, K]
        used = resp.sum(0) > 0  # [K] not the surplus components of a small class
        for _ in range(ROUNDS):
            # mass_k = Σ_i r_ik,   μ_k = Σ_i r_ik x_i / mass_k,   Σ_k = Σ_i r_ik x_i x_iᵀ / mass_k − μ_k μ_kᵀ
            mass = resp.sum(0)  # [K]
            share = resp.T / mass.clamp(min=torch.finfo(x.dtype).tiny)[:, None]  # [K, n]
            means = share @ x  # [K, D]
            # r_ik ∝ mass_k N(x_i; μ_k, Σ_k + REG·I)
            if self.covariance == "diag":
                covs = (share @ x2 - means.square()).clamp(min=0)  # [K, D]
                v = covs + REG
                maha = x2 @ (1 / v).T - 2 * x @ (means / v).T + (means.square() / v).sum(1)  # [n, K]
                log_p = -0.5 * (maha + v.log().sum(1))
            else:
                covs = self.moment(share, x) - means[:, :, None] * means[:, None]  # [K, D, D]
                normal = torch.distributions.MultivariateNormal(means, scale_tril=cholesky(covs, REG))
                log_p = normal.log_prob(x[:, None])  # [n, K]
            old, resp = resp, (mass.log() + log_p).softmax(1)
            if not resp.sum(0)[used].min() >= MIN_MASS or (resp - old).abs().mean() < TOLERANCE:
                break
        return mass, means + origin, covs

    def _apply(self, fn, recurse=True):
        return super()._apply(never_half(fn), recurse)


def cholesky(cov, ridge):
    """Lower factor of cov [J, D, D] + ridge·I; more where rounding could make it indefinite."""
    trace = cov.detach().diagonal(dim1=1, dim2=2).sum(1)  # [J]
    ridge = (JITTER * torch.finfo(cov.dtype).eps * trace).clamp(min=ridge)
    eye = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)
    return torch.linalg.cholesky_ex(cov + ridge[:, None, None] * eye).L


def kmeans(z, k, init=None, generator=None):
    """Lloyd's K-means of z [n, D] -> centres [k, D], each the mean of its members, and every z's cluster [n].

    Starts from init [k, D], or from the best of N_INIT draws of k-means++ (generator: a CPU generator). Equal
    samples count as one point with a weight. So no cluster is empty, unless there are fewer than k different
    samples: then the surplus stays empty, and its centres are copies of the largest cluster's."""
    points, same, weight = torch.unique(z, dim=0, return_inverse=True, return_counts=True)  # [m, D], [n], [m]
    weight, used, middle = weight.to(z.dtype), min(k, len(points)), points.mean(0)
    x = points - middle  # [m, D] centred, so that little is lost where ||x − μ||² is expanded
    if init is None:
        few = torch.randperm(len(x), generator=generator)[: TRIAL_POINTS * used].to(z.device)
        some, w = x[few], weight[few]
        trials = [lloyd(some, w, plus_plus(some, w, used, generator)) for _ in range(N_INIT)]
        start = min(trials, key=lambda trial: trial[0])[1]  # [used, D] of the least inertia
    else:
        start = init[:used] - middle
    _, centres, assign = lloyd(x, weight, start)
    assign = assign[same]  # [n]
    largest = centres[assign.bincount().argmax()]
    return torch.cat([centres, largest.expand(k - used, -1)]) + middle, assign


def lloyd(x, weight, centres):
    """x [m, D], weight [m], centres [k, D] -> inertia Σ weight ||x − μ||², centres, assign [m]."""
    k, assign = len(centres), None
    for _ in range(ROUNDS):
        # k*(x) = argmin_k ||x − μ_k||² = argmin_k ||μ_k||² − 2 x·μ_k
        old, assign = assign, torch.addmm(centres.square().sum(1), x, centres.T, alpha=-2).argmin(1)
        while (count := torch.bincount(assign, minlength=k)).min() == 0:  # the empty one takes the farthest x
            far = (x - centres[assign]).square().sum(1)  # [m]
            assign[torch.where(count[assign] > 1, far, -1).argmax()] = count.argmin()
        if old is not None and torch.equal(old, assign):
            break
        # μ_k = Σ weight x / Σ weight over the members of k
        member = x.new_zeros(k, len(x)).scatter_(0, assign[None], weight[None])  # [k, m]
        centres = (member / member.sum(1, keepdim=True)) @ x
    return float(weight @ (x - centres[assign]).square().sum(1)), centres, assign


def plus_plus(x, weight, k, generator):
    """k-means++: the next centre is a sample, drawn ∝ weight · squared distance to the nearest so far."""
    p, centres = weight, x[:0]
    for u in torch.rand(k, generator=generator).to(x):
        cdf = p.cumsum(0)  # [m]
        i = torch.searchsorted(cdf, u * cdf[-1], right=True).clamp(max=len(x) - 1)
        centres = torch.cat([centres, x[i][None]])
        p = weight * torch.cdist(x, centres).amin(1).square()
    return centres


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
