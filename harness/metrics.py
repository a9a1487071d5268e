"""How well an image was reconstructed. For pixels in [0, 1] and batches [N, 3, H, W]:

MSE   mean over all pixels             NMSE  MSE / variance of the reported pixels
PSNR  10 log10(1 / MSE) of that MSE    SSIM  11x11 Gaussian window, σ 1.5, borders it does not cover left out
"""

import math
import sys

import torch

BATCH = 500  # images at a time
SSIM_WINDOW, SSIM_SIGMA = 11, 1.5
SSIM_C1, SSIM_C2 = 0.01**2, 0.03**2


def mse(a, b):
    return (a - b).square().mean()


def gaussian_band(size, like):
    """[size-10, size]: row i holds the window's weights for the places i to i+10; band @ x blurs."""
    t = torch.arange(SSIM_WINDOW, dtype=like.dtype, device=like.device) - SSIM_WINDOW // 2
    g = torch.exp(-t.square() / (2 * SSIM_SIGMA**2))
    return torch.eye(size, dtype=like.dtype, device=like.device).unfold(0, SSIM_WINDOW, 1) @ (g / g.sum())


def ssim(a, b):
    """Mean over images, channels and all places where the window fits."""
    if min(a.shape[-2:]) < SSIM_WINDOW:
        raise ValueError(
            f"SSIM needs images of at least {SSIM_WINDOW}x{SSIM_WINDOW} pixels, not {tuple(a.shape[-2:])}."
        )
    rows, cols = gaussian_band(a.shape[-2], a), gaussian_band(a.shape[-1], a)

    def blur(x):  # Gaussian-weighted local mean, separably: [N, 3, H, W] -> [N, 3, H-10, W-10]
        return rows @ x @ cols.T

    mu_a, mu_b = blur(a), blur(b)
    var_a, var_b, cov = blur(a * a) - mu_a**2, blur(b * b) - mu_b**2, blur(a * b) - mu_a * mu_b
    # SSIM = (2 μ_a μ_b + c1)(2 σ_ab + c2) / ((μ_a² + μ_b² + c1)(σ_a² + σ_b² + c2))
    above = (2 * mu_a * mu_b + SSIM_C1) * (2 * cov + SSIM_C2)
    below = (mu_a**2 + mu_b**2 + SSIM_C1) * (var_a + var_b + SSIM_C2)
    return (above / below).mean()


def metrics(original, reconstruction):
    """-> {mse, nmse, psnr, ssim} as floats, computed in double precision batch by batch."""
    squares, likeness = 0.0, 0.0
    for start in range(0, len(original), BATCH):
        a, b = (x[start : start + BATCH].double() for x in (original, reconstruction))
        squares += mse(a, b).item() * len(a)
        likeness += ssim(a, b).item() * len(a)
    error = squares / len(original)
    variance = max(original.double().var().item(), sys.float_info.min)
    return {
        "mse": error,
        "nmse": error / variance,
        "psnr": 10 * math.log10(1 / error) if error else math.inf,
        "ssim": likeness / len(original),
    }
