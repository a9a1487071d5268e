"""direct_cel.py: the linear-Gaussian channel in closed form, the equations as literal loops, the gradient
through the solve, what the loss sees and what it does not, and hostile input."""

import math
import warnings

import pytest
import torch

from direct_cel import ROUNDING, DirectCEL

MEASURES = ("trace", "logdet")


def batch(seed=0, B=40, shape=(2, 3, 4), p=2, classes=3, dtype=torch.float64):
    """Pictures in [0, 1], and features that are a noisy nonlinear function of them."""
    g = torch.Generator().manual_seed(seed)
    c, h, w = shape
    x = torch.rand(B, 3, h * p, w * p, generator=g, dtype=torch.float64)
    mix = torch.randn(c, 3 * p * p, generator=g, dtype=torch.float64)
    z = torch.sigmoid(torch.einsum("cd,bdhw->bchw", mix, torch.nn.functional.pixel_unshuffle(x, p)))
    z = z + 0.1 * torch.randn(z.shape, generator=g, dtype=torch.float64)
    y = torch.randint(0, classes, (B,), generator=g)
    return z.to(dtype).requires_grad_(), y, x.to(dtype)


def make(z, measure="trace", sigma=0.1, classes=3, every=1, **kwargs):
    return DirectCEL(classes, z[0].numel(), sigma, measure=measure, every=every, **kwargs).to(z.dtype)


def literal_cells(z, y, x, k, chosen=None):
    """t [n, p_t] and f [n, q] of every cell that is looked at, one image, cell and neighbour at a time."""
    B, c, h, w = z.shape
    p = x.shape[2] // h
    ts, fs = [], []
    for b in range(B):
        group = [i for i in range(B) if y[i] == y[b]]
        if len(group) == 1:
            group = [i for i in range(B) if sum(y == y[i]) == 1]  # the images that are alone are one class
        M = len(group)
        dz = (z[b] - sum(z[i] for i in group) / M) * math.sqrt(M / (M - 1))
        dx = (x[b] - sum(x[i] for i in group) / M) * math.sqrt(M / (M - 1))
        for i in range(h):
            for j in range(w) if chosen is None else [j for j in range(w) if (i, j) in chosen]:
                ts.append(dx[:, i * p : (i + 1) * p, j * p : (j + 1) * p].reshape(-1))
                f = []
                for a in range(c):
                    for di in range(-(k // 2), k // 2 + 1):
                        for dj in range(-(k // 2), k // 2 + 1):
                            inside = 0 <= i + di < h and 0 <= j + dj < w
                            f.append(dz[a, i + di, j + dj] if inside else z.new_zeros(()))
                fs.append(torch.stack(f))
    return torch.stack(ts), torch.stack(fs)


def literal_loss(z, y, x, sigma, measure, k=3, **cells):
    """The equations with E = Σ_tt − Σ_tf (Σ_ff + σ²I)⁻¹ Σ_ft; autograd goes through the inverse."""
    t, f = literal_cells(z, y, x, k, **cells)
    S_tt = t.T @ t / len(t) + ROUNDING * torch.eye(t.shape[1], dtype=t.dtype)
    S_tf, S_ff = t.T @ f / len(t), f.T @ f / len(t)
    E = S_tt - S_tf @ torch.linalg.inv(S_ff + sigma**2 * torch.eye(len(S_ff), dtype=t.dtype)) @ S_tf.T
    if measure == "trace":
        return torch.log(S_tt.trace() / E.trace()), E
    return (torch.logdet(S_tt) - torch.logdet(E)) / 2, E


def exact_gaussian(n, S, seed=0):
    """n samples [n, d] with mean 0 and unbiased covariance S, both to rounding."""
    v = torch.randn(n, len(S), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    v = v - v.mean(0)
    v = torch.linalg.solve_triangular(torch.linalg.cholesky(v.T @ v / (n - 1)), v.T, upper=False)
    return (torch.linalg.cholesky(S) @ v).T


# ----- the linear-Gaussian channel: one cell, z = A x, x ~ N(0, S)


def channel(outputs, scale=1.0):
    g = torch.Generator().manual_seed(outputs)
    root = torch.randn(12, 12, generator=g, dtype=torch.float64) / 3
    S = scale**2 * (root @ root.T + 0.1 * torch.eye(12, dtype=torch.float64))
    A = torch.randn(outputs, 12, generator=g, dtype=torch.float64) / scale
    t = exact_gaussian(300, S)
    z, x = (t @ A.T)[:, :, None, None].requires_grad_(), t.unflatten(1, (3, 2, 2))
    return S, A, z, x, torch.zeros(300, dtype=torch.int64)


@pytest.mark.parametrize("k", [1, 3])  # beside the only cell there is nothing
@pytest.mark.parametrize("outputs", [3, 12, 20])  # fewer than the 12 pixels, as many, more
def test_logdet_is_the_mutual_information_of_the_gaussian_channel(outputs, k):
    S, A, z, x, y = channel(outputs, scale=1e4)  # so large that the rounding of pixels does not count
    information = torch.logdet(torch.eye(outputs, dtype=S.dtype) + A @ S @ A.T / 0.3**2) / 2
    loss = make(z, "logdet", sigma=0.3, neighbourhood=k)(z, y, x)
    assert loss.item() == pytest.approx(information.item(), abs=1e-8)


def test_logdet_of_an_orthogonal_encoder():
    t = exact_gaussian(200, 1e8 * torch.eye(12, dtype=torch.float64))
    A = (
        torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(1), dtype=t.dtype))[0]
        / 1e4
    )
    z, x = (t @ A.T)[:, :, None, None].requires_grad_(), t.unflatten(1, (3, 2, 2))
    loss = make(z, "logdet", sigma=0.3)(z, torch.zeros(200, dtype=torch.int64), x)
    assert loss.item() == pytest.approx(6 * math.log(1 + 1 / 0.09), abs=1e-8)  # d/2 log(1 + s²/σ²)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("outputs", [3, 12, 20])
def test_pixels_of_usual_size_are_known_to_their_rounding(outputs, measure):
    """Information about t + u and its error, u the rounding to 8 bits; spread and above_tau say the same."""
    S, A, z, x, y = channel(outputs, scale=0.2)
    S_tt = S + ROUNDING * torch.eye(12, dtype=S.dtype)
    gain = torch.linalg.solve(A @ S @ A.T + 0.3**2 * torch.eye(outputs, dtype=S.dtype), A @ S)
    E = S_tt - S @ A.T @ gain
    cel = make(z, measure, sigma=0.3)
    loss = cel(z, y, x)
    expected = {
        "trace": torch.log(S_tt.trace() / E.trace()),
        "logdet": (torch.logdet(S_tt) - torch.logdet(E)) / 2,
    }
    assert loss.item() == pytest.approx(expected[measure].item(), abs=1e-8)
    assert 12 * cel.stats["spread"].item() == pytest.approx(E.trace().item(), abs=1e-8)  # the linear MMSE
    assert cel.stats["above_tau"].item() == pytest.approx(1 - (E.trace() / S_tt.trace()).item(), abs=1e-8)
    assert cel.stats["loss"].item() == loss.item() and cel.stats["skipped"].item() == 0


# ----- the equations, literally


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(
    "k, shape, p", [(1, (2, 2, 3), 2), (3, (2, 3, 4), 2), (3, (1, 1, 1), 2), (5, (1, 3, 3), 1)]
)
def test_equals_the_literal_loop_and_the_gradient_through_the_solve(k, shape, p, measure):
    z, y, x = batch(1, B=24, shape=shape, p=p, classes=3)
    y[:3] = torch.tensor([3, 4, 5])  # three classes with one image each
    cel = make(z, measure, classes=6, neighbourhood=k)
    loss = cel(z, y, x)
    expected, E = literal_loss(z, y, x, 0.1, measure, k)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
    assert cel.stats["spread"].item() == pytest.approx(E.diagonal().mean().item(), abs=1e-12)
    (grad,) = torch.autograd.grad(loss, z)
    (through_solve,) = torch.autograd.grad(expected, z)
    assert through_solve.abs().max() > 1e-4
    assert torch.allclose(grad, through_solve, rtol=0, atol=1e-10)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(
    "h, w, every, rows, columns", [(4, 6, 2, 2, 3), (3, 5, 2, 1, 2), (1, 2, 2, 1, 1), (6, 3, 3, 2, 1)]
)
def test_in_training_every_second_cell_from_a_random_first_one(h, w, every, rows, columns, measure):
    """Each call is the literal loss of one choice of cells; all choices come, and every z gets a gradient."""
    z, _, x = batch(21, B=12, shape=(2, h, w))
    y = torch.arange(12) % 3
    starts = [(a, b) for a in range(h - every * (rows - 1)) for b in range(w - every * (columns - 1))]
    expected = {}
    for a, b in starts:
        chosen = {(a + every * i, b + every * j) for i in range(rows) for j in range(columns)}
        loss, _ = literal_loss(z, y, x, 0.1, measure, chosen=chosen)
        expected[a, b] = loss.item(), torch.autograd.grad(loss, z)[0]
    cel, seen, touched = make(z, measure, every=every), set(), torch.zeros_like(z)
    torch.manual_seed(0)
    for _ in range(12 * len(starts)):
        loss = cel(z, y, x)
        (grad,) = torch.autograd.grad(loss, z)
        start = min(starts, key=lambda s: abs(expected[s][0] - loss.item()))
        assert loss.item() == pytest.approx(expected[start][0], abs=1e-10)
        assert torch.allclose(grad, expected[start][1], rtol=0, atol=1e-10)
        seen.add(start)
        touched += grad.abs()
    assert seen == set(starts) and (touched > 0).all()
    whole = make(z, measure)(z, y, x).item()
    with torch.no_grad():
        assert cel.eval()(z, y, x).item() == pytest.approx(whole, abs=1e-12)  # all cells when it measures


@pytest.mark.parametrize("measure", MEASURES)
def test_gradient_is_that_of_the_error_with_W_held_fixed(measure):
    """∂ tr E = ∂ mean ||W f − t||², ∂ ½ log|E| = the same with the weight E⁻¹ on the residuals."""
    z, y, x = batch(2, B=20, shape=(2, 2, 2))
    t, f = literal_cells(z, y, x, 3)
    W = (t.T @ f) @ torch.linalg.inv(f.T @ f + len(f) * 0.01 * torch.eye(f.shape[1], dtype=f.dtype))
    W, E, residual = W.detach(), literal_loss(z, y, x, 0.1, measure)[1].detach(), t - f @ W.detach().T
    if measure == "trace":
        closed = -residual.square().sum(1).mean() / E.trace()
    else:
        closed = -((residual @ torch.linalg.inv(E)) * residual).sum(1).mean() / 2
    (expected,) = torch.autograd.grad(closed, z)
    (grad,) = torch.autograd.grad(make(z, measure)(z, y, x), z)
    assert torch.allclose(grad, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("measure", MEASURES)
def test_gradcheck(measure):
    z, y, x = batch(3, B=6, shape=(2, 2, 2), p=1)
    cel = make(z, measure)
    assert torch.autograd.gradcheck(lambda z: cel(z, y, x), (z,))


# ----- what it sees, and what not


@pytest.mark.parametrize("measure", MEASURES)
def test_channels_can_be_rotated_in_all_cells_alike(measure):
    z, y, x = batch(4, shape=(4, 3, 3))
    R = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=z.dtype))[0]
    turned = torch.einsum("ij,bjhw->bihw", R, z)
    assert make(z, measure)(turned, y, x).item() == pytest.approx(make(z, measure)(z, y, x).item(), abs=1e-10)


@pytest.mark.parametrize("measure", MEASURES)
def test_what_the_label_tells_does_not_count(measure):
    z, y, x = batch(5)
    g = torch.Generator().manual_seed(0)
    dz, dx = (
        torch.randn(3, *z.shape[1:], generator=g).double(),
        torch.randn(3, *x.shape[1:], generator=g).double(),
    )
    moved = make(z, measure)(z + dz[y], y, x + dx[y])
    assert moved.item() == pytest.approx(make(z, measure)(z, y, x).item(), abs=1e-10)


def test_loss_does_not_depend_on_the_images_a_class_has():
    """400 images as one class, as 200 pairs, and as 400 classes of one: the same spread and loss."""
    z, y, x = batch(6, B=400, shape=(2, 2, 2))
    labels = {1: torch.zeros_like(y), 200: torch.arange(400) // 2, 400: torch.arange(400)}
    figures = {}
    for classes, y in labels.items():
        cel = make(z, classes=classes, neighbourhood=1)  # few inputs: next to no small-sample bias
        figures[classes] = cel(z, y, x).item(), cel.stats["spread"].item()
    for classes in (200, 400):
        assert figures[classes] == pytest.approx(figures[1], rel=0.05)


def test_independent_pictures_and_features_give_the_stated_bias_and_no_more():
    g, y = torch.Generator().manual_seed(0), torch.zeros(128, dtype=torch.int64)
    n, q, p_t = 127 * 64, 2 * 9, 12  # one image of 128 is spent on the mean
    trace, logdet = [], []
    for _ in range(6):
        z = torch.randn(128, 2, 8, 8, generator=g).double().requires_grad_()
        x = torch.rand(128, 3, 16, 16, generator=g).double()
        trace.append(make(z, "trace", sigma=1e-3)(z, y, x).item())
        logdet.append(make(z, "logdet", sigma=1e-3)(z, y, x).item())
    assert sum(trace) / 6 == pytest.approx(math.log(n / (n - q)), rel=0.12)
    assert sum(logdet) / 6 == pytest.approx(p_t * q / (2 * n), rel=0.12)


@pytest.mark.parametrize("measure", MEASURES)
def test_more_noise_hides_more_and_the_loss_is_never_negative(measure):
    z, y, x = batch(7)
    losses = [make(z, measure, sigma=s)(z, y, x).item() for s in (0.01, 0.1, 1.0, 10.0, 1e4)]
    assert losses == sorted(losses, reverse=True)
    assert 0 <= losses[-1] < 1e-6 and losses[0] > 0.05


def test_sees_the_neighbours_and_nothing_farther():
    """Each cell carries the picture of the cell `shift` columns to its left."""
    g = torch.Generator().manual_seed(0)
    x = torch.rand(200, 3, 1, 12, generator=g).double()
    y = torch.zeros(200, dtype=torch.int64)
    loss = {s: make(z := x.roll(s, 3).requires_grad_(), sigma=0.01)(z, y, x).item() for s in (0, 1, 2)}
    assert loss[0] > 3 and loss[1] > 2  # of twelve columns one has lost its picture around the corner
    assert loss[2] < 0.02
    assert make(z, sigma=0.01, neighbourhood=5)(z, y, x).item() > 1.5


def test_a_picture_that_is_there_but_not_linearly_is_not_seen():
    """No bound on the information: |x − ½| gives x up to a sign, and L is its small-sample bias."""
    g = torch.Generator().manual_seed(0)
    x = torch.rand(400, 3, 4, 4, generator=g).double()
    z, y = (x - 0.5).abs().requires_grad_(), torch.zeros(400, dtype=torch.int64)
    assert make(z, sigma=0.01)(z, y, x).item() < 2 * 27 / (400 * 16)


@pytest.mark.parametrize("measure", MEASURES)
def test_descent_hides_the_picture_from_a_linear_attacker_who_is_fitted_on_other_samples(measure):
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2, stride=2), torch.nn.Sigmoid())
    encoder[0].weight.data *= 3
    x, fresh, y = torch.rand(256, 3, 6, 6), torch.rand(2, 2048, 3, 6, 6), torch.zeros(256, dtype=torch.int64)

    @torch.no_grad()
    def attack():
        """Squared error over variance of a least-squares fit of the whole picture to the whole z'."""
        (a, b), noise = [encoder(f).flatten(1) for f in fresh], 0.1 * torch.randn(2, 2048, 36)
        a, b, mean = a + noise[0], b + noise[1], fresh[0].flatten(1).mean(0)
        fit = torch.linalg.lstsq(a - a.mean(0), fresh[0].flatten(1) - mean).solution
        error = (b - a.mean(0)) @ fit + mean - fresh[1].flatten(1)
        return (error.square().mean() / fresh[1].var()).item()

    before, cel = attack(), DirectCEL(1, 36, 0.1, measure=measure)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1.0 if measure == "trace" else 0.2)
    for _ in range(60):
        optimizer.zero_grad()
        cel(encoder(x), y, x).backward()
        optimizer.step()
    assert before < 0.9 and attack() > 0.97


# ----- hostile input


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "case",
    ["flat picture", "grey", "flat z", "equal channels", "one row", "two rows", "q > n", "z huge", "x 255"],
)
def test_singular_moments_are_finite(case, dtype, measure):
    z, y, x = batch(8, B=32, shape=(4, 2, 2), classes=2, dtype=dtype)
    z = z.detach()
    if case == "flat picture":
        x = torch.full_like(x, 0.3)
    if case == "grey":
        x = x[:, :1].expand(-1, 3, -1, -1)
    if case == "flat z":
        z = torch.full_like(z, 0.7)
    if case == "equal channels":
        z = z[:, :1].expand(-1, 4, -1, -1).clone()
    if case in ("one row", "two rows"):
        rows = 1 if case == "one row" else 2
        z, y, x = z[:rows], y[:rows], x[:rows]
    if case == "q > n":
        z, y, x = z[:8, :, :1, :1].clone(), y[:8], x[:8, :, :2, :2]  # 36 inputs, 8 cells
    if case == "z huge":
        z = 1e6 * z
    if case == "x 255":
        x = 255 * x[:, :1].expand(-1, 3, -1, -1)
    z.requires_grad_()
    cel = make(z, measure, sigma=0.01)
    loss = cel(z, y, x)
    loss.backward()
    assert loss.isfinite() and z.grad.isfinite().all() and loss.item() > -1e-5
    assert all(figure.isfinite() for figure in cel.stats.values())
    if case in ("flat picture", "flat z", "one row"):
        assert loss.item() == pytest.approx(0, abs=1e-5) and z.grad.abs().max() < 1e-3
    assert cel.stats["skipped"].item() == (case == "one row")


def test_grey_pictures_leak_what_their_one_channel_leaks():
    """The two directions that grey pixels lack cancel in |Σ_tt| / |E|: float32 and float64 agree."""
    z, y, x = batch(9, shape=(3, 4, 4))
    x = x[:, :1].expand(-1, 3, -1, -1)
    exact, single = (
        make(z.to(d), "logdet")(z.to(d), y, x.to(d)).item() for d in (torch.float64, torch.float32)
    )
    assert single == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("measure", MEASURES)
def test_rows_with_nan_or_inf_in_z_or_x_are_left_out(measure):
    z, y, x = batch(10)
    z, bad = z.detach().clone(), torch.zeros(40, dtype=torch.bool)
    bad[[3, 7, 11, 30]] = True
    z[3, 0, 0, 0], z[7], x[11, 1, 2, 3], x[30, 0, 0, 0] = torch.nan, torch.inf, torch.nan, -torch.inf
    cel, z = make(z, measure), z.requires_grad_()
    cel(z, y, x).backward()
    good = z.detach()[~bad].requires_grad_()
    expected = make(good, measure)(good, y[~bad], x[~bad])
    expected.backward()
    assert cel.stats["loss"].item() == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(z.grad[~bad], good.grad, rtol=0, atol=1e-12) and (z.grad[bad] == 0).all()
    assert cel.stats["skipped"].item() == pytest.approx(0.1)


@pytest.mark.parametrize("measure", MEASURES)
def test_nothing_left_is_zero_with_a_live_graph(measure):
    z, y, x = batch(11)
    cel = make(z, measure)
    loss = cel(z * torch.nan, y, x)
    loss.backward()
    assert loss.item() == 0 and cel.stats["skipped"].item() == 1


def test_flat_and_channels_last_features_mean_the_same():
    z, y, x = batch(12)
    expected = make(z)(z, y, x).item()
    assert make(z, shape=(2, 3, 4))(z.flatten(1), y, x).item() == expected
    assert make(z)(z.contiguous(memory_format=torch.channels_last), y, x).item() == expected
    assert make(z)(z, y, x.contiguous(memory_format=torch.channels_last)).item() == expected


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1, 20])
def test_half_precision(dtype, scale, measure):
    z, y, x = batch(13, B=64, shape=(4, 4, 4), dtype=torch.float32)
    z = (scale * (2 * z - 1)).detach() if scale > 1 else z.detach()
    z = z.to(dtype)  # the encoder's own rounding is not the surrogate's

    def run(z, x, autocast=False):
        z = z.clone().requires_grad_()
        cel = DirectCEL(3, 64, 0.1, measure=measure, every=1)
        cel = cel.to(z.dtype)  # .to(half) must leave its sums in float32
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = cel(z, y, x)
        loss.backward()
        assert loss.dtype == torch.float32
        return loss.item(), z.grad.float().flatten()

    expected, grad = run(z.float(), x)
    for loss, g in (run(z, x), run(z, x.to(dtype)), run(z.float(), x, autocast=True)):
        assert loss == pytest.approx(expected, rel=0.01)
        assert torch.cosine_similarity(g, grad, dim=0) >= 0.99


@pytest.mark.parametrize("measure", MEASURES)
def test_compiles_without_a_break(measure):
    z, y, x = batch(14)
    cel = make(z, measure)
    expected = cel(z, y, x)
    (grad,) = torch.autograd.grad(expected, z)
    compiled = torch.compile(cel, fullgraph=True, backend="eager")(z, y, x)
    assert compiled.item() == expected.item()
    assert torch.equal(torch.autograd.grad(compiled, z)[0], grad)


def test_nothing_to_learn_to_save_or_to_give_a_gradient_to():
    z, y, x = batch(15)
    cel, x = make(z), x.requires_grad_()
    cel(z, y, x).backward()
    assert x.grad is None and z.grad.abs().sum() > 0
    assert not list(cel.parameters()) and not cel.state_dict()
    with torch.no_grad():
        assert cel(z, y, x).item() == cel.eval()(z.detach(), y, x).item() == cel.stats["loss"].item()
    assert not any(figure.requires_grad for figure in cel.stats.values())


def test_a_silent_loss_is_announced_once():
    z, y, x = batch(16, B=1)
    cel = make(z)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(250):
            cel(z, y, x)
    (warning,) = caught
    assert "DirectCEL was 0 in its first 100 calls" in str(warning.message) and "larger" in str(
        warning.message
    )


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(x=None), "x is None: pass a picture for each row of z"),
        (dict(x=torch.zeros(40, 3, 6, 8, dtype=torch.uint8)), "x is torch.uint8"),
        (dict(x=torch.zeros(39, 3, 6, 8)), r"\[40, 3, p·3, p·4\] floats"),
        (dict(x=torch.zeros(40, 1, 6, 8)), r"x is torch.float32 \[40, 1, 6, 8\]"),
        (dict(x=torch.zeros(40, 3, 7, 8)), "p·3, p·4"),  # not a multiple of the map
        (dict(x=torch.zeros(40, 3, 6, 12)), "p·3, p·4"),  # cells would not be square
        (dict(x=torch.zeros(40, 3, 2, 2)), "p·3, p·4"),  # fewer pixels than cells
        (dict(x=torch.zeros(40, 3 * 48)), "p·3, p·4"),
        (dict(z=torch.zeros(40, 24, requires_grad=True)), r"pass \[B, c, h, w\], or \[B, D\] and its shape"),
        (dict(z=torch.zeros(40, 24, 1, requires_grad=True)), r"pass \[B, c, h, w\]"),
        (dict(z=torch.zeros(40, 2, 3, 5, requires_grad=True)), "at least one row of 24 floats"),
        (dict(z=torch.zeros(0, 2, 3, 4, requires_grad=True), y=torch.zeros(0).long()), "at least one row"),
        (dict(z=torch.zeros(40, 2, 3, 4, dtype=torch.int64)), "at least one row of 24 floats"),
        (dict(z=torch.zeros(40, 2, 3, 4)), "z has no gradient"),
        (dict(y=torch.zeros(40)), "one class number, int64"),
        (dict(y=torch.zeros(40, 3)), "one class number, int64"),
        (dict(y=torch.full((40,), 3)), r"outside 0..2"),
        (dict(y=torch.full((40,), -100)), r"outside 0..2"),
    ],
)
def test_wrong_input_is_one_sentence(change, says):
    z, y, x = batch(17, dtype=torch.float32)
    given = dict(z=z, y=y, x=x) | change
    with pytest.raises(ValueError, match=says) as error:
        make(z)(**given)
    assert "\n" not in str(error.value)


def test_a_map_of_another_shape_than_announced_is_refused():
    z, y, x = batch(18)
    with pytest.raises(ValueError, match="its shape"):
        make(z, shape=(4, 3, 2))(z, y, x)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(sigma=0.0),
        dict(sigma=-1.0),
        dict(sigma=math.nan),
        dict(measure="bits"),
        dict(neighbourhood=2),
        dict(neighbourhood=-1),
        dict(shape=(2, 3, 5)),
        dict(shape=(24,)),
        dict(num_classes=0),
        dict(every=0),
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError):
        DirectCEL(**(dict(num_classes=3, dim=24, sigma=0.1) | wrong))
