"""ClusterCEL against the worked example of seed 000 §6.1–6.2 (with its errata), closed-form gradients, literal loops and known optima."""

import itertools
import math

import pytest
import torch

import cluster_cel
from cluster_cel import ClusterCEL, _plus_plus, kmeans

EXAMPLE = torch.tensor([
    [[0.0, 0.0], [0.2, 0.1], [-0.1, 0.05], [0.15, -0.05]],
    [[1.0, 1.0], [1.2, 1.1], [0.8, 0.9], [1.1, 0.95]],
    [[1.0, -1.0], [0.8, -0.9], [1.1, -1.2], [0.9, -1.05]],
], dtype=torch.float64)  # [3 classes, 4 samples, 2]
EXAMPLE_Y = torch.arange(3).repeat_interleave(4)
EPS = 1e-6


def gen(seed):
    return torch.Generator().manual_seed(seed)


def random_module(seed, C, K, D, form="log", variance="trace", tau=0.3, unfitted=()):
    """A module with hand-made statistics: random centres and weights, some weights zero, some classes unfitted."""
    g = gen(seed)
    cel = ClusterCEL(C, D, tau, clusters=K, form=form, variance=variance, eps=EPS).double()
    weights = torch.rand(C, K, generator=g, dtype=torch.float64)
    weights[:, 1:][torch.rand(C, K - 1, generator=g) < 0.2] = 0
    cel.centers.copy_(torch.randn(C, K, D, generator=g, dtype=torch.float64))
    cel.weights.copy_(weights / weights.sum(1, keepdim=True))
    cel.fitted.fill_(True)
    for c in unfitted:
        cel.fitted[c], cel.weights[c], cel.centers[c] = False, 0, 0
    return cel


def literal(cel, z, y):
    """Steps 2–4, eq. (1), (2), one class, one cluster, one sample at a time -> L, dL/dz by the closed form."""
    B, (C, K, D) = len(z), cel.centers.shape
    loss, grad = 0.0, torch.zeros_like(z)
    for c in range(C):
        rows = [i for i in range(B) if y[i] == c and cel.fitted[c]]
        if not rows:
            continue
        members = {k: [] for k in range(K)}
        for i in rows:
            d2 = {k: float(((z[i] - cel.centers[c, k]) ** 2).sum()) for k in range(K) if cel.weights[c, k] > 0}
            members[min(d2, key=d2.get)].append(i)
        v_c = torch.zeros(D, dtype=z.dtype)
        for k in range(K):
            if members[k]:
                v_c += cel.weights[c, k] * sum((z[i] - cel.centers[c, k]) ** 2 for i in members[k]) / len(members[k])
        v = [float(v_c.sum())] if cel.variance == "trace" else v_c.tolist()
        beta = len(rows) / B
        R, slope = [], []
        for e in v:
            if cel.form == "lin":
                R.append(e), slope.append(1.0)
            else:
                R.append(max(0.0, math.log(e + cel.eps) - math.log(cel.tau + cel.eps)))
                slope.append(1 / (e + cel.eps) if e > cel.tau else 0.0)
        loss += beta * sum(R) / len(R)
        for k in range(K):
            for i in members[k]:
                # β_c π_ck (2/n_ck) (z − μ_ck) · R'(v̂), mean over dimensions for per_dim
                grad[i] = (beta * cel.weights[c, k] * 2 / len(members[k]) * (z[i] - cel.centers[c, k])
                           * torch.tensor(slope, dtype=z.dtype) / len(v))
    return loss, grad


# ---------------------------------------------------------------- the worked example, seed 000 §6.1–6.2

def best_partition(x, k=2):
    """Exhaustive K-means optimum -> (inertia, sorted [(members, v)])."""
    best = None
    for labels in itertools.product(range(k), repeat=len(x)):
        if len(set(labels)) < k:
            continue
        parts = [[i for i, l in enumerate(labels) if l == j] for j in range(k)]
        v = [float(((x[p] - x[p].mean(0)) ** 2).sum(1).mean()) for p in parts]
        inertia = sum(len(p) * s for p, s in zip(parts, v))
        if best is None or inertia < best[0] - 1e-15:
            best = (inertia, sorted(zip(map(tuple, parts), v)))
    return best


def example_module(tau, form="log"):
    cel = ClusterCEL(3, 2, tau, clusters=2, form=form, eps=EPS).double()
    for seed in range(20):  # k-means++ from several seeds: keep the best, class by class
        trial = ClusterCEL(3, 2, tau, clusters=2, eps=EPS).double()
        trial.refresh(EXAMPLE.flatten(0, 1), EXAMPLE_Y, gen(seed))
        for c in range(3):
            if not cel.fitted[c] or (trial.weights * trial.variances)[c].sum() < (cel.weights * cel.variances)[c].sum() - 1e-12:
                for name in ("centers", "weights", "variances", "fitted"):
                    getattr(cel, name)[c] = getattr(trial, name)[c]
    return cel


def test_example_class_1_as_printed():
    inertia, parts = best_partition(EXAMPLE[0])
    assert [p for p, _ in parts] == [(0, 2), (1, 3)]
    assert [v for _, v in parts] == pytest.approx([0.003125, 0.00625], abs=1e-12)
    cel = example_module(0.002)
    order = cel.centers[0, :, 0].argsort(descending=True)
    torch.testing.assert_close(cel.centers[0, order], torch.tensor([[0.175, 0.025], [-0.05, 0.025]], dtype=torch.float64))
    assert cel.variances[0, order].tolist() == pytest.approx([0.00625, 0.003125], abs=1e-12)
    assert cel.weights[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("c, printed", [(1, (0.005, 0.004)), (2, (0.007, 0.006))])
def test_example_classes_2_and_3_are_misprinted(c, printed):
    true_v = [0.0, 0.19 / 18]  # one point alone, three together: 0.0105556
    inertia, parts = best_partition(EXAMPLE[c])
    assert sorted(len(p) for p, _ in parts) == [1, 3]
    assert sorted(v for _, v in parts) == pytest.approx(true_v, abs=1e-12)
    cel = example_module(0.002)
    order = cel.variances[c].argsort()
    assert cel.variances[c, order].tolist() == pytest.approx(true_v, abs=1e-12)
    assert cel.weights[c, order].tolist() == [0.25, 0.75]
    assert float((cel.weights * cel.variances)[c].sum()) == pytest.approx(0.0079167, abs=5e-8)
    # no split of the class into two clusters has the printed variances
    for labels in itertools.product(range(2), repeat=4):
        parts = [EXAMPLE[c][[i for i in range(4) if labels[i] == j]] for j in range(2)]
        if all(len(p) for p in parts):
            v = sorted((float(((p - p.mean(0)) ** 2).sum(1).mean()) for p in parts), reverse=True)
            assert not all(abs(a - b) < 5e-4 for a, b in zip(v, printed))


def test_example_loss():
    z, y = EXAMPLE.flatten(0, 1), EXAMPLE_Y
    cel = example_module(0.05)
    assert float(cel(z, y)) == 0.0 and float(cel.stats["active"]) == 0.0  # all v̂ are below τ = 0.05, none "exceeds" it
    torch.testing.assert_close(cel.stats["variance"], torch.tensor([0.0046875, 0.0095 / 1.2, 0.0095 / 1.2], dtype=torch.float64))

    log_ratio = lambda v: math.log(v + EPS) - math.log(0.002 + EPS)
    assert log_ratio(0.0046875) == pytest.approx(0.8515, abs=5e-5)
    assert abs(log_ratio(0.0046875) - 0.846) > 5e-3  # printed
    assert sum(map(log_ratio, (0.0046875, 0.0045, 0.0065))) / 3 == pytest.approx(0.9468, abs=5e-5)  # from the printed v̂
    cel = example_module(0.002)
    loss = float(cel(z, y))
    assert loss == pytest.approx(1.2008, abs=5e-5)
    assert abs(loss - 0.564) > 0.3 and abs(0.9468 - 0.564) > 0.3  # printed: fits neither
    assert float(example_module(0.002, form="lin")(z, y)) == pytest.approx((0.0046875 + 2 * 0.0095 / 1.2) / 3, abs=1e-12)


@pytest.mark.parametrize("form", ["log", "lin"])
def test_example_descent_step_points_to_the_centre(form):
    z = EXAMPLE.flatten(0, 1).requires_grad_()
    example_module(0.002, form)(z, EXAMPLE_Y).backward()
    step = -z.grad[1]  # of the sample (0.2, 0.1); printed as "the gradient"
    direction = torch.tensor([-0.025, -0.075], dtype=torch.float64)
    torch.testing.assert_close(step / step.norm(), direction / direction.norm())
    scale = 1 / 3 * 0.5 * 2 / 2 / (0.0046875 + EPS if form == "log" else 1)
    torch.testing.assert_close(step, scale * direction)


# ---------------------------------------------------------------- gradients and brute force

@pytest.mark.parametrize("form", ["log", "lin"])
@pytest.mark.parametrize("variance", ["trace", "per_dim"])
def test_equals_literal_loops(form, variance):
    skipped_something = empty_cluster = fewer_than_classes = 0
    for seed in range(60):
        g = gen(seed)
        B, C, K, D = (int(torch.randint(1, hi, (), generator=g)) for hi in (20, 9, 5, 6))
        cel = random_module(seed, C, K, D, form, variance, tau=0.2 + seed % 3, unfitted=[0] if seed % 4 == 0 else [])
        z = torch.randn(B, D, generator=g, dtype=torch.float64).requires_grad_()
        y = torch.randint(C, (B,), generator=g)
        loss = cel(z, y)
        loss.backward()
        want, grad = literal(cel, z.detach(), y)
        assert loss.item() == pytest.approx(want, abs=1e-10)
        assert (z.grad - grad).abs().max() < 1e-10
        assert int(cel.stats["skipped"]) == int((~cel.fitted[y]).sum())
        skipped_something += int(cel.stats["skipped"]) > 0
        empty_cluster += float(cel.stats["missing_mass"]) > 0
        fewer_than_classes += B < C
    assert skipped_something and empty_cluster and fewer_than_classes


@pytest.mark.parametrize("form", ["log", "lin"])
@pytest.mark.parametrize("variance", ["trace", "per_dim"])
def test_gradcheck(form, variance):
    cel = random_module(1, 3, 2, 4, form, variance)
    z = torch.randn(9, 4, generator=gen(2), dtype=torch.float64).requires_grad_()
    y = torch.arange(9) % 3
    assert torch.autograd.gradcheck(lambda t: cel(t, y), (z,))


def test_per_dim_of_one_dimension_is_trace():
    a, b = (random_module(3, 4, 3, 1, variance=v) for v in ("trace", "per_dim"))
    z, y = torch.randn(30, 1, generator=gen(0), dtype=torch.float64), torch.arange(30) % 4
    assert float(a(z, y)) == pytest.approx(float(b(z, y)), abs=1e-14)


def test_descent_shrinks_the_spread_to_tau():
    z = torch.randn(200, 3, generator=gen(0), dtype=torch.float64)
    y = torch.arange(200) % 2
    cel = ClusterCEL(2, 3, tau=0.5, clusters=2).double()
    cel.refresh(z, y, gen(0))
    z.requires_grad_()
    for _ in range(300):
        (grad,) = torch.autograd.grad(cel(z, y), z)
        z = (z - 2.0 * grad).detach().requires_grad_()
    cel(z, y)
    assert (cel.stats["variance"] <= 0.5 * 1.02).all() and (cel.stats["variance"] > 0.4).all()


# ---------------------------------------------------------------- K-means

def inertia(z, centers, assign):
    return float(((z - centers[assign]) ** 2).sum())


def test_kmeans_reaches_the_optimum_of_separated_blobs():
    for seed in range(10):
        g = gen(seed)
        k = 2 + seed % 5
        blob = torch.arange(40 * k) % k
        centres = 100 * torch.randperm(50, generator=g)[:k].double()[:, None] * torch.ones(6, dtype=torch.float64)
        z = centres[blob] + torch.randn(len(blob), 6, generator=g, dtype=torch.float64)
        best = sum(((z[blob == j] - z[blob == j].mean(0)) ** 2).sum() for j in range(k))
        mu, assign = kmeans(z, k, generator=g)
        assert inertia(z, mu, assign) == pytest.approx(float(best), rel=1e-10)
        mu, assign = kmeans(z, k, init=z[:1].expand(k, -1))  # the worst start: all centres equal, k − 1 clusters empty
        assert torch.bincount(assign, minlength=k).min() > 0


def test_kmeans_equals_literal_lloyd_round_by_round():
    for seed in range(15):
        g = gen(seed)
        n, k, D = 60, 1 + seed % 6, 3
        z = torch.randn(n, D, generator=g, dtype=torch.float64) + 1000
        mu = z[:k].clone()
        for rounds in range(1, 12):
            near = torch.stack([((z - m) ** 2).sum(1) for m in mu], 1).argmin(1)
            mu = torch.stack([z[near == j].mean(0) for j in range(k)])
            got_mu, got = kmeans(z, k, init=z[:k], iters=rounds)
            assert torch.equal(got, near)
            torch.testing.assert_close(got_mu, mu, rtol=0, atol=1e-9)


def test_kmeans_fixed_point_centres_and_no_empty_cluster():
    for seed in range(20):
        g = gen(seed)
        z = torch.randn(50, 4, generator=g, dtype=torch.float64)
        mu, assign = kmeans(z, 7, init=z[:1] + 100 * torch.arange(7)[:, None] if seed % 2 else None, iters=200, generator=g)
        assert torch.bincount(assign, minlength=7).min() > 0
        assert torch.equal(torch.cdist(z, mu).argmin(1), assign)
        for j in range(7):
            torch.testing.assert_close(mu[j], z[assign == j].mean(0))


def test_kmeans_plus_plus_draws_by_squared_distance():
    # three points on a line, 0, 1 and 3: P(pair) from P(first) = 1/3 and P(second) ∝ D²
    z = torch.tensor([[0.0], [1.0], [3.0]])
    counts, trials = {}, 6000
    g = gen(0)
    for _ in range(trials):
        pair = tuple(sorted(_plus_plus(z, 2, g).flatten().tolist()))
        counts[pair] = counts.get(pair, 0) + 1
    want = {(0, 1): (1 / 10 + 1 / 5) / 3, (0, 3): (9 / 10 + 9 / 13) / 3, (1, 3): (4 / 5 + 4 / 13) / 3}
    for pair, p in want.items():
        assert counts[pair] / trials == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / trials))


@pytest.mark.parametrize("z, k, clusters", [
    (torch.zeros(5, 3), 4, 1),  # all equal
    (torch.tensor([[1.0, 2.0]]), 3, 1),  # one sample
    (torch.tensor([[0.0], [1.0]]), 5, 2),  # k > n
    (torch.tensor([[0.0], [0.0], [7.0], [7.0], [7.0]]), 3, 2),  # two distinct values, k = 3
])
def test_kmeans_with_fewer_distinct_samples_than_clusters(z, k, clusters):
    for seed in range(5):
        mu, assign = kmeans(z, k, generator=gen(seed))
        assert mu.shape == (k, z.shape[1]) and mu.isfinite().all()
        assert inertia(z, mu, assign) == 0 and len(assign.unique()) == clusters


# ---------------------------------------------------------------- refresh

def test_refresh_statistics_are_those_of_the_seed():
    g = gen(0)
    z, y = torch.randn(300, 5, generator=g, dtype=torch.float64), torch.randint(3, (300,), generator=g)
    cel = ClusterCEL(4, 5, 1.0, clusters=3).double()
    info = cel.refresh(z, y, g)
    assert info["fitted"] == 3 and cel.fitted.tolist() == [True, True, True, False]
    for c in range(3):
        x = z[y == c]
        assign = torch.cdist(x, cel.centers[c]).argmin(1)
        for k in range(3):
            S = x[assign == k]
            torch.testing.assert_close(cel.centers[c, k], S.mean(0))
            torch.testing.assert_close(cel.variances[c, k], ((S - S.mean(0)) ** 2).sum(1).mean())
            assert float(cel.weights[c, k]) == pytest.approx(len(S) / len(x))
    # the whole epoch as one batch: v̂_c is the class's K-means inertia per sample
    cel(z, y)
    torch.testing.assert_close(cel.stats["variance"], (cel.weights * cel.variances).sum(1))


def test_warm_start_keeps_the_order_of_the_clusters():
    g = gen(1)
    z, y = torch.randn(400, 2, generator=g), torch.randint(2, (400,), generator=g)
    z += 20 * torch.randint(3, (400, 1), generator=g)
    cel = ClusterCEL(2, 2, 1.0, clusters=3)
    cel.refresh(z, y, g)
    before = cel.centers.clone()
    cel.refresh(z + 0.1, y, g)
    torch.testing.assert_close(cel.centers, before + 0.1, rtol=0, atol=1e-3)


def test_absent_class_keeps_its_statistics():
    z, y = torch.randn(60, 2, generator=gen(0)), torch.arange(60) % 3
    cel = ClusterCEL(3, 2, 1.0, clusters=2)
    cel.refresh(z, y, gen(0))
    old = {k: v.clone() for k, v in cel.state_dict().items()}
    cel.refresh(z[y != 1] + 5, y[y != 1], gen(0))
    assert all(torch.equal(cel.state_dict()[k][1], old[k][1]) for k in old)
    assert not torch.equal(cel.centers[0], old["centers"][0])


def outlier_data():
    g = gen(3)
    tight = torch.tensor([[0.0, 0.0], [10.0, 0.0]]).repeat_interleave(100, 0) + 0.1 * torch.randn(200, 2, generator=g)
    loose = torch.tensor([[0.0, 50.0]]) + torch.cat([0.1 * torch.randn(50, 2, generator=g), torch.tensor([[8.0, 0.0], [0.0, 9.0]])])
    z = torch.cat([tight, loose]).double()
    init = torch.tensor([[[0.0, 0.0], [10.0, 0.0], [0.0, 50.0]]]).double()
    return z, torch.zeros(len(z), dtype=torch.int64), init


def fitted_on_outliers(outliers):
    z, y, init = outlier_data()
    cel = ClusterCEL(1, 2, 1.0, clusters=3, outliers=outliers).double()
    cel.centers.copy_(init)
    cel.fitted.fill_(True)
    return z, cel, cel.refresh(z, y, gen(0))


def test_outliers_keep_and_truncate():
    z, kept, info = fitted_on_outliers("keep")
    assert info["outlier_clusters"] == 1 and float(kept.variances[0, 2]) > 1
    z, cut, info = fitted_on_outliers("truncate")
    assert info["outlier_clusters"] == 1
    # members within the radius² = 4 × median of v around the plain centre stay
    S = z[200:]
    limit = 4 * kept.variances[0].median()
    inside = S[((S - S.mean(0)) ** 2).sum(1) <= limit]
    expected = inside if len(inside) else S
    torch.testing.assert_close(cut.centers[0, 2], expected.mean(0))
    torch.testing.assert_close(cut.variances[0, 2], ((expected - expected.mean(0)) ** 2).sum(1).mean())
    torch.testing.assert_close(cut.weights, kept.weights)
    torch.testing.assert_close(cut.centers[0, :2], kept.centers[0, :2])
    assert len(inside) > 0 and float((cut.centers[0, 2] - torch.tensor([0.0, 50.0])).norm()) < float((kept.centers[0, 2] - torch.tensor([0.0, 50.0])).norm())


def test_outliers_reseed_goes_on_from_the_bulk():
    z, cel, info = fitted_on_outliers("reseed")
    assign = torch.cdist(z, cel.centers[0]).argmin(1)
    assert info["outlier_clusters"] == 1 and float(cel.weights.sum()) == pytest.approx(1)
    for k in range(3):
        torch.testing.assert_close(cel.centers[0, k], z[assign == k].mean(0))


def test_truncate_keeps_a_cluster_that_would_lose_all_members():
    angle = torch.arange(40, dtype=torch.float64) * (2 * math.pi / 40)
    ring = torch.stack([angle.cos(), angle.sin()], 1)  # no member near its centre
    tight = 0.01 * torch.randn(80, 2, generator=gen(0), dtype=torch.float64) + torch.tensor([[20.0, 0.0], [40.0, 0.0]]).repeat_interleave(40, 0)
    cel = ClusterCEL(1, 2, 1.0, clusters=3, outliers="truncate").double()
    cel.centers.copy_(torch.tensor([[[0.0, 0.0], [20.0, 0.0], [40.0, 0.0]]]))
    cel.fitted.fill_(True)
    assert cel.refresh(torch.cat([ring, tight]), torch.zeros(120, dtype=torch.int64))["outlier_clusters"] == 1
    assert cel.centers[0, 0].norm() < 1e-12 and float(cel.variances[0, 0]) == pytest.approx(1)


def test_reseed_starts_from_a_sample_of_the_other_clusters(monkeypatch):
    starts = []
    original = cluster_cel.kmeans
    monkeypatch.setattr(cluster_cel, "kmeans", lambda z, k, init, *rest: (starts.append(init.clone()), original(z, k, init, *rest))[1])
    z, _, _ = fitted_on_outliers("reseed")
    _, second = starts
    assert (z[:200] == second[2]).all(1).any()  # rows 200.. are the outlier cluster


def test_no_outlier_among_equal_or_single_clusters():
    cel = ClusterCEL(1, 2, 1.0, clusters=3)
    assert not cel._outliers(torch.tensor([1.0, 1.0, 9.0]), torch.tensor([0.0, 0.0, 5.0]))[0].any()
    assert not cel._outliers(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3))[0].any()


# ---------------------------------------------------------------- robustness

def test_before_refresh_a_differentiable_zero():
    cel = ClusterCEL(3, 4, 1.0)
    z = torch.randn(5, 4).requires_grad_()
    loss = cel(z, torch.tensor([0, 0, 1, 2, 2]))
    loss.backward()
    assert loss.item() == 0 and torch.equal(z.grad, torch.zeros(5, 4))
    assert (float(cel.stats["active"]), int(cel.stats["skipped"]), int(cel.stats["skipped_classes"])) == (0, 5, 3)


@pytest.mark.parametrize("variance", ["trace", "per_dim"])
def test_bad_rows_weigh_zero_and_have_zero_gradient(variance):
    cel = random_module(0, 3, 2, 4, variance=variance, tau=0.05)
    z, y = torch.randn(12, 4, generator=gen(1), dtype=torch.float64), torch.arange(12) % 3
    bad = z.clone()
    bad[0, 1], bad[5, 0], bad[7] = math.nan, math.inf, -math.inf
    good = [i for i in range(12) if i not in (0, 5, 7)]
    bad.requires_grad_()
    loss = cel(bad, y)
    loss.backward()
    assert loss.item() == pytest.approx(float(cel(z[good], y[good])) * 9 / 12, abs=1e-12)  # B is the whole batch
    assert bad.grad.isfinite().all() and (bad.grad[[0, 5, 7]] == 0).all() and (bad.grad[good] != 0).any(1).all()
    cel(bad, y)
    assert int(cel.stats["nonfinite"]) == 3 and int(cel.stats["skipped"]) == 0
    assert float(cel(torch.full((2, 4), math.nan, dtype=torch.float64), y[:2])) == 0


def test_refresh_leaves_out_and_counts_bad_rows():
    z, y = torch.randn(60, 4, generator=gen(1)), torch.arange(60) % 3
    bad = torch.cat([z, torch.full((4, 4), math.nan), torch.full((1, 4), math.inf)])
    a, b = ClusterCEL(4, 4, 1.0), ClusterCEL(4, 4, 1.0)
    a.refresh(z, y, gen(0))
    assert b.refresh(bad, torch.cat([y, torch.tensor([0, 1, 2, 3, 3])]), gen(0))["nonfinite"] == 5
    assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values()))
    assert not b.fitted[3]


@pytest.mark.parametrize("form", ["log", "lin"])
@pytest.mark.parametrize("variance", ["trace", "per_dim"])
@pytest.mark.parametrize("outliers", ["keep", "truncate", "reseed"])
def test_finite_at_every_scale(form, variance, outliers):
    for scale in (1e-12, 1e-6, 1.0, 1e6, 1e12):
        for constant in (False, True):
            z = torch.randn(40, 16, generator=gen(0)) * scale
            z = z[:1].expand(40, 16) if constant else z
            y = torch.arange(40) % 7
            cel = ClusterCEL(8, 16, 1e-3, form=form, variance=variance, outliers=outliers)
            cel.refresh(z, y, gen(0))
            z = (z * 1.5).requires_grad_()
            loss = cel(z, y)
            loss.backward()
            assert loss.isfinite() and loss >= 0 and z.grad.isfinite().all()
            assert all(v.isfinite().all() for v in cel.stats.values())


def test_one_sample_classes_and_more_clusters_than_samples():
    z, y = torch.randn(5, 3, generator=gen(0), dtype=torch.float64), torch.tensor([0, 1, 1, 2, 2])
    cel = ClusterCEL(3, 3, 1e-3, clusters=4, form="lin").double()
    cel.refresh(z, y, gen(0))
    torch.testing.assert_close(cel.weights.sum(1), torch.ones(3, dtype=torch.float64))
    assert (cel.weights > 0).sum(1).tolist() == [1, 2, 2]
    assert float(cel(z, y)) == pytest.approx(0, abs=1e-20)  # every sample is its own centre
    assert float(cel(z[:1] + 1, y[:1])) == pytest.approx(3.0)  # one sample: ||z − μ||² = D
    cel.refresh(z.repeat(4, 1) + torch.randn(20, 3, generator=gen(1)), y.repeat(4), gen(0))  # grown classes fill up
    assert (cel.weights > 0).all(1).tolist() == [True, True, True]


def test_four_dimensional_strided_input_and_float32():
    z = torch.randn(30, 4, 4, 2, generator=gen(0), dtype=torch.float64).permute(0, 3, 1, 2)  # [30, 2, 4, 4], not contiguous
    y = torch.arange(30) % 3
    a, b, c = (ClusterCEL(3, 32, 1.0).double() for _ in range(3))
    a.refresh(z, y, gen(0)), b.refresh(z.flatten(1), y, gen(0))
    assert float(a(z, y)) == float(b(z.flatten(1), y)) > 0
    c.float().load_state_dict(a.state_dict())
    assert float(c(z.float(), y)) == pytest.approx(float(a(z, y)), rel=1e-5)


def test_state_dict_round_trip():
    z, y = torch.randn(60, 4, generator=gen(1)), torch.arange(60) % 3
    a, b = ClusterCEL(3, 4, 0.1), ClusterCEL(3, 4, 0.1)
    a.refresh(z, y, gen(0))
    b.load_state_dict(a.state_dict())
    assert float(a(z, y)) == float(b(z, y)) > 0


@pytest.mark.parametrize("kwargs", [
    {"tau": 0.0}, {"tau": math.nan}, {"clusters": 0}, {"form": "exp"}, {"variance": "full"}, {"outliers": "drop"},
    {"eps": 0.0}, {"num_classes": 0}, {"outlier_factor": 1.0},
])
def test_bad_arguments_are_refused(kwargs):
    with pytest.raises(ValueError):
        ClusterCEL(**{"num_classes": 3, "dim": 4, "tau": 1.0, **kwargs})


def test_bad_inputs_are_refused():
    cel = ClusterCEL(3, 4, 1.0)
    with pytest.raises(ValueError, match="dim=4"):
        cel(torch.zeros(2, 5), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="0..2"):
        cel(torch.zeros(2, 4), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="0..2"):
        cel.refresh(torch.zeros(2, 4), torch.tensor([-1, 0]))
