"""The twelve points of [A §6] as a picture of four panels: marks, arrows, a curve, as text of an SVG."""

import math

import torch

Z = torch.tensor([[0.0, 0.0], [0.2, 0.1], [-0.1, 0.05], [0.15, -0.05],
                  [1.0, 1.0], [1.2, 1.1], [0.8, 0.9], [1.1, 0.95],
                  [1.0, -1.0], [0.8, -0.9], [1.1, -1.2], [0.9, -1.05]], dtype=torch.float64)  # fmt: skip
Y = torch.arange(3).repeat_interleave(4)
MIDDLE = torch.stack([Z[Y == c].mean(0) for c in range(3)])
PANEL, REACH, ARROW = 190, 0.28, 46  # size of a panel, half of what it shows, longest arrow
CORNERS = [(4, 22), (206, 22), (4, 236), (206, 236)]
COLOURS = ["var(--c1,#1d5fbf)", "var(--c2,#b4470b)", "var(--c3,#1a7f37)"]


def place(c, point):
    """Pixels of a point in the panel of class c."""
    left, top = CORNERS[c]
    dx, dy = ((torch.as_tensor(point) - MIDDLE[c]) / REACH * PANEL / 2).tolist()
    return left + PANEL / 2 + dx, top + PANEL / 2 - dy


def ellipse(c, centre, radii, style):
    (x, y), (rx, ry) = place(c, centre), (float(r) / REACH * PANEL / 2 for r in radii)
    left, top = CORNERS[c]  # a picture in the picture cuts off what is outside the panel
    frame = f'x="{left}" y="{top}" width="{PANEL}" height="{PANEL}" viewBox="{left} {top} {PANEL} {PANEL}"'
    shape = f'<ellipse cx="{x:.1f}" cy="{y:.1f}" rx="{rx:.1f}" ry="{ry:.1f}" fill="none" {style}/>'
    return f"<svg {frame}>{shape}</svg>"


def cross(c, centre):
    x, y = place(c, centre)
    return (
        f'<path d="M{x - 5:.1f} {y:.1f}h10M{x:.1f} {y - 5:.1f}v10" stroke="currentColor" stroke-width="1.6"/>'
    )


def points(gradient, radius=None, hollow=(), square=()):
    """The twelve points and their arrows."""
    step, parts = -gradient / gradient.norm(dim=1).max().clamp(min=1e-12) * ARROW, []
    for i, c in enumerate(Y.tolist()):
        (x, y), (dx, dy), r = place(c, Z[i]), step[i].tolist(), 5.0 if radius is None else float(radius[i])
        x2, y2, turn, length = x + dx, y - dy, math.atan2(-dy, dx), math.hypot(dx, dy)
        head = " ".join(
            f"{x2 - 6 * math.cos(turn + a):.1f},{y2 - 6 * math.sin(turn + a):.1f}" for a in (0.45, -0.45)
        )
        if length > 3:
            parts.append(
                f'<path d="M{x:.1f} {y:.1f}L{x2:.1f} {y2:.1f}" stroke="{COLOURS[c]}" stroke-width="1.8"/>'
            )
            parts.append(f'<polygon points="{x2:.1f},{y2:.1f} {head}" fill="{COLOURS[c]}"/>')
        fill = "var(--paper,#fff)" if i in hollow else COLOURS[c]
        style = f'fill="{fill}" stroke="{COLOURS[c]}" stroke-width="1.6"'
        if i in square:
            parts.append(
                f'<rect x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r:.1f}" height="{2 * r:.1f}" {style}/>'
            )
        else:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" {style}/>')
    return "".join(parts)


def curve(f, dots, right, across, up, threshold=None):
    """The fourth panel: f over 0..right, and dots (class, v, radius) on it."""
    left, top = CORNERS[3]
    highest = f(right) or 1.0
    x_of, y_of = lambda v: left + 14 + v / right * 160, lambda v: top + 168 - f(v) / highest * 140
    line = " ".join(f"{x_of(right * i / 80):.1f},{y_of(right * i / 80):.1f}" for i in range(81))
    parts = [f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.4"/>']
    if threshold:
        name, v = threshold
        parts.append(
            f'<path d="M{x_of(v):.1f} {top + 24}V{top + 168}" stroke="currentColor" stroke-dasharray="3 3"/>'
        )
        parts.append(f'<text x="{x_of(v) + 4:.1f}" y="{top + 34}">{name}</text>')
    parts += [
        f'<circle cx="{x_of(v):.1f}" cy="{y_of(v):.1f}" r="{r:.1f}" fill="{COLOURS[c]}"/>' for c, v, r in dots
    ]
    parts.append(f'<text x="{left + 182}" y="{top + 184}" text-anchor="end">{across}</text>')
    return "".join([*parts, f'<text x="{left + 8}" y="{top + 14}">{up}</text>'])


def save(path, title, drawing, loss, caption):
    frames = "".join(
        f'<rect x="{x}" y="{y}" width="{PANEL}" height="{PANEL}" rx="4" fill="none" stroke="currentColor" '
        f'stroke-opacity=".3"/>'
        for x, y in CORNERS
    )
    heads = [*(f"class {c + 1}" for c in range(3)), f"L = {float(loss):.4f}"]
    words = "".join(f'<text x="{x + 2}" y="{y - 6}">{head}</text>' for (x, y), head in zip(CORNERS, heads))
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 430" role="img" '
        f'font-family="Georgia,serif" font-size="13" fill="currentColor">'
        f"<title>{title}</title><desc>{caption}</desc>"
        f"{frames}{words}{drawing}</svg>\n".replace("><", ">\n<"),
        encoding="utf-8",
    )
