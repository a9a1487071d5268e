"""What harness/metrics.py measures: MSE, NMSE, PSNR and SSIM against plain loops over pixels and windows."""

import math

import numpy as np
import pytest
import torch
from conftest import seeded

from harness.data import draw_shapes
from harness.metrics import metrics, mse, ssim


def pair(n=2, height=14, width=13, seed=0):
    g = seeded(seed)
    a = torch.rand(n, 3, height, width, generator=g, dtype=torch.float64)
    return a, (a + 0.2 * torch.randn(a.shape, generator=g, dtype=torch.float64)).clamp(0, 1)


def literal_mse(a, b):
    pixels = list(zip(a.flatten().tolist(), b.flatten().tolist()))
    return sum((u - v) ** 2 for u, v in pixels) / len(pixels)


def literal_ssim(a, b):
    """Every 11x11 window of every channel: weighted means, variances and covariance about them, in loops."""
    bell = lambda i, j: math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / (2 * 1.5**2))
    weights = np.array([[bell(i, j) for j in range(11)] for i in range(11)])
    weights /= weights.sum()
    c1, c2, values = 0.01**2, 0.03**2, []
    for u, v in zip(a.flatten(0, 1).numpy(), b.flatten(0, 1).numpy()):
        for top in range(u.shape[0] - 10):
            for left in range(u.shape[1] - 10):
                p, q = u[top : top + 11, left : left + 11], v[top : top + 11, left : left + 11]
                mp, mq = (weights * p).sum(), (weights * q).sum()
                vp, vq = (weights * (p - mp) ** 2).sum(), (weights * (q - mq) ** 2).sum()
                cov = (weights * (p - mp) * (q - mq)).sum()
                values.append((2 * mp * mq + c1) * (2 * cov + c2) / ((mp**2 + mq**2 + c1) * (vp + vq + c2)))
    return sum(values) / len(values)


def test_mse_and_psnr_are_the_literal_loop():
    a, b = pair()
    assert mse(a, b).item() == pytest.approx(literal_mse(a, b), rel=1e-12)
    assert metrics(a, b)["psnr"] == pytest.approx(10 * math.log10(1 / literal_mse(a, b)), rel=1e-12)
    off = torch.full((1, 3, 12, 12), 0.1)
    assert metrics(torch.zeros_like(off), off)["psnr"] == pytest.approx(20, rel=1e-5)  # MSE 0.01


@pytest.mark.parametrize("height, width, seed", [(14, 13, 0), (11, 11, 1), (12, 17, 2)])
def test_ssim_is_the_literal_loop(height, width, seed):
    a, b = pair(2, height, width, seed)
    want = literal_ssim(a, b)
    assert ssim(a, b).item() == pytest.approx(want, rel=1e-9) == ssim(b, a).item()
    assert ssim(a.float(), b.float()).item() == pytest.approx(want, abs=1e-4)
    strided = a.contiguous(memory_format=torch.channels_last)
    assert ssim(strided, b).item() == pytest.approx(want, rel=1e-9)


def test_ssim_agrees_with_scikit_image():
    reference = pytest.importorskip("skimage.metrics").structural_similarity
    a = draw_shapes(6, seed=1).float().double()
    b = (a + 0.1 * torch.randn(a.shape, generator=seeded(0), dtype=torch.float64)).clamp(0, 1)
    settings = dict(
        gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1.0, channel_axis=0
    )
    want = [reference(u.numpy(), v.numpy(), **settings) for u, v in zip(a, b)]
    assert ssim(a, b).item() == pytest.approx(np.mean(want), abs=1e-4)


def test_ssim_of_known_pairs():
    a, _ = pair()
    assert ssim(a, a).item() == pytest.approx(1, abs=1e-12)
    u, v = (torch.full((1, 3, 12, 12), shade, dtype=torch.float64) for shade in (0.3, 0.6))
    assert ssim(u, v).item() == pytest.approx((2 * 0.18 + 1e-4) / (0.09 + 0.36 + 1e-4), rel=1e-9)
    assert ssim(a, 1 - a).item() < 0  # the negative is anticorrelated
    with pytest.raises(ValueError, match="11x11"):
        ssim(a[..., :10, :], a[..., :10, :])


def test_ssim_has_the_gradient_that_differences_show():
    a, b = pair(1, 12, 12)
    assert torch.autograd.gradcheck(lambda b: ssim(a, b), b.clone().requires_grad_())


def test_metrics_are_the_pure_functions_whatever_the_batch(monkeypatch):
    a, b = (t.float() for t in pair(7))
    exact = a.double(), b.double()
    error = mse(*exact).item()
    want = {"mse": error, "psnr": 10 * math.log10(1 / error), "ssim": ssim(*exact).item()}
    pixels = exact[0].flatten().tolist()
    mean = sum(pixels) / len(pixels)
    variance = sum((p - mean) ** 2 for p in pixels) / len(pixels)
    for batch in (500, 7, 3, 1):  # 3 leaves a last batch of one
        monkeypatch.setattr("harness.metrics.BATCH", batch)
        got = metrics(a, b)
        assert set(got) == {"mse", "nmse", "psnr", "ssim"} and all(type(v) is float for v in got.values())
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=1e-9), name
        assert got["nmse"] == pytest.approx(want["mse"] / variance, rel=2 / len(pixels))


def test_metrics_of_perfect_mean_and_constant_pictures():
    a, _ = pair(3)
    perfect = metrics(a, a)
    assert (perfect["mse"], perfect["nmse"], perfect["psnr"]) == (0, 0, math.inf)
    assert perfect["ssim"] == pytest.approx(1)
    assert metrics(a, torch.full_like(a, a.mean().item()))["nmse"] == pytest.approx(
        1, rel=1e-3
    )  # explains nothing
    grey = torch.full((2, 3, 12, 12), 0.5)
    assert metrics(grey, grey)["nmse"] == 0 and math.isfinite(metrics(grey, grey + 0.1)["mse"])
