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
samples, s = update_scale (the paper 1, its released code 10). π_j is the old one in a_j, else the new one.

The value is L_C; in its gradient Δ_j has the weight n_j/(π_j B) in the place of a_j: ∂L/∂z = (Σ_j + σ²I)⁻¹
(z − μ_j) / B, an unbiased estimate of the gradient over all N samples, so that λ does not depend on N and s.
With a_j it would be about s·B/N of that. DOCUMENTS.md derives both.

    cel = GMMCEL(num_classes=10, dim=512, sigma=0.1)
    cel.refresh(z_all, y_all)          # K-means and EM of each class; before it L is 0. Once per epoch
    loss = cel(encoder(x), y)          # z [B, D] or [B, C, H, W], y [B] int64
    cel.stats["logdet_term"]           # Σ π ½ log |Σ + Σ_p| / |Σ_p|; "entropy_term" is the rest, H(A)
    cel.bound()                        # L_C of what is stored

refresh() runs on the CPU, and its `generator` is a CPU generator. num_samples: how many samples z_all stands
for, if it is a part of them. A class without a finite sample in z_all keeps its μ, its Σ and its π·N samples.

Differs from the documents in: a mixture for each class, not one of all features; that weight; no threshold:
L_C has no hinge, and stats["above_tau"] compares with VAR_THRESHOLD·σ² to be comparable with other losses.
Left out, with gradient 0: rows with NaN or Inf, and classes that no refresh has seen. In the update of π, B
counts only the rows that are not left out, so that Σπ stays 1.
"""

import warnings

import torch
from torch import nn

MAX_RATE = 0.99  # of a_j and b
VAR_THRESHOLD = 0.125  # of stats["above_tau"], in units of σ²; the loss does not use it
REG = 1e-6  # EM adds it to the covariances where it needs densities; the Σ that is stored has none
MIN_MASS, TOLERANCE = 0.5, 5e-3  # EM ends before a component has fewer samples, or if r_ik moves by less
JITTER = 8  # rounding makes a covariance indefinite by up to about JITTER · machine epsilon · trace
N_INIT, TRIAL_POINTS, ROUNDS = 20, 100, 50  # K-means: first starts, samples per cluster in them, most steps


class GMMCEL(nn.Module):
    """loss = cel(z, y); cel.refresh(z_all, y_all) fits the mixtures. Equations are at the top of the file."""

    def __init__(self, num_classes, dim, sigma, components=3, covariance="diag", update_scale=1.0):
        super().__init__()
        if covariance not in ("diag", "full"):
            raise ValueError(f'covariance {covariance!r}: use "diag" or "full".')
        if min(num_classes, dim, components) < 1 or not sigma > 0 or not update_scale > 0:
            raise ValueError("num_classes, dim, components must be >= 1, sigma and update_scale > 0.")
        self.num_classes, self.dim, self.sigma, self.components = num_classes, dim, sigma, components
        self.covariance, self.update_scale = covariance, update_scale
        shape = (dim,) if covariance == "diag" else (dim, dim)
        self.register_buffer("weights", torch.zeros(num_classes, components))  # π, 0 where there is none
        self.register_buffer("means", torch.zeros(num_classes, components, dim))  # μ
        self.register_buffer("covs", torch.zeros(num_classes, components, *shape))  # Σ of the clean z
        self.register_buffer("num_samples", torch.zeros(()))  # N
        self.stats = {}

    def forward(self, z, y, x=None):
        z, ok = usable_rows(self, z, y)  # [B, D], [B]
        with torch.autocast(z.device.type, enabled=False):
            B, N, s = len(z), self.num_samples.clamp(min=1), self.update_scale
            pi, cov = self.weights.flatten(), self.covs.flatten(0, 1).flatten(1)  # [J], [J, D] or [J, D²]
            ok = ok & self.weights[y].any(1)  # [B] without the classes that no refresh has seen
            # j(z) = argmin_j ||z − μ_j||²
            d2 = (z.detach()[:, None] - self.means[y]).square().sum(2)  # [B, K]
            k = d2.masked_fill(self.weights[y] == 0, torch.inf).argmin(1)  # [B]
            member = z.new_zeros(len(pi), B).scatter(0, (y * self.components + k)[None], ok[None].to(z.dtype))
            n = member.sum(1)  # [J]
            # Δ_j = (1/n_j) Σ (z − μ_j)(z − μ_j)ᵀ
            r = torch.where(ok[:, None], z - self.means[y, k], 0)  # [B, D]
            w = member / n.clamp(min=1)[:, None]  # [J, B]
            delta = w @ r.square() if self.covariance == "diag" else ((w[:, :, None] * r).mT @ r).flatten(1)
            # Σ_j ← (1 − a_j) Σ_j + a_j Δ_j,   a_j = min(0.99, s n_j / (π_j N))
            a = torch.where(n > 0, s * n / (pi * N), 0).clamp(max=MAX_RATE)[:, None]  # [J, 1]
            cov = (1 - a) * cov + a * delta
            # π ← (1 − b) π + b n / B,   b = min(0.99, s B / N)
            b = (s * n.sum() / N).clamp(max=MAX_RATE)
            pi = (1 - b) * pi + b * n / n.sum().clamp(min=1)
            if self.training:
                self.weights.copy_(pi.view_as(self.weights))
                self.covs.copy_(cov.detach().view_as(self.covs))
            # the value of Σ_j, with the gradient of n_j/(π_j B) Δ_j
            cov = cov.detach() + torch.where(n > 0, n / (pi * B), 0)[:, None] * (delta - delta.detach())
            # L_C = Σ_j π_j ( −log π_j + ½ log |Σ_j + Σ_p| / |Σ_p| )           [E §1.4]
            entropy, logdet = self.terms(pi, cov)
            variance = r.detach().square().sum(0) / n.sum().clamp(min=1)  # [D] about the means, in the batch
            set_stats(self, entropy + logdet, "no refresh has seen its classes: call refresh(z_all, y_all)", {
                "spread": variance.mean(),
                "above_tau": (variance > VAR_THRESHOLD * self.sigma**2).to(n.dtype).mean(),
                "skipped": 1 - n.sum() / B,
                "entropy_term": entropy.detach(),
                "logdet_term": logdet.detach(),
            })  # fmt: skip
            return entropy + logdet

    def terms(self, pi, cov):
        """The two sums of L_C, of pi [J] and cov [J, D] or [J, D²]. |Σ + Σ_p| / |Σ_p| = |I + Σ/σ²|."""
        entropy = torch.special.entr(pi).sum().clamp(min=0)  # entr(0) = 0; a π may round to above 1
        if self.covariance == "diag":
            return entropy, (pi * 0.5 * torch.log1p(cov / self.sigma**2).sum(1)).sum()
        L = cholesky(cov.unflatten(1, (self.dim, self.dim)) / self.sigma**2, 1.0)  # [J, D, D]
        return entropy, (pi * L.diagonal(dim1=1, dim2=2).log().sum(1)).sum()

    def bound(self):
        """L_C of the stored statistics, in nats."""
        return sum(self.terms(self.weights.flatten(), self.covs.flatten(0, 1).flatten(1)))

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def refresh(self, z_all, y_all, num_samples=None, generator=None):
        """K-means, then EM, of each class over the epoch's features z_all [N, D], y_all [N]."""
        z, ok = usable_rows(self, z_all, y_all)
        mass = self.weights * self.num_samples  # [C, K] samples of each component
        for c in y_all[ok].unique():
            z_c = z[ok & (y_all == c)].cpu()  # [n, D]
            start = self.means[c].cpu() if self.weights[c].any() else None
            _, assign = kmeans(z_c, self.components, start, generator)
            mass[c], self.means[c], self.covs[c] = self.em(z_c.double(), assign)
            mass[c] *= 1 if num_samples is None else num_samples / ok.sum()
        if ok.any():
            self.weights.copy_(mass / mass.sum())
            self.num_samples.copy_(mass.sum().round())

    def em(self, x, assign):
        """EM of x [n, D], from the clusters assign [n] -> samples [K], μ [K, D], Σ [K, D] or [K, D, D]."""
        x, origin = x - x[0], x[0]  # [n, D]; equal samples are exactly 0 and have Σ = 0
        resp = nn.functional.one_hot(assign, self.components).to(x)  # [n, K]
        for _ in range(ROUNDS):
            # mass_k = Σ_i r_ik,   μ_k = Σ_i r_ik x_i / mass_k,   Σ_k = Σ_i r_ik x_i x_iᵀ / mass_k − μ_k μ_kᵀ
            mass = resp.sum(0)  # [K] 0 for the surplus components of a small class
            share = resp.T / mass.clamp(min=torch.finfo(x.dtype).tiny)[:, None]  # [K, n]
            means = share @ x  # [K, D]
            # r_ik ∝ mass_k N(x_i; μ_k, Σ_k + REG·I)
            if self.covariance == "diag":
                covs = (share @ x.square() - means.square()).clamp(min=0)  # [K, D]
                p = 1 / (covs + REG)
                log_p = x @ (p * means).T - 0.5 * (x.square() @ p.T + (p * means.square() - p.log()).sum(1))
            else:
                covs = (share[:, :, None] * x).mT @ x - means[:, :, None] * means[:, None]  # [K, D, D]
                normal = torch.distributions.MultivariateNormal(means, scale_tril=cholesky(covs, REG))
                log_p = normal.log_prob(x[:, None])  # [n, K]
            old, resp = resp, (mass.log() + log_p).softmax(1)
            if not resp.sum(0)[mass > 0].min() >= MIN_MASS or (resp - old).abs().mean() < TOLERANCE:
                break
        return mass, means + origin, covs

    def _apply(self, fn, recurse=True):
        return super()._apply(never_half(fn), recurse)


def cholesky(cov, ridge):
    """Lower factor of cov [J, D, D] + ridge·I; more where rounding could make it indefinite."""
    trace = cov.detach().diagonal(dim1=1, dim2=2).sum(1, keepdim=True)  # [J, 1]
    ridge = (JITTER * torch.finfo(cov.dtype).eps * trace).clamp(min=ridge).expand(cov.shape[:2])
    return torch.linalg.cholesky_ex(cov + torch.diag_embed(ridge)).L


def kmeans(z, k, init=None, generator=None):
    """Lloyd's K-means of z [n, D] -> centres [k, D], means of their members, and every z's cluster [n]."""
    if init is None:  # the best of N_INIT starts, found on a part of the samples
        part = z[torch.randperm(len(z), generator=generator)[: TRIAL_POINTS * k]]
        fits = [kmeans(part, k, plus_plus(part, k, generator)) for _ in range(N_INIT)]
        init, _ = min(fits, key=lambda fit: (part - fit[0][fit[1]]).square().sum())
    middle = z.mean(0)
    x, centres = z - middle, init - middle  # centred, so that little is lost where ||x − μ||² is expanded
    norm = x.square().sum(1, keepdim=True)  # [n, 1]
    for _ in range(ROUNDS):
        # k*(x) = argmin_k ||x − μ_k||². Of centres that are equal but for rounding, the first gets all
        d2 = torch.addmm(norm + centres.square().sum(1), x, centres.T, alpha=-2)  # [n, k]
        equal = torch.cdist(centres, centres).square() <= torch.finfo(x.dtype).eps * norm.mean()  # [k, k]
        near, assign = d2.masked_fill(equal.triu(1).any(0), torch.inf).min(1)  # [n], [n]
        # μ_k = mean of the members of k; without members, the x that is farthest from its centre
        member = nn.functional.one_hot(assign, k).to(x.dtype)  # [n, k]
        count = member.sum(0)[:, None]  # [k, 1]
        old, centres = centres, torch.where(count > 0, member.T @ x / count.clamp(min=1), x[near.argmax()])
        if torch.equal(old, centres):
            break
    return centres + middle, assign


def plus_plus(z, k, generator):
    """k-means++: k of the samples, each drawn ∝ its squared distance to the nearest one drawn before."""
    p, centres = torch.ones(len(z)), z[:0]
    for _ in range(k):
        centres = torch.cat([centres, z[torch.multinomial(p, 1, generator=generator)]])
        p = torch.cdist(z, centres).amin(1).square().clamp(min=1e-30).cpu()  # not all 0, if all are equal
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
