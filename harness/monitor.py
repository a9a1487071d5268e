"""What a run tells while it trains: lines, figures about its surrogates, and two pictures.

training.png has the curves, spread.png the spread per class and dimension and τ ([D] "variance histograms").
"""

import torch
import torch.nn.functional as F

from harness.files import say, write
from harness.parts import tau_of

# of a surrogate's stats, in the report
FIGURES = ("spread", "above_tau", "skipped", "ess", "slots_used", "ssim")


def describe(args, splits, shape, cels):
    sizes = f"{len(splits.train)} train, {len(splits.val)} val, {len(splits.test)} test images"
    processes = f", {args.processes} processes" if args.processes > 1 else ""
    say(f"{args.dataset}: {sizes} of {len(splits.classes)} classes, {args.device}{processes}")
    sent = "x".join(map(str, shape))
    say(f"{args.arch} cut after {args.cut} units, z = {sent}, sigma {args.sigma:g}, defence {args.defense}")
    for (name, cel), lambd in zip(cels.items(), args.lambd):
        tau = f", tau {tau_of(cel):.3g} per dimension" if tau_of(cel) else ""
        warmup = f"warm-up {args.warmup} of {args.epochs} epochs"
        say(f"{name}: lambda {lambd:g}, scale {args.scale:g}, {warmup}{tau}")


def epoch_line(row, epochs, cels):
    line = f"epoch {row['epoch']:3} of {epochs}  accuracy {100 * row['val_accuracy']:5.1f} %"
    line += f"  L_D {row['loss_d']:.3f}"
    for name, cel in cels.items():
        if f"{name}.loss" in row:
            line += f"  {name} {row[f'{name}.loss']:.3g}"
            line += f", spread/tau {row[f'{name}.spread'] / tau_of(cel):.2g}" if tau_of(cel) else ""
    return line


def cel_figures(row, cels):
    """What became of each surrogate in the last epoch -> {name: {figure: number}}"""
    found = {}
    for name, cel in cels.items():
        found[name] = {key: row[f"{name}.{key}"] for key in FIGURES if f"{name}.{key}" in row}
        if tau_of(cel) and "spread" in found[name]:
            found[name]["spread / tau"] = found[name]["spread"] / tau_of(cel)
        found[name]["gradient ratio"] = row["gradient_ratio"]
    return found


def defense_figures(row, defense):
    """What became of each defence in the last epoch's last step -> {defence.figure: number}"""
    return {key: value for key, value in row.items() if key.split(".")[0] in defense.split("+")}


@torch.no_grad()
def spread_per_class(victim, images, pool=0):
    """Variance of z, pooled as the surrogates see it, within each class of two images or more, in each
    dimension -> [classes, D] on the CPU."""
    z, y = victim.features(images.x), images.y
    z = (F.adaptive_avg_pool2d(z, pool) if pool else z).flatten(1).cpu()
    several = [c for c in y.unique() if (y == c).sum() > 1]
    return torch.stack([z[y == c].var(0) for c in several]) if several else z[:0]


def figure_of(path, width, height):
    """A matplotlib figure, or None and a sentence where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say(f"{path.name} is left out: drawing it needs matplotlib (pip install matplotlib)")
        return None
    return Figure(figsize=(width, height))


def save(figure, path):
    write(
        path,
        lambda to: figure.savefig(
            to, format="png", dpi=100, bbox_inches="tight", metadata={"Software": None}
        ),
    )


def draw_training(path, log):
    """Accuracy, both losses and every surrogate's spread, an epoch a point."""
    figure = figure_of(path, 9, 2.8)
    if figure is None:
        return
    spreads = [key for key in log[-1] if key.endswith(".spread")]
    panels = {
        "accuracy": ["train_accuracy", "val_accuracy"],
        "loss": ["loss_d", "loss_cel"],
        "spread": spreads,
    }
    epochs = [row["epoch"] for row in log]
    for i, (title, keys) in enumerate(panels.items()):
        axes = figure.add_subplot(1, 3, i + 1, title=title, xlabel="epoch")
        for key in keys:
            axes.plot(epochs, [row.get(key, float("nan")) for row in log], "o-", markersize=3, label=key)
        if keys:
            axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    save(figure, path)


def draw_spread(path, spreads, cels):
    """Histogram of the variance per class and dimension after the first and the last epoch, against τ."""
    spreads = [values for values in spreads if len(values)]  # few validation images: none of a class twice
    figure = figure_of(path, 5, 3) if spreads else None
    if figure is None:
        return
    axes = figure.add_subplot(
        xlabel="log10 of the variance of z within a class, per dimension", ylabel="share"
    )
    for name, values in zip(("first epoch", "last epoch") if len(spreads) > 1 else ("last epoch",), spreads):
        logs = values.flatten().clamp(min=1e-8).log10().tolist()
        axes.hist(logs, bins=60, weights=[1 / len(logs)] * len(logs), alpha=0.5, label=name)
    for tau in filter(None, map(tau_of, cels.values())):
        axes.axvline(torch.tensor(tau).log10().item(), color="black", linestyle="--", label="τ")
    axes.legend(fontsize=8)
    save(figure, path)
