"""The figures of bench/RESULTS.md. Each function draws one, and returns the line that shows it on a page."""

from PIL import Image, ImageDraw, ImageFont  # comes with torchvision

from bench.finished import in_words, line, point_cells, select
from bench.gain import front, gain, mean_points
from bench.grids import ATTACKERS, METHODS, MIDDLE
from harness.evaluation import LABEL_WIDTH
from harness.files import read_ours, write
from harness.monitor import figure_of, save

BUDGETS = [name for name in ATTACKERS if name.startswith(("size", "epochs"))]


def stack_rows(path, runs, columns=10):
    """One sheet of [(label, reconstructions.png, results)]: what the first attacker, the decoder, made of
    each run's first images, under the originals, repeated where they are others. -> whether there were any"""
    rows, shown = [], None
    for label, file, r in runs:
        if r["attacks"] and file.exists():
            sheet = read_ours(file, lambda file: Image.open(file, formats=["PNG"]).convert("RGB"))
            tile = sheet.height // (1 + len(r["attacks"]))
            right = min(sheet.width, LABEL_WIDTH + columns * tile)
            original, made = (sheet.crop((LABEL_WIDTH, i, right, i + tile)) for i in (0, tile))
            rows += [("original", original)] if shown != original.tobytes() else []
            rows.append((label.encode("ascii", "replace").decode(), made))
            shown = original.tobytes()
    if rows:
        font, tile = ImageFont.load_default(14), rows[0][1].height
        box = lambda label: ImageDraw.Draw(Image.new("RGB", (1, 1))).multiline_textbbox((5, 0), label, font)
        left = 10 + int(max(box(label)[2] for label, _ in rows))
        rows = [(label, strip.resize((strip.width * tile // strip.height, tile))) for label, strip in rows]
        out = Image.new("RGB", (left + max(strip.width for _, strip in rows), tile * len(rows)), "white")
        for i, (label, strip) in enumerate(rows):
            out.paste(strip, (left, i * tile))
            middle = i * tile + (tile - box(label)[3]) // 2
            ImageDraw.Draw(out).multiline_text((5, middle), label, "black", font)
        write(path, lambda temporary: out.save(temporary, format="PNG"))
    return bool(rows)


def shapes(found, root):
    runs = [
        (r["method"], root / f"cells/shapes/{r['name']}.png", r) for r in found if r["config"]["seed"] == 0
    ]
    drawn = stack_rows(root / "figures/shapes.png", runs)
    return "![Originals above what the decoder made of them, seed 0](figures/shapes.png)" if drawn else ""


def draw_lines(path, lines, **axis):
    """[(method, x, error, look)] on one pair of axes; a method has one colour, noise alone is black."""
    figure = figure_of(path, 7, 4.5)
    if figure is not None:
        axes = figure.add_subplot(**axis)
        axes.set_yscale("log", subs=(1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9))
        axes.yaxis.set_major_formatter("{x:.4f}")
        axes.yaxis.set_minor_formatter("{x:.4f}")
        colours = dict(zip(METHODS, ["black", *(f"C{i}" for i in range(10)), "navy", "gold"]))
        for method, x, error, look in lines:
            axes.errorbar(x, error, fmt="o-", color=colours[method], **{"label": in_words(method), **look})
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        save(figure, path)


def curves(found, root):
    """Tier 1: the settings that all seeds ran, mean and standard deviation over the seeds."""
    lines = []
    for method in METHODS:
        of = mean_points(line(select(found, family="tier1", method=method)))
        if of:
            accuracy, error = zip(*front(of))
            wide, high = zip(*(of[point] for point in front(of)))
            bars = {"xerr": [100 * w for w in wide], "yerr": high, "elinewidth": 0.8}
            lines.append((method, [100 * a for a in accuracy], error, bars))
    axis = {"xlabel": "test accuracy, %", "ylabel": "attacker's MSE, test images (log scale)"}
    draw_lines(root / "figures/curves.png", lines, **axis)
    words = "Test accuracy against the attacker's error, mean and standard deviation over the seeds"
    return f"![{words}](figures/curves.png)"


def equal_accuracy(found, root, name="equal_accuracy", methods=METHODS, columns=10):
    """Tier 1, seed 0: noise alone at one σ, and every other method at its setting nearest in accuracy, of
    those that have as many seeds, with its gain over noise alone at its own accuracy."""
    found = select(found, family="tier1")
    seeds = lambda r: len(select(found, method=r["method"], setting=r["setting"]))
    noise = select(found, name=f"tier1-none-sigma{MIDDLE['none']:g}-seed0")
    curve = line(select(found, method="none")).get(0, {}).values()
    rows = []
    for method in methods if noise else ():
        runs = select(found, method=method) if method != "none" else noise
        runs = [r for r in runs if r["config"]["seed"] == 0 and seeds(r) >= seeds(noise[0])]
        for r in sorted(runs, key=lambda r: abs(r["accuracy"] - noise[0]["accuracy"]))[:1]:
            over_noise = gain([(r["accuracy"], r["figures"]["mse"])], curve)
            figures = f"accuracy {100 * r['accuracy']:.1f} %\nMSE {r['figures']['mse']:.4f}"
            figures += f"\ngain {over_noise:.2f}" if over_noise and method != "none" else ""
            label = f"{in_words(method)}\n{in_words(r['setting'])}\n{figures}"
            rows.append((label, root / f"cells/cifar/{r['name']}.png", r))
    drawn = stack_rows(root / f"figures/{name}.png", rows, columns)
    words = f"Originals; noise alone, σ = {MIDDLE['none']:g}; each method at its setting of the nearest accuracy; seed 0"
    return f"![{words}](figures/{name}.png)" if drawn else ""


def attackers(found, root):
    """Seed 0, one point a method: the error against what the decoder's training cost, tier 1 and tier 3."""
    families = ("tier1", *(f"tier3{budget}" for budget in BUDGETS))
    cost, lines = lambda r: r["attacks"]["decoder"]["operations"], []
    for method in METHODS:
        of = point_cells(found, method, families)
        if len(of) > 1:
            of = sorted(of, key=cost)
            error = [r["attacks"]["decoder"]["test"]["mse"] for r in of]
            label = {"label": f"{in_words(method)}, {in_words(of[0]['setting'])}"}
            lines.append((method, list(map(cost, of)), error, label))
    if not lines:
        return ""
    words = "operations of the decoder's training (a multiply-add counts two)"
    axis = {"xscale": "log", "xlabel": words, "ylabel": "decoder's MSE, test images (log scale)"}
    draw_lines(root / "figures/attackers.png", lines, **axis)
    points = "Points from the left: 2x48 and 4x64, ten epochs; 4x64 and 8x64, twenty"
    return f"![The attacker's error against what its training cost, seed 0. {points}](figures/attackers.png)"
