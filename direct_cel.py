"""Direct CEL: how much of the picture a linear attacker gets out of what is sent.

The other surrogates look at z and y. This one looks at x: [A §9] asks for I(X;Z|Y) as the objective itself,
[E objective 1] for the dispersion of x given z. Cell i of the feature map lies over a patch of the picture:

    t_i = the p×p×3 pixels under cell i, p = H/h                           [p_t]
    f_i = the k×k cells of z around it; what leaves is f_i + n             [q], q = c·k²

both without their class mean at that place. Σ are averages over m cells: in training every second one in both
directions from a random first one, which saves time (m = B·h·w/4; k = 3 cells around them cover an even map).

    W   = Σ_tf (Σ_ff + σ²I)⁻¹                                  the best linear estimate of t from f + n
    E   = mean (W f − t)(W f − t)ᵀ + σ² W Wᵀ                   its error, Σ_tt − Σ_tf (Σ_ff + σ²I)⁻¹ Σ_ft
    L   = log( tr Σ_tt / tr E )  ≥ 0                           measure="trace": log 1/NMSE of that estimate
    L   = ½ log( |Σ_tt| / |E| )  ≥ 0                           measure="logdet": nats a cell

W minimises E, so holding it fixed changes no gradient (envelope theorem), and σ² W Wᵀ has none. There is no
inner loop and no second network, only one q × q solve a step (72 × 72 for c = 8, k = 3).

It estimates what the best *linear* attacker gets who knows y, sees k×k cells and has one W for all. "logdet"
is the Gaussian estimate of the information: it is I(t; f + n | Y) of one cell if (t, f) given y is Gaussian
with the same covariance in all classes and cells. Neither bounds I(x; z'|y), nor the error of other
attackers. Small samples bias it up: if x and z are independent it is about log(m/(m−q)) (trace) and
p_t·q/(2m) nats (logdet), m independent cells.

    cel = DirectCEL(num_classes=10, dim=512, sigma=0.1)
    loss = cel(encoder(x), y, x)       # z [B, c, h, w], or [B, D] with shape=(c, h, w); y [B] int64;
                                       # x [B, 3, p·h, p·w] float in [0, 1]
    cel.stats["spread"]                # tr E / p_t: variance per pixel that the estimate leaves unexplained
    cel.stats["above_tau"]             # 1 − tr E / tr Σ_tt: share of the variance it explains; there is no τ

The mean of a class is that of the batch's M images, and deviations from it are scaled by √(M/(M−1)): Σ is
then unbiased however few they are. The classes with one image in the batch count as one class together.
Outside the map f is padded with 0, the mean after centring, and has noise too. Σ_tt and E include the
variance of rounding pixels to 8 bits: flat and grey pictures stay finite. [A] and [E]: see DOCUMENTS.md.
Left out, with gradient 0: rows with NaN or Inf in z or x, and an image without a second to compare with.
"""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn

MEASURES = ("trace", "logdet")
ROUNDING = 1 / (12 * 255**2)  # variance of the error in a pixel of [0, 1] that was rounded to 8 bits


class DirectCEL(nn.Module):
    """loss = cel(z, y, x), nothing to learn or refresh; the equations are at the top of the file."""

    def __init__(self, num_classes, dim, sigma, shape=None, neighbourhood=3, measure="trace", every=2):
        super().__init__()
        if measure not in MEASURES or (shape is not None and (len(shape) != 3 or math.prod(shape) != dim)):
            raise ValueError(f"measure {measure!r}, shape {shape}: use one of {MEASURES}, c·h·w = {dim}.")
        if min(num_classes, dim, neighbourhood, every) < 1 or neighbourhood % 2 == 0 or not sigma > 0:
            raise ValueError("num_classes, dim, every must be >= 1, neighbourhood odd and >= 1, sigma > 0.")
        self.num_classes, self.dim, self.sigma = num_classes, dim, sigma
        self.shape, self.neighbourhood, self.measure, self.every = shape, neighbourhood, measure, every
        self.register_buffer("precision", torch.empty(0), persistent=False)  # its dtype is the module's
        self.stats = {}

    def forward(self, z, y, x=None):
        flat, ok = usable_rows(self, z, y)  # [B, D], [B]
        c, h, w, p = sizes(z, x, self.shape)
        k, sigma2, every = self.neighbourhood, self.sigma**2, self.every if self.training else 1
        with torch.autocast(z.device.type, enabled=False):
            x = x.detach().movedim(1, 3).to(flat)  # [B, H, W, 3]
            group, M, ok = groups(y, ok & x.sum((1, 2, 3)).isfinite())  # [B]; a NaN or Inf stays one in a sum
            rows, columns = looked_at(h, every, z.device), looked_at(w, every, z.device)  # [r], [s]
            m = ok.sum().clamp(min=1) * (len(rows) * len(columns))  # of the n = B·r·s cells those that count

            # t_i and f_i without their class mean, 0 in rows of the batch that are left out
            z = centred(flat, group, M, ok).unflatten(1, (c, h, w))  # [B, c, h, w]
            x = x.reshape(-1, h, p, w, p, 3).index_select(1, rows).index_select(3, columns)
            x = centred(x.flatten(1).nan_to_num(0, 0, 0), group, M, ok).view_as(x)  # [B, r, p, s, p, 3]
            t = x.permute(2, 4, 5, 1, 3, 0).flatten(3).flatten(0, 2)  # [p_t, n]
            f = neighbourhoods(z, rows, columns, k)  # [q, n]
            # W = Σ_tf (Σ_ff + σ²I)⁻¹, a constant for the gradient
            S_ff, S_ft = f.detach() @ f.detach().T / m, f.detach() @ t.T / m  # [q, q], [q, p_t]
            W = torch.cholesky_solve(S_ft, cholesky(S_ff, sigma2, S_ff.trace())).T  # [p_t, q]
            # E = mean (W f − t)(W f − t)ᵀ + σ² W Wᵀ, first its trace and that of Σ_tt, both with the rounding
            Wf = W @ f  # [p_t, n]
            tr_tt = t.square().sum() / m + len(W) * ROUNDING
            tr_E = F.mse_loss(Wf, t, reduction="sum") / m + sigma2 * W.square().sum() + len(W) * ROUNDING
            if self.measure == "trace":
                # L = log( tr Σ_tt / tr E ), below 0 by rounding alone
                loss = torch.log(tr_tt / tr_E).clamp(min=0)
            else:
                E = (Wf - t) @ (Wf - t).T / m + sigma2 * W @ W.T  # [p_t, p_t]
                # L = ½ log( |Σ_tt| / |E| ), and ½ log of a determinant is Σ log of its factor's diagonal
                root_tt, root_E = cholesky(t @ t.T / m, ROUNDING, tr_tt), cholesky(E, ROUNDING, tr_tt)
                loss = (root_tt.diagonal().log() - root_E.diagonal().log()).sum()
            set_stats(self, loss, "no batch had two rows that are finite in z and x: use larger batches", {
                "spread": tr_E.detach() / len(W),
                "above_tau": 1 - (tr_E / tr_tt).detach(), "skipped": 1 - ok.to(z.dtype).mean(),
            })  # fmt: skip
            return loss

    def _apply(self, fn, recurse=True):
        return super()._apply(never_half(fn), recurse)


def sizes(z, x, shape):
    """c, h, w of the feature map, and p: each cell lies over p×p pixels."""
    got = tuple(z.shape[1:]) if shape is None or z.dim() > 2 else tuple(shape)
    if len(got) != 3 or (shape is not None and got != tuple(shape)):
        raise ValueError(f"z is {list(z.shape)}: pass [B, c, h, w], or [B, D] and its shape=(c, h, w).")
    c, h, w = got
    p = 0 if x is None or x.dim() != 4 else x.shape[2] // h
    if p == 0 or not x.is_floating_point() or x.shape != (len(z), 3, h * p, w * p):
        got = "None" if x is None else f"{x.dtype} {list(x.shape)}"
        raise ValueError(f"x is {got}: pass a picture for each row of z, [{len(z)}, 3, p·{h}, p·{w}] floats.")
    return c, h, w, p


def groups(y, ok):
    """For each row: the first row of its class, M images of its class, and whether it counts (M > 1)."""
    same = (y[:, None] == y) & ok  # [B, B]
    alone = same.sum(1) < 2  # the classes that have one image in the batch are one class together
    same = torch.where(alone[:, None], alone & ok, same)
    return same.int().argmax(1), same.sum(1), ok & (same.sum(1) > 1)


def centred(v, group, M, ok):
    """v [B, d] minus the mean of its class, times √(M/(M−1)); 0 in rows that do not count."""
    M, one = M.clamp(min=2).to(v.dtype)[:, None], ok.to(v.dtype)[:, None]  # [B, 1] each
    # the mean may be a constant for the gradient: W f − t sums to 0 in each class, so its part is 0
    mean = torch.zeros_like(v).index_add_(0, group, v.detach() * one).index_select(0, group) / M
    return (v - mean) * (one * (M / (M - 1)).sqrt())


def looked_at(side, every, device):
    """Every so many of `side` places, from a random first one; at least one, and all of them for 1."""
    span = every * max(1, side // every)
    return torch.randint(side - span + every, (), device=device) + torch.arange(0, span, every, device=device)


def neighbourhoods(z, rows, columns, k):
    """f [c·k², r·s·B]: the k×k cells of z around each cell of these rows and columns, 0 outside the map."""
    wide = F.pad(z.permute(1, 2, 3, 0), [0, 0, *[k // 2] * 4])  # [c, h+k−1, w+k−1, B]
    rows, columns = (torch.arange(k, device=z.device)[:, None] + at for at in (rows, columns))  # [k, ·] each
    cells = rows[:, None, :, None] * wide.shape[2] + columns[:, None]  # [k, k, r, s]
    return wide.flatten(1, 2).index_select(1, cells.flatten()).view(len(wide) * k * k, -1)


def cholesky(S, floor, scale):
    """Factor of S + floor·I; the floor is raised by what rounding may take from an eigenvalue of S."""
    floor = floor + torch.finfo(S.dtype).eps * scale
    return torch.linalg.cholesky_ex(S + floor * torch.eye(len(S), dtype=S.dtype, device=S.device))[0]


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
