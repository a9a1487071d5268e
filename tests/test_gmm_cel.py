"""GMMCEL: the equations as loops, gradients, closed forms of the bound, K-means, EM, hostile input."""

import itertools
import math
import pathlib
import warnings

import pytest
import torch

import gmm_cel
from gmm_cel import GMMCEL, kmeans

F64 = torch.float64
BITS = 1 / math.log(2)
BOTH = pytest.mark.parametrize("covariance", ["diag", "full"])
EXAMPLE = torch.tensor(
    [
        [[0.0, 0.0], [0.2, 0.1], [-0.1, 0.05], [0.15, -0.05]],
        [[1.0, 1.0], [1.2, 1.1], [0.8, 0.9], [1.1, 0.95]],
        [[1.0, -1.0], [0.8, -0.9], [1.1, -1.2], [0.9, -1.05]],
    ],
    dtype=F64,
)  # [A §6.1]: three classes, four samples each


def gen(seed):
    return torch.Generator().manual_seed(seed)


def randn(seed, *shape):
    return torch.randn(*shape, generator=gen(seed), dtype=F64)


def random_module(seed, C, K, D, covariance="diag", sigma=0.4, N=500, unseen=(), **kwargs):
    """A module with hand-made statistics; some components have weight 0, some classes no refresh has seen."""
    g = gen(seed)
    cel = GMMCEL(C, D, sigma, components=K, covariance=covariance, **kwargs).double()
    weights = torch.rand(C, K, generator=g, dtype=F64) + 0.1
    weights[:, 1:][torch.rand(C, K - 1, generator=g) < 0.2] = 0
    for c in unseen:
        weights[c] = 0
    A = torch.randn(C, K, D, D, generator=g, dtype=F64) / D**0.5
    cov = A @ A.mT
    cel.weights.copy_(weights / weights.sum().clamp(min=1e-9))
    cel.means.copy_(torch.randn(C, K, D, generator=g, dtype=F64))
    cel.covs.copy_(cov if covariance == "full" else cov.diagonal(dim1=-2, dim2=-1))
    cel.num_samples.fill_(N)
    return cel


def value_and_grad(cel, z, y):
    z = z.detach().clone().requires_grad_()
    loss = cel(z, y)
    loss.backward()
    return loss.detach(), z.grad


def literal(cel, z, y):
    """The equations, one sample at a time -> L_C, new π, new Σ, ∂L/∂z."""
    (C, K, D), B = cel.means.shape, len(z)
    full = cel.covariance == "full"
    members = {(c, k): [] for c in range(C) for k in range(K)}
    for i in range(B):
        c = int(y[i])
        d2 = {k: float(((z[i] - cel.means[c, k]) ** 2).sum()) for k in range(K) if cel.weights[c, k] > 0}
        if d2:
            members[c, min(d2, key=d2.get)].append(i)
    B_seen, N, s = sum(map(len, members.values())), float(cel.num_samples), cel.update_scale
    b = min(0.99, s * B_seen / N)
    pi, cov, loss = cel.weights.clone(), cel.covs.clone(), 0.0
    grad = torch.zeros_like(z)
    for (c, k), rows in members.items():
        if cel.weights[c, k] == 0:
            continue
        if B_seen:
            pi[c, k] = (1 - b) * cel.weights[c, k] + b * len(rows) / B_seen
        a = min(0.99, s * len(rows) / (float(cel.weights[c, k]) * N))
        if rows:
            e = [z[i] - cel.means[c, k] for i in rows]
            delta = sum(torch.outer(r, r) if full else r * r for r in e) / len(rows)
            cov[c, k] = (1 - a) * cel.covs[c, k] + a * delta
        S = (cov[c, k] if full else torch.diag(cov[c, k])) + cel.sigma**2 * torch.eye(D, dtype=z.dtype)
        p = float(pi[c, k])
        loss += p * (-math.log(p) + 0.5 * float(torch.logdet(S) - D * math.log(cel.sigma**2)))
        for i in rows:
            grad[i] = torch.linalg.solve(S, z[i] - cel.means[c, k]) / B
    return loss, pi, cov, grad


# ----- the equations, and the gradient


@BOTH
def test_equals_the_equations_written_as_loops(covariance):
    skipped = absent = fewer_than_classes = clamped = 0
    for seed in range(40):
        g = gen(seed)
        B, C, K, D = (int(torch.randint(1, hi, (), generator=g)) for hi in (20, 7, 5, 6))
        N, s = [3, 40, 500][seed % 3], [1.0, 10.0][seed % 2]
        unseen = [0] if seed % 4 == 0 and C > 1 else []
        y = torch.randint(C, (B,), generator=g)
        z = torch.randn(B, D, generator=g, dtype=F64)
        cel = random_module(seed, C, K, D, covariance, 0.4, N, unseen, update_scale=s)
        want, pi, cov, expected = literal(cel, z, y)
        loss, grad = value_and_grad(cel, z, y)
        assert loss.item() == pytest.approx(want, abs=1e-10)
        assert (grad - expected).abs().max() < 1e-10
        assert (cel.weights - pi).abs().max() < 1e-12 and (cel.covs - cov).abs().max() < 1e-12
        assert float(cel.weights.sum()) == pytest.approx(1, abs=1e-12)
        assert cel.bound().item() == pytest.approx(want, abs=1e-10)  # what was stored is what was scored
        skipped += float(cel.stats["skipped"]) > 0
        absent += len(y.unique()) < C
        fewer_than_classes += B < C
        clamped += s * B > N
    assert skipped and absent and fewer_than_classes and clamped


@BOTH
def test_the_gradient_estimates_that_of_the_whole_set(covariance):
    """N samples as one batch have the exact gradient of L_C; a batch of B carries N/B times its part."""
    N, D, B = 60, 3, 12
    z, y = randn(0, N, D), torch.arange(N) % 2
    cel = GMMCEL(2, D, 0.5, components=1, covariance=covariance).double().eval()
    cel.refresh(z, y, num_samples=10**12, generator=gen(0))  # so many that a batch does not move Σ
    t = z.clone().requires_grad_()
    whole = 0
    for c in range(2):
        e = t[y == c] - cel.means[c, 0]
        cov = e.T @ e / len(e)
        if covariance == "diag":
            cov = torch.diag(cov.diagonal())
        whole = whole + 0.5 * 0.5 * torch.logdet(torch.eye(D, dtype=F64) + cov / 0.25)
    whole.backward()
    for rows in torch.randperm(N, generator=gen(0)).split(B):
        _, grad = value_and_grad(cel, z[rows], y[rows])
        torch.testing.assert_close(grad * B, t.grad[rows] * N, rtol=1e-8, atol=1e-10)


def test_the_gradient_does_not_depend_on_the_size_of_the_data_set_and_the_update_scale():
    z, y = randn(3, 10, 4), torch.arange(10) % 2

    def gradient(**kwargs):
        return value_and_grad(random_module(0, 2, 2, 4, **kwargs), z, y)[1]

    base = gradient(N=10**6)
    for kwargs in ({"N": 10**9}, {"N": 10**6, "update_scale": 10.0}):
        torch.testing.assert_close(gradient(**kwargs), base, rtol=1e-3, atol=0)


@BOTH
def test_statistics_move_in_training_mode_only(covariance):
    cel = random_module(0, 2, 2, 3, covariance)
    z, y = randn(0, 8, 3), torch.arange(8) % 2
    before = {k: v.clone() for k, v in cel.state_dict().items()}
    value = cel.eval()(z, y)
    assert all(torch.equal(v, before[k]) for k, v in cel.state_dict().items())
    assert value_and_grad(cel.train(), z, y)[0].item() == value.item()
    assert not torch.equal(cel.weights, before["weights"]) and not torch.equal(cel.covs, before["covs"])
    assert torch.equal(cel.means, before["means"])
    with torch.no_grad():
        for _ in range(200):
            cel(randn(1, 8, 3), y)
    assert float(cel.weights.sum()) == pytest.approx(1, abs=1e-12)


def test_descent_shrinks_the_bound():
    z, y = torch.rand(90, 3, generator=gen(0), dtype=F64), torch.arange(90) % 3
    cel = GMMCEL(3, 3, 0.05, components=2).double()
    cel.refresh(z, y, generator=gen(0))
    before = cel.bound()
    for _ in range(50):
        z = z - 0.02 * value_and_grad(cel, z, y)[1]
    cel.refresh(z, y, generator=gen(0))
    assert cel.bound() < before - 1


@BOTH
def test_stats_say_what_was_measured(covariance):
    z, y = randn(0, 40, 3) * torch.tensor([1.0, 1.0, 0.01], dtype=F64), torch.zeros(40, dtype=torch.int64)
    cel = GMMCEL(2, 3, 0.2, components=1, covariance=covariance).double()
    cel.refresh(z, y)
    batch = (
        torch.cat([z, z[:10], z[:10] / 0]),
        torch.cat([y, y[:10] + 1, y[:10]]),
    )  # 40 good, 10 unseen, 10 bad
    loss, _ = value_and_grad(cel, *batch)
    stats = {name: float(value) for name, value in cel.stats.items()}
    assert not any(value.requires_grad for value in cel.stats.values())
    assert stats["loss"] == loss.item() == stats["entropy_term"] + stats["logdet_term"]
    assert stats["entropy_term"] == pytest.approx(0, abs=1e-12)
    assert stats["skipped"] == pytest.approx(20 / 60)
    assert stats["spread"] == pytest.approx(z.var(0, correction=0).mean().item())
    assert stats["above_tau"] == pytest.approx(2 / 3)  # 0.0001 < 0.125·0.04 < 1


# ----- the bound against closed forms


@pytest.mark.parametrize(
    "A, bits, ratio",
    [
        (torch.linalg.qr(randn(0, 8, 8))[0], 14.393, 1.0),  # square orthogonal
        (torch.linalg.qr(randn(1, 8, 4))[0].T, 7.197, 0.531),  # wide, orthonormal rows
        (torch.linalg.qr(randn(2, 12, 8))[0], 14.393, 1.0),  # tall, orthonormal columns
        (randn(3, 8, 8), None, None),
        (torch.diag(torch.tensor([1.0, 2.0, 0.5, 0.1], dtype=F64)), None, None),
        (randn(4, 6, 3), None, None),
    ],
)
def test_linear_gaussian_channel(A, bits, ratio):
    """x ~ N(0, I), z = A x, σ = 0.3: the full L_C of one component is I, and bounds the error from below."""
    (D, d), sigma = A.shape, 0.3
    info = 0.5 * torch.logdet(torch.eye(D, dtype=F64) + A @ A.T / sigma**2).item()
    value = {}
    for covariance in ("diag", "full"):
        cel = GMMCEL(1, D, sigma, components=1, covariance=covariance).double()
        cel.weights.fill_(1)
        cel.covs[0, 0] = A @ A.T if covariance == "full" else (A @ A.T).diagonal()
        value[covariance] = cel.bound().item()
    assert value["full"] == pytest.approx(info, abs=1e-9)
    off_diagonal = (A @ A.T - torch.diag((A @ A.T).diagonal())).abs().max() > 1e-9
    assert value["diag"] >= info - 1e-9 and (value["diag"] > info + 1e-3) == bool(off_diagonal)
    mmse = torch.linalg.inv(torch.eye(d, dtype=F64) + A.T @ A / sigma**2).trace().item() / d
    entropy_x = d / 2 * math.log(2 * math.pi * math.e)
    floor = math.exp(2 * (entropy_x - value["full"]) / d) / (2 * math.pi * math.e)
    gram = A.T @ A
    tight = D >= d and (gram - gram[0, 0] * torch.eye(d, dtype=F64)).abs().max() < 1e-9
    assert floor <= mmse * (1 + 1e-9) and (floor > mmse * (1 - 1e-6)) == bool(tight)
    if bits is not None:
        assert info * BITS == pytest.approx(bits, abs=5e-4)
        assert floor / mmse == pytest.approx(ratio, abs=5e-4)


def test_one_component_is_the_log_det_of_the_sample_covariance():
    z, y = randn(0, 200, 6) @ randn(1, 6, 6), torch.zeros(200, dtype=torch.int64)
    cov = torch.cov(z.T, correction=0)
    full, diag = (GMMCEL(1, 6, 0.3, components=1, covariance=c).double() for c in ("full", "diag"))
    full.refresh(z, y), diag.refresh(z, y)
    want = 0.5 * torch.logdet(torch.eye(6, dtype=F64) + cov / 0.09).item()
    assert full.bound().item() == pytest.approx(want, abs=1e-9)
    assert full.eval()(z, y).item() == pytest.approx(want, abs=1e-9)  # the batch is the set: nothing changes
    want = 0.5 * torch.log1p(cov.diagonal() / 0.09).sum().item()
    assert diag.bound().item() == pytest.approx(want, abs=1e-9)


def test_diag_is_at_least_full_for_the_same_components():
    for seed in range(20):
        full, diag = (random_module(seed, 3, 2, 5, covariance).eval() for covariance in ("full", "diag"))
        assert torch.equal(diag.covs, full.covs.diagonal(dim1=-2, dim2=-1))
        z, y = randn(seed, 30, 5), torch.arange(30) % 3
        assert diag.bound() > full.bound() and diag(z, y) > full(z, y)


def mutual_information(z, sigma):
    """I(z;z') in nats of a z that takes the given values [n] equally often, by integration on a grid."""
    grid = torch.linspace(float(z.min()) - 8 * sigma, float(z.max()) + 8 * sigma, 20001, dtype=F64)
    bell = torch.exp(-0.5 * ((grid[:, None] - z[None]) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
    entropy = torch.trapezoid(torch.special.entr(bell.mean(1)), grid).item()
    return entropy - 0.5 * math.log(2 * math.pi * math.e * sigma**2)


def test_bound_holds_for_any_distribution_and_any_number_of_components():
    for seed, sigma in ((0, 0.05), (1, 0.3), (2, 1.0)):
        g = gen(seed)
        z = torch.cat([torch.rand(150, generator=g, dtype=F64) ** 3, 2 + randn(seed, 50).abs()])
        y = torch.randint(2, (200,), generator=g)
        info = mutual_information(z, sigma)
        for K in (1, 2, 3, 5):
            cel = GMMCEL(2, 1, sigma, components=K).double()
            cel.refresh(z[:, None], y, generator=g)
            assert cel.bound().item() > info
    # equality in the limit: two points far apart, one component each: I = H(A) = log 2
    z, y = torch.tensor([-1.0, 1.0], dtype=F64).repeat(10), torch.zeros(20, dtype=torch.int64)
    cel = GMMCEL(1, 1, 0.05, components=2).double()
    cel.refresh(z[:, None], y, generator=gen(0))
    assert cel.bound().item() == pytest.approx(math.log(2), abs=1e-9)
    assert mutual_information(z, 0.05) == pytest.approx(math.log(2), abs=1e-6)


# ----- K-means


def inertia(z, centres, assign):
    return (z - centres[assign]).square().sum().item()


def test_kmeans_finds_the_optimum_of_the_worked_example_from_every_seed():
    """[A §6.2] class 1 is right; the optimum of classes 2 and 3 is {one point} and {the other three}."""
    for seed in range(20):
        for c, want in enumerate((0.0046875, 0.0079167, 0.0079167)):
            centres, assign = kmeans(EXAMPLE[c], 2, generator=gen(seed))
            assert inertia(EXAMPLE[c], centres, assign) / 4 == pytest.approx(want, abs=1e-7)
            assert sorted(assign.bincount().tolist()) == ([2, 2] if c == 0 else [1, 3])


def test_kmeans_finds_the_best_of_all_partitions_of_small_sets():
    for seed in range(5):
        z = randn(seed, 7, 2)
        best = math.inf
        for rest in itertools.product(range(3), repeat=6):
            assign = torch.tensor((0, *rest))
            centres = torch.stack([z[assign == k].mean(0) for k in range(3)])
            if len(assign.unique()) == 3:
                best = min(best, inertia(z, centres, assign))
        assert inertia(z, *kmeans(z, 3, generator=gen(seed))) == pytest.approx(best, rel=1e-9)


def test_kmeans_ends_in_a_fixed_point_and_a_warm_start_stays_there():
    for seed, offset in ((0, 0.0), (1, 1e3), (2, -1e5)):
        z = randn(seed, 300, 5) + offset
        centres, assign = kmeans(z, 4, generator=gen(seed))
        assert torch.equal(torch.cdist(z - offset, centres - offset).argmin(1), assign)
        torch.testing.assert_close(centres, torch.stack([z[assign == k].mean(0) for k in range(4)]))
        again, same = kmeans(z, 4, init=centres)
        assert torch.equal(same, assign)
        torch.testing.assert_close(again, centres)


def test_kmeans_surplus_clusters_stay_empty():
    """401 samples of 2 values, K = 4: two clusters with members, in every run and at every width."""
    for seed in range(20):
        g = gen(seed)
        values = torch.randn(2, (1, 3, 37, 512)[seed % 4], generator=g)
        pick = torch.randint(2, (401,), generator=g)
        for init in (None, torch.randn(4, values.shape[1], generator=g)):
            centres, assign = kmeans(values[pick], 4, init, g)
            assert sorted(assign.bincount(minlength=4).tolist())[:2] == [0, 0] and len(assign.unique()) == 2
            torch.testing.assert_close(centres[assign], values[pick])
            assert torch.cdist(centres, values).amin(1).max() < 1e-4  # the surplus centres are copies


def test_kmeans_leaves_no_cluster_empty_if_there_are_enough_different_samples():
    for seed in range(20):
        g = gen(seed)
        values = torch.randn(4, 3, generator=g)
        z = values[torch.cat([torch.arange(4), torch.zeros(200, dtype=torch.int64)])]
        far = torch.full((4, 3), 100.0)  # a warm start that draws all samples into one cluster
        for init in (None, far):
            _, assign = kmeans(z, 4, init, g)
            assert len(assign.unique()) == 4 and torch.equal(assign[4:], assign[0].expand(200))


def test_kmeans_of_a_few_values_keeps_equal_samples_together():
    """At any scale, offset, precision and start: as many clusters as there are values, at most k."""
    for seed in range(100):
        g = gen(seed)
        D, m, n, k = (int(torch.randint(1, hi, (), generator=g)) for hi in (40, 9, 300, 8))
        values = torch.randn(m, D, generator=g, dtype=(torch.float32, F64)[seed % 2])
        values = values * 10.0 ** (seed % 13 - 6) + 10.0 ** (seed % 5 - 2)
        z = values[torch.randint(m, (n,), generator=g)]
        kinds, kind = z.unique(dim=0, return_inverse=True)
        centres = (None, torch.randn(k, D, generator=g).to(values), values[:1].expand(k, -1))[seed % 3]
        for _ in range(2):  # the second time from the centres of the first
            centres, assign = kmeans(z, k, centres, g)
            assert len(assign.unique()) == min(k, len(kinds))
            assert len(torch.stack([kind, assign]).unique(dim=1).T) == len(kinds)


def test_kmeans_is_the_one_of_cluster_cel():
    def text(name):
        source = (pathlib.Path(gmm_cel.__file__).parent / name).read_text(encoding="utf-8")
        constants = [line for line in source.splitlines() if line.startswith(("N_INIT", "TRIAL_POINTS"))]
        return constants, source[source.index("\ndef kmeans(") : source.index("# ----- what every")]

    assert text("gmm_cel.py") == text("cluster_cel.py")


# ----- EM


@BOTH
def test_em_equals_the_formulas_and_raises_the_likelihood(covariance, monkeypatch):
    monkeypatch.setattr(gmm_cel, "TOLERANCE", 0.0)
    x, assign = randn(4, 80, 3), torch.arange(80) % 3
    cel = GMMCEL(1, 3, 0.1, components=3, covariance=covariance).double()
    resp = torch.nn.functional.one_hot(assign, 3).double()
    likelihood = []
    for rounds in range(1, 11):
        monkeypatch.setattr(gmm_cel, "ROUNDS", rounds)
        mass, means, covs = cel.em(x, assign)
        log_p = torch.empty(80, 3, dtype=F64)
        for k in range(3):
            r = resp[:, k] / resp[:, k].sum()
            mu = sum(r[i] * x[i] for i in range(80))
            S = sum(r[i] * torch.outer(x[i] - mu, x[i] - mu) for i in range(80))
            S = S if covariance == "full" else torch.diag(S.diagonal())
            torch.testing.assert_close(mass[k], resp[:, k].sum())
            torch.testing.assert_close(means[k], mu)
            torch.testing.assert_close(covs[k], S if covariance == "full" else S.diagonal())
            S = S + gmm_cel.REG * torch.eye(3, dtype=F64)
            normal = torch.distributions.MultivariateNormal(mu, S)
            log_p[:, k] = normal.log_prob(x) + (mass[k] / 80).log()
        likelihood.append(log_p.logsumexp(1).sum().item())
        resp = log_p.softmax(1)
    assert (
        all(b > a - 1e-4 for a, b in zip(likelihood, likelihood[1:])) and likelihood[-1] > likelihood[0] + 1
    )


@BOTH
def test_em_recovers_a_known_mixture(covariance, monkeypatch):
    monkeypatch.setattr(gmm_cel, "ROUNDS", 500)
    monkeypatch.setattr(gmm_cel, "TOLERANCE", 1e-6)
    g, n = gen(0), 20000
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    means = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]], dtype=F64)
    covs = torch.diag_embed(torch.tensor([[1.0, 0.3], [0.4, 1.5], [1.2, 0.5]], dtype=F64))
    if covariance == "full":
        covs[:, 0, 1] = covs[:, 1, 0] = torch.tensor([0.3, -0.4, 0.5], dtype=F64)
    k = torch.multinomial(weights, n, replacement=True, generator=g)
    noise = torch.randn(n, 2, 1, generator=g, dtype=F64)
    z = means[k] + (torch.linalg.cholesky(covs)[k] @ noise).squeeze(2)
    cel = GMMCEL(1, 2, 0.1, components=3, covariance=covariance).double()
    cel.refresh(z, torch.zeros(n, dtype=torch.int64), generator=g)
    order = torch.cdist(means, cel.means[0]).argmin(1)
    assert sorted(order.tolist()) == [0, 1, 2]
    assert (cel.weights[0, order] - weights).abs().max() < 0.02
    assert (cel.means[0, order] - means).abs().max() < 0.08
    want = covs if covariance == "full" else covs.diagonal(dim1=1, dim2=2)
    assert (cel.covs[0, order] - want).abs().max() < 0.1


def test_em_stops_before_a_component_loses_its_mass(monkeypatch):
    z, y = randn(0, 90, 2), torch.zeros(90, dtype=torch.int64)
    monkeypatch.setattr(gmm_cel, "MIN_MASS", 1e9)  # no step may be taken: what remains is K-means
    cel = GMMCEL(1, 2, 0.1, components=3).double()
    cel.refresh(z, y, generator=gen(0))
    centres, assign = kmeans(z, 3, generator=gen(0))
    counts = assign.bincount().double()
    torch.testing.assert_close(cel.weights[0], counts / 90)
    for k in range(3):
        torch.testing.assert_close(cel.covs[0, k], z[assign == k].var(0, correction=0))
        torch.testing.assert_close(cel.means[0, k], centres[k])


def test_no_component_is_ever_empty():
    for seed in range(20):
        g, n = gen(seed), 4 + seed
        cel = GMMCEL(2, 2, 0.1, components=4, covariance=("diag", "full")[seed % 2])
        cel.refresh(torch.randn(2 * n, 2, generator=g), torch.arange(2 * n) % 2, generator=g)
        assert (cel.weights * 2 * n >= gmm_cel.MIN_MASS * 0.999).all()
        assert float(cel.weights.sum()) == pytest.approx(1, abs=1e-5)


# ----- refresh


def test_weights_are_global_and_absent_classes_keep_theirs():
    z, y = randn(0, 100, 2), torch.arange(100) % 4
    cel = GMMCEL(5, 2, 0.1, components=2).double()
    cel.refresh(z, y, generator=gen(0))
    torch.testing.assert_close(cel.weights.sum(1), torch.tensor([0.25, 0.25, 0.25, 0.25, 0], dtype=F64))
    assert float(cel.num_samples) == 100
    old = {k: v.clone() for k, v in cel.state_dict().items()}
    some = (y == 0) | ((y == 1) & (torch.arange(100) < 50))
    cel.refresh(
        z[some], y[some], num_samples=50, generator=gen(0)
    )  # they stand for the 50 of classes 0 and 1
    for c in (2, 3):
        assert all(torch.equal(cel.state_dict()[k][c], old[k][c]) for k in ("means", "covs"))
    torch.testing.assert_close(cel.weights[2:], old["weights"][2:])
    share = (y[some] == 0).double().mean()
    torch.testing.assert_close(cel.weights[:2].sum(1), 0.5 * torch.stack([share, 1 - share]))
    assert float(cel.weights.sum()) == pytest.approx(1) and float(cel.num_samples) == 100
    cel.refresh(z[some], y[some], num_samples=150, generator=gen(0))  # classes 2 and 3 keep their 25 each
    torch.testing.assert_close(cel.weights.sum(1)[2:4], torch.full((2,), 25 / 200, dtype=F64))
    assert float(cel.weights.sum()) == pytest.approx(1) and float(cel.num_samples) == 200


def test_a_class_seen_later_gets_its_share():
    z, y = randn(0, 100, 2), torch.arange(100) % 4
    cel = GMMCEL(4, 2, 0.1, components=2).double()
    cel.refresh(z[y == 0], y[y == 0])  # π = 1, 0, 0, 0 of 25 samples
    cel.refresh(z[y == 1], y[y == 1])  # class 1 makes room for itself
    torch.testing.assert_close(cel.weights.sum(1), torch.tensor([0.5, 0.5, 0, 0], dtype=F64))
    both = GMMCEL(4, 2, 0.1, components=2).double()
    both.refresh(z[y < 2], y[y < 2], num_samples=1000)  # a part of 500 + 500
    both.refresh(z[y > 0], y[y > 0], num_samples=1500)  # 500 each; class 0 is absent, 2 and 3 are new
    torch.testing.assert_close(both.weights.sum(1), torch.full((4,), 0.25, dtype=F64))
    cel.weights[0], cel.weights[1] = 0.5 + 1e-7, 0  # π rounds to above 1
    cel.refresh(z[y == 1], y[y == 1])
    assert (cel.weights >= 0).all()


def test_refresh_in_training_mode_takes_features_without_gradient_of_any_dtype_and_leaves_out_bad_rows():
    z, y = torch.randn(60, 4, generator=gen(1)), torch.arange(60) % 3
    bad = torch.cat([z, torch.full((4, 4), math.nan), torch.full((1, 4), math.inf)])
    a, b, c = GMMCEL(4, 4, 0.1), GMMCEL(4, 4, 0.1), GMMCEL(4, 4, 0.1)
    a.refresh(z, y, generator=gen(0))
    b.refresh(bad, torch.cat([y, torch.tensor([0, 1, 2, 3, 3])]), generator=gen(0))
    c.refresh(z.double().view(60, 1, 2, 2).requires_grad_(), y, generator=gen(0))
    for other in (b, c):
        assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), other.state_dict().values()))
    before = {k: v.clone() for k, v in a.state_dict().items()}
    a.refresh(torch.full((5, 4), math.nan), torch.arange(5) % 3)  # nothing to fit: all stays
    assert all(torch.equal(v, before[k]) for k, v in a.state_dict().items())


@BOTH
def test_constant_features_tell_nothing(covariance):
    z = torch.rand(1, 24, generator=gen(0), dtype=F64).expand(401, 24)
    for dtype in (torch.float32, torch.bfloat16, F64):
        cel = GMMCEL(1, 24, 0.025, covariance=covariance).to(torch.promote_types(dtype, torch.float32))
        for _ in range(2):  # the second time from the centres of the first
            cel.refresh(z.to(dtype), torch.zeros(401, dtype=torch.int64))
            assert cel.weights.tolist() == [[1, 0, 0]] and cel.bound() == 0
        loss, grad = value_and_grad(cel, z[:16].to(dtype), torch.zeros(16, dtype=torch.int64))
        assert loss == 0 and not grad.any()
    cel = GMMCEL(4, 24, 0.025, covariance=covariance)  # with four classes the label is all there is to learn
    cel.refresh(z[:400], torch.arange(400) % 4)
    assert cel.bound().item() == pytest.approx(math.log(4), rel=1e-6)


@BOTH
def test_one_sample_classes_and_more_components_than_samples(covariance):
    z, y = randn(0, 5, 3), torch.tensor([0, 1, 1, 2, 2])
    cel = GMMCEL(3, 3, 0.1, components=4, covariance=covariance).double()
    cel.refresh(z, y)
    assert (cel.weights > 0).sum(1).tolist() == [1, 2, 2]
    assert cel.bound().item() == pytest.approx(math.log(5), abs=1e-9)  # five points, no spread: H(A) = log 5
    _, grad = value_and_grad(cel, z[:1] + 1, y[:1])
    assert grad.isfinite().all() and (grad > 0).all()


# ----- mixed precision


@pytest.fixture(scope="module")
def features():
    """z [4096, 64] in (0, 1) with two modes a class, y [4096] of ten classes."""
    g = gen(0)
    y = torch.randint(10, (4096,), generator=g)
    modes = torch.randn(10, 2, 64, generator=g)[y, torch.randint(2, (4096,), generator=g)]
    return torch.sigmoid(modes + 0.5 * torch.randn(4096, 64, generator=g)), y


@BOTH
@pytest.mark.parametrize("how", ["float16", "bfloat16", "autocast", "half module"])
def test_half_precision_gives_the_loss_and_gradient_of_float32(covariance, how, features):
    z, y = features
    a, b = (GMMCEL(10, 64, 0.1, covariance=covariance) for _ in range(2))
    dtype = torch.float16 if how == "float16" else torch.bfloat16
    if how == "half module":
        b.half()
    for cel in (a, b):
        cel.refresh(z, y, num_samples=50_000, generator=gen(0))
    for rows in torch.arange(512).split(128):
        want, want_grad = value_and_grad(a, z[rows], y[rows])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            loss, grad = value_and_grad(b, z[rows].to(dtype), y[rows])
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(want.item(), rel=0.01)
        assert torch.cosine_similarity(grad.float().flatten(), want_grad.flatten(), dim=0) > 0.99
    assert {t.dtype for t in b.buffers()} == {torch.float32}


@BOTH
def test_autocast_changes_nothing_for_float32_features(covariance, features):
    z, y = features
    cel = GMMCEL(10, 64, 0.1, covariance=covariance).eval()
    cel.refresh(z, y, generator=gen(0))
    loss, grad = value_and_grad(cel, z[:128], y[:128])
    t = z[:128].clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = cel(t, y[:128])
    under.backward()
    assert torch.equal(under, loss) and torch.equal(t.grad, grad)


def test_refresh_under_autocast_and_of_bfloat16_features(features):
    z, y = features
    bounds = []
    for dtype, enabled in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True)):
        cel = GMMCEL(10, 64, 0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            cel.refresh(z.to(dtype), y, generator=gen(0))
        bounds.append(cel.bound().item())
    assert bounds[1] == bounds[0] and bounds[2] == pytest.approx(bounds[0], rel=0.01)


@pytest.mark.parametrize("C, B", [(10, 128), (100, 64)])
def test_weights_keep_their_sum_in_bfloat16(C, B):
    cel = GMMCEL(C, 8, 0.1)
    z, y = torch.rand(50 * C, 8, generator=gen(0)), torch.arange(50 * C) % C
    cel.refresh(z, y, num_samples=50_000, generator=gen(0))
    before = cel.bound().item()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for step in range(200):
            rows = torch.randint(len(z), (B,), generator=gen(step))
            loss = cel(z[rows].bfloat16(), y[rows])
    assert float(cel.weights.sum()) == pytest.approx(1, abs=1e-5)
    assert loss.item() == pytest.approx(before, rel=0.05)


def test_counts_do_not_stop_at_256_in_bfloat16():
    z, y = torch.rand(8192, 16, generator=gen(0)), torch.arange(8192) % 2
    values = []
    for dtype in (torch.float32, torch.bfloat16):
        cel = GMMCEL(2, 16, 0.1)
        cel.refresh(z, y, generator=gen(0))
        values.append(value_and_grad(cel, z.to(dtype), y)[0].item())
    assert values[1] == pytest.approx(values[0], rel=0.01)


# ----- other loops


@BOTH
def test_compiles_as_one_graph_in_training_mode(covariance, features):
    z, y = features
    plain, traced = (GMMCEL(10, 64, 0.1, covariance=covariance) for _ in range(2))
    for cel in (plain, traced):
        cel.refresh(z, y, generator=gen(0))
    torch._dynamo.reset()
    compiled = torch.compile(traced, fullgraph=True, backend="eager")
    for rows in torch.arange(256).split(128):
        want, got = value_and_grad(plain, z[rows], y[rows]), value_and_grad(compiled, z[rows], y[rows])
        assert all(torch.equal(p, q) for p, q in zip(want, got))
    assert all(torch.equal(p, q) for p, q in zip(plain.buffers(), traced.buffers()))
    assert plain.stats.keys() == traced.stats.keys()
    assert all(torch.equal(plain.stats[k], traced.stats[k]) for k in plain.stats)


def test_says_once_that_it_was_never_refreshed():
    z, y = torch.rand(8, 4, requires_grad=True), torch.arange(8) % 2
    cel = GMMCEL(2, 4, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(99):
            cel(z, y)
    with pytest.warns(UserWarning, match=r"GMMCEL was 0 .*refresh\(z_all, y_all\)"):
        cel(z, y)
    refreshed = GMMCEL(2, 4, 0.1)
    refreshed.refresh(z, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(100):
            cel(z, y)
            refreshed(z, y)


@BOTH
def test_state_dict_round_trip(covariance):
    z, y = torch.randn(60, 4, generator=gen(1)), torch.arange(60) % 3
    a, b = GMMCEL(3, 4, 0.1, covariance=covariance), GMMCEL(3, 4, 0.1, covariance=covariance)
    a.refresh(z, y, generator=gen(0))
    value_and_grad(a, z[:20], y[:20])
    b.load_state_dict(a.state_dict())
    assert a.bound() == b.bound() and b.num_samples == 60
    for want, got in zip(value_and_grad(a, z, y), value_and_grad(b, z, y)):
        assert torch.equal(want, got)


def test_maps_strides_and_float32_give_the_same_value():
    z = torch.rand(30, 4, 4, 2, generator=gen(0), dtype=F64).permute(0, 3, 1, 2)  # [30, 2, 4, 4], strided
    y = torch.arange(30) % 3
    a, b = (GMMCEL(3, 32, 0.1).double().eval() for _ in range(2))
    a.refresh(z, y, generator=gen(0)), b.refresh(z.flatten(1), y, generator=gen(0))
    c = GMMCEL(3, 32, 0.1).eval()
    c.load_state_dict(a.state_dict())
    value = a(z, y, None).item()
    assert value == b(z.flatten(1), y).item() and c(z.float(), y).item() == pytest.approx(value, rel=1e-5)


# ----- hostile input


@BOTH
def test_before_refresh_a_differentiable_zero(covariance):
    cel = GMMCEL(3, 4, 0.1, covariance=covariance)
    loss, grad = value_and_grad(cel, torch.randn(5, 4), torch.tensor([0, 0, 1, 2, 2]))
    assert loss.item() == 0 and torch.equal(grad, torch.zeros(5, 4)) and float(cel.stats["skipped"]) == 1
    assert not cel.weights.any() and not cel.covs.any()


@BOTH
def test_bad_rows_and_unseen_classes_change_nothing(covariance):
    z, y = randn(1, 12, 4), torch.arange(12) % 3
    bad = z.clone()
    bad[0, 1], bad[5, 0], bad[7] = math.nan, math.inf, -math.inf
    rows = [i for i in range(12) if i not in (0, 5, 7) and y[i] != 1]
    a, b = (random_module(0, 3, 2, 4, covariance, unseen=[1]) for _ in range(2))
    loss, grad = value_and_grad(a, bad, y)
    want, want_grad = value_and_grad(b, z[rows], y[rows])
    assert loss.item() == pytest.approx(want.item(), abs=1e-12)
    torch.testing.assert_close(
        grad[rows], want_grad * len(rows) / 12
    )  # the B of the gradient is the whole batch
    assert not grad[[i for i in range(12) if i not in rows]].any()
    for p, q in zip(a.state_dict().values(), b.state_dict().values()):
        torch.testing.assert_close(p, q, rtol=1e-14, atol=0)
    assert float(a.stats["skipped"]) == pytest.approx(1 - len(rows) / 12)
    before = a.bound()
    loss, grad = value_and_grad(a, torch.full((2, 4), math.nan, dtype=F64), y[:2])  # nothing to add
    assert loss.item() == pytest.approx(before.item(), abs=1e-12) and not grad.any()
    assert float(a.stats["skipped"]) == 1


@BOTH
def test_finite_at_every_scale(covariance):
    for scale, constant in itertools.product((1e-12, 1e-6, 1.0, 1e6, 1e12), (False, True)):
        z = torch.randn(60, 24, generator=gen(0)) * scale
        z, y = z[:1].expand(60, 24) if constant else z, torch.arange(60) % 7
        cel = GMMCEL(8, 24, 0.025, covariance=covariance)
        cel.refresh(z, y, generator=gen(0))
        for _ in range(5):
            loss, grad = value_and_grad(cel, z * 1.5, y)
            assert loss.isfinite() and loss >= 0 and grad.isfinite().all()
        assert all(v.isfinite().all() for v in cel.stats.values())


@pytest.mark.parametrize(
    "kwargs",
    [{"sigma": 0.0}, {"sigma": -1.0}, {"sigma": math.nan}, {"components": 0}, {"update_scale": 0.0}]
    + [{"update_scale": math.nan}, {"num_classes": 0}, {"dim": 0}, {"covariance": "tied"}],
)
def test_bad_arguments_are_refused(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        GMMCEL(**{"num_classes": 3, "dim": 4, "sigma": 0.1, **kwargs})


@pytest.mark.parametrize(
    "z, y, sentence",
    [
        (torch.zeros(2, 5), torch.tensor([0, 1]), "4 floats"),
        (torch.zeros(2, 4, dtype=torch.int64), torch.tensor([0, 1]), "4 floats"),
        (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), "at least one row"),
        (torch.zeros(2, 4), torch.tensor([0, 3]), "0..2"),
        (torch.zeros(2, 4), torch.tensor([0, -100]), "0..2"),
        (torch.zeros(2, 4), torch.tensor([0, 1], dtype=torch.int32), "int64"),
        (torch.zeros(2, 4), torch.full((2, 3), 1 / 3), "int64"),
        (torch.zeros(2, 4), torch.tensor([0, 1, 2]), "each row"),
    ],
)
def test_bad_inputs_are_refused_in_one_sentence(z, y, sentence):
    cel = GMMCEL(3, 4, 1.0)
    for call in (cel.refresh, cel.eval()):
        with pytest.raises(ValueError, match=sentence):
            call(z, y)
    with pytest.raises(ValueError, match="no gradient"):
        cel.train()(torch.zeros(2, 4), torch.tensor([0, 1]))
