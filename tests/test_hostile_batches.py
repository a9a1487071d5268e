"""The five surrogates on random nasty batches: fixed seeds, every option, their own count of rows left out.

A case is a batch (one sample or many; one class, all different, some missing; constant, duplicated, offset,
scales from 1e-12 to 1e12, also mixed; rows with NaN or Inf, also all rows; float32 and float64; vectors and
maps), a module with random options, and what it saw before: refreshes or batches to remember, as nasty.

  - the loss is finite and >= 0, as it is by definition in all five; so is what stays in the module
  - gradients at z and at the module's parameters are finite, and exactly 0 in rows that are left out
  - `stats` are finite, and stats["skipped"] is what a plain loop over the case counts
  - neither value nor gradient changes by one bit with the memory layout of z, or with rows left out
  - z and y are not written to

A failure names its case. To run it alone:   CASE=17 python -m pytest tests/test_hostile_batches.py -k gmm
"""

import math
import os
import random
from collections import Counter

import pytest
import torch

from cluster_cel import ClusterCEL
from direct_cel import DirectCEL
from gated_att_cel import GatedAttCEL
from gmm_cel import GMMCEL
from slot_cross_cel import SlotCrossCEL

CASES = {"gmm": 80, "cluster": 80, "gated": 100, "slot": 60, "direct": 80}
SHOWN = 5  # failures in the message
RARE = 0.1  # everything that check_case returns happens in a larger share of the cases
SIZES = ((2,), (7,), (24,), (1, 1, 1), (2, 3, 2), (4, 2, 3))
MAPS = ((1, 1, 1), (2, 3, 2), (4, 2, 2))  # for direct: cells over 2x2 pixels
BATCHES = (1, 2, 3, 5, 8, 17, 40)
BAD = (math.nan, math.inf, -math.inf)
REFRESHED = ("gmm", "cluster")


# ------------------------------------------------------------ the cases


def draw_features(rng, B, size):
    """[B, *size] in float64, finite, of magnitude 1e-12 to about 1e12."""
    g = torch.Generator().manual_seed(rng.getrandbits(32))
    D = math.prod(size)
    noise = torch.randn(B, D, generator=g, dtype=torch.float64)
    powers = lambda *shape: 10 ** (24 * torch.rand(*shape, generator=g, dtype=torch.float64) - 12)
    z = {
        "noise": noise,
        "bounded": noise.sigmoid(),
        "constant": noise[:1].expand(B, D),
        "zero": torch.zeros(B, D, dtype=torch.float64),
        "few": noise[torch.randint(min(B, 2), (B,), generator=g)],  # duplicates
        "offset": 1 + 1e-5 * noise,
        "rows": noise * powers(B, 1),  # every sample its own scale
        "columns": noise * powers(1, D),
        "bits": (noise > 0).double(),
    }
    kind = rng.choice(list(z))
    scale = 1.0 if kind in ("rows", "columns") else 10.0 ** rng.choice((-12, 12, 0, 0, rng.uniform(-12, 12)))
    return (z[kind] * scale).reshape(B, *size), kind


def draw_labels(rng, B, C):
    kind = rng.choice(("any", "any", "one class", "different", "some missing"))
    if kind == "different" and B <= C:
        return torch.tensor(rng.sample(range(C), B))
    if kind == "one class":
        return torch.full((B,), rng.randrange(C))
    classes = rng.sample(range(C), rng.randint(1, C)) if kind == "some missing" else range(C)
    return torch.tensor([rng.choice(classes) for _ in range(B)])


def spoil(rng, z, rows):
    """A copy of z with NaN or Inf somewhere in each of `rows`."""
    z = z.clone()
    for i in rows:
        row = z[i].view(-1)
        for d in rng.sample(range(len(row)), rng.randint(1, len(row))):
            row[d] = rng.choice(BAD)
    return z


def draw_batch(rng, C, size, dtype):
    """z, y and what they are; the rows that are not finite are any share of the batch, also all."""
    B = rng.choice(BATCHES)
    z, kind = draw_features(rng, B, size)
    share = rng.choice((0, 0, 0, 0.2, 0.2, 0.6, 1))
    bad = [i for i in range(B) if rng.random() < share]
    return spoil(rng, z.to(dtype), bad), draw_labels(rng, B, C), f"{kind}, B={B}, {len(bad)} bad rows"


LAYOUTS = {  # functions of z with the same values and other strides
    2: {
        "transposed": lambda z: z.T.contiguous().T,
        "every second column": lambda z: torch.stack([z, torch.ones_like(z)], 2).flatten(1)[:, ::2],
    },
    4: {
        "channels_last": lambda z: z.contiguous(memory_format=torch.channels_last),
        "height and width swapped": lambda z: z.transpose(2, 3).contiguous().transpose(2, 3),
    },
}


# ------------------------------------------------------------ the modules


def power(low, high):
    return lambda rng: 10.0 ** rng.uniform(low, high)


THRESHOLDS = {"var_threshold": (0.125, 1e-3, 10.0), "floor": (1.0, 1e-2, 100.0)}
OFF = ((), ("cross_attention", "slot_mass"), ("per_dim_gate",), ("snr_gate", "class_gate"))
OPTIONS = {
    "gmm": {"components": (1, 2, 3, 5), "covariance": ("diag", "full"), "update_scale": (1.0, 10.0)},
    "cluster": {
        "clusters": (1, 2, 3, 5),
        "form": ("log", "lin", "released"),
        "variance": ("trace", "per_dim"),
        "outliers": ("keep", "truncate", "reseed"),
        **THRESHOLDS,
    },
    "gated": {
        "mode": ("fit", "adversarial", "documented"),
        "variance": ("trace", "per_dim"),
        "hidden": (None, 1, 5),
        "memory": (0, 1, 4),
        **THRESHOLDS,
    },
    "slot": {
        "mode": ("mixture", "documented"),
        "slots": (1, 2, 8),
        "memory": (0, 1, 4),
        "off": OFF,
        **THRESHOLDS,
    },
    "direct": {"measure": ("trace", "logdet"), "neighbourhood": (1, 3)},
}
CLASSES = {
    "gmm": GMMCEL,
    "cluster": ClusterCEL,
    "gated": GatedAttCEL,
    "slot": SlotCrossCEL,
    "direct": DirectCEL,
}


def draw_module(rng, name, C, size):
    options = {key: rng.choice(choice) for key, choice in OPTIONS[name].items()}
    if options.get("mode") == "mixture":
        del options["off"]
    torch.manual_seed(rng.getrandbits(32))
    cel = CLASSES[name](C, math.prod(size), power(-3, 1)(rng), **options).train(rng.random() < 0.7)
    with torch.no_grad():
        for p in cel.parameters():  # some parts start at 0 or at one value: move them off it
            p.add_(0.1 * torch.randn_like(p))
    return cel.double() if rng.random() < 0.5 else cel, options


# ------------------------------------------------------------ what must hold


def finite_rows(z):
    return [all(map(math.isfinite, row)) for row in z.flatten(1).tolist()]


class Count:
    """By plain loops: which rows are left out, after what the module has seen."""

    def __init__(self, name, memory):
        self.name, self.memory, self.seen = name, memory, Counter()

    def note(self, z, y):
        self.seen.update(c for c, ok in zip(y.tolist(), finite_rows(z)) if ok)

    def left_out(self, z, y):
        good, y = finite_rows(z), y.tolist()
        here = Counter(c for c, ok in zip(y, good) if ok)
        if self.name in REFRESHED:
            usable = {c for c in here if self.seen[c]}
        elif self.name == "direct":  # classes of one image count as one class together
            alone = sum(here[c] == 1 for c in here)
            usable = {c for c in here if here[c] > 1 or alone > 1}
        else:
            usable = {c for c in here if here[c] + min(self.memory, self.seen[c]) > 1}
        return torch.tensor([not ok or c not in usable for c, ok in zip(y, good)])


def bits(a):
    return a.detach().contiguous().view({4: torch.int32, 8: torch.int64}[a.element_size()])


def call(cel, z, y, x, layout=lambda z: z, seed=0):
    """Loss and gradient at z, whatever the layout in which z reaches the module."""
    leaf = z.clone().requires_grad_()
    torch.manual_seed(seed)
    sent = layout(leaf)
    before, labels = bits(sent).clone(), y.clone()
    cel.zero_grad()
    loss = cel(sent, y, x)
    assert loss.shape == () and loss.requires_grad
    loss.backward()
    assert torch.equal(bits(sent), before) and torch.equal(y, labels), "the input was written to"
    return loss.detach(), leaf.grad


def check_state(name, cel):
    for key, value in cel.state_dict().items():
        assert value.isfinite().all(), f"{key} is not finite"
    if name in REFRESHED:
        fitted = cel.weights.sum(1) > 0
        total = cel.weights.sum() if name == "gmm" else cel.weights.sum(1)[fitted]
        assert (cel.weights >= 0).all() and (not fitted.any() or (total - 1).abs().max() < 1e-4), "weights"
        variance = cel.variances if name == "cluster" else cel.covs
        if name == "gmm" and cel.covariance == "full":
            variance = cel.covs.diagonal(dim1=-2, dim2=-1)
        assert variance.min() >= 0, "a negative variance"


def prepare(rng, name, cel, C, size, dtype, count, x_of):
    """What the module sees before the case."""
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        z, y, _ = draw_batch(rng, C, size, dtype)
        if name in REFRESHED:
            before = bits(z).clone()
            cel.refresh(z, y)
            assert torch.equal(bits(z), before), "refresh wrote to its input"
            count.note(z, y)
        elif cel.training:
            cel(z.requires_grad_(), y, x_of(z))
            count.note(z, y)
    check_state(name, cel)


def check_case(name, seed):
    rng = random.Random(f"{name} {seed}")
    size, C = rng.choice(MAPS if name == "direct" else SIZES), rng.randint(1, 6)
    dtype = rng.choice((torch.float32, torch.float64))
    cel, options = draw_module(rng, name, C, size)
    pixels = lambda z: torch.rand(len(z), 3, 2 * size[1], 2 * size[2])
    x_of = pixels if name == "direct" else lambda z: None
    z, y, what = draw_batch(rng, C, size, dtype)
    try:
        count = Count(name, options.get("memory", 0))
        prepare(rng, name, cel, C, size, dtype, count, x_of)
        return check_call(rng, name, cel, z, y, x_of(z), count.left_out(z, y), seed)
    except Exception as error:
        mode = "train" if cel.training else "eval"
        what = f"{what}, size {size}, y={y.tolist()}, {dtype}, {mode}, {options}"
        raise AssertionError(f"{name} case {seed}: {type(error).__name__} {error}\n    {what}") from error


def check_call(rng, name, cel, z, y, x, left_out, seed):
    state = {key: value.clone() for key, value in cel.state_dict().items()}
    loss, grad = call(cel, z, y, x, seed=seed)
    assert loss.isfinite() and loss >= 0, f"loss {loss.item()}"
    assert grad.isfinite().all(), "gradient at z not finite"
    assert not grad[left_out].any(), "a sample left out has a gradient"
    for key, p in cel.named_parameters():
        assert p.grad is None or p.grad.isfinite().all(), f"gradient of {key} not finite"
    check_state(name, cel)
    stats = cel.stats
    assert all(v.isfinite().all() and not v.requires_grad for v in stats.values()), f"stats {stats}"
    assert abs(float(stats["skipped"]) - left_out.double().mean().item()) < 1e-5, "skipped"
    assert abs(float(stats["loss"]) - loss.item()) <= 1e-6 * loss.item()
    if left_out.all():
        assert not grad.any() and (loss == 0 or name == "gmm"), "acts on nothing"

    cel.load_state_dict(state)  # a call in training mode moves statistics and counters
    layout, apply = rng.choice(list(LAYOUTS[z.dim()].items()))
    other_loss, other_grad = call(cel, z, y, x, apply, seed)
    assert loss == other_loss and torch.equal(grad, other_grad), f"{layout}: another value or gradient"
    if left_out.any():  # other content there, with the same reason to leave it out
        cel.load_state_dict(state)
        other = draw_features(rng, len(z), z.shape[1:])[0].to(z.dtype)
        other = spoil(rng, other, [i for i, ok in enumerate(finite_rows(z)) if not ok])
        other = torch.where(left_out.view(-1, *[1] * (z.dim() - 1)), other, z)
        other_loss, other_grad = call(cel, other, y, x, seed=seed)
        assert loss == other_loss and torch.equal(grad, other_grad), "what is left out changes the rest"
    return {
        "acts": bool(grad.any()),
        "bad rows": not all(finite_rows(z)),
        "some left out, some used": bool(left_out.any() and not left_out.all()),
        "nothing used": bool(left_out.all()),
    }


@pytest.mark.parametrize("name", CASES)
def test_random_cases(name):
    failures, reached = [], Counter()
    for seed in [int(os.environ["CASE"])] if "CASE" in os.environ else range(CASES[name]):
        try:
            reached.update(check_case(name, seed))
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} cases failed:\n" + "\n".join(failures[:SHOWN])
    if "CASE" not in os.environ:
        rare = {what: n for what, n in reached.items() if n < RARE * CASES[name]}
        assert not rare, f"the cases no longer reach what they are for: {rare}"


@pytest.mark.parametrize("seed", range(8))
def test_many_calls_in_a_row(seed):
    """gmm keeps statistics from call to call: one class alone takes all of π, and the others come back."""
    rng = random.Random(seed)
    C, dtype = 3, rng.choice((torch.float32, torch.float64))
    cel, options = draw_module(rng, "gmm", C, (5,))
    cel.train()
    prepare(random.Random(1), "gmm", cel, C, (5,), dtype, Count("gmm", 0), lambda z: None)
    for step in range(60):
        z, y, what = draw_batch(rng, C, (5,), dtype)
        loss, grad = call(cel, z, torch.zeros_like(y) if 10 <= step < 50 else y, None)
        where = f"seed {seed}, call {step}, {what}, {options}"
        assert loss.isfinite() and loss >= 0 and grad.isfinite().all(), where
        check_state("gmm", cel)
