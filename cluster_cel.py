"""Cluster CEL: the spread of every class around its K-means centres, squeezed below a threshold.

Claim. Per class, the features of an epoch are clustered by K-means (stage 2, `refresh`). In the next epoch a batch is
matched to those centres and its mean squared distance from them is penalised where it exceeds τ (stage 1, `forward`).
The centres are constants of the batch, so the whole gradient goes to the encoder.

    k*(z)  = argmin_k ||z − μ_ck||²                                           step 2
    v̂_ck   = mean of ||z − μ_ck||² over the batch's members of cluster (c,k), 0 if it has none     step 3
    v̂_c    = Σ_k π_ck v̂_ck                                                    (1)
    R_lin  = v̂_c,   R_log = max(0, log(v̂_c + ε) − log(τ + ε))                 step 4
    L      = Σ_c β_c R(c),   β_c = M_c / B                                    (2)

Gradient. k* is piecewise constant, μ and π are constants. For z in cluster (c,k) with n_ck members in the batch
∂v̂_ck/∂z = (2/n_ck)(z − μ_ck), ∂v̂_c/∂v̂_ck = π_ck, ∂R_log/∂v̂_c = 1/(v̂_c + ε) where v̂_c > τ and 0 below, so

    ∂L/∂z = β_c π_ck (2/n_ck) (z − μ_ck) / (v̂_c + ε)    (log, where v̂_c > τ)
    ∂L/∂z = β_c π_ck (2/n_ck) (z − μ_ck)                (lin)

It points away from the centre; the descent step −∂L/∂z points towards it. variance="per_dim" is the same equation in
each dimension d, with (z_d − μ_ckd)², v̂_cd and its own hinge, and the mean over the D dimensions at the end.

Shapes: B batch, C classes, D feature size, K clusters per class, M = M_c samples of class c in the batch,
E = 1 (variance="trace") or D ("per_dim"), N samples of a refresh, n samples of one class in it.

    cel = ClusterCEL(num_classes=10, dim=512, tau=512 * 0.125 * 0.025**2, clusters=3)
    cel.refresh(z_epoch, y_epoch)        # once per epoch (or every R epochs): features [N, 512], labels [N], no gradient
    loss = cel(z, y)                     # z [B, 512] or [B, 8, 8, 8], y [B] int64
    loss.backward()
    cel.stats["variance"]                # v̂_c of the last batch, [C]
    cel.state_dict()                     # holds centres, weights, variances

τ: for "trace" the squared norm is compared, so τ = D · var_threshold · σ²; for "per_dim" τ = var_threshold · σ².
eps is ε of seed 000 and the floor g0 (there called γ) of 001 and 003: one number inside both logs.

Left out, with zero gradient and counted in `stats`: rows with NaN or Inf ("nonfinite"), and samples of classes that no
refresh has seen ("skipped", "skipped_classes"); before the first refresh these are all samples and L = 0. B is the whole
batch, so what is left out weighs zero. A class of one sample, or of fewer than K, gets fewer clusters; the rest has
π = 0 and is never matched. An empty v̂_ck counts as 0 in (1), as documented, so a batch with few samples per cluster
underestimates v̂_c; stats["missing_mass"] is the share of π that found no member.

Reference: seed 000 §3.2–3.4 (eq. 1, 2, steps 1–5), §7.1 (outliers), §8.1, appendix A.
Differs from the documents in: step 1's pooling is the caller's (here: flatten); "the gradient points to the centre"
(§6.2 step 4) is true of the descent step only; v_ck is stored for monitoring and for §7.1, no equation of stage 1 uses
it; §7.1 leaves "truncate" and "re-initialise" open, `refresh` says what they mean here.
"""

import torch
from torch import nn

FORMS = ("log", "lin")
VARIANCES = ("trace", "per_dim")
OUTLIERS = ("keep", "truncate", "reseed")
FEW = 0.25  # share of moved samples up to which K-means corrects its sums instead of forming them anew


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


class ClusterCEL(nn.Module):
    """`loss = cel(z, y)`; `cel.refresh(z_all, y_all)` fits the statistics. See the top of the file."""

    def __init__(self, num_classes, dim, tau, clusters=3, form="log", variance="trace", outliers="keep",
                 outlier_factor=4.0, iters=50, eps=1e-6):
        super().__init__()
        if num_classes < 1 or dim < 1 or clusters < 1 or iters < 1:
            raise ValueError("num_classes, dim, clusters and iters count something: give at least 1 for each.")
        if not tau > 0 or not eps > 0:
            raise ValueError("tau and eps stand inside a logarithm: give positive numbers, e.g. tau = dim*var_threshold*sigma**2.")
        if not outlier_factor > 1:
            raise ValueError("outlier_factor multiplies the median variance of a class's clusters: give a number above 1.")
        for name, value, allowed in (("form", form, FORMS), ("variance", variance, VARIANCES), ("outliers", outliers, OUTLIERS)):
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(allowed)}.")
        self.num_classes, self.dim, self.tau, self.clusters = num_classes, dim, tau, clusters
        self.form, self.variance, self.outliers = form, variance, outliers
        self.outlier_factor, self.iters, self.eps = outlier_factor, iters, eps
        self.register_buffer("centers", torch.zeros(num_classes, clusters, dim))  # μ_ck
        self.register_buffer("weights", torch.zeros(num_classes, clusters))  # π_ck, Σ_k π_ck = 1 once fitted
        self.register_buffer("variances", torch.zeros(num_classes, clusters))  # v_ck at the last refresh
        self.register_buffer("fitted", torch.zeros(num_classes, dtype=torch.bool))
        self.stats = {}

    def forward(self, z, y):
        z = z.flatten(1).contiguous()  # [B, D]; rounding is then the same for all strides
        self._check(z, y)
        B, C, K = len(z), self.num_classes, self.clusters
        centers, weights = self.centers.to(z.dtype), self.weights.to(z.dtype)

        finite = z.isfinite().all(1)  # [B]
        seen = finite & self.fitted[y]  # [B]
        z = torch.where(seen[:, None], z, 0)  # before any arithmetic: what is left out has gradient 0, not NaN

        # k*(z) = argmin_k ||z − μ_ck||²                                      step 2
        with torch.no_grad():
            d2 = (z[:, None] - centers[y]).square().sum(2)  # [B, K]
            k = d2.masked_fill(weights[y] == 0, torch.inf).argmin(1)  # [B]
            j = y * K + k  # [B] index of (c, k)

        # v̂_ck = (1/n_ck) Σ ||z − μ_ck||²,  0 if n_ck = 0                      step 3
        r2 = torch.where(seen[:, None], z - centers[y, k], 0).square()  # [B, D]
        if self.variance == "trace":
            r2 = r2.sum(1, keepdim=True)  # [B, E]
        n = z.new_zeros(C * K).index_add(0, j, seen.to(z.dtype))  # [C·K]
        v_ck = z.new_zeros(C * K, r2.shape[1]).index_add(0, j, r2) / n.clamp(min=1)[:, None]  # [C·K, E]

        # v̂_c = Σ_k π_ck v̂_ck                                                 (1)
        v_c = (weights[:, :, None] * v_ck.view(C, K, -1)).sum(1)  # [C, E]

        # R_lin = v̂_c,   R_log = max(0, log(v̂_c + ε) − log(τ + ε))            step 4
        if self.form == "lin":
            R = v_c.mean(1)  # [C]
        else:
            log_tau = v_c.new_tensor(self.tau + self.eps).log()
            R = ((v_c + self.eps).log() - log_tau).relu().mean(1)  # [C]

        # L = Σ_c β_c R(c),   β_c = M_c / B                                    (2)
        beta = n.view(C, K).sum(1) / B  # [C]
        loss = (beta * R).sum()
        self._record(loss, y, finite, seen, n.view(C, K), beta, v_c, weights)
        return loss

    def _check(self, z, y):
        if z.shape[1] != self.dim:
            raise ValueError(f"z has {z.shape[1]} features per sample but dim={self.dim}: make the module with the flattened size.")
        if y.device.type == "cpu" and len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.num_classes:
            raise ValueError(f"labels must lie in 0..{self.num_classes - 1}: pass num_classes to match the data set.")

    @torch.no_grad()
    def _record(self, loss, y, finite, seen, n, beta, v_c, weights):
        left_out = finite & ~seen  # [B]
        per_class = beta.new_zeros(self.num_classes).index_add(0, y, left_out.to(beta.dtype))  # [C]
        above = (v_c > self.tau).to(beta.dtype).mean(1)  # [C] share of the dimensions above τ
        missing = (weights * (n == 0)).sum(1)  # [C]
        total = beta.sum().clamp(min=torch.finfo(beta.dtype).tiny)
        self.stats = {
            "loss": loss.detach(),
            "active": (loss.detach() > 0).to(beta.dtype),
            "nonfinite": (~finite).sum(),
            "skipped_classes": (per_class > 0).sum(),
            "skipped": left_out.sum(),
            "variance": v_c.detach().mean(1),  # [C] v̂_c, 0 for classes not in the batch
            "above_tau": (beta * above).sum() / total,  # share of the samples (and dimensions) above τ
            "missing_mass": (beta * missing).sum() / total,  # mean over samples of Σ π_ck of clusters without a member
        }

    @torch.no_grad()
    def refresh(self, z, y, generator=None):
        """Stage 2: K-means per class over the epoch's z [N, D] or [N, C, H, W], y [N]; returns counts as a dict.

        A class fitted before starts from its old centres, otherwise k-means++. Classes without a finite sample keep
        what they have. A cluster is an outlier if its variance exceeds outlier_factor × the median variance of its
        class's clusters with at least two members (§7.1). outliers="truncate": its members with
        ||z − μ||² > outlier_factor × median leave its μ and v (not π), unless none would remain. "reseed": its centre
        moves to a sample drawn uniformly from the class's other clusters and K-means goes on once more.
        Besides z, two copies of the largest class are held at a time."""
        self._check(z[:1].flatten(1), y)
        nonfinite, outlier_clusters = 0, 0
        for c in range(self.num_classes):
            x = z.index_select(0, (y == c).nonzero().flatten()).flatten(1).to(self.centers)  # [n, D]
            finite = x.sum(1).isfinite()  # [n]; NaN and Inf survive the sum
            if not finite.all():
                nonfinite += int((~finite).sum())
                x = x[finite]
            if len(x) == 0:
                continue
            init = self.centers[c] if self.fitted[c] else None
            centers, assign = kmeans(x, self.clusters, init, self.iters, generator)
            d2, n, v = self._spread(x, centers, assign)
            outlier, limit = self._outliers(n, v)
            outlier_clusters += int(outlier.sum())
            if self.outliers == "reseed" and outlier.any():
                inliers = (~outlier[assign]).nonzero().flatten()
                draw = torch.rand(int(outlier.sum()), generator=generator).to(x)
                centers[outlier] = x[inliers[(draw * len(inliers)).long().clamp(max=len(inliers) - 1)]]
                centers, assign = kmeans(x, self.clusters, centers, self.iters, generator)
                d2, n, v = self._spread(x, centers, assign)
            weights = n / len(x)
            if self.outliers == "truncate" and outlier.any():
                keep = ~outlier[assign] | (d2 <= limit)
                kept = torch.bincount(assign[keep], minlength=self.clusters)
                keep |= kept[assign] == 0
                x, assign = x[keep], assign[keep]
                members = _one_hot(assign, self.clusters, x)  # [K, n]
                mean = (members @ x) / members.sum(1).clamp(min=1)[:, None]
                centers = torch.where(outlier[:, None], mean, centers)
                v = self._spread(x, centers, assign)[2]
            self.centers[c], self.weights[c], self.variances[c], self.fitted[c] = centers, weights, v, True
        return {"nonfinite": nonfinite, "fitted": int(self.fitted.sum()), "outlier_clusters": outlier_clusters}

    def _spread(self, x, centers, assign):
        """-> ||z − μ||² [n], |S_ck| [K], v_ck = mean of ||z − μ_ck||² over S_ck [K]."""
        d2 = torch.linalg.vector_norm(centers.index_select(0, assign).sub_(x), dim=1).square()
        n = torch.bincount(assign, minlength=len(centers)).to(x.dtype)
        return d2, n, x.new_zeros(len(centers)).index_add(0, assign, d2) / n.clamp(min=1)

    def _outliers(self, n, v):
        """-> outlier [K] bool, limit = outlier_factor × median of v over the clusters with two members or more."""
        limit = self.outlier_factor * v[n > 1].median() if (n > 1).any() else v.new_tensor(torch.inf)
        return v > limit, limit
