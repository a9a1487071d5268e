"""Gated attention CEL: the spread of each class under learned weights, squeezed below a threshold.

    z̃    = LayerNorm(z)                                       (3a)   [B, D]
    v    = tanh(W_V z̃)                                        (3b)   [B, h]
    u    = sigmoid(W_U z̃)                                     (3c)   [B, h]
    s    = v ⊙ u                                              (3d)   [B, h]
    α'   = wᵀ s                                               (3e)   [B]
    α    = softmax of α' over the samples of the class        (3f)   [N]
    z̄_c  = Σ_i α_i z_i,    v_c = Σ_i α_i ||z_i − z̄_c||²       [A §4.3] steps 2, 3
    R(c) = max(0, log(v_c + ε) − log(τ + ε))                  [A §4.3] step 4
    L    = Σ_c β_c R(c),   β_c = M_c / B                      (2)

B batch, C classes, D features, h attention width, M_c samples of class c in the batch,
N rows of all classes: B without memory, else the remembered ones of the batch's classes too.
variance="per_dim" takes v_c, the hinge and τ = var_threshold·σ² in each dimension, then their mean.
"trace" sums the dimensions first, as [A] prints it; τ and ε are then D times as large. ε = floor·σ²: with
floor = 1, log(v_c + ε) is the entropy of the noisy feature, but for ½ and a constant.

`mode` says where the gradient goes. The value of cel(z, y) is L in all three.
  "fit"          α is a constant for z. W_V, W_U and w maximise the likelihood of the class's noisy samples
                 under N(z̄_c, v_c + σ²). Its optimum is equal weights: L is in effect the plain class
                 variance, and a far sample keeps its weight. The safe default.
  "adversarial"  z descends L while W_V, W_U and w ascend it: the worst-case spread that [A §6.3] describes.
                 A far sample gains weight, up to e² = 7.4 times another's, as |α'| stays below 1.
  "documented"   everything descends L: [A §4.4] ("trace"), or on the LayerNormed features [B] ("per_dim").
                 It collapses: ∂v/∂α'_j = α_j (||z_j − z̄||² − v), so descent takes weight from every sample
                 farther than average, until v_c is below τ, L = 0, and the encoder learns nothing.

    cel = GatedAttCEL(num_classes=10, dim=512, sigma=0.1)
    own = torch.optim.Adam(cel.parameters(), lr=2e-3)                   # beside the network's optimiser
    loss = cross_entropy(server(z + noise), y) + lambd * cel(z, y)      # z [B, ...] of D numbers, y [B] int64
    cel.stats["ess"]                   # effective samples of a class, 1/Σα², as a share of its samples

memory=m counts the last m samples of each class beside the batch's own, for batches with few of a class.
They have no gradient; to make up for it, the batch's own is (M + m)/M times as large.
[A], [B], [D] are listed in DOCUMENTS.md. Different from them: the modes; ε; the spread is that of z.
Left out, with gradient 0: rows with NaN or Inf, and classes with fewer than two samples.
"""

import math
import warnings

import torch
from torch import nn

MODES, VARIANCES = ("fit", "adversarial", "documented"), ("per_dim", "trace")
MIN_HIDDEN, MAX_HIDDEN = 64, 512  # h = min(512, max(64, D/4)), [D]
MIN_TAU = 1e-8  # the least τ of a dimension, [B]
MAX_LOGIT = 1.0  # of |α'| in "adversarial"


class GatedAttCEL(nn.Module):
    """loss = cel(z, y), one attention for all classes; equations and modes are at the top of the file."""

    # fmt: off
    def __init__(self, num_classes, dim, sigma, mode="fit", variance="per_dim", hidden=None, memory=0,
                 var_threshold=0.125, floor=1.0, tau=None, eps=None):
        # fmt: on
        super().__init__()
        if mode not in MODES or variance not in VARIANCES:
            raise ValueError(f"mode {mode!r}, variance {variance!r}: use one of {MODES} and of {VARIANCES}.")
        self.num_classes, self.dim, self.sigma = num_classes, dim, sigma
        self.mode, self.variance = mode, variance
        self.on_norm = mode == "documented" and variance == "per_dim"  # [B] measures z̃ itself
        terms = dim if variance == "trace" else 1  # dimensions that one v_c sums
        self.tau = terms * max(var_threshold * sigma**2, MIN_TAU) if tau is None else tau
        self.eps = terms * floor * sigma**2 if eps is None else eps
        hidden = min(MAX_HIDDEN, max(MIN_HIDDEN, dim // 4)) if hidden is None else hidden
        if min(num_classes, dim, hidden, memory + 1) < 1 or not min(sigma, self.tau, self.eps) > 0:
            raise ValueError("num_classes, dim, hidden must be >= 1, memory >= 0, sigma, tau, eps > 0.")
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)  # a gain of its own could shrink the loss
        self.W_V = nn.Parameter(torch.empty(hidden, dim).uniform_(-1, 1) / math.sqrt(dim))
        self.W_U = nn.Parameter(torch.empty(hidden, dim).uniform_(-1, 1) / math.sqrt(dim))
        self.w = nn.Parameter(torch.empty(hidden).uniform_(-1, 1) / math.sqrt(hidden))
        self.register_buffer("memory", torch.zeros(num_classes, memory, dim))  # the last m samples, a ring
        self.register_buffer("stored", torch.zeros(num_classes, dtype=torch.int64))  # how many it ever got
        self.stats = {}

    def forward(self, z, y, x=None):
        z, ok = usable_rows(self, z, y)  # [B, D], [B]
        with torch.autocast(z.device.type, enabled=False):
            W_V, W_U, w = self.W_V, self.W_U, self.w
            if self.mode == "adversarial":  # the same values, the gradient's sign turned: descent ascends L
                W_V, W_U, w = (2 * p.detach() - p for p in (W_V, W_U, w))

            # z̃ = LayerNorm(z)                                               (3a)
            z_norm = self.norm(z.detach() if self.mode == "fit" else z)  # [B, D]
            # v = tanh(W_V z̃)                                                (3b)
            v = torch.tanh(z_norm @ W_V.T)  # [B, h]
            # u = sigmoid(W_U z̃)                                             (3c)
            u = torch.sigmoid(z_norm @ W_U.T)  # [B, h]
            # s = v ⊙ u                                                      (3d)
            s = v * u  # [B, h]
            # α' = wᵀ s                                                      (3e)
            logit = self.cap(s @ w)  # [B]; "adversarial": tanh of it
            M = class_sum(ok.to(z.dtype), y, self.num_classes)  # [C]
            n = M + self.stored.clamp(max=self.memory.shape[1])  # [C] with the remembered ones
            # samples: blocks (z [G, k, D], class [G]), of the batch and of the memory; N logits, N classes
            samples, logit, c = self.with_memory(z_norm if self.on_norm else z, logit, y, ok, M, n)
            # α_i = exp(α'_i) / Σ_j exp(α'_j), j in the class of i           (3f)
            alpha = class_softmax(logit, c, self.num_classes)  # [N]
            both = torch.stack([alpha, (logit > -torch.inf) / n.clamp(min=1)[c]])  # [2, N] α, and 1/n of each

            # z̄_c = Σ_i α_i z_i                                              [A §4.3] step 2
            mean, plain = weighted_sum(both, [(z_i.detach(), k) for z_i, k in samples], self.num_classes)
            # v_c = Σ_i α_i ||z_i − z̄_c||²                                   [A §4.3] step 3
            fixed = mean.detach()[:, None]  # [C, 1, D]; ∂v_c/∂z̄ = −2 Σ α (z − z̄) = 0
            square = [((z_i - fixed[k]).square_(), k) for z_i, k in samples]
            (v_c,) = weighted_sum((alpha.detach() if self.mode == "fit" else alpha)[None], square, len(mean))
            if self.variance == "trace":
                v_c = v_c.sum(1, keepdim=True)  # [C, D] -> [C, 1]
            # R(c) = max(0, log(v_c + ε) − log(τ + ε))                       [A §4.3] step 4
            R = torch.relu(torch.log(v_c + self.eps) - math.log(self.tau + self.eps)).mean(1)  # [C]
            # L = Σ_c β_c R(c),   β_c = M_c / B                              (2)
            beta = torch.where(n > 1, M / len(y), 0)  # [C] one sample has no spread
            loss = (beta * R).sum()

            self.note(loss, beta, v_c, alpha, n, c)
            if self.mode == "fit" and torch.is_grad_enabled():
                nll = (beta * self.misfit(both, mean, plain, square)).sum()
                loss = loss + (nll - nll.detach())  # the value of L; W_V, W_U, w get the gradient of nll
            if self.training and self.memory.numel() > 0:
                self.remember(z, y, ok, M)
            return loss

    def misfit(self, both, mean, plain, square):
        """−log N(z + n; z̄_c, v_c + σ²), its mean over n ~ N(0, σ²), a class's samples and dimensions: [C]."""
        total, error = weighted_sum(both, [(x.detach(), k) for x, k in square], len(mean))  # [C, D] each
        # The mean of (z + n − z̄)²; its gradient is that of (plain mean − z̄)².
        shift = (plain - mean).square()
        total, error = total + self.sigma**2, error + (shift - shift.detach()) + self.sigma**2  # v_c + σ²
        if self.variance == "trace":
            total, error = total.mean(1, keepdim=True), error.mean(1, keepdim=True)  # [C, 1]
        # −log N = ½ log 2π(v_c + σ²) + ½ (z + n − z̄)² / (v_c + σ²)
        return 0.5 * (torch.log(2 * math.pi * total) + error / total).mean(1)

    def cap(self, logit):
        return MAX_LOGIT * torch.tanh(logit / MAX_LOGIT) if self.mode == "adversarial" else logit

    def with_memory(self, z, logit, y, ok, M, n):
        """Blocks of samples of one class, ([B, 1, D], y) and ([P, m, D], k); α' and class of each, [N]."""
        C, m, _ = self.memory.shape
        if m == 0:
            return [(z[:, None], y)], logit.masked_fill(~ok, -torch.inf), y  # exp(−∞) = 0: left out
        share = (n / M.clamp(min=1))[y]  # (M + m)/M  [B]
        z, logit = (t.detach() + s * (t - t.detach()) for t, s in ((z, share[:, None]), (logit, share)))
        with torch.no_grad():
            on_cpu = z.device.type == "cpu" and not torch.compiler.is_compiling()
            P = int((M > 0).sum()) if on_cpu else min(len(y), C)  # elsewhere counting would wait
            k = M.topk(P).indices  # [P] every class of the batch, and maybe absent ones: their β is 0
            held = self.memory.index_select(0, k)  # [P, m, D], faster than memory[k]
            empty = torch.arange(m, device=z.device) >= self.stored[k, None]  # [P, m]
            z_norm = self.norm(held)  # (3a) to (3e) again  [P, m, D]
            s = torch.tanh(z_norm @ self.W_V.T) * torch.sigmoid(z_norm @ self.W_U.T)  # [P, m, h]
            old = self.cap(s @ self.w).masked_fill(empty, -torch.inf)  # [P, m]
        samples = [(z[:, None], y), (z_norm if self.on_norm else held, k)]
        logit = torch.cat([logit.masked_fill(~ok, -torch.inf), old.flatten()])
        return samples, logit, torch.cat([y, k.repeat_interleave(m)])

    @torch.no_grad()
    def remember(self, z, y, ok, M):
        """Writes the batch into the rings, in its order: where two samples meet, the later one stays."""
        m = self.memory.shape[1]
        same = (y[:, None] == y) & ok  # [B, B] column counts and is of the row's class
        place = (self.stored[y] + same.tril(-1).sum(1)) % m  # [B] the row's place in the ring of its class
        same = same & (place[:, None] == place)
        last = (same * torch.arange(1, len(y) + 1, device=z.device)).amax(1) - 1  # [B] who stays; −1: none
        self.memory[y, place] = torch.where(last[:, None] < 0, self.memory[y, place], z[last])
        self.stored += M.to(self.stored.dtype)

    @torch.no_grad()
    def note(self, loss, beta, v_c, alpha, n, c):
        seen, share = (beta > 0).to(n.dtype), beta / beta.sum().clamp(min=torch.finfo(n.dtype).tiny)  # [C]
        ess = 1 / (n * class_sum(alpha.square(), c, self.num_classes)).clamp(min=1)  # 1/Σα² / n  [C]
        set_stats(self, loss, "every class had fewer than two samples: use larger batches, or memory=32", {
            "spread": (share * v_c.sum(1)).sum() / self.dim,
            "above_tau": (share * (v_c > self.tau).to(n.dtype).mean(1)).sum(),
            "skipped": (1 - beta.sum()).clamp(min=0),
            "ess": (seen * ess).sum() / seen.sum().clamp(min=1),
        })  # fmt: skip

    def _apply(self, fn, recurse=True):
        return super()._apply(never_half(fn), recurse)


def class_sum(values, c, num_classes):
    """Σ of values [N, ...] over the samples of each class c [N] -> [C, ...]."""
    return values.new_zeros(num_classes, *values.shape[1:]).index_add(0, c, values)


def weighted_sum(weight, blocks, num_classes):
    """Σ_i weight_i x_i by class, [C, D] for each row of weight [K, N]; blocks (x [G, k, D], class [G])."""
    weights = weight.split([x.shape[0] * x.shape[1] for x, _ in blocks], 1)  # of N
    sums = [(w.unflatten(1, x.shape[:2]).transpose(0, 1) @ x, c) for w, (x, c) in zip(weights, blocks)]
    return sum(class_sum(x, c, num_classes) for x, c in sums).unbind(1)  # of [C, K, D]


def class_softmax(logit, c, num_classes):
    """softmax of logit [N] over the samples of each class c [N]."""
    top = logit.new_full((num_classes,), torch.finfo(logit.dtype).min)
    e = torch.exp(logit - top.scatter_reduce(0, c, logit.detach(), "amax")[c])  # at most 1
    return e / class_sum(e, c, num_classes).clamp(min=1)[c]


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
