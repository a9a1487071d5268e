"""GMM CEL: the mixture bound L_C on what the noisy features tell about the input.

Claim. z = F_e(x), z' = z + n, n ~ N(0, σ²I), Σ_p = σ²I. With component i of weight π_i and Σ_i the covariance of the
*clean* z in it, i over all C·K components and Σ_i π_i = 1,

    I(x;z') ≤ L_C = Σ_i π_i ( −log π_i + ½ log |Σ_i + Σ_p| / |Σ_p| )                             (004 §1.4)

because I(x;z') = H(z') − H(n) ≤ H(A) + H(z'|A) − H(n) for every assignment A of samples to components, hard or soft, and
a Gaussian has the largest entropy of its covariance. It holds for any distribution of z with the true moments, hence
right after `refresh` for the samples it was given (EM ends with a moment step). Between refreshes it is an estimate.
Both terms are ≥ 0, so L_C ≥ 0. covariance="diag" keeps the diagonal of Σ_i: |Σ| ≤ Π_d Σ_dd, so diag ≥ full.

In a batch every sample goes to the component j of its class with the nearest mean (Euclidean), then

    Δ_j  = (1/n_j) Σ_{z in j} (z − μ_j)(z − μ_j)ᵀ          the gradient flows here; μ_j is a constant
    Σ_j ← (1 − a_j) Σ_j + a_j Δ_j,   a_j = min(0.99, s n_j / (π_j N))
    π   ← (1 − b) π + b n / B,       b   = min(0.99, s B / N)

and L_C is taken with the new Σ and π, which are stored if the module is in training mode. N is the number of training
samples, s = update_scale (the paper: 1, its released code: 10). Counts have no gradient, so π passes none.

Gradient. ∂L_C/∂Σ_j = ½ π_j (Σ_j + σ²I)⁻¹ and dΣ_j = a_j dΔ_j. For symmetric G, ∂tr(G Δ_j)/∂z_i = (2/n_j) G (z_i − μ_j):

    ∂L_C/∂z_i = π_j (a_j/n_j) (Σ_j + σ²I)⁻¹ (z_i − μ_j)     rate_free=False (π_j, Σ_j after the update, a_j of before it)

a_j ≈ s n_j/(π_j N), so this is ≈ (s/N)(…): it shrinks with the data set and grows with s, and λ would have to follow.
Had all N samples been in one batch, Σ_j would be the mean over its π_j N members and ∂L_C/∂z_i = (1/N)(Σ_j+σ²I)⁻¹(z_i−μ_j).
A batch of B of them estimates that sum without bias if each of its samples carries 1/B in the place of 1/N:

    ∂L/∂z_i = (1/B) (Σ_j + σ²I)⁻¹ (z_i − μ_j)               rate_free=True (default), free of N and s

(diag: divide elementwise). It is made by a straight-through term: Σ_j + w_j (Δ_j − [Δ_j]) with [·] detached, Σ_j the
detached update and w_j = n_j/(π_j B); π_j w_j (2/n_j) ½ = 1/B. The value of L_C is the same with both. Compared with
the literal form it is N/(s B) times as large wherever a_j and b are not clamped, up to the step from old to new π_j.

Shapes: B batch, C classes, D feature size, K components per class, J = C·K, N samples of a refresh, n of one class in it.

    cel = GMMCEL(num_classes=10, dim=512, sigma=0.025, components=3)
    cel.refresh(z_epoch, y_epoch)        # once per epoch (or every R epochs): features [N, 512], labels [N], no gradient
    loss = cel(z, y)                     # z [B, 512] or [B, 8, 8, 8], y [B] int64; nats
    loss.backward()
    cel.stats["entropy_term"], cel.stats["logdet_term"]     # the two halves of L_C
    cel.state_dict()                     # holds π, μ, Σ, N

Left out, with zero gradient and counted in `stats`: rows with NaN or Inf ("nonfinite"), and samples of classes that no
refresh has seen ("skipped", "skipped_classes"). Before the first refresh there is no component and L = 0. The B of the
update counts the samples that are not left out, so that π keeps its sum; the 1/B of the gradient counts the whole batch,
so what is left out weighs zero. K larger than a class: the surplus components have π = 0 and are never matched.

Reference: seed 004 §1.4; Xia et al., CVPR 2025.
Differs from the documents in: a mixture per class instead of one of all features (000 §3.4); rate_free; the E-step adds
`reg` to the covariances, the stored Σ has none (at D = 512 and σ = 0.025 a reg of 1e-6 would add 0.4 nats to L_C).
"""

import torch
from torch import nn

COVARIANCES = ("diag", "full")
MAX_RATE = 0.99  # of a_j and b
MIN_MASS = 0.5  # samples; EM stops before a component holds less
FEW = 0.25  # share of moved samples up to which K-means corrects its sums instead of forming them anew
JITTER = 8  # × machine epsilon × trace is added to a full covariance before Cholesky: rounding may make it indefinite


def kmeans(z, k, init=None, iters=50, generator=None):
    """Lloyd's K-means of z [n, D] -> (centers [k, D], assign [n]); every centre is the mean of its members.

    Starts from init [k, D] or from k-means++, stops when no assignment changes or after `iters` rounds. An empty cluster
    takes the sample that is farthest from its centre. With fewer than k distinct samples the surplus clusters stay empty
    and their centres are copies of the largest one's. `generator` is a CPU generator. Cost O(iters · n k D)."""
    k_used = min(k, len(z))
    centers = _plus_plus(z, k_used, generator) if init is None else init[:k_used]  # [k', D]
    assign = torch.full((len(z),), -1, device=z.device)  # [n]
    for _ in range(iters):
        # argmin_k ||z − μ_k||² = argmin_k (||c_k||² + 2 m·c_k − 2 z·c_k), c_k = μ_k − m: no copy of z, little cancellation
        m = centers.mean(0)
        c = centers - m  # [k', D]
        nearest = torch.addmm(c.square().sum(1) + 2 * (c @ m), z, c.T, alpha=-2).argmin(1)  # [n]
        counts = torch.bincount(nearest, minlength=k_used)  # [k']
        if counts.min() == 0:
            counts = _fill_empty(z, centers, nearest, counts)
        moved = (nearest != assign).nonzero().flatten()  # [m]
        if len(moved) == 0:
            break
        # μ_k = Σ_{z in S_k} z / |S_k|; when few samples moved, only they change the sums
        if len(moved) > FEW * len(z):
            sums = torch.zeros_like(centers).index_add_(0, nearest, z)  # [k', D]
        else:
            change = _one_hot(nearest[moved], k_used, z) - _one_hot(assign[moved], k_used, z)  # [k', m]
            sums = sums + change @ z.index_select(0, moved)
        assign = nearest
        centers = sums / counts.clamp(min=1)[:, None]
    largest = centers[counts.argmax()]
    centers = torch.where(counts[:, None] > 0, centers, largest)
    return torch.cat([centers, largest.expand(k - k_used, -1)]), assign


def _one_hot(assign, k, like):
    return like.new_zeros(k, len(assign)).scatter_(0, assign[None], 1)  # [k, n]


def _plus_plus(z, k, generator):
    """k-means++: each next centre is a sample drawn with probability ∝ D², its squared distance from the nearest one so far."""
    u = torch.rand(k, generator=generator).to(z)
    chosen = [(u[0] * len(z)).long().clamp(max=len(z) - 1)]
    d2 = z.new_full((len(z),), torch.inf)  # [n]
    for j in range(1, k):
        d2 = torch.minimum(d2, torch.linalg.vector_norm(z - z[chosen[-1]], dim=1).square())
        cdf = d2.cumsum(0)
        chosen.append(torch.searchsorted(cdf, u[j] * cdf[-1], right=True).clamp(max=len(z) - 1))
    return z[torch.stack(chosen)]  # [k, D]


def _fill_empty(z, centers, assign, counts):
    """Give every empty cluster the sample farthest from its centre (changes assign in place); returns the new counts."""
    far = (z - centers[assign]).square().sum(1)  # [n]
    for j in (counts == 0).nonzero().flatten():
        i = torch.where(counts[assign] > 1, far, 0).argmax()
        if far[i] == 0 or counts[assign[i]] == 1:  # fewer distinct samples than clusters
            break
        assign[i], far[i] = j, 0
        counts = torch.bincount(assign, minlength=len(centers))
    return counts


def cholesky(cov, ridge, stored):
    """Lower Cholesky factor of cov [..., D, D] + ridge·I, with the JITTER that rounding needs; no host synchronisation.

    stored: the type in which cov was kept. A float32 statistic in a float64 sum has still the rounding of float32."""
    trace = cov.detach().diagonal(dim1=-2, dim2=-1).sum(-1)  # [...]
    ridge = ridge + JITTER * max(torch.finfo(cov.dtype).eps, torch.finfo(stored).eps) * trace
    eye = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)
    return torch.linalg.cholesky_ex(cov + ridge[..., None, None] * eye).L


class GMMCEL(nn.Module):
    """`loss = cel(z, y)`; `cel.refresh(z_all, y_all)` fits the mixtures. See the top of the file."""

    def __init__(self, num_classes, dim, sigma, components=3, covariance="diag", update_scale=1.0, rate_free=True,
                 reg=1e-6, iters=50, tol=1e-3):
        super().__init__()
        if num_classes < 1 or dim < 1 or components < 1 or iters < 1:
            raise ValueError("num_classes, dim, components and iters count something: give at least 1 for each.")
        if not sigma > 0:
            raise ValueError("sigma must be positive: without noise the bound L_C is infinite; add noise or leave the surrogate out.")
        if not update_scale > 0 or not reg > 0 or not tol > 0:
            raise ValueError("update_scale, reg and tol must be positive: they are a rate, a variance and a tolerance.")
        if covariance not in COVARIANCES:
            raise ValueError(f"covariance={covariance!r} is unknown: choose one of {', '.join(COVARIANCES)}.")
        self.num_classes, self.dim, self.sigma, self.components = num_classes, dim, sigma, components
        self.covariance, self.update_scale, self.rate_free = covariance, update_scale, rate_free
        self.reg, self.iters, self.tol = reg, iters, tol
        shape = (dim,) if covariance == "diag" else (dim, dim)
        self.register_buffer("weights", torch.zeros(num_classes, components))  # π_j, Σ over all J = 1 once fitted
        self.register_buffer("means", torch.zeros(num_classes, components, dim))  # μ_j
        self.register_buffer("covs", torch.zeros(num_classes, components, *shape))  # Σ_j of the clean z
        self.register_buffer("num_samples", torch.zeros(()))  # N
        self.register_buffer("fitted", torch.zeros(num_classes, dtype=torch.bool))
        self.stats = {}

    def forward(self, z, y):
        z = z.flatten(1).contiguous()  # [B, D]; rounding is then the same for all strides
        self._check(z, y)
        B, J, K = len(z), self.num_classes * self.components, self.components
        means, pi, cov = (t.to(z.dtype) for t in (self.means, self.weights.flatten(), self.covs.flatten(0, 1)))  # [C,K,D], [J], [J,D(,D)]

        finite = z.isfinite().all(1)  # [B]
        seen = finite & self.fitted[y]  # [B]
        z = torch.where(seen[:, None], z, 0)  # before any arithmetic: what is left out has gradient 0, not NaN

        # j(z) = argmin_j ||z − μ_j||² over the components of its class
        with torch.no_grad():
            d2 = (z[:, None] - means[y]).square().sum(2)  # [B, K]
            k = d2.masked_fill(pi.view(-1, K)[y] == 0, torch.inf).argmin(1)  # [B]
            j = y * K + k  # [B]

        # Δ_j = (1/n_j) Σ (z − μ_j)(z − μ_j)ᵀ
        r = torch.where(seen[:, None], z - means[y, k], 0)  # [B, D]
        n = z.new_zeros(J).index_add(0, j, seen.to(z.dtype))  # [J]
        per_sample = 1 / n.clamp(min=1)[j]  # [B]
        if self.covariance == "diag":
            delta = z.new_zeros(J, self.dim).index_add(0, j, r.square() * per_sample[:, None])  # [J, D]
        else:
            share = z.new_zeros(J, B).scatter(0, j[None], per_sample[None])  # [J, B]
            delta = (share[:, :, None] * r).transpose(1, 2) @ r  # [J, D, D]

        # a_j = min(0.99, s n_j / (π_j N)),   b = min(0.99, s B / N)
        N, s, n_all = self.num_samples.to(z.dtype).clamp(min=1), self.update_scale, n.sum()
        a = (s * n / (pi.clamp(min=torch.finfo(z.dtype).tiny) * N)).clamp(max=MAX_RATE)  # [J]
        b = (s * n_all / N).clamp(max=MAX_RATE)

        # π ← (1 − b) π + b n / B
        pi = (1 - b) * pi + b * n / n_all.clamp(min=1)  # [J]

        # Σ_j ← (1 − a_j) Σ_j + a_j Δ_j
        a = a.view(J, *[1] * (cov.dim() - 1))
        cov = (1 - a) * cov + a * delta  # [J, D] or [J, D, D]
        if self.training:
            self._store(pi, cov)
        if self.rate_free:
            # Σ_j = [Σ_j] + w_j (Δ_j − [Δ_j]),   w_j = n_j / (π_j B)
            w = (n / (pi * B).clamp(min=torch.finfo(z.dtype).tiny)).view_as(a)
            cov = cov.detach() + w * (delta - delta.detach())

        entropy, logdet = self._terms(pi, cov)
        loss = entropy + logdet
        self._record(loss, y, finite, seen, n, r, entropy, logdet)
        return loss

    def _terms(self, pi, cov):
        """The two sums of L_C for pi [J] and cov [J, D] or [J, D, D]."""
        # L_C = Σ_j π_j ( −log π_j + ½ log |Σ_j + Σ_p| / |Σ_p| )               (004 §1.4)
        entropy = torch.special.entr(pi).sum().clamp(min=0)  # entr(0) = 0; the clamp is for a π that rounds to above 1
        ratio = cov / self.sigma**2  # |Σ + Σ_p| / |Σ_p| = |I + Σ/σ²|
        if self.covariance == "diag":
            logdet = torch.log1p(ratio).sum(1)  # [J]
        else:
            logdet = 2 * cholesky(ratio, 1.0, self.covs.dtype).diagonal(dim1=1, dim2=2).log().sum(1)  # [J]
        return entropy, (pi * 0.5 * logdet).sum()

    @torch.no_grad()
    def bound(self):
        """L_C of the stored statistics, in nats: right after refresh a bound on I(x;z') for the samples it was given."""
        return sum(self._terms(self.weights.flatten(), self.covs.flatten(0, 1)))

    def _check(self, z, y):
        if z.shape[1] != self.dim:
            raise ValueError(f"z has {z.shape[1]} features per sample but dim={self.dim}: make the module with the flattened size.")
        if y.device.type == "cpu" and len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.num_classes:
            raise ValueError(f"labels must lie in 0..{self.num_classes - 1}: pass num_classes to match the data set.")

    @torch.no_grad()
    def _store(self, pi, cov):
        self.weights.copy_(pi.view_as(self.weights))
        self.covs.copy_(cov.view_as(self.covs))

    @torch.no_grad()
    def _record(self, loss, y, finite, seen, n, r, entropy, logdet):
        left_out = finite & ~seen  # [B]
        per_class = n.new_zeros(self.num_classes).index_add(0, y, left_out.to(n.dtype))  # [C]
        self.stats = {
            "loss": loss.detach(),
            "active": (r != 0).any().to(n.dtype),
            "nonfinite": (~finite).sum(),
            "skipped_classes": (per_class > 0).sum(),
            "skipped": left_out.sum(),
            "entropy_term": entropy.detach(),  # Σ −π log π = H(A)
            "logdet_term": logdet.detach(),  # Σ π ½ log |Σ+Σ_p|/|Σ_p|
            "matched": (n > 0).sum(),  # components with a member in the batch
        }

    @torch.no_grad()
    def refresh(self, z, y, generator=None, num_samples=None):
        """EM per class over the epoch's z [N, D] or [N, C, H, W], y [N]; returns counts as a dict.

        Starts from K-means, and K-means from the old means if the class was fitted before. Every component keeps at least
        MIN_MASS samples, otherwise EM stops one step earlier. Classes without a finite sample keep μ, Σ and π, the others
        share the rest of π; classes seen for the first time make room for themselves, as if N had grown by their samples.
        num_samples: N, if z is a subsample of the training set. Besides z, about three copies of the largest class are
        held at a time (diag)."""
        self._check(z[:1].flatten(1), y)
        nonfinite, steps, known = 0, 0, self.fitted.clone()
        mass = torch.zeros_like(self.weights)  # [C, K] samples
        for c in range(self.num_classes):
            x = z.index_select(0, (y == c).nonzero().flatten()).flatten(1).to(self.means)  # [n, D]
            finite = x.sum(1).isfinite()  # [n]; NaN and Inf survive the sum
            if not finite.all():
                nonfinite += int((~finite).sum())
                x = x[finite]
            if len(x) == 0:
                continue
            init = self.means[c] if self.fitted[c] else None
            assign = kmeans(x, self.components, init, self.iters, generator)[1]
            mass[c], self.means[c], self.covs[c], used = self._em(x, assign)
            self.fitted[c], steps = True, max(steps, used)
        present = mass.sum(1, keepdim=True) > 0  # [C, 1]
        if present.any():
            N = float(len(y) - nonfinite if num_samples is None else num_samples)
            first = N * mass[~known].sum() / mass.sum()  # samples of classes seen for the first time
            room = self.num_samples / (self.num_samples + first).clamp(min=1)
            kept = room * torch.where(present, 0, self.weights)  # [C, K]
            self.weights.copy_(torch.where(present, (1 - kept.sum()).clamp(min=0) * mass / mass.sum(), kept))
            self.num_samples.fill_(N)
        return {"nonfinite": nonfinite, "fitted": int(self.fitted.sum()), "em_steps": steps}

    def _em(self, x, assign):
        """EM of one class from hard assignments [n] -> mass [K] (samples), μ [K, D], Σ [K, D(, D)], steps taken."""
        resp = _one_hot(assign, self.components, x).T  # [n, K]
        used = resp.sum(0) > 0  # [K]; False for the surplus components of a small class
        e = torch.empty_like(x)  # [n, D]; one scratch copy for all differences x − μ_k
        mixture = self._moments(x, resp, e)
        step = 0
        while step < self.iters and used.sum() > 1:
            new = self._posterior(x, *mixture, e)
            if new.sum(0)[used].min() < MIN_MASS:
                break
            change = (new - resp).abs().max()
            resp, mixture, step = new, self._moments(x, new, e), step + 1
            if change < self.tol:
                break
        return (*mixture, step)

    def _moments(self, x, resp, e):
        """M-step: mass = Σ_i r_ik, μ_k = Σ r_ik x_i / mass, Σ_k = Σ r_ik (x_i − μ_k)(x_i − μ_k)ᵀ / mass; e is scratch."""
        mass = resp.sum(0)  # [K]
        r = resp / mass.clamp(min=torch.finfo(x.dtype).tiny)  # [n, K]
        shift = x.mean(0)
        means = shift + r.T @ torch.sub(x, shift, out=e)  # [K, D]
        covs = []
        for k in range(len(mass)):
            torch.sub(x, means[k], out=e).mul_(r[:, k, None].sqrt())  # [n, D]
            covs.append(e.square_().sum(0) if self.covariance == "diag" else e.T @ e)
        return mass, means, torch.stack(covs)

    def _posterior(self, x, mass, means, covs, e):
        """E-step: r_ik ∝ π_k N(x_i; μ_k, Σ_k + reg·I) -> [n, K]; e is scratch."""
        log_p = []
        for k in range(len(mass)):
            torch.sub(x, means[k], out=e)  # [n, D]
            if self.covariance == "diag":
                v = covs[k] + self.reg
                log_p.append(mass[k].log() - 0.5 * (v.log().sum() + e.square_() @ (1 / v)))
            else:
                L = cholesky(covs[k], self.reg, covs.dtype)
                maha = torch.linalg.solve_triangular(L, e.T, upper=False).square_().sum(0)
                log_p.append(mass[k].log() - L.diagonal().log().sum() - 0.5 * maha)
        return torch.stack(log_p, 1).softmax(1)
