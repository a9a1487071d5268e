"""Cluster CEL: the spread of each class about its K-means centres, squeezed below a threshold.

    k*(z) = argmin_k ||z − μ_ck||²                                                    [A §3.3] step 2
    v̂_ck  = mean of ||z − μ_ck||² over the batch's n_ck members of (c,k), 0 if none   [A §3.3] step 3
    v̂_c   = Σ_k π_ck v̂_ck                                                             (1)
    R(c)  = v̂_c ("lin"),   max(0, log(v̂_c + ε) − log(τ + ε)) ("log")                  [A §3.3] step 4
    L     = Σ_c β_c R(c),   β_c = M_c / B                                             (2)

B batch, C classes, D features, K clusters of a class, M_c samples of class c in the batch, N in all;
τ = var_threshold·σ² and ε = floor·σ² per dimension. [A] is listed in DOCUMENTS.md, as are its (1) and (2).
refresh() finds the centres μ_ck, the shares π_ck (Σ_k π_ck = 1) and the variances v_ck by K-means [A §3.4].
For a batch they are constants, so the whole gradient goes to the encoder:

    ∂L/∂z = β_c π_ck (2/n_ck) (z − μ_ck) / (v̂_c + ε)   where v̂_c > τ; "lin": always, without the denominator

It points away from the centre; the descent step points towards it.
That is "trace", as [A] prints it: the dimensions are summed first, τ and ε are D times as large. "per_dim"
takes v̂, hinge and τ in each dimension, then their mean (so the gradient has another 1/D).

form="released" is the loss of the released CEM code, which published tables call CEM. It has one number a
cluster (v̂_ck and v_ck are means over the dimensions; `variance` and `floor` are ignored), and g0 = 0.01:

    a = min(0.99, 10 n_ck / (π_ck N/C)),   v = a v̂_ck + (1 − a) v_ck
    L = 1/|classes in the batch| Σ_{c,k present} π_ck max(0, log(v + g0) − log(τ + g0))
    ∂L/∂z = 20 (z − μ_ck) / (N D (v + g0))   where v > τ, a < 0.99 and the batch has all C classes

It goes with K = 5 and λ = 16. That code looks π and v up by a sample counter, an error not repeated here.

    cel = ClusterCEL(num_classes=10, dim=512, sigma=0.1)
    cel.refresh(z_all, y_all)          # the training set's features, once an epoch or more rarely
    loss = cel(encoder(x), y)          # z [B, ...] of D numbers, y [B] int64
    cel.stats["missing"]               # share of π whose clusters have no member in the batch

A cluster without a member counts as 0 in (1), as printed, so small batches measure too small a spread.
Differs from the documents in: ε; pooling z (step 1) is the caller's; outliers as in fit_class().
Left out, with gradient 0: rows with NaN or Inf, and classes that no refresh has seen.
"""

import warnings

import torch
from torch import nn

FORMS, VARIANCES, OUTLIERS = ("log", "lin", "released"), ("per_dim", "trace"), ("keep", "truncate", "reseed")
OUTLIER = 4.0  # a cluster is one above this many times the median variance of its class's clusters
RATE, MAX_RATE, G0 = 10, 0.99, 0.01  # of form="released"
N_INIT, TRIAL_POINTS, ROUNDS = 20, 100, 50  # K-means: first starts, samples per cluster in them, most steps


class ClusterCEL(nn.Module):
    """loss = cel(z, y) after cel.refresh(z_all, y_all); the equations are at the top of the file."""

    # fmt: off
    def __init__(self, num_classes, dim, sigma, clusters=3, form="log", variance="per_dim", outliers="keep",
                 var_threshold=0.125, floor=1.0, tau=None, eps=None):
        # fmt: on
        super().__init__()
        if form not in FORMS or variance not in VARIANCES or outliers not in OUTLIERS:
            raise ValueError(f"{form!r}, {variance!r}, {outliers!r}: use {FORMS}, {VARIANCES}, {OUTLIERS}.")
        self.num_classes, self.dim, self.sigma, self.clusters = num_classes, dim, sigma, clusters
        self.form, self.variance, self.outliers = form, variance, outliers
        self.terms = dim if variance == "trace" and form != "released" else 1  # dimensions that one v̂ sums
        floor = G0 if form == "released" else self.terms * floor * sigma**2
        self.tau = self.terms * var_threshold * sigma**2 if tau is None else tau
        self.eps = floor if eps is None else eps
        if min(num_classes, dim, clusters) < 1 or not min(sigma, self.tau, self.eps) > 0:
            raise ValueError("num_classes, dim, clusters must be >= 1, sigma, tau, eps > 0.")
        self.register_buffer("centers", torch.zeros(num_classes, clusters, dim))  # μ_ck
        self.register_buffer("weights", torch.zeros(num_classes, clusters))  # π_ck; all 0: not fitted yet
        self.register_buffer("variances", torch.zeros(num_classes, clusters))  # v_ck
        self.register_buffer("num_samples", torch.zeros((), dtype=torch.int64))  # N
        self.stats = {}

    def forward(self, z, y, x=None):
        z, ok = usable_rows(self, z, y)  # [B, D], [B]
        C, K, pi = self.num_classes, self.clusters, self.weights
        ok = ok & pi[y].any(1)  # not the classes that no refresh has seen
        with torch.autocast(z.device.type, enabled=False):
            # k*(z) = argmin_k ||z − μ_ck||²                                 [A §3.3] step 2
            distance = (z.detach()[:, None] - self.centers[y]).square().sum(2)  # [B, K]
            k = distance.masked_fill(pi[y] == 0, torch.inf).argmin(1)  # [B]
            # v̂_ck = (1/n_ck) Σ ||z − μ_ck||²,   0 if n_ck = 0               [A §3.3] step 3
            square = torch.where(ok[:, None], z - self.centers[y, k], 0).square()  # [B, D]
            square = square.sum(1, keepdim=True) if self.terms > 1 else square  # [B, D] or [B, 1]
            n = z.new_zeros(C * K).index_add(0, y * K + k, ok.to(z.dtype)).view(C, K)
            v_ck = z.new_zeros(C * K, square.shape[1]).index_add(0, y * K + k, square).view(C, K, -1)
            v_ck = v_ck / n.clamp(min=1)[:, :, None]  # [C, K, D] or [C, K, 1]
            if self.form == "released":
                # a = min(0.99, 10 n_ck / (π_ck N/C)),   v = a v̂_ck + (1 − a) v_ck
                a = torch.where(n > 0, RATE * n / (pi * self.num_samples / C), 0).clamp(max=MAX_RATE)
                v = (a * v_ck.mean(2) + (1 - a) * self.variances / self.dim).view(-1, 1)  # [C·K, 1]
                weight = torch.where(n > 0, pi, 0).flatten() / n.any(1).sum().clamp(min=1)  # π_ck / |classes|
            else:
                # v̂_c = Σ_k π_ck v̂_ck                                        (1)
                v = (pi[:, :, None] * v_ck).sum(1)  # [C, D] or [C, 1]
                weight = n.sum(1) / len(y)  # β_c = M_c / B  [C]
            # R_lin = v,   R_log = max(0, log(v + ε) − log(τ + ε))           [A §3.3] step 4
            R = v if self.form == "lin" else torch.relu(torch.log((v + self.eps) / (self.tau + self.eps)))
            # L = Σ weight · R                                               (2)
            loss = (weight * R.mean(1)).sum()
            self.note(loss, n, v, len(y))
            return loss

    @torch.no_grad()
    def note(self, loss, n, v, B):
        share = n.view(len(v), -1).sum(1) / n.sum().clamp(min=1)  # of the samples, for each row of v
        set_stats(self, loss, "no refresh has seen its classes: call cel.refresh(z_all, y_all) first", {
            "spread": (share * v.mean(1)).sum() / self.terms,
            "above_tau": (share * (v > self.tau).to(v.dtype).mean(1)).sum(),
            "skipped": 1 - n.sum() / B,
            "missing": (n.sum(1) @ (self.weights * (n == 0))).sum() / n.sum().clamp(min=1),
        })  # fmt: skip

    @torch.no_grad()
    def refresh(self, z_all, y_all, num_samples=None, generator=None):
        """Stage 2 [A §3.4]: K-means of each class over z_all [N, D], y_all [N], from its old centres if any.

        A class not among them keeps what it has. num_samples: N of all classes, if z_all is not all."""
        z, ok = usable_rows(self, z_all, y_all)
        with torch.autocast(z.device.type, enabled=False):
            for c in y_all[ok].unique():
                start = self.centers[c] if self.weights[c].any() else None
                fit = self.fit_class(z[ok & (y_all == c)], start, self.outliers, generator)
                self.centers[c], self.weights[c], self.variances[c] = fit
        self.num_samples.fill_(ok.sum() if num_samples is None else num_samples)

    def fit_class(self, z, start, outliers, generator):
        """μ_ck [K, D], π_ck [K], v_ck [K] of one class's z [n, D].

        [A §7.1] An outlier is a cluster with v_ck above OUTLIER × the median over clusters of two samples or
        more. "truncate" drops its members with ||z − μ_ck||² above that, unless none would be left; "reseed"
        moves its centre to a random sample of the other clusters. Then K-means goes on."""
        mu, k = kmeans(z, self.clusters, start, generator)
        distance = (z - mu[k]).square().sum(1)  # [n]
        n = torch.bincount(k, minlength=self.clusters).to(z.dtype)
        v = torch.zeros_like(n).index_add(0, k, distance) / n.clamp(min=1)
        limit = OUTLIER * torch.where(n > 1, v, torch.nan).nanmedian()
        outlier = v > limit  # [K]
        if outliers == "keep" or not outlier.any():
            return mu, n / len(z), v
        if outliers == "truncate":
            keep = ~outlier[k] | (distance <= limit)  # [n]
            z = z[keep | (torch.bincount(k[keep], minlength=self.clusters) == 0)[k]]
        else:
            others = z[~outlier[k]]
            mu[outlier] = others[torch.randint(len(others), (int(outlier.sum()),), generator=generator)]
        return self.fit_class(z, mu, "keep", generator)

    def _apply(self, fn, recurse=True):
        return super()._apply(never_half(fn), recurse)


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
