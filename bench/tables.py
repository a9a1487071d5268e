"""bench/RESULTS.md and its figures, made from bench/cells alone; and `compare`, the same for any runs.

A section is an entry of SECTIONS: grid, title, text, table, picture. It appears with its first cell.
"""

import json
import math
import re
import statistics
from pathlib import Path

from PIL import Image, ImageDraw  # comes with torchvision

from bench.gain import front, gain_interval, mean_points
from bench.grids import ATTACKERS, METHODS, POINTS, cells, made_by, points, vary
from harness.evaluation import LABEL_WIDTH
from harness.files import UserError, read_ours, say, write
from harness.monitor import figure_of, save
from harness.options import OF_THE_PLACE

ROOT = Path(__file__).resolve().parent
# column: (key in a cell's "figures", scale, digits)
COLUMNS = {"accuracy %": ("accuracy", 100, 2), "attacker's MSE (test)": ("mse", 1, 4), "SSIM": ("ssim", 1, 3),
           "leakage, bits ≤": ("bits", 1, 0), "dFIL": ("dfil", 1, 2)}  # fmt: skip
COST = {"cost of a step": ("cost", 1, 2)}
CHOICE = {"validation accuracy %": ("val_accuracy", 100, 2), "minutes": ("minutes", 1, 0)}
COMPARED_AT = "sigma0.15"  # noise alone whose accuracy the picture of reconstructions compares at
SIZES = [name for name in ATTACKERS if name.startswith("size")]
NOISE_OF = {"tier2": "tier1"}  # the family whose noise alone a family stands beside, where it has none itself


def read_cell(path):
    """results.json of a run, with "figures"; NaN counts as missing. What is wrong with it is one sentence."""

    def read(path):
        r = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
        # the attacker that is the strongest on the stop images; of several, on images that all have seen
        test = r["attacks"][r["strongest"]]["test"] if r["attacks"] else {"mse": None, "ssim": None}
        common = {k: test.get(f"{k}_common", test[k]) for k in ("mse", "ssim")}
        needed = {k: r[k] for k in ("accuracy", "val_accuracy")} | {"mse": common["mse"]}
        if not all(0 <= v < math.inf for v in needed.values() if v is not None or r["attacks"]):
            raise ValueError("a figure is no number")
        minutes = (r["seconds"]["train"] + r["seconds"]["attack"]) / 60
        return r | {"figures": {**needed, **r["leakage"], "ssim": common["ssim"], "minutes": minutes}}

    return read_ours(path, read)


def current_cell(path, flags):
    """The cell if it is whole and was made by these flags under the defaults of today, else None."""
    try:
        cell = read_cell(path) if path.exists() else None
        if cell is None or read_ours(path, lambda _: made_by(cell, flags)):
            return cell
        say(f"{path}: made with other settings than its grid has now; it does not count")
    except UserError as error:
        say(error)


def speed_rows(root):
    path = root / "cells" / "speed.json"
    return read_ours(path, lambda path: json.loads(path.read_text())["rows"]) if path.exists() else []


def load_cells(preset, root=ROOT):
    """The finished cells, each with its name taken apart; a file of any other name is not ours."""
    found, cost = [], {r["name"]: r["ratio"] for r in speed_rows(root) if r["part"] == "step"}
    for name, flags in cells(preset):
        r = current_cell(root / "cells" / preset / f"{name}.json", flags)
        *family, method, setting = [*name.split("-")[:-1], *[""] * (name.count("-") == 1)]
        if r:
            found.append(r | {"name": name, "family": "".join(family), "method": method, "setting": setting})
            r["figures"]["cost"] = 1 if method in ("none", "clean") else cost.get(method)
    starts = {(r["base"]["name"], r["base"]["hash"]) for r in found if r.get("base")}
    if len(starts) > len({name for name, _ in starts}):  # then a comparison would not be paired
        raise UserError(f"cells/{preset}: some start from different networks of one name; run those again.")
    return found


def select(found, **wanted):
    return [r for r in found if all(r[k] == v for k, v in wanted.items())]


def is_point(method, setting):
    """Whether it is the one setting that stands for a method."""
    return vary(method, POINTS[method])[0][0] == f"{method}-{setting}"


def line(found):
    """{seed: {setting: (accuracy, MSE)}}"""
    by_seed = {}
    for r in found:
        by_seed.setdefault(r["config"]["seed"], {})[r["setting"]] = r["accuracy"], r["figures"]["mse"]
    return by_seed


def markdown(header, rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def figures(results, columns=COLUMNS):
    """Mean ± standard deviation over the results of each column."""
    shown = []
    for key, scale, digits in columns.values():
        values = [scale * r["figures"][key] for r in results if r["figures"].get(key) is not None]
        spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        shown.append(f"{statistics.fmean(values):.{digits}f}{spread}" if values else "–")
    return shown


def show_gain(own, other, runs, through=None):
    """With its interval, and the number of seeds it stands on where those are fewer than the runs."""
    mean, low, high, n = gain_interval(own, other, through)
    interval = f" ({low:.2f} to {high:.2f})" if low else ""
    return f"{mean:.2f}{interval}{f' [{n} of {runs} seeds]' if n < runs else ''}" if n else "–"


def table(found, more, over=(), whole=False, columns=COLUMNS):
    """A row a setting, with its gain over each method of `over` in its family, at its own accuracy. `whole`:
    of tier 1 only noise alone and the point of each method, with the gain of its whole curve."""
    rows, columns = [], columns | more
    keys = dict.fromkeys((r["family"], r["method"], r["setting"]) for r in found)
    if whole:
        keys = [key for key in (("tier1", *name.split("-")) for name, _ in points()) if key in keys]
    for family, method, setting in keys:
        curve = select(found, family=family, method=method)
        results = select(curve, setting=setting)
        name = ["noise alone" if method == "none" else method, re.sub(r"(?<=[a-z])(?=\d)", " ", setting)]
        name = name if whole else [family, method, setting]
        row = [" ".join(filter(None, name)), *figures(results, columns)]
        beside = select(found, family=NOISE_OF.get(family, family))
        of = {name: line(select(beside, method=name)) for name in ("none", *over)}
        for other in over:
            own, through = line(curve if whole else results), None if other == "none" else of["none"]
            row.append("1" if other == method else show_gain(own, of[other], len(results), through))
        rows.append([*row, str(len(results))])
    gains = [f"gain over {'noise alone' if other == 'none' else other} (95 %)" for other in over]
    return markdown(["method", *columns, *gains, "n"], rows)


def stack_rows(path, runs):
    """One sheet of [(label, reconstructions.png, results)]: what the first attacker, the decoder, made of
    each run, under the originals, repeated where they are others. -> whether there was anything to draw"""
    rows, shown = [], None
    for label, file, r in runs:
        if r["attacks"] and file.exists():
            sheet = read_ours(file, lambda file: Image.open(file, formats=["PNG"]).convert("RGB"))
            tile = sheet.height // (1 + len(r["attacks"]))
            original, made = (sheet.crop((LABEL_WIDTH, i, sheet.width, i + tile)) for i in (0, tile))
            rows += [("original", original)] if shown != original.tobytes() else []
            rows.append((label.encode("ascii", "replace").decode(), made))
            shown = original.tobytes()
    if rows:
        ruler, tile = ImageDraw.Draw(Image.new("RGB", (1, 1))), rows[0][1].height
        left = 10 + int(max(ruler.textlength(label) for label, _ in rows))
        rows = [(label, strip.resize((strip.width * tile // strip.height, tile))) for label, strip in rows]
        out = Image.new("RGB", (left + max(strip.width for _, strip in rows), tile * len(rows)), "white")
        for i, (label, strip) in enumerate(rows):
            out.paste(strip, (left, i * tile))
            ImageDraw.Draw(out).text((5, i * tile + tile // 2 - 5), label, fill="black")
        write(path, lambda temporary: out.save(temporary, format="PNG"))
    return bool(rows)


def shapes_picture(found, root):
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
        axes.yaxis.set_major_formatter("{x:.3f}")
        axes.yaxis.set_minor_formatter("{x:.3f}")
        colours = dict(zip(METHODS, ["black", *(f"C{i}" for i in range(len(METHODS)))]))
        for method, x, error, look in lines:
            axes.plot(x, error, "o-", color=colours[method], **look)
        axes.legend(fontsize=8)
        save(figure, path)


def curves_picture(found, root):
    """Tier 1: every seed a thin line, the means of equal settings a thick one."""
    lines = []
    for method in METHODS:
        by_seed = line(select(found, family="tier1", method=method))
        thin = [(of.values(), {"linewidth": 0.5, "markersize": 1.5}) for of in by_seed.values()]
        for of, look in [(mean_points(by_seed), {"label": method}), *thin]:
            if of:
                accuracy, error = zip(*front(of))
                lines.append((method, [100 * a for a in accuracy], error, look))
    axis = {"xlabel": "test accuracy, %", "ylabel": "attacker's MSE, test images"}
    draw_lines(root / "figures/curves.png", lines, **axis)
    return "![Test accuracy against the attacker's error](figures/curves.png)"


def equal_accuracy_picture(found, root):
    """Tier 1, seed 0: noise alone at one σ, and of every other method the setting nearest to its accuracy."""
    runs = [r for r in select(found, family="tier1") if r["config"]["seed"] == 0]
    reference = select(runs, method="none", setting=COMPARED_AT)
    rows = []
    for method in dict.fromkeys(r["method"] for r in runs) if reference else ():
        distance = lambda r: abs(r["accuracy"] - reference[0]["accuracy"])
        r = reference[0] if method == "none" else min(select(runs, method=method), key=distance)
        label = f"{method}  {100 * r['accuracy']:.1f} %  MSE {r['figures']['mse']:.4f}"
        rows.append((label, root / f"cells/cifar/{r['name']}.png", r))
    drawn = stack_rows(root / "figures/equal_accuracy.png", rows)
    words = "Originals above what the decoder made of them, every method near the accuracy of one noise level"
    return f"![{words}, seed 0](figures/equal_accuracy.png)" if drawn else ""


def attackers_picture(found, root):
    """Seed 0, one point a method: the error against the size of the decoder, from tier 1 and tier 3."""
    families = ("tier1", *(f"tier3{size}" for size in SIZES))
    runs = [r for r in found if r["family"] in families and r["config"]["seed"] == 0]
    runs = [r for r in runs if is_point(r["method"], r["setting"])]
    size, lines = lambda r: r["attacks"]["decoder"]["params"], []
    for method in METHODS:
        of = select(runs, method=method)
        if len(of) > 1:
            of = sorted(of, key=size)
            error = [r["attacks"]["decoder"]["test"]["mse"] for r in of]
            lines.append((method, list(map(size, of)), error, {"label": method}))
    if not lines:
        return ""
    axis = {"xscale": "log", "xlabel": "parameters of the decoder", "ylabel": "its MSE, test images"}
    draw_lines(root / "figures/attackers.png", lines, **axis)
    return "![The decoder's error against its size, seed 0](figures/attackers.png)"


JPEG = "This CIFAR-10 was re-saved as JPEG: its figures compare with each other, not with a paper's."
POINT, SETTING = {"more": COST, "over": ["none", "gmm"], "whole": True}, {"more": CHOICE, "over": ["none"]}
SECTIONS = [
    ("cifar", "CIFAR-10: each method against more noise",
     "Networks of width 32, hardened by each method. A row is one setting of a method; its gains are those\n"
     f"of the curve through all settings that every seed ran. {JPEG}",
     POINT, curves_picture, attackers_picture, equal_accuracy_picture),
    ("cifar", "CIFAR-10: every setting",
     "Gains are at the setting's own accuracy. tier2: other defences, alone and with a surrogate. scratch:\n"
     "networks of width 16, trained with the method from the start. tier3: one seed, against stronger\n"
     f"attackers. tier4: one seed, networks of width 16, one thing changed at a time. {JPEG}", SETTING),
    ("bases", "CIFAR-10: the networks that are hardened",
     f"Width 32 and 16, trained on 45,000 images without a surrogate, one thread. {JPEG}", {"more": CHOICE}),
    ("datasets", "Other images", "180 classes of Tiny ImageNet at 32x32, and faces; from scratch.", SETTING),
    ("shapes", "Drawn images: the default run of each surrogate",
     "The same command with another `--surrogate`, each at its default λ. Accuracies differ, so this shows\n"
     "what a run gives, not which loss is better. `clean` is a run without noise.",
     {"more": COST}, shapes_picture),
    ("again", "The first command on two threads",
     "Rounding differs with the number of threads, and training carries it far: compare with gated above,\n"
     "which ran on one.", {"more": {}}),
]  # fmt: skip


def fill(page, name, body):
    """Put `body` between <!-- name --> and <!-- /name --> of a page."""
    text = read_ours(page, lambda page: page.read_text(encoding="utf-8"))
    marked = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    if not re.search(marked, text, re.S):
        raise UserError(f"{page}: it has no <!-- {name} --> ... <!-- /{name} --> to fill; put them back.")
    write(page, re.sub(marked, lambda m: f"{m[1]}{body}\n{m[2]}", text, flags=re.S))


def fill_gains(page, root):
    """Numbers in prose: **...**<!-- gain A over B --> becomes what tier 1 has, with its interval."""
    found, text = load_cells("cifar", root), read_ours(page, lambda page: page.read_text(encoding="utf-8"))
    curve = lambda name: line(select(found, family="tier1", method="none" if name == "noise" else name))

    def shown(match):
        a, b, through = curve(match[1]), curve(match[2]), None if match[2] == "noise" else curve("noise")
        return f"**{show_gain(a, b, len(a), through)}**<!-- gain {match[1]} over {match[2]} -->"

    write(page, re.sub(r"\*\*[^*]*\*\*<!-- gain (\S+) over (\S+) -->", shown, text))


def fill_readme(page, root):
    """README's first table, and what to expect of its first command: the range over all cells that ran it."""
    found = [r for r in load_cells("shapes", root) if r["method"] != "clean"]
    again = select(found, method="gated") + load_cells("again", root)
    if again:
        columns = dict(list(COLUMNS.items())[:2])
        fill(page, "shapes", table(found, {}, columns=columns))
        thousandths = {
            key: [round(1000 * r["figures"][key], 3) for r in again] for key in ("accuracy", "mse")
        }
        low = {key: math.floor(min(values)) for key, values in thousandths.items()}
        high = {key: math.ceil(max(values)) for key, values in thousandths.items()}
        accuracy = f"{low['accuracy'] / 10:.1f} to {high['accuracy'] / 10:.1f} %"
        mse = f"{low['mse'] / 1000:.3f} to {high['mse'] / 1000:.3f} on test images"
        runs = f"{len(again)} runs: seeds 0 to 2, on one and on two threads"
        fill(page, "expect", f"Expect an accuracy of {accuracy} and an MSE of {mse}\n({runs}).")


def report(root=ROOT):
    """Rewrite what stands between the markers of RESULTS.md and README.md, and the figures."""
    blocks = []
    for preset, title, words, columns, *pictures in SECTIONS:
        found = load_cells(preset, root)
        if found:
            blocks += [
                f"## {title}",
                f"`python -m bench run --preset {preset}`. {words}",
                table(found, **columns),
            ]
            blocks += filter(None, (picture(found, root) for picture in pictures))
    rows = [[r["what"], f"{r['ratio']:.2f}"] for r in speed_rows(root)]
    words = "`python -m bench speed`. Ratios of times, both sides measured in turns in one run, medians."
    blocks += ["## Speed", words, markdown(["what", "ratio"], rows)] if rows else []
    body = "\n\n".join(blocks) or "No cell has been run with this version yet."
    fill(root / "RESULTS.md", "results", f"\n{body}\n")
    fill_gains(root / "RESULTS.md", root)
    for page in (root.parent / "README.md", root.parent / "README.zh.md"):
        if page.exists():
            fill_readme(page, root)


def compare(folders, out):
    """One table of runs on the terminal, with the settings in which they differ, and one picture."""
    runs = {folder: read_cell(folder / "results.json") for folder in map(Path, folders)}
    configs = [r["config"] for r in runs.values()]
    names = [
        k for k in configs[0] if k not in OF_THE_PLACE and any(c.get(k) != configs[0][k] for c in configs)
    ]
    rows, show = (
        [["run", *COLUMNS, "differs in"]],
        lambda v: "+".join(map(str, v if isinstance(v, list) else [v])),
    )
    for folder, r in runs.items():
        differs = ", ".join(f"{k} {show(r['config'].get(k)) or 'none'}" for k in names)
        rows.append([folder.name, *figures([r]), differs])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        say("  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip())
    path = Path(out) / "compare.png"
    drawn = stack_rows(path, [(folder.name, folder / "reconstructions.png", r) for folder, r in runs.items()])
    say(f"-> {path}" if drawn else "no picture: none of these runs was attacked")
