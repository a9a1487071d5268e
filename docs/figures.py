"""Writes docs/NAME.svg, what each surrogate sees on the twelve points of [A §6], and docs/examples.json, the
worked examples computed by the surrogates. `python docs/build.py` runs this first; it needs torch.

In all figures three panels are the three classes, the fourth is what a spread costs. An arrow is the descent
direction −∂L/∂z of its point; the longest of a figure has a fixed length. σ is such that the default
threshold 0.125 σ² of a dimension, summed over both, is the τ = 0.002 of [A §6].
"""

import json
import math
import re
import sys
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from drawing import COLOURS, CORNERS, MIDDLE, Y, Z, cross, curve, ellipse, points, save  # noqa: E402

from cluster_cel import ClusterCEL  # noqa: E402
from direct_cel import DirectCEL  # noqa: E402
from gated_att_cel import GatedAttCEL  # noqa: E402
from gmm_cel import GMMCEL  # noqa: E402
from slot_cross_cel import MARGIN, SOFTPLUS_BETA, SlotCrossCEL  # noqa: E402

TAU, EPS, DIM = 0.002, 1e-6, 2
SIGMA = math.sqrt(TAU / (DIM * 0.125))


# ------------------------------------------------------------------------------------------ the surrogates


def call(cel, z=Z, x=None, y=Y):
    """Loss and gradient at the twelve points, or at those of `z`."""
    leaf = z.clone().requires_grad_()
    loss = cel(leaf, y, x)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0].flatten(1)


def spy(cel, name):
    """The arguments and results of the last call of cel.name, in a dictionary."""
    seen, method = {}, getattr(cel, name)

    def wrapped(*args):
        seen["args"], seen["result"] = args, method(*args)
        return seen["result"]

    setattr(cel, name, wrapped)
    return seen


def cluster(tau=TAU):
    cel = ClusterCEL(3, DIM, SIGMA, clusters=2, variance="trace", tau=tau, eps=EPS).double()
    cel.refresh(Z, Y, generator=torch.Generator().manual_seed(0))
    return cel


def attention(mode="documented", norm=False):
    """[A §6.3]: W_V = W_U = I, w = (1, 1), and LayerNorm off, which its numbers need."""
    cel = GatedAttCEL(3, DIM, SIGMA, mode, "trace", hidden=2, tau=TAU, eps=EPS).double()
    cel.W_V.data, cel.W_U.data = torch.eye(2).double(), torch.eye(2).double()
    cel.w.data = torch.ones(2).double()
    cel.norm = cel.norm if norm else nn.Identity()
    return cel


def hinge(v, tau=TAU, eps=EPS):
    return max(0.0, math.log((v + eps) / (tau + eps)))


def draw():
    dashed = 'stroke="currentColor" stroke-dasharray="3 3"'
    solid = 'stroke="currentColor" stroke-opacity=".75"'

    cel = GMMCEL(3, DIM, SIGMA, components=2).double().eval()
    cel.refresh(Z, Y, generator=torch.Generator().manual_seed(0))
    loss, g = call(cel)
    pairs = [(c, k) for c in range(3) for k in range(2)]
    shapes = "".join(
        ellipse(c, cel.means[c, k], cel.covs[c, k].sqrt(), solid)
        + ellipse(c, cel.means[c, k], [SIGMA, SIGMA], dashed) + cross(c, cel.means[c, k])
        for c, k in pairs
    )  # fmt: skip
    dots = [(c, float(v), 2.5 + 9 * float(cel.weights[c, k])) for c, k in pairs for v in cel.covs[c, k]]
    cost = curve(
        lambda v: 0.5 * math.log1p(v / SIGMA**2), dots, 0.02, "Σ_d, a component", "½ log(1 + Σ_d/σ²)"
    )
    save(HERE / "gmm_cel.svg", "GMM CEL on the twelve points", shapes + points(g) + cost, loss,
         "Two components a class. Solid: one standard deviation of a component in each dimension; "
         "dashed: the noise σ it is weighed against. There is no threshold: every spread costs, and "
         "every point is pulled to the mean of its component.")  # fmt: skip

    cel = cluster()
    loss, g = call(cel)
    shapes = "".join(
        ellipse(c, cel.centers[c, k], [cel.variances[c, k].sqrt()] * 2, solid)
        + ellipse(c, cel.centers[c, k], [TAU**0.5] * 2, dashed) + cross(c, cel.centers[c, k])
        for c, k in pairs
    )  # fmt: skip
    dots = [(c, float(v), 5) for c, v in enumerate((cel.weights * cel.variances).sum(1))]
    cost = curve(hinge, dots, 0.03, "v̂_c", "R(c)", ("τ", TAU))
    save(HERE / "cluster_cel.svg", "Cluster CEL on the twelve points", shapes + points(g) + cost, loss,
         "[A §6.2], two clusters a class. Solid: the root of a cluster’s variance; dashed: the root of "
         "τ. Every point is pulled to its own centre. A point that is a cluster by itself is not "
         "pulled and costs nothing.")  # fmt: skip

    cel = attention("fit")
    seen = spy(cel, "note")
    loss, g = call(cel)
    _, _, v_c, alpha, _, _ = (t.detach() for t in seen["args"])
    mean = torch.stack([alpha[Y == c] @ Z[Y == c] for c in range(3)])
    shapes = "".join(
        ellipse(c, mean[c], [v_c[c].sqrt()] * 2, solid) + ellipse(c, mean[c], [TAU**0.5] * 2, dashed)
        + cross(c, mean[c]) for c in range(3)
    )  # fmt: skip
    far = [i for i in range(12) if (Z[i] - mean[Y[i]]).square().sum() > v_c[Y[i]]]
    cost = curve(hinge, [(c, float(v_c[c]), 5) for c in range(3)], 0.03, "v_c", "R(c)", ("τ", TAU))
    save(HERE / "gated_att_cel.svg", "Gated attention CEL on the twelve points",
         shapes + points(g, 40 * alpha**1.5, hollow=far) + cost, loss,
         "[A §6.3], LayerNorm off. Cross: the weighted mean; solid: the root of v_c; dashed: the root "
         "of τ; the size of a point is its weight α. Arrows: the descent step with α fixed, α times the "
         "distance. Hollow: farther than average. In mode “documented” descent takes weight from "
         "those.")  # fmt: skip

    torch.manual_seed(0)
    cel = SlotCrossCEL(3, DIM, SIGMA, slots=2).double()
    seen = spy(cel, "cross_fit")
    loss, g = call(cel)
    _, x, _, share, _ = (t.detach() for t in seen["args"])
    var, weight, _ = (t.detach() for t in seen["result"])  # [G, H, S, D], [G, H, S]
    means, each = (share @ x).flip(1), [(c, h, s) for c in range(3) for h in range(2) for s in range(2)]
    shapes = "".join(
        ellipse(c, means[c, h, s], var[c, h, s].sqrt(), f'{solid if h else dashed} stroke-width="1.3"')
        + cross(c, means[c, h, s]) for c, h, s in each
    )  # fmt: skip
    dots = [(c, float(v), 1.5 + 4 * float(weight[c, h, s])) for c, h, s in each for v in var[c, h, s]]
    soft = lambda v: math.log1p(
        math.exp(SOFTPLUS_BETA * (math.log((v + cel.eps) / (cel.tau + cel.eps)) - MARGIN))
    )
    cost = curve(
        lambda v: soft(v) / SOFTPLUS_BETA, dots, 0.06, "σ_s² of a dimension", "L_base", ("τ", cel.tau)
    )
    save(HERE / "slot_cross_cel.svg", "Slot CEL on the twelve points",
         shapes + points(g, square=[i for i in range(12) if i % 2]) + cost, loss,
         "Two slots, before any training, mode “mixture”. Each class is dealt into halves, circles and "
         "squares. Crosses: the slots’ means of one half; ellipses: the other half’s spread about them "
         "(dashed: of the circles). A point is pulled to the means of the half it is not in.")  # fmt: skip

    cel = DirectCEL(3, DIM, SIGMA, neighbourhood=1).double()
    grey = 0.5 + 0.8 * (Z - MIDDLE[Y])[:, :1]  # one pixel a picture, as bright as its point is far right
    loss, g = call(cel, Z.view(12, 2, 1, 1), grey.view(12, 1, 1, 1).expand(12, 3, 1, 1))
    f, t = (Z - MIDDLE[Y]) * math.sqrt(4 / 3), (grey - 0.5) * math.sqrt(4 / 3)
    guess = f @ torch.linalg.solve(f.T @ f / 12 + SIGMA**2 * torch.eye(2), f.T @ t / 12)
    left, top = CORNERS[3]
    put = lambda a, b: (left + 95 + 330 * float(a), top + 95 - 330 * float(b))
    spots = "".join(
        '<circle cx="{:.1f}" cy="{:.1f}" r="5" fill="{}"/>'.format(*put(t[i], guess[i]), COLOURS[Y[i]])
        for i in range(12)
    )
    cost = f'<path d="M{left + 15} {top + 175}l160 -160" stroke="currentColor" stroke-opacity=".5"/>'
    cost += f'{spots}<text x="{left + 182}" y="{top + 184}" text-anchor="end">brightness</text>'
    save(HERE / "direct_cel.svg", "Direct CEL on the twelve points",
         points(g) + cost + f'<text x="{left + 8}" y="{top + 14}">its estimate W f</text>', loss,
         "Here each point has a picture: one pixel, the brighter the farther right the point lies in "
         "its class. A linear attacker estimates it from z + n (last panel; the line would be a "
         "perfect guess). Only what tells about the picture is squeezed: the arrows are nearly "
         "level.")  # fmt: skip


# ------------------------------------------------------------------------------------------ worked examples


def row(where, what, printed, *computed, digits=4):
    """A line of the table; the mark says if the printed figures are the computed ones, rounded."""
    computed = [float(torch.as_tensor(v).detach()) for v in computed]
    numbers = re.findall(r"−?\d+\.\d+", printed)
    near = [
        abs(float(p.replace("−", "-")) - v) <= 0.501 * 10.0 ** -len(p.split(".")[1])
        for p, v in zip(numbers, computed)
    ]
    text = ", ".join(f"{v + 0.0:.{digits}f}".replace("-", "−") for v in computed)
    return {"where": where, "what": what, "printed": printed, "computed": text, "agrees": all(near)}


def examples():
    cel, rows = cluster(), []
    first = cel.centers[0, :, 0].argsort(descending=True)  # in the order of the document
    of = lambda cel, c: call(cel, Z[Y == c], y=Y[Y == c])[0]  # of class c alone: β_c = 1 and L = R(c)
    v_hat = (cel.weights * cel.variances).sum(1)
    two = [cel.variances[c].sort().values for c in (1, 2)]
    loss, g = call(cel)
    k = first[0]
    step = -g[1] / g[1].norm() * (Z[1] - cel.centers[0, k]).norm()
    rows += [
        row("6.2", "μ₁₁", "0.175, 0.025", *cel.centers[0, first[0]], digits=3),
        row("6.2", "μ₁₂", "−0.05, 0.025", *cel.centers[0, first[1]], digits=3),
        row("6.2", "v₁₁, v₁₂", "0.00625, 0.003125", *cel.variances[0, first], digits=6),
        row("6.2", "v₂₁, v₂₂", "0.005, 0.004", *two[0], digits=7),
        row("6.2", "v₃₁, v₃₂", "0.007, 0.006", *two[1], digits=7),
        row("6.2", "v̂₁", "0.0046875", v_hat[0], digits=7),
        row("6.2", "v̂₂, v̂₃", "0.0045, 0.0065", *v_hat[1:], digits=7),
        row("6.2", "L at τ = 0.05", "0.0", call(cluster(0.05))[0]),
        row("6.2", "R_log(1) at τ = 0.002", "0.846", of(cel, 0)),
        row("6.2", "L at τ = 0.002", "0.564", loss),
        row("6.2", "descent step at (0.2, 0.1)", "−0.025, −0.075", *step, digits=3),
    ]
    cel = attention()
    seen, logits = spy(cel, "note"), spy(cel, "cap")
    loss, _ = call(cel)
    _, _, v_c, alpha, _, _ = (t.detach() for t in seen["args"])
    order = [1, 3, 0, 2]  # of the document
    normed = attention(norm=True)
    seen_normed = spy(normed, "note")
    call(normed)
    rows += [
        row("6.3", "α'₁, of (0.2, 0.1)", "0.160", logits["result"][1]),
        row("6.3", "α", "0.28, 0.26, 0.23, 0.23", *alpha[order]),
        row("6.3", "z̄₁", "0.088, 0.016", *(alpha[:4] @ Z[:4])),
        row("6.3", "v₁", "0.0058", v_c[0], digits=5),
        row("6.3", "v₂, v₃", "0.0061, 0.0072", *v_c[1:, 0], digits=4),
        row("6.3", "R(1) at τ = 0.002", "0.405", of(attention(), 0)),
        row("6.3", "R(2), R(3)", "", of(attention(), 1), of(attention(), 2)),
        row("6.3", "L at τ = 0.002", "", loss),
        row(
            "6.3",
            "α with LayerNorm on, “≈ identity”",
            "0.28, 0.26, 0.23, 0.23",
            *seen_normed["args"][3][order],
        ),
    ]
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    HERE = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    draw()
    text = json.dumps(examples(), ensure_ascii=False, indent=1)
    (HERE / "examples.json").write_text(text + "\n", encoding="utf-8")
