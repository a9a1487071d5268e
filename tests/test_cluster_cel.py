"""ClusterCEL: the worked example [A §6.2] and its errata, literal loops, gradients, K-means, bad input."""

import itertools
import math
import re
import warnings
from pathlib import Path

import pytest
import torch

import cluster_cel
from cluster_cel import ClusterCEL, kmeans, plus_plus

FORMS = [("log", "per_dim"), ("log", "trace"), ("lin", "per_dim"), ("lin", "trace"), ("released", "per_dim")]
EPS = 1e-6


def gen(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=gen(seed), dtype=torch.float64)


def random_module(seed, C, K, D, form="log", variance="trace", tau=0.3, unfitted=()):
    """A module with made-up statistics: some clusters not in use (π = 0), some classes not fitted."""
    g = gen(seed)
    cel = ClusterCEL(C, D, 0.1, clusters=K, form=form, variance=variance, tau=tau, eps=EPS).double()
    weights = torch.rand(C, K, generator=g, dtype=torch.float64)
    weights[:, 1:][torch.rand(C, K - 1, generator=g) < 0.2] = 0
    cel.centers.copy_(torch.randn(C, K, D, generator=g, dtype=torch.float64))
    cel.weights.copy_(weights / weights.sum(1, keepdim=True))
    cel.variances.copy_(D * torch.rand(C, K, generator=g, dtype=torch.float64))
    cel.num_samples.fill_(int(torch.randint(10, 3000, (), generator=g)))
    for c in unfitted:
        cel.weights[c], cel.centers[c] = 0, 0
    return cel


def members_of(cel, z, y, c):
    """Step 2 for one class: {k: rows of the batch whose nearest centre in use is k}."""
    used = [k for k in range(cel.clusters) if cel.weights[c, k] > 0]
    members = {k: [] for k in used}
    for i in range(len(z)):
        if used and y[i] == c:
            members[min(used, key=lambda k: float(((z[i] - cel.centers[c, k]) ** 2).sum()))].append(i)
    return members


def literal(cel, z, y):
    """Steps 2 to 4, (1) and (2), one class, cluster, sample at a time -> L, and ∂L/∂z by the closed form."""
    B, D = z.shape
    loss, grad = 0.0, torch.zeros_like(z)
    for c in range(cel.num_classes):
        members = members_of(cel, z, y, c)
        v_c = torch.zeros(D, dtype=z.dtype)
        for k, rows in members.items():
            if rows:
                v_c += cel.weights[c, k] * sum((z[i] - cel.centers[c, k]) ** 2 for i in rows) / len(rows)
        v = [float(v_c.sum())] if cel.variance == "trace" else v_c.tolist()
        beta = sum(map(len, members.values())) / B
        R, slope = [], []
        for e in v:
            if cel.form == "lin":
                R.append(e), slope.append(1.0)
            else:
                R.append(max(0.0, math.log(e + cel.eps) - math.log(cel.tau + cel.eps)))
                slope.append(1 / (e + cel.eps) if e > cel.tau else 0.0)
        loss += beta * sum(R) / len(R)
        slope = torch.tensor(slope, dtype=z.dtype) / len(v)
        for k, rows in members.items():
            for i in rows:
                # β_c π_ck (2/n_ck) (z − μ_ck) R'(v̂_c)
                grad[i] = beta * cel.weights[c, k] * 2 / len(rows) * (z[i] - cel.centers[c, k]) * slope
    return loss, grad


def literal_released(cel, z, y):
    """The released loss, one cluster at a time -> L, its gradient, and a and v of the clusters present."""
    D, N, C = z.shape[1], int(cel.num_samples), cel.num_classes
    loss, grad, rates = 0.0, torch.zeros_like(z), {}
    present = {c for c in range(C) if any(members_of(cel, z, y, c).values())}
    for c in present:
        for k, rows in members_of(cel, z, y, c).items():
            if not rows:
                continue
            pi, mu = float(cel.weights[c, k]), cel.centers[c, k]
            v_hat = sum(float(((z[i] - mu) ** 2).sum()) for i in rows) / (len(rows) * D)
            a = min(10 * len(rows) / (pi * N / C), 0.99)
            v = a * v_hat + (1 - a) * float(cel.variances[c, k]) / D
            rates[c, k] = (a, v, rows)
            loss += pi * max(0.0, math.log(v + cel.eps) - math.log(cel.tau + cel.eps)) / len(present)
            if v > cel.tau:
                for i in rows:
                    grad[i] = pi / len(present) * a * 2 * (z[i] - mu) / (len(rows) * D) / (v + cel.eps)
    return loss, grad, rates


# ----- the worked example, [A §6.1] and [A §6.2]: K = 2, D = 2, four samples a class

EXAMPLE = torch.tensor(
    [
        [[0.0, 0.0], [0.2, 0.1], [-0.1, 0.05], [0.15, -0.05]],
        [[1.0, 1.0], [1.2, 1.1], [0.8, 0.9], [1.1, 0.95]],
        [[1.0, -1.0], [0.8, -0.9], [1.1, -1.2], [0.9, -1.05]],
    ],
    dtype=torch.float64,
)  # [3 classes, 4 samples, 2]
EXAMPLE_Z, EXAMPLE_Y = EXAMPLE.flatten(0, 1), torch.arange(3).repeat_interleave(4)


def example_module(tau, form="log", seed=0):
    cel = ClusterCEL(3, 2, 0.1, clusters=2, form=form, variance="trace", tau=tau, eps=EPS).double()
    cel.refresh(EXAMPLE_Z, EXAMPLE_Y, generator=gen(seed))
    return cel.eval()


def splits(x, k=2):
    """All ways to split x into k clusters: (inertia, [(members, v)])."""
    for labels in itertools.product(range(k), repeat=len(x)):
        parts = [[i for i, label in enumerate(labels) if label == j] for j in range(k)]
        if all(parts):
            v = [float(((x[p] - x[p].mean(0)) ** 2).sum(1).mean()) for p in parts]
            yield sum(len(p) * s for p, s in zip(parts, v)), sorted(zip(map(tuple, parts), v))


def test_example_class_1_is_as_printed():
    _, parts = min(splits(EXAMPLE[0]))
    assert [p for p, _ in parts] == [(0, 2), (1, 3)]
    assert [v for _, v in parts] == pytest.approx([0.003125, 0.00625], abs=1e-12)
    cel = example_module(0.002)
    order = cel.centers[0, :, 0].argsort(descending=True)
    printed = torch.tensor([[0.175, 0.025], [-0.05, 0.025]], dtype=torch.float64)
    torch.testing.assert_close(cel.centers[0, order], printed)
    assert cel.variances[0, order].tolist() == pytest.approx([0.00625, 0.003125], abs=1e-12)
    assert cel.weights[0].tolist() == [0.5, 0.5]
    assert float((cel.weights * cel.variances)[0].sum()) == pytest.approx(0.0046875, abs=1e-12)


@pytest.mark.parametrize("c, printed", [(1, (0.004, 0.005)), (2, (0.006, 0.007))])
def test_erratum_variances_of_classes_2_and_3(c, printed):
    true = [0.0, 0.19 / 18]  # one sample alone, three together: 0.0105556
    _, parts = min(splits(EXAMPLE[c]))
    assert sorted(len(p) for p, _ in parts) == [1, 3]
    assert sorted(v for _, v in parts) == pytest.approx(true, abs=1e-12)
    cel = example_module(0.002)
    order = cel.variances[c].argsort()
    assert cel.variances[c, order].tolist() == pytest.approx(true, abs=1e-12)
    assert cel.weights[c, order].tolist() == [0.25, 0.75]
    assert float((cel.weights * cel.variances)[c].sum()) == pytest.approx(0.0079167, abs=5e-8)
    for _, parts in splits(EXAMPLE[c]):  # no split at all has the printed variances
        assert max(abs(a - b) for a, b in zip(sorted(v for _, v in parts), printed)) > 5e-4


def test_erratum_none_of_the_classes_exceeds_tau_005():
    cel = example_module(0.05)
    assert float(cel(EXAMPLE_Z, EXAMPLE_Y)) == 0 and float(cel.stats["above_tau"]) == 0


def test_erratum_the_loss_at_tau_0002():
    log_ratio = lambda v: math.log(v + EPS) - math.log(0.002 + EPS)
    assert log_ratio(0.0046875) == pytest.approx(0.8515, abs=5e-5)  # printed 0.846
    assert sum(map(log_ratio, (0.0046875, 0.0045, 0.0065))) / 3 == pytest.approx(
        0.9468, abs=5e-5
    )  # printed 0.564
    assert float(example_module(0.002)(EXAMPLE_Z, EXAMPLE_Y)) == pytest.approx(1.2008, abs=5e-5)
    mean_v = (0.0046875 + 2 * 0.0095 / 1.2) / 3
    lin = example_module(0.002, "lin")
    assert float(lin(EXAMPLE_Z, EXAMPLE_Y)) == pytest.approx(mean_v, abs=1e-12)
    assert float(lin.stats["spread"]) == pytest.approx(mean_v / 2, abs=1e-12)  # per dimension
    assert float(lin.stats["above_tau"]) == 1


@pytest.mark.parametrize("form", ["log", "lin"])
def test_erratum_the_descent_step_points_to_the_centre_not_the_gradient(form):
    z = EXAMPLE_Z.clone().requires_grad_()
    example_module(0.002, form)(z, EXAMPLE_Y).backward()
    printed = torch.tensor(
        [-0.025, -0.075], dtype=torch.float64
    )  # of the sample (0.2, 0.1), centre (0.175, 0.025)
    scale = 1 / 3 * 0.5 * 2 / 2 / (0.0046875 + EPS if form == "log" else 1)
    torch.testing.assert_close(-z.grad[1], scale * printed)


def test_the_examples_optimum_is_found_from_every_seed():
    want = sum(min(splits(EXAMPLE[c]))[0] for c in range(3))
    for seed in range(100):
        cel = example_module(0.002, seed=seed)
        assert float((4 * cel.weights * cel.variances).sum()) == pytest.approx(want, abs=1e-12)


# ----- the equations, literally


@pytest.mark.parametrize("form, variance", FORMS)
def test_equals_literal_loops(form, variance):
    skipped = missing = few = capped = free = 0
    for seed in range(60):
        g = gen(seed)
        B, C, K, D = (int(torch.randint(1, hi, (), generator=g)) for hi in (20, 9, 5, 6))
        unfitted = [0] if seed % 4 == 0 else []
        cel = random_module(seed, C, K, D, form, variance, tau=0.2 + seed % 3, unfitted=unfitted)
        z = torch.randn(B, D, generator=g, dtype=torch.float64).requires_grad_()
        y = torch.randint(C, (B,), generator=g)
        loss = cel(z, y)
        loss.backward()
        if form == "released":
            want, grad, rates = literal_released(cel, z.detach(), y)
            capped += any(a == 0.99 for a, _, _ in rates.values())
            free += any(a < 0.99 for a, _, _ in rates.values())
        else:
            want, grad = literal(cel, z.detach(), y)
        assert loss.item() == pytest.approx(want, abs=1e-10)
        assert (z.grad - grad).abs().max() < 1e-10
        left_out = float((cel.weights[y].sum(1) == 0).double().mean())
        assert float(cel.stats["skipped"]) == pytest.approx(left_out, abs=1e-15)
        skipped += left_out > 0
        missing += float(cel.stats["missing"]) > 0
        few += B < C
    assert skipped and missing and few  # the hard cases were among them
    assert form != "released" or (capped and free)


def test_released_gradient_closed_form():
    """∂L/∂z = 20 (z − μ_ck) / (N D (v + g0)) where all classes are present, v > τ and a < 0.99."""
    C, K, D, N = 4, 3, 5, 50_000
    cel = ClusterCEL(C, D, 0.1, clusters=K, form="released").double()
    y = torch.arange(400) % C
    cel.refresh(normal(400, D), y, num_samples=N, generator=gen(0))
    z, y = normal(64, D, seed=1).requires_grad_(), y[:64]
    cel(z, y).backward()
    _, _, rates = literal_released(cel, z.detach(), y)
    assert len(rates) == C * K and int(cel.num_samples) == N
    for (c, k), (a, v, rows) in rates.items():
        assert a < 0.99 and v > cel.tau
        want = 20 * (z[rows] - cel.centers[c, k]) / (N * D * (v + 0.01))
        assert (z.grad[rows] - want).abs().max() < 1e-15 < want.abs().max()


def test_released_uses_the_last_refresh_and_stores_nothing():
    cel = random_module(0, 3, 2, 4, "released")
    before = {name: t.clone() for name, t in cel.state_dict().items()}
    z, y = normal(12, 4, seed=1).requires_grad_(), torch.arange(12) % 3
    assert cel(z, y).item() == cel(z, y).item() > 0
    assert all(torch.equal(t, before[name]) for name, t in cel.state_dict().items())
    larger = ClusterCEL(3, 4, 0.1, clusters=2, form="released", tau=0.3, eps=EPS).double()
    larger.load_state_dict(before)
    larger.num_samples.fill_(10**9)  # a → 0: the loss is that of v_ck alone, and has no gradient
    (grad,) = torch.autograd.grad(larger(z, y), z)
    assert grad.abs().max() < 1e-6


@pytest.mark.parametrize("form, variance", FORMS)
def test_gradcheck(form, variance):
    cel = random_module(1, 3, 2, 4, form, variance)
    z, y = normal(9, 4, seed=2).requires_grad_(), torch.arange(9) % 3
    assert torch.autograd.gradcheck(lambda t: cel(t, y), (z,))


def test_thresholds():
    default = ClusterCEL(10, 512, 0.1)
    assert (default.form, default.variance, default.clusters, default.outliers) == (
        "log",
        "per_dim",
        3,
        "keep",
    )
    assert (default.tau, default.eps) == pytest.approx((0.125 * 0.1**2, 0.1**2))  # both follow the noise
    trace = ClusterCEL(10, 512, 0.1, variance="trace", var_threshold=0.5, floor=2.0)
    assert (trace.tau, trace.eps) == pytest.approx((512 * 0.5 * 0.1**2, 512 * 2 * 0.1**2))
    released = ClusterCEL(10, 512, 0.025, form="released", variance="trace", floor=3.0)
    assert (released.tau, released.eps) == pytest.approx(
        (0.125 * 0.025**2, 0.01)
    )  # [A]'s trace does not apply
    given = ClusterCEL(10, 512, 0.1, form="released", tau=0.002, eps=1e-6)
    assert (given.tau, given.eps) == (0.002, 1e-6)


def test_per_dim_of_one_dimension_is_trace():
    a, b = (random_module(3, 4, 3, 1, variance=v).eval() for v in ("trace", "per_dim"))
    z, y = normal(30, 1), torch.arange(30) % 4
    assert float(a(z, y)) == pytest.approx(float(b(z, y)), abs=1e-14)


@pytest.mark.parametrize("form, variance", [("log", "per_dim"), ("log", "trace"), ("released", "per_dim")])
def test_descent_shrinks_the_spread_to_tau_and_no_further(form, variance):
    z, y = normal(200, 3).requires_grad_(), torch.arange(200) % 2
    tau = 0.15 * (3 if variance == "trace" else 1)
    cel = ClusterCEL(2, 3, 0.1, clusters=2, form=form, variance=variance, tau=tau, eps=EPS).double()
    for _ in range(400):
        if form == "released" or _ == 0:  # its v holds 1 % of the last refresh's
            cel.refresh(z.detach(), y, generator=gen(0))
        (grad,) = torch.autograd.grad(cel(z, y), z)
        z = (z - 2.0 * grad).detach().requires_grad_()
    cel(z, y)
    assert 0.12 < float(cel.stats["spread"]) < 0.15 * 1.02 and float(cel.stats["loss"]) < 0.02


# ----- K-means


def inertia(z, centers, assign):
    return float(((z - centers[assign]) ** 2).sum())


def test_kmeans_is_that_of_gmm_cel():
    """Each file copies out alone, so both carry it: to the letter the same."""
    here, there = (
        Path(cluster_cel.__file__).with_name(f"{name}_cel.py").read_text("utf-8")
        for name in ("cluster", "gmm")
    )
    functions = lambda text: text[text.index("def kmeans") : text.index("# ----- what every surrogate")]
    numbers = lambda text: [
        line for line in text.splitlines() if re.match("N_INIT|TRIAL_POINTS|ROUNDS", line)
    ]
    assert functions(here) == functions(there) and numbers(here) == numbers(there) != []


def test_kmeans_reaches_the_optimum_of_separated_blobs():
    for seed in range(10):
        g = gen(seed)
        k = 2 + seed % 5
        blob = torch.arange(40 * k) % k
        middle = (
            100 * torch.randperm(50, generator=g)[:k].double()[:, None] * torch.ones(6, dtype=torch.float64)
        )
        z = middle[blob] + torch.randn(len(blob), 6, generator=g, dtype=torch.float64)
        best = sum(((z[blob == j] - z[blob == j].mean(0)) ** 2).sum() for j in range(k))
        mu, assign = kmeans(z, k, generator=g)
        assert inertia(z, mu, assign) == pytest.approx(float(best), rel=1e-10)
        mu, assign = kmeans(z, k, init=z[:1].expand(k, -1))  # the worst start: all centres equal
        assert torch.bincount(assign, minlength=k).min() > 0


def test_kmeans_equals_literal_lloyd():
    for seed in range(15):
        k, z = 1 + seed % 6, normal(60, 3, seed=seed) + 1000
        mu, near = z[:k].clone(), None
        for _ in range(50):
            near = torch.stack([((z - m) ** 2).sum(1) for m in mu], 1).argmin(1)
            mu = torch.stack([z[near == j].mean(0) for j in range(k)])
        got_mu, got = kmeans(z, k, init=z[:k])
        assert torch.equal(got, near)
        torch.testing.assert_close(got_mu, mu, rtol=0, atol=1e-9)


def test_kmeans_ends_at_a_fixed_point_without_an_empty_cluster():
    for seed in range(20):
        z = normal(50, 4, seed=seed)
        far_off = z[:1] + 100 * torch.arange(7)[:, None]
        mu, assign = kmeans(z, 7, init=far_off if seed % 2 else None, generator=gen(seed))
        assert torch.bincount(assign, minlength=7).min() > 0
        assert torch.equal(torch.cdist(z, mu).argmin(1), assign)
        for j in range(7):
            torch.testing.assert_close(mu[j], z[assign == j].mean(0))


def test_plus_plus_draws_by_squared_distance():
    # three points on a line, 0, 1 and 3: P(pair) from P(first) = 1/3 and P(second) ∝ D²
    z, g, trials = torch.tensor([[0.0], [1.0], [3.0]]), gen(0), 6000
    pairs = [tuple(sorted(plus_plus(z, 2, g).flatten().tolist())) for _ in range(trials)]
    want = {(0, 1): (1 / 10 + 1 / 5) / 3, (0, 3): (9 / 10 + 9 / 13) / 3, (1, 3): (4 / 5 + 4 / 13) / 3}
    for pair, p in want.items():
        assert pairs.count(pair) / trials == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / trials))


@pytest.mark.parametrize(
    "z, k, distinct",
    [
        (torch.zeros(5, 3), 4, 1),  # all equal
        (torch.full((401, 7), 0.1), 3, 1),  # all equal, and the sum of many rounds
        (torch.tensor([[1.0, 2.0]]), 3, 1),  # one sample
        (torch.tensor([[0.0], [1.0]]), 5, 2),  # k > n
        (torch.tensor([[0.1, 0.7], [0.3, 0.9]])[torch.arange(401) % 2], 4, 2),  # 401 samples of two values
    ],
)
def test_kmeans_leaves_surplus_clusters_empty(z, k, distinct):
    for seed in range(20):
        for init in (None, z[:1] + torch.rand(k, z.shape[1], generator=gen(seed))):
            mu, assign = kmeans(z, k, init, gen(seed))
            assert mu.shape == (k, z.shape[1]) and len(assign.unique()) == distinct
            assert inertia(z, mu, assign) < 1e-10


# ----- refresh, stage 2 of [A §3.4]


def test_refresh_finds_the_documents_statistics():
    z, y = normal(300, 5), torch.randint(3, (300,), generator=gen(1))
    cel = ClusterCEL(4, 5, 0.1, form="lin", variance="trace").double().eval()
    cel.refresh(z, y, generator=gen(0))
    assert cel.weights.any(1).tolist() == [True, True, True, False] and int(cel.num_samples) == 300
    for c in range(3):
        x = z[y == c]
        assign = torch.cdist(x, cel.centers[c]).argmin(1)
        for k in range(3):
            S = x[assign == k]
            torch.testing.assert_close(cel.centers[c, k], S.mean(0))
            torch.testing.assert_close(cel.variances[c, k], ((S - S.mean(0)) ** 2).sum(1).mean())
            assert float(cel.weights[c, k]) == pytest.approx(len(S) / len(x))
    # the whole set as one batch: v̂_c is the class's inertia per sample
    M = torch.bincount(y, minlength=4) / 300
    want = (M[:, None] * cel.weights * cel.variances).sum()
    torch.testing.assert_close(cel(z, y), want)


def test_warm_start_keeps_the_order_of_the_clusters():
    z, y = normal(400, 2) + 20 * torch.randint(3, (400, 1), generator=gen(1)), torch.arange(400) % 2
    cel = ClusterCEL(2, 2, 0.1)
    cel.refresh(z, y, generator=gen(2))
    before = cel.centers.clone()
    cel.refresh(z + 0.1, y)
    torch.testing.assert_close(cel.centers, before + 0.1, rtol=0, atol=1e-3)


def test_absent_class_keeps_its_statistics():
    z, y = normal(60, 2), torch.arange(60) % 3
    cel = ClusterCEL(3, 2, 0.1, clusters=2)
    cel.refresh(z, y, generator=gen(0))
    old = [t.clone() for t in (cel.centers, cel.weights, cel.variances)]
    cel.refresh(z[y != 1] + 5, y[y != 1])
    assert all(
        torch.equal(new[1], was[1]) for new, was in zip((cel.centers, cel.weights, cel.variances), old)
    )
    assert not torch.equal(cel.centers[0], old[0][0])


def test_equal_features_cost_nothing():
    z, y = torch.full((401, 7), 0.1), torch.arange(401) % 2
    cel = ClusterCEL(2, 7, 0.1, clusters=4, form="lin").eval()
    cel.refresh(z, y)
    assert (cel.weights > 0).sum(1).tolist() == [1, 1] and float(cel(z, y)) < 1e-12


def test_small_classes_get_fewer_clusters_and_grow():
    z, y = normal(5, 3), torch.tensor([0, 1, 1, 2, 2])
    cel = ClusterCEL(3, 3, 0.1, clusters=4, form="lin", variance="trace").double().eval()
    cel.refresh(z, y, generator=gen(0))
    torch.testing.assert_close(cel.weights.sum(1), torch.ones(3, dtype=torch.float64))
    assert (cel.weights > 0).sum(1).tolist() == [1, 2, 2]
    assert float(cel(z, y)) == pytest.approx(0, abs=1e-20)  # every sample is its own centre
    assert float(cel(z[:1] + 1, y[:1])) == pytest.approx(3.0)  # one sample: ||z − μ||² = D
    cel.refresh(z.repeat(4, 1) + normal(20, 3, seed=1), y.repeat(4), generator=gen(0))
    assert (cel.weights > 0).all()


# ----- outlying clusters, [A §7.1]


def fitted_on_outliers(outliers):
    """Two tight clusters and one with two far members; K-means starts at the three middles."""
    tight = torch.tensor([[0.0, 0.0], [10.0, 0.0]]).repeat_interleave(100, 0) + 0.1 * normal(200, 2, seed=3)
    loose = torch.cat([0.1 * normal(50, 2, seed=4), torch.tensor([[8.0, 0.0], [0.0, 9.0]])])
    z = torch.cat([tight, loose + torch.tensor([0.0, 50.0])])
    cel = ClusterCEL(1, 2, 0.1, outliers=outliers).double()
    cel.centers.copy_(torch.tensor([[[0.0, 0.0], [10.0, 0.0], [0.0, 50.0]]]))
    cel.weights.fill_(1 / 3)
    cel.refresh(z, torch.zeros(252, dtype=torch.int64), generator=gen(0))
    return z, cel


def test_truncate_drops_the_far_members_of_an_outlying_cluster():
    z, kept = fitted_on_outliers("keep")
    limit = 4 * kept.variances[0].median()
    assert kept.variances[0, 2] > limit > kept.variances[0, :2].max()
    S = z[200:]
    inside = S[((S - S.mean(0)) ** 2).sum(1) <= limit]
    assert 0 < len(inside) < len(S) - 1
    _, cut = fitted_on_outliers("truncate")
    torch.testing.assert_close(cut.centers[0, 2], inside.mean(0))
    torch.testing.assert_close(cut.variances[0, 2], ((inside - inside.mean(0)) ** 2).sum(1).mean())
    assert cut.weights[0].tolist() == pytest.approx(
        [n / (200 + len(inside)) for n in (100, 100, len(inside))]
    )
    torch.testing.assert_close(cut.centers[0, :2], kept.centers[0, :2])


def test_truncate_keeps_a_cluster_that_would_lose_all_members():
    angle = torch.arange(40, dtype=torch.float64) * (2 * math.pi / 40)
    ring = torch.stack([angle.cos(), angle.sin()], 1)  # no member is near its centre, as in many dimensions
    middles = torch.tensor([[0.0, 0.0], [20.0, 0.0], [40.0, 0.0]], dtype=torch.float64)
    z = torch.cat([ring, middles[1:].repeat_interleave(40, 0) + 0.01 * normal(80, 2)])
    cel = ClusterCEL(1, 2, 0.1, outliers="truncate").double()
    cel.centers.copy_(middles[None])
    cel.weights.fill_(1 / 3)
    cel.refresh(z, torch.zeros(120, dtype=torch.int64))
    assert cel.centers[0, 0].norm() < 1e-12 and float(cel.variances[0, 0]) == pytest.approx(1)
    assert cel.weights[0].tolist() == pytest.approx([1 / 3] * 3)


def test_reseed_goes_on_from_a_sample_of_the_other_clusters(monkeypatch):
    starts, original = [], cluster_cel.kmeans
    record = lambda z, k, init, generator: (starts.append(init.clone()), original(z, k, init, generator))[1]
    monkeypatch.setattr(cluster_cel, "kmeans", record)
    z, cel = fitted_on_outliers("reseed")
    _, second = starts
    assert (z[:200] == second[2]).all(1).any()  # the rows from 200 on are the outlying cluster
    assign = torch.cdist(z, cel.centers[0]).argmin(1)
    for k in range(3):
        torch.testing.assert_close(cel.centers[0, k], z[assign == k].mean(0))
    assert float(cel.weights.sum()) == pytest.approx(1)


def test_no_outlier_among_equal_or_single_samples():
    y = torch.zeros(4, dtype=torch.int64)
    for z in (torch.zeros(4, 2), torch.tensor([[0.0, 0.0], [0.0, 1.0], [9.0, 9.0], [50.0, 0.0]])):
        a, b = ClusterCEL(1, 2, 0.1, clusters=4), ClusterCEL(1, 2, 0.1, clusters=4, outliers="truncate")
        a.refresh(z, y, generator=gen(0)), b.refresh(z, y, generator=gen(0))
        assert torch.equal(a.centers, b.centers) and torch.equal(a.weights, b.weights)


# ----- in somebody else's loop


def test_before_refresh_a_zero_with_a_graph_and_one_warning():
    cel = ClusterCEL(3, 4, 0.1)
    z, y = torch.randn(5, 4).requires_grad_(), torch.tensor([0, 0, 1, 2, 2])
    loss = cel(z, y)
    loss.backward()
    assert loss.item() == 0 and torch.equal(z.grad, torch.zeros(5, 4)) and float(cel.stats["skipped"]) == 1
    with pytest.warns(UserWarning, match=r"ClusterCEL was 0 .* call cel.refresh\(z_all, y_all\)"):
        for _ in range(99):
            cel(z, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cel(z, y)


@pytest.mark.parametrize("form, variance", FORMS)
def test_bad_rows_weigh_nothing_and_have_gradient_zero(form, variance):
    cel = random_module(0, 3, 2, 4, form, variance, tau=0.05)
    z, y = normal(12, 4, seed=1), torch.arange(12) % 3
    bad = z.clone()
    bad[0, 1], bad[5, 0], bad[7] = math.nan, math.inf, -math.inf
    good = [i for i in range(12) if i not in (0, 5, 7)]
    bad.requires_grad_()
    loss = cel(bad, y)
    loss.backward()
    assert float(cel.stats["skipped"]) == 3 / 12
    assert (
        bad.grad.isfinite().all() and (bad.grad[[0, 5, 7]] == 0).all() and (bad.grad[good] != 0).any(1).all()
    )
    cel.eval()
    share = (
        1 if form == "released" else 9 / 12
    )  # β_c = M_c / B, B the whole batch; the released loss has no B
    assert loss.item() == pytest.approx(share * float(cel(z[good], y[good])), abs=1e-12)
    assert float(cel(torch.full((2, 4), math.nan), y[:2])) == 0


def test_refresh_leaves_out_bad_rows():
    z, y = normal(60, 4), torch.arange(60) % 3
    bad = torch.cat([z, torch.full((4, 4), math.nan), torch.full((1, 4), math.inf)])
    a, b = ClusterCEL(4, 4, 0.1), ClusterCEL(4, 4, 0.1)
    a.refresh(z, y, generator=gen(0))
    b.refresh(bad, torch.cat([y, torch.tensor([0, 1, 2, 3, 3])]), generator=gen(0))
    assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values()))
    assert not b.weights[3].any()


@pytest.mark.parametrize("form, variance", FORMS)
@pytest.mark.parametrize("outliers", ["keep", "truncate", "reseed"])
def test_finite_at_every_scale(form, variance, outliers):
    for scale, constant in itertools.product((1e-12, 1e-6, 1.0, 1e6, 1e12), (False, True)):
        z, y = torch.randn(40, 16, generator=gen(0)) * scale, torch.arange(40) % 7
        z = z[:1].expand(40, 16) if constant else z
        cel = ClusterCEL(8, 16, 0.1, form=form, variance=variance, outliers=outliers)
        cel.refresh(z, y, generator=gen(0))
        z = (z * 1.5).requires_grad_()
        loss = cel(z, y)
        loss.backward()
        assert loss.isfinite() and loss >= 0 and z.grad.isfinite().all()
        assert all(figure.isfinite() and figure.dim() == 0 for figure in cel.stats.values())


@pytest.mark.parametrize("form, variance", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision(form, variance, dtype):
    """Half precision z, with or without autocast, module.half(): as in float32, and so is the refresh."""
    cel, half = (ClusterCEL(4, 32, 0.1, form=form, variance=variance) for _ in range(2))
    all_z, y = torch.rand(600, 32, generator=gen(0)), torch.arange(600) % 4
    cel.refresh(all_z, y, generator=gen(1))
    half.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half.refresh(all_z, y, generator=gen(1))
    assert all(torch.equal(p, q) for p, q in zip(cel.state_dict().values(), half.state_dict().values()))
    z, y = all_z[:128].clone().requires_grad_(), y[:128]
    loss = cel(z, y)
    (grad,) = torch.autograd.grad(loss, z)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            got = half(z.to(dtype), y)
        (got_grad,) = torch.autograd.grad(got, z)
        assert got.dtype == torch.float32 and got.item() == pytest.approx(loss.item(), rel=0.01)
        assert torch.cosine_similarity(got_grad.flatten(), grad.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("form, variance", FORMS)
def test_compiles_without_a_graph_break(form, variance):
    cel = ClusterCEL(4, 6, 0.1, form=form, variance=variance).double()
    z, y = normal(32, 6), torch.arange(32) % 4
    cel.refresh(z, y, generator=gen(0))
    z = normal(32, 6, seed=1).requires_grad_()
    want = cel(z, y)
    (want_grad,) = torch.autograd.grad(want, z)
    torch.compiler.reset()
    got = torch.compile(cel.train(), fullgraph=True, backend="eager")(z, y)
    (grad,) = torch.autograd.grad(got, z)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grad, want_grad)
    assert float(cel.stats["loss"]) == float(got)


def test_feature_maps_with_any_strides():
    z = normal(30, 4, 4, 2).permute(0, 3, 1, 2)  # [30, 2, 4, 4], not contiguous
    y = torch.arange(30) % 3
    a, b = (ClusterCEL(3, 32, 0.1).double().eval() for _ in range(2))
    a.refresh(z, y, generator=gen(0)), b.refresh(z.flatten(1), y, generator=gen(0))
    assert float(a(z, y)) == float(b(z.flatten(1), y)) > 0


def test_state_dict_round_trip():
    z, y = normal(60, 4), torch.arange(60) % 3
    a, b = (ClusterCEL(3, 4, 0.1, form="released").eval() for _ in range(2))
    a.refresh(z, y, num_samples=9000, generator=gen(0))
    b.load_state_dict(a.state_dict())
    assert float(a(z, y)) == float(b(z, y)) > 0 and int(b.num_samples) == 9000
    assert not list(a.parameters())  # nothing for an optimiser: the whole gradient is the encoder's


@pytest.mark.parametrize(
    "wrong",
    [{"sigma": 0.0}, {"sigma": math.nan}, {"tau": 0.0}, {"eps": 0.0}, {"var_threshold": 0.0}, {"clusters": 0}]
    + [{"num_classes": 0}, {"dim": 0}, {"form": "exp"}, {"variance": "full"}, {"outliers": "drop"}],
)
def test_bad_arguments_are_refused(wrong):
    with pytest.raises(ValueError):
        ClusterCEL(**{"num_classes": 3, "dim": 4, "sigma": 0.1, **wrong})


@pytest.mark.parametrize(
    "z, y, says",
    [
        (torch.zeros(2, 5), torch.tensor([0, 1]), "rows? of 4 floats"),
        (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), "at least one row"),
        (torch.zeros(2, 4, dtype=torch.int64), torch.tensor([0, 1]), "floats"),
        (torch.zeros(2, 4), torch.tensor([0, 3]), "outside 0..2"),
        (torch.zeros(2, 4), torch.tensor([0, -100]), "outside 0..2"),
        (torch.zeros(2, 4), torch.tensor([0.0, 1.0]), "int64"),
        (torch.zeros(2, 4), torch.eye(3)[:2], "int64"),
    ],
)
def test_bad_inputs_are_refused_in_one_sentence(z, y, says):
    cel = ClusterCEL(3, 4, 0.1)
    with pytest.raises(ValueError, match=says):
        cel(z.requires_grad_() if z.is_floating_point() else z, y)
    with pytest.raises(ValueError, match=says):
        cel.refresh(z.detach(), y)


def test_z_without_gradient_is_refused_in_training_only():
    cel, y = ClusterCEL(3, 4, 0.1), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="no gradient"):
        cel(torch.zeros(2, 4), y)
    with torch.no_grad():
        assert float(cel(torch.zeros(2, 4), y)) == 0
