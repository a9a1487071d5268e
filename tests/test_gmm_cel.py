"""GMMCEL against closed forms (linear-Gaussian channel, sample covariances), literal loops, analytic gradients and known mixtures."""

import inspect
import math

import pytest
import torch

import cluster_cel
import gmm_cel
from gmm_cel import GMMCEL

F64 = torch.float64
BITS = 1 / math.log(2)


def gen(seed):
    return torch.Generator().manual_seed(seed)


def random_psd(g, *shape):
    D = shape[-1]
    A = torch.randn(*shape, D, generator=g, dtype=F64) / D**0.5
    return A @ A.mT


def random_module(seed, C, K, D, covariance="diag", sigma=0.4, N=500, unfitted=(), **kwargs):
    """A module with hand-made statistics; some components have weight 0, some classes are unfitted."""
    g = gen(seed)
    cel = GMMCEL(C, D, sigma, components=K, covariance=covariance, **kwargs).double()
    weights = torch.rand(C, K, generator=g, dtype=F64) + 0.1
    weights[:, 1:][torch.rand(C, K - 1, generator=g) < 0.2] = 0
    cel.fitted.fill_(True)
    for c in unfitted:
        weights[c], cel.fitted[c] = 0, False
    cov = random_psd(g, C, K, D)
    cel.weights.copy_(weights / weights.sum().clamp(min=1e-9))
    cel.means.copy_(torch.randn(C, K, D, generator=g, dtype=F64))
    cel.covs.copy_(cov if covariance == "full" else cov.diagonal(dim1=-2, dim2=-1))
    cel.num_samples.fill_(N)
    return cel


def literal(cel, z, y):
    """The equations of the docstring, one component and one sample at a time -> L_C, new π [C, K], new Σ, dL/dz (both forms)."""
    (C, K, D), B = cel.means.shape, len(z)
    full = cel.covariance == "full"
    members = {(c, k): [] for c in range(C) for k in range(K)}
    for i in range(B):
        c = int(y[i])
        if cel.fitted[c]:
            d2 = {k: float(((z[i] - cel.means[c, k]) ** 2).sum()) for k in range(K) if cel.weights[c, k] > 0}
            members[c, min(d2, key=d2.get)].append(i)
    B_seen, N, s = sum(map(len, members.values())), float(cel.num_samples), cel.update_scale
    b = min(0.99, s * B_seen / N)
    pi, cov, loss = cel.weights.clone(), cel.covs.clone(), 0.0
    literal_grad, free_grad = torch.zeros_like(z), torch.zeros_like(z)
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
            step = torch.linalg.solve(S, z[i] - cel.means[c, k])
            literal_grad[i] = p * a / len(rows) * step
            free_grad[i] = step / B
    return loss, pi, cov, literal_grad, free_grad


# ---------------------------------------------------------------- forward: value, update, gradient

@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_equals_literal_loops(covariance):
    skipped = absent = fewer_than_classes = clamped = 0
    for seed in range(40):
        g = gen(seed)
        B, C, K, D = (int(torch.randint(1, hi, (), generator=g)) for hi in (20, 7, 5, 6))
        N = [3, 40, 500][seed % 3]
        s = [1.0, 10.0][seed % 2]
        unfitted = [0] if seed % 4 == 0 and C > 1 else []
        y = torch.randint(C, (B,), generator=g)
        z0 = torch.randn(B, D, generator=g, dtype=F64)
        for rate_free in (False, True):
            cel = random_module(seed, C, K, D, covariance, N=N, update_scale=s, unfitted=unfitted, rate_free=rate_free)
            want, pi, cov, literal_grad, free_grad = literal(cel, z0, y)
            z = z0.clone().requires_grad_()
            loss = cel(z, y)
            loss.backward()
            assert loss.item() == pytest.approx(want, abs=1e-10)
            assert (z.grad - (free_grad if rate_free else literal_grad)).abs().max() < 1e-10
            assert (cel.weights - pi).abs().max() < 1e-12 and (cel.covs - cov).abs().max() < 1e-12
            assert float(cel.weights.sum()) == pytest.approx(1, abs=1e-12)
            assert cel.bound().item() == pytest.approx(want, abs=1e-10)  # what was stored is what was scored
        skipped += int(cel.stats["skipped"]) > 0
        absent += len(y.unique()) < C
        fewer_than_classes += B < C
        clamped += s * B > N
    assert skipped and absent and fewer_than_classes and clamped


@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_gradcheck_of_the_literal_form(covariance):
    cel = random_module(1, 3, 2, 4, covariance, N=60, rate_free=False).eval()
    z = torch.randn(9, 4, generator=gen(2), dtype=F64).requires_grad_()
    y = torch.arange(9) % 3
    assert torch.autograd.gradcheck(lambda t: cel(t, y), (z,))


@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_rate_free_gradient_estimates_that_of_the_whole_set(covariance):
    """N samples as one batch have the exact gradient of L_C; small batches carry the same per sample, times N/B."""
    g = gen(0)
    N, D = 60, 3
    z, y = torch.randn(N, D, generator=g, dtype=F64), torch.arange(N) % 2
    cel = GMMCEL(2, D, 0.5, components=1, covariance=covariance).double().eval()
    cel.refresh(z, y, g, num_samples=10**12)  # so large an N that the running Σ stays what refresh made it
    t = z.clone().requires_grad_()
    whole = 0
    for c in range(2):
        e = t[y == c] - cel.means[c, 0]
        cov = e.T @ e / len(e)
        if covariance == "diag":
            cov = torch.diag(cov.diagonal())
        whole = whole + 0.5 * 0.5 * torch.logdet(torch.eye(D, dtype=F64) + cov / 0.25)
    whole.backward()
    for rows in torch.randperm(N, generator=g).split(12):
        batch = z[rows].requires_grad_()
        cel(batch, y[rows]).backward()
        torch.testing.assert_close(batch.grad * 12, t.grad[rows] * N, rtol=1e-8, atol=1e-10)


def test_rate_free_removes_data_set_size_and_update_scale():
    z0, y = torch.randn(10, 4, generator=gen(3), dtype=F64), torch.arange(10) % 2
    def gradient(**kwargs):
        z = z0.clone().requires_grad_()
        random_module(0, 2, 2, 4, **kwargs)(z, y).backward()
        return z.grad
    base = gradient(N=10**6)
    for kwargs in ({"N": 10**9}, {"N": 10**6, "update_scale": 10.0}):
        torch.testing.assert_close(gradient(**kwargs), base, rtol=1e-3, atol=0)
    lit = gradient(N=10**6, rate_free=False)
    torch.testing.assert_close(gradient(N=10**9, rate_free=False) * 1000, lit, rtol=1e-3, atol=0)
    torch.testing.assert_close(gradient(N=10**6, update_scale=10.0, rate_free=False), lit * 10, rtol=1e-3, atol=0)
    torch.testing.assert_close(lit * 10**6 / 10, base, rtol=1e-3, atol=0)  # N / (s B) times smaller


@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_statistics_move_in_training_mode_only(covariance):
    cel = random_module(0, 2, 2, 3, covariance)
    z, y = torch.randn(8, 3, generator=gen(0), dtype=F64), torch.arange(8) % 2
    before = {k: v.clone() for k, v in cel.state_dict().items()}
    value = cel.eval()(z, y)
    assert all(torch.equal(v, before[k]) for k, v in cel.state_dict().items())
    assert cel.train()(z, y).item() == value.item()
    assert not torch.equal(cel.weights, before["weights"]) and not torch.equal(cel.covs, before["covs"])
    assert torch.equal(cel.means, before["means"])
    for _ in range(200):
        cel(torch.randn(8, 3, generator=gen(1), dtype=F64), y)
    assert float(cel.weights.sum()) == pytest.approx(1, abs=1e-12)


def test_descent_shrinks_the_bound():
    z, y = torch.rand(90, 3, generator=gen(0), dtype=F64), torch.arange(90) % 3
    cel = GMMCEL(3, 3, 0.05, components=2).double()
    cel.refresh(z, y, gen(0))
    before = cel.bound()
    for _ in range(50):
        z.requires_grad_()
        (grad,) = torch.autograd.grad(cel(z, y), z)
        z = (z - 0.02 * grad).detach()
    cel.refresh(z, y, gen(0))
    assert cel.bound() < before - 1


# ---------------------------------------------------------------- oracles of the bound

@pytest.mark.parametrize("A, bits, ratio", [
    (torch.linalg.qr(torch.randn(8, 8, generator=gen(0), dtype=F64))[0], 14.393, 1.0),  # square orthogonal
    (torch.linalg.qr(torch.randn(8, 4, generator=gen(1), dtype=F64))[0].T, 7.197, 0.531),  # wide, orthonormal rows
    (torch.linalg.qr(torch.randn(12, 8, generator=gen(2), dtype=F64))[0], 14.393, 1.0),  # tall, orthonormal columns
    (torch.randn(8, 8, generator=gen(3), dtype=F64), None, None),
    (torch.diag(torch.tensor([1.0, 2.0, 0.5, 0.1], dtype=F64)), None, None),
])
def test_linear_gaussian_oracle(A, bits, ratio):
    """x ~ N(0, I_d), z = A x: L_C of one full component is I(x;z'), diag only if A Aᵀ is diagonal; the MSE bound against the MMSE."""
    sigma, (D, d) = 0.3, A.shape
    info = 0.5 * torch.logdet(torch.eye(D, dtype=F64) + A @ A.T / sigma**2).item()
    value = {}
    for covariance in ("full", "diag"):
        cel = GMMCEL(1, D, sigma, components=1, covariance=covariance).double()
        cel.weights.fill_(1), cel.fitted.fill_(True)
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
    z = torch.randn(200, 6, generator=gen(0), dtype=F64) @ torch.randn(6, 6, generator=gen(1), dtype=F64)
    y = torch.zeros(200, dtype=torch.int64)
    cov = torch.cov(z.T, correction=0)
    full, diag = (GMMCEL(1, 6, 0.3, components=1, covariance=c).double() for c in ("full", "diag"))
    full.refresh(z, y), diag.refresh(z, y)
    want = 0.5 * torch.logdet(torch.eye(6, dtype=F64) + cov / 0.09).item()
    assert full.bound().item() == pytest.approx(want, abs=1e-9)
    assert full(z, y).item() == pytest.approx(want, abs=1e-9)  # the batch is the set, so the update changes nothing
    assert diag.bound().item() == pytest.approx(0.5 * torch.log1p(cov.diagonal() / 0.09).sum().item(), abs=1e-9)


def test_diag_is_at_least_full_for_the_same_assignments():
    for seed in range(20):
        full = random_module(seed, 3, 2, 5, "full")
        diag = random_module(seed, 3, 2, 5, "diag")
        assert torch.equal(diag.covs, full.covs.diagonal(dim1=-2, dim2=-1))
        z, y = torch.randn(30, 5, generator=gen(seed), dtype=F64), torch.arange(30) % 3
        assert diag.bound() > full.bound() and diag(z, y) > full(z, y)


def mutual_information(z, sigma, weights=None):
    """I(z;z') in nats of a one-dimensional z on finitely many points, by integration on a grid."""
    grid = torch.linspace(float(z.min()) - 8 * sigma, float(z.max()) + 8 * sigma, 20001, dtype=F64)
    density = (torch.exp(-0.5 * ((grid[:, None] - z[None]) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))).mean(1)
    return torch.trapezoid(torch.special.entr(density), grid).item() - 0.5 * math.log(2 * math.pi * math.e * sigma**2)


def test_bound_holds_for_any_distribution_and_any_number_of_components():
    for seed, sigma in ((0, 0.05), (1, 0.3), (2, 1.0)):
        g = gen(seed)
        z = torch.cat([torch.rand(150, generator=g, dtype=F64) ** 3, 2 + torch.randn(50, generator=g, dtype=F64).abs()])
        y = torch.randint(2, (200,), generator=g)
        info = mutual_information(z, sigma)
        for K in (1, 2, 3, 5):
            cel = GMMCEL(2, 1, sigma, components=K).double()
            cel.refresh(z[:, None], y, g)
            assert cel.bound().item() > info
    # equality in the limit: two points far apart, one component each: I = H(A) = log 2
    z, y = torch.tensor([-1.0, 1.0], dtype=F64).repeat(10), torch.zeros(20, dtype=torch.int64)
    cel = GMMCEL(1, 1, 0.05, components=2).double()
    cel.refresh(z[:, None], y, gen(0))
    assert cel.bound().item() == pytest.approx(math.log(2), abs=1e-9) and mutual_information(z, 0.05) == pytest.approx(math.log(2), abs=1e-6)


# ---------------------------------------------------------------- refresh

@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_em_recovers_a_known_mixture(covariance):
    g = gen(0)
    n = 20000
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    means = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]], dtype=F64)
    covs = torch.tensor([[[1.0, 0.0], [0.0, 0.3]], [[0.4, 0.0], [0.0, 1.5]], [[1.2, 0.0], [0.0, 0.5]]], dtype=F64)
    if covariance == "full":
        covs[:, 0, 1] = covs[:, 1, 0] = torch.tensor([0.3, -0.4, 0.5], dtype=F64)
    k = torch.multinomial(weights, n, replacement=True, generator=g)
    z = means[k] + (torch.linalg.cholesky(covs)[k] @ torch.randn(n, 2, 1, generator=g, dtype=F64)).squeeze(2)
    cel = GMMCEL(1, 2, 0.1, components=3, covariance=covariance, iters=500, tol=1e-5).double()
    cel.refresh(z, torch.zeros(n, dtype=torch.int64), g)
    order = torch.cdist(means, cel.means[0]).argmin(1)
    assert sorted(order.tolist()) == [0, 1, 2]
    assert (cel.weights[0, order] - weights).abs().max() < 0.02
    assert (cel.means[0, order] - means).abs().max() < 0.08
    want = covs if covariance == "full" else covs.diagonal(dim1=1, dim2=2)
    assert (cel.covs[0, order] - want).abs().max() < 0.1


@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_em_step_equals_literal_formulas_and_raises_the_likelihood(covariance):
    g = gen(4)
    x = torch.randn(80, 3, generator=g, dtype=F64)
    cel = GMMCEL(1, 3, 0.1, components=3, covariance=covariance).double()
    e = torch.empty_like(x)
    mixture = cel._moments(x, torch.rand(80, 3, generator=g, dtype=F64).softmax(1), e)
    likelihood = []
    for _ in range(15):
        mass, means, covs = mixture
        dense = covs if covariance == "full" else torch.diag_embed(covs)
        joint = torch.stack([
            torch.distributions.MultivariateNormal(means[k], dense[k] + cel.reg * torch.eye(3, dtype=F64)).log_prob(x)
            + (mass[k] / 80).log() for k in range(3)], 1)
        likelihood.append(joint.logsumexp(1).sum().item())
        resp = cel._posterior(x, *mixture, e)
        torch.testing.assert_close(resp, joint.softmax(1), rtol=1e-8, atol=1e-12)
        mixture = cel._moments(x, resp, e)
        for k in range(3):
            r = resp[:, k] / resp[:, k].sum()
            mu = sum(r[i] * x[i] for i in range(80))
            S = sum(r[i] * torch.outer(x[i] - mu, x[i] - mu) for i in range(80))
            torch.testing.assert_close(mixture[1][k], mu)
            torch.testing.assert_close(mixture[2][k], S if covariance == "full" else S.diagonal())
    assert all(b > a - 1e-4 for a, b in zip(likelihood, likelihood[1:])) and likelihood[-1] > likelihood[0] + 1


def test_no_component_is_ever_empty():
    for seed in range(20):
        g = gen(seed)
        n = 4 + seed
        cel = GMMCEL(2, 2, 0.1, components=4, covariance=("diag", "full")[seed % 2])
        cel.refresh(torch.randn(2 * n, 2, generator=g), torch.arange(2 * n) % 2, g)
        assert (cel.weights * 2 * n >= gmm_cel.MIN_MASS * 0.999).all() and float(cel.weights.sum()) == pytest.approx(1, abs=1e-5)


def test_em_stops_before_a_component_loses_its_mass(monkeypatch):
    z, y = torch.randn(90, 2, generator=gen(0), dtype=F64), torch.zeros(90, dtype=torch.int64)
    monkeypatch.setattr(gmm_cel, "MIN_MASS", 1e9)  # no step may be taken: what remains is K-means
    cel = GMMCEL(1, 2, 0.1, components=3).double()
    assert cel.refresh(z, y, gen(0))["em_steps"] == 0
    means, assign = gmm_cel.kmeans(z, 3, generator=gen(0))
    for k in range(3):
        torch.testing.assert_close(cel.means[0, k], means[k])
        torch.testing.assert_close(cel.covs[0, k], z[assign == k].var(0, correction=0))


def test_weights_are_global_and_absent_classes_keep_theirs():
    z, y = torch.randn(100, 2, generator=gen(0), dtype=F64), torch.arange(100) % 4
    cel = GMMCEL(5, 2, 0.1, components=2).double()
    cel.refresh(z, y, gen(0))
    torch.testing.assert_close(cel.weights.sum(1), torch.tensor([0.25, 0.25, 0.25, 0.25, 0], dtype=F64))
    assert float(cel.num_samples) == 100 and cel.fitted.tolist() == [True] * 4 + [False]
    old = {k: v.clone() for k, v in cel.state_dict().items()}
    some = (y == 0) | ((y == 1) & (torch.arange(100) < 50))
    cel.refresh(z[some], y[some], gen(0), num_samples=5000)
    for c in (2, 3):
        assert all(torch.equal(cel.state_dict()[k][c], old[k][c]) for k in ("weights", "means", "covs"))
    share = (y[some] == 0).double().mean()
    torch.testing.assert_close(cel.weights[:2].sum(1), 0.5 * torch.stack([share, 1 - share]))
    assert float(cel.weights.sum()) == pytest.approx(1) and float(cel.num_samples) == 5000


def test_a_class_seen_later_gets_its_share():
    z, y = torch.randn(100, 2, generator=gen(0), dtype=F64), torch.arange(100) % 4
    cel = GMMCEL(4, 2, 0.1, components=2).double()
    cel.refresh(z[y == 0], y[y == 0], gen(0))  # π = 1, 0, 0, 0 of 25 samples
    cel.refresh(z[y == 1], y[y == 1], gen(0))  # none left over for class 1
    torch.testing.assert_close(cel.weights.sum(1), torch.tensor([0.5, 0.5, 0, 0], dtype=F64))
    both = GMMCEL(4, 2, 0.1, components=2).double()
    both.refresh(z[y < 2], y[y < 2], gen(0), num_samples=1000)  # a subsample of 500 + 500
    some = y > 0
    both.refresh(z[some], y[some], gen(0), num_samples=1500)  # 500 each; class 0 is absent, 2 and 3 are new
    torch.testing.assert_close(both.weights.sum(1), torch.full((4,), 0.25, dtype=F64))
    cel.weights[0], cel.weights[1] = 0.5 + 1e-7, 0  # π rounds to above 1
    cel.refresh(z[y == 1], y[y == 1], gen(0))
    assert (cel.weights >= 0).all()


def test_kmeans_is_the_one_of_cluster_cel():
    for name in ("kmeans", "_one_hot", "_plus_plus", "_fill_empty"):
        assert inspect.getsource(getattr(gmm_cel, name)) == inspect.getsource(getattr(cluster_cel, name))
    assert gmm_cel.FEW == cluster_cel.FEW


# ---------------------------------------------------------------- robustness

@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_before_refresh_a_differentiable_zero(covariance):
    cel = GMMCEL(3, 4, 0.1, covariance=covariance)
    z = torch.randn(5, 4).requires_grad_()
    loss = cel(z, torch.tensor([0, 0, 1, 2, 2]))
    loss.backward()
    assert loss.item() == 0 and torch.equal(z.grad, torch.zeros(5, 4))
    assert (float(cel.stats["active"]), int(cel.stats["skipped"]), int(cel.stats["skipped_classes"])) == (0, 5, 3)
    assert not cel.weights.any() and not cel.covs.any()


@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_bad_rows_and_unseen_classes_change_nothing(covariance):
    z, y = torch.randn(12, 4, generator=gen(1), dtype=F64), torch.arange(12) % 3
    bad = z.clone()
    bad[0, 1], bad[5, 0], bad[7] = math.nan, math.inf, -math.inf
    rows = [i for i in range(12) if i not in (0, 5, 7) and y[i] != 1]
    a, b = (random_module(0, 3, 2, 4, covariance, unfitted=[1]) for _ in range(2))
    bad.requires_grad_()
    loss = a(bad, y)
    loss.backward()
    good = z[rows].requires_grad_()
    want = b(good, y[rows])
    want.backward()
    assert loss.item() == pytest.approx(want.item(), abs=1e-12)
    torch.testing.assert_close(bad.grad[rows], good.grad * len(rows) / 12)  # B of the gradient is the whole batch
    assert torch.equal(bad.grad[[i for i in range(12) if i not in rows]], torch.zeros(12 - len(rows), 4, dtype=F64))
    assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values()))
    assert (int(a.stats["nonfinite"]), int(a.stats["skipped"]), int(a.stats["skipped_classes"])) == (3, 3, 1)
    before = a.bound()
    assert a(torch.full((2, 4), math.nan, dtype=F64), y[:2]).item() == pytest.approx(before.item(), abs=1e-12)  # nothing to add
    assert float(a.stats["active"]) == 0


def test_refresh_leaves_out_and_counts_bad_rows():
    z, y = torch.randn(60, 4, generator=gen(1)), torch.arange(60) % 3
    bad = torch.cat([z, torch.full((4, 4), math.nan), torch.full((1, 4), math.inf)])
    a, b = GMMCEL(4, 4, 0.1), GMMCEL(4, 4, 0.1)
    a.refresh(z, y, gen(0))
    assert b.refresh(bad, torch.cat([y, torch.tensor([0, 1, 2, 3, 3])]), gen(0))["nonfinite"] == 5
    assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values()))


@pytest.mark.parametrize("covariance", ["diag", "full"])
@pytest.mark.parametrize("rate_free", [True, False])
def test_finite_at_every_scale(covariance, rate_free):
    for scale in (1e-12, 1e-6, 1.0, 1e6, 1e12):
        for constant in (False, True):
            z = torch.randn(60, 24, generator=gen(0)) * scale
            z = z[:1].expand(60, 24) if constant else z
            y = torch.arange(60) % 7
            cel = GMMCEL(8, 24, 0.025, covariance=covariance, rate_free=rate_free)
            cel.refresh(z, y, gen(0))
            for _ in range(5):
                t = (z * 1.5).requires_grad_()
                loss = cel(t, y)
                loss.backward()
                assert loss.isfinite() and loss >= 0 and t.grad.isfinite().all()
            assert all(v.isfinite().all() for v in cel.stats.values())


@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_one_sample_classes_and_more_components_than_samples(covariance):
    z, y = torch.randn(5, 3, generator=gen(0), dtype=F64), torch.tensor([0, 1, 1, 2, 2])
    cel = GMMCEL(3, 3, 0.1, components=4, covariance=covariance).double()
    cel.refresh(z, y, gen(0))
    assert (cel.weights > 0).sum(1).tolist() == [1, 2, 2]
    assert cel.bound().item() == pytest.approx(math.log(5), abs=1e-9)  # five points, no spread: H(A) = log 5
    t = z[:1].clone().add_(1).requires_grad_()
    cel(t, y[:1]).backward()
    assert t.grad.isfinite().all() and (t.grad > 0).all()


def test_four_dimensional_strided_input_and_float32():
    z = torch.rand(30, 4, 4, 2, generator=gen(0), dtype=F64).permute(0, 3, 1, 2)  # [30, 2, 4, 4], not contiguous
    y = torch.arange(30) % 3
    a, b = (GMMCEL(3, 32, 0.1).double() for _ in range(2))
    a.refresh(z, y, gen(0)), b.refresh(z.flatten(1), y, gen(0))
    c = GMMCEL(3, 32, 0.1)
    c.load_state_dict(a.state_dict())
    value = a(z, y).item()
    assert value == b(z.flatten(1), y).item() and c(z.float(), y).item() == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_state_dict_round_trip(covariance):
    z, y = torch.randn(60, 4, generator=gen(1)), torch.arange(60) % 3
    a, b = GMMCEL(3, 4, 0.1, covariance=covariance), GMMCEL(3, 4, 0.1, covariance=covariance)
    a.refresh(z, y, gen(0))
    a(z[:20], y[:20])
    b.load_state_dict(a.state_dict())
    assert a(z, y).item() == b(z, y).item() and a.bound() == b.bound() and b.num_samples == 60


def test_zero_noise_is_refused_with_the_reason():
    for sigma in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="infinite"):
            GMMCEL(3, 4, sigma)


@pytest.mark.parametrize("kwargs", [{"components": 0}, {"covariance": "tied"}, {"update_scale": 0.0}, {"reg": 0.0}, {"num_classes": 0}])
def test_bad_arguments_are_refused(kwargs):
    with pytest.raises(ValueError):
        GMMCEL(**{"num_classes": 3, "dim": 4, "sigma": 0.1, **kwargs})


def test_bad_inputs_are_refused():
    cel = GMMCEL(3, 4, 1.0)
    with pytest.raises(ValueError, match="dim=4"):
        cel(torch.zeros(2, 5), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="0..2"):
        cel(torch.zeros(2, 4), torch.tensor([0, 3]))
