"""The built-in images: ten kinds of shape, drawn from a seed, so that everything runs without a download."""

import math

import torch

SIZE = 32
NAMES = ("disc", "ring", "square", "triangle", "plus", "star", "crescent", "bar", "pair", "hourglass")
TINT = 0.10  # how far a colour channel may lie from the brightness


def shape_distance(label, u, v):
    """Signed distance-like field of shape `label` in its own unit coordinates: negative inside."""
    r = torch.hypot(u, v)
    if label == 0:  # disc
        return r - 0.95
    if label == 1:  # ring
        return (r - 0.75).abs() - 0.22
    if label == 2:  # square
        return torch.maximum(u.abs(), v.abs()) - 0.8
    if label == 3:  # triangle
        corners = [math.pi * (0.5 + 2 * k / 3) for k in range(3)]
        return torch.stack([u * math.cos(a) + v * math.sin(a) for a in corners]).amax(0) - 0.55
    if label == 4:  # plus
        return torch.minimum(
            torch.maximum(u.abs() - 1, v.abs() - 0.3), torch.maximum(u.abs() - 0.3, v.abs() - 1)
        )
    if label == 5:  # star
        return r - (0.72 + 0.32 * torch.cos(5 * torch.atan2(v, u)))
    if label == 6:  # crescent
        return torch.maximum(r - 1, 0.8 - torch.hypot(u - 0.5, v))
    if label == 7:  # bar
        return torch.maximum(u.abs() - 1.15, v.abs() - 0.26)
    if label == 8:  # pair
        return torch.minimum(torch.hypot(u - 0.65, v), torch.hypot(u + 0.65, v)) - 0.42
    return torch.maximum(v.abs() - 0.85 * u.abs(), u.abs() - 0.95)  # hourglass


def draw(n, seed=0, size=SIZE):
    """-> uint8 [n, 3, size, size], int64 [n]. Classes in turn; all but the shape varies."""
    g = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(n, *shape, generator=g)

    yy, xx = torch.meshgrid(torch.arange(size) + 0.5, torch.arange(size) + 0.5, indexing="ij")

    def stripes():  # [n, 1, H, W] in [-1, 1]: soft waves, 10 to 24 pixels long
        ranges = (0, math.pi), (10, 24), (0, 2 * math.pi)
        angle, wave, phase = (uniform(low, high, 1, 1, 1) for low, high in ranges)
        return torch.sin(2 * math.pi * (xx * angle.cos() + yy * angle.sin()) / wave + phase)

    # As in photographs most of the contrast is brightness. Figure and ground differ in it by 0.35 to 0.65 (on
    # the circle [0, 1)), so the shape is always visible; each has a tint of its own.
    brightness = uniform(0, 1, 1, 1, 1)
    ground = brightness + uniform(-TINT, TINT, 3, 1, 1)
    figure = (brightness + uniform(0.35, 0.65, 1, 1, 1)) % 1 + uniform(-TINT, TINT, 3, 1, 1)
    slope = uniform(0, 2 * math.pi, 1, 1, 1)
    ramp = ((xx - size / 2) * slope.cos() + (yy - size / 2) * slope.sin()) / size
    background = ground + uniform(-0.3, 0.3, 1, 1, 1) * ramp + uniform(0.02, 0.08, 1, 1, 1) * stripes()
    foreground = figure + uniform(0.02, 0.08, 1, 1, 1) * stripes()

    label = torch.arange(n) % len(NAMES)
    centre_x, centre_y = size / 2 + uniform(-5, 5, 1, 1), size / 2 + uniform(-5, 5, 1, 1)
    radius, angle = uniform(6.5, 11, 1, 1), uniform(0, 2 * math.pi, 1, 1)
    dx, dy = (xx - centre_x) / radius, (yy - centre_y) / radius
    u, v = dx * angle.cos() + dy * angle.sin(), dy * angle.cos() - dx * angle.sin()
    inside = torch.empty(n, size, size)
    for k in range(len(NAMES)):
        own = slice(k, None, len(NAMES))
        inside[own] = (0.5 - shape_distance(k, u[own], v[own]) * radius[own]).clamp(0, 1)
    inside = inside[:, None]
    pixels = foreground * inside + background * (1 - inside)
    x = (pixels.clamp(0, 1) * 255).round().to(torch.uint8)
    return x.contiguous(memory_format=torch.channels_last), label
