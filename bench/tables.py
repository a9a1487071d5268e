"""bench/RESULTS.md and README's table, made from bench/cells alone; and `compare`, the same for any runs.

A section is an entry of SECTIONS: grid, which of its families, title, text, table, pictures. It appears with
its first cell. The first of them opens the page, the others stand below the words about it.
"""

import math
import re
import statistics
from pathlib import Path

from bench import pictures
from bench.finished import ROOT, in_words, line, load_cells, read_cell, select, speed_rows
from bench.gain import gain_interval, points_at
from bench.grids import METHODS, POINTS, PRESETS, cifar, points
from harness.files import UserError, read_ours, say, write
from harness.options import OF_THE_PLACE

# column: (key in a cell's "figures", scale, digits)
COLUMNS = {"accuracy %": ("accuracy", 100, 2), "attacker's MSE (test)": ("mse", 1, 4), "SSIM": ("ssim", 1, 3),
           "leakage, bits ≤": ("bits", 1, 0), "dFIL": ("dfil", 1, 2)}  # fmt: skip
COST = {"cost of a step": ("cost", 1, 2)}
CHOICE = {"validation accuracy %": ("val_accuracy", 100, 2)}
EACH = {f"MSE of {name}": (name, 1, 4) for name in ("decoder", "gan", "whitebox")}
NOISE_OF = {"tier2": "tier1"}  # the family whose noise alone a family stands beside, where it has none itself
CHOSEN = [tuple(name.split("-")) for name, _ in points(noises=METHODS["none"][2], at=POINTS)]
# the rows of the first table (family, method, setting), and of README's table and picture
MAIN = [("tier1", *point) for point in CHOSEN]
TIER2 = r"tier2-.*-seed0|scratch-patrol.*-seed0"
MAIN += [tuple(name.split("-")[:3]) for name in cifar() if re.fullmatch(TIER2, name)]
LEFT_OUT = {"sigma0.15", "sigma0.25", "sigma0.3", "released", "direct+slot_image"}
SHORT = [key for key in MAIN if key[0] == "tier1" and not LEFT_OUT & {*key}]
PICTURED = ("none", "gmm", "direct", "noise_arl+direct")


# figures of a cell of which more is more private
MSE, FEWER_BITS = lambda figures: figures["mse"], lambda figures: 1 / figures["bits"]
COSTS = (0.5, 1, 1.5, 2, 2.5)  # points of test accuracy below noise alone at σ = 0.1
GAINS = "**Gain at equal cost.** The gain over noise alone where a method has cost so many points of accuracy,\n"
GAINS += "read off its curve: between its settings log MSE is linear in accuracy."
BITS = "**Bits at equal cost.** The bound on bits, divided by that of noise alone at the same accuracy. Below 1:\n"
BITS += "tighter than noise."


def markdown(header, rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def figures(results, columns=COLUMNS):
    """Mean ± standard deviation over the results of each column; a cost was measured once for all of them."""
    shown = []
    for key, scale, digits in columns.values():
        values = [scale * r["figures"][key] for r in results if r["figures"].get(key) is not None]
        spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 and key != "cost" else ""
        shown.append(f"{statistics.fmean(values):.{digits}f}{spread}" if values else "–")
    return shown


def show_gain(own, other, runs, through=None):
    """With its interval from three seeds on, and their number where those are fewer than the runs."""
    mean, low, high, n = gain_interval(own, other, through)
    interval = f" ({low:.2f} to {high:.2f})" if n > 2 else ""
    return f"{mean:.2f}{interval}{f' [{n} of {runs} seeds]' if n < runs else ''}" if n else "–"


def standing(found, family, method, setting=""):
    """What a family's gains are measured by: of noise alone the curve, of another method one point, in tier 1
    that of POINTS; or this setting. Tier 2 stands beside tier 1's."""
    for place in (family, NOISE_OF.get(family)):
        runs = select(found, family=place, method=method)
        stands = lambda r: place != "tier1" or (method, r["setting"]) in CHOSEN
        runs = [r for r in runs if (r["setting"] == setting if setting else stands(r))]
        if runs:
            break
    return runs


def table(found, more, over=(), rows=(), columns=COLUMNS, families=""):
    """A row a setting of the families, or these `rows` alone; its gain over `over` at its own accuracy."""
    lines, columns = [], columns | more
    keys = dict.fromkeys((r["family"], r["method"], r["setting"]) for r in found)
    for key in [key for key in rows or keys if key in keys and re.match(families, key[0])]:
        family, method, setting = key
        results = select(found, family=family, method=method, setting=setting)
        name = [family * (not rows), in_words(method), in_words(setting)]
        name += ["from scratch"] * (bool(rows) and family == "scratch")
        row = [" ".join(filter(None, name)), *figures(results, columns)]
        of = {name: line(standing(found, family, name)) for name in ("none", *over)}
        for other in over:
            through = None if other == "none" else of["none"]
            shown = "1" if other == method else "–" if method == "none" else None
            row.append(shown or show_gain(line(results), of[other], len(results), through))
        lines.append([*row, str(len(results))])
    gains = [f"gain over {in_words(other)} (95 %)" for other in over]
    return markdown(["method", *columns, *gains, "n"], lines)


def accuracies(found, method="none", setting="sigma0.1"):
    """{seed: accuracy} of one setting of tier 1; costs are counted from noise alone at σ = 0.1."""
    runs = select(found, family="tier1", method=method, setting=setting)
    return {r["config"]["seed"]: r["accuracy"] for r in runs}


def at_cost(found, method, cost, figure):
    """A method's curve of tier 1 where it has cost so many points of accuracy; of noise alone all of it."""
    runs = select(found, family="tier1", method=method)
    curve = line([r for r in runs if figure is MSE or (r["figures"]["bits"] or 0) > 0], figure)
    there = {seed: accuracy - float(cost) / 100 for seed, accuracy in accuracies(found).items()}
    return curve if method == "none" else points_at(curve, there)


def by_cost(found, _):
    """Tier 1: the gain of every method where it costs as much accuracy, and its bits over those of noise."""
    blocks, runs = [], lambda method: len(line(select(found, family="tier1", method=method)))
    for figure, words in ((MSE, GAINS), (FEWER_BITS, BITS)):
        rows, noise = [], at_cost(found, "none", 0, figure)
        for method in filter(runs, list(METHODS)[1:]):
            sides = [(at_cost(found, method, cost, figure), noise) for cost in COSTS]
            sides = sides if figure is MSE else [side[::-1] for side in sides]
            rows.append([in_words(method), *(show_gain(*side, runs(method)) for side in sides)])
        heads = [f"{cost:g}" for cost in COSTS]
        blocks += [words, markdown(["points of accuracy given up:", *heads], rows)] if rows else []
    return "\n\n".join(blocks)


JPEG = "This CIFAR-10 was re-saved as JPEG: its figures compare with each other, not with a paper's."
POINT, SETTING = {"more": COST, "over": ["none", "gmm"], "rows": MAIN}, {"more": CHOICE, "over": ["none"]}
SECTIONS = [
    ("cifar", "tier[12]|scratch", "CIFAR-10: each method against more noise",
     f"Networks of width 32, hardened; of width 16 where a row says *from scratch*. {JPEG}",
     POINT, by_cost, pictures.curves, pictures.attackers, pictures.equal_accuracy),
    ("cifar", "tier[12]", "CIFAR-10: every setting",
     f"Gains are at the setting's own accuracy. {JPEG}", SETTING),
    ("cifar", "scratch", "CIFAR-10: trained from scratch", JPEG, SETTING),
    ("cifar", "tier3(?!attackers)", "CIFAR-10: stronger decoders",
     f"One seed, one point a method. {JPEG}", SETTING),
    ("cifar", "tier3attackers", "CIFAR-10: three attackers",
     "One seed, one point a method. Each attacker's error is that on the first 64 test images, which all\n"
     "of them reconstruct. The gain is that against the strongest of the three, chosen on other images.\n"
     + JPEG,
     {"more": EACH, "over": ["none"], "columns": dict(list(COLUMNS.items())[:1])}),
    ("cifar", "tier4", "CIFAR-10: one thing changed at a time", JPEG, SETTING),
    ("bases", "", "The networks that are hardened",
     f"w32, w16: CIFAR-10 at width 32 and 16. No surrogate, one thread. {JPEG}", {"more": CHOICE}),
    ("datasets", "", "Other images", "Decoder of 2x48.", SETTING),
    ("shapes", "", "Drawn images: the default run of each surrogate",
     "The same command with another `--surrogate`, each at its default λ. Accuracies differ, so this shows\n"
     "what a run gives, not which loss is better. `clean` is a run without noise.",
     {"more": COST}, pictures.shapes),
    ("again", "", "The first command on two threads",
     "Rounding differs with the number of threads, and training carries it far: compare with gated above,\n"
     "which ran on one.", {"more": {}}),
]  # fmt: skip
# what a section says of the families that it shows
FAMILIES = {
    "tier1": "networks of width 32, hardened by each method",
    "tier2": "other defences, alone and with a surrogate, hardened likewise",
    "scratch": "networks of width 16, trained with the method from the start, as PATROL has to be",
    "tier3attackers": "the decoder of tier 1, a GAN of its size, white-box from what the decoder painted",
    "tier3size2x48": "a smaller decoder than tier 1 has",
    "tier3epochs20": "the decoder of tier 1, trained twice as long",
    "tier3size8x64": "the paper's decoder, trained twice as long",
    "tier3looks10": "that smaller decoder, which averages ten transmissions of a picture",
    "tier4": "networks of width 16, hardened, against a decoder of 2x48",
    "tier4batch32": "the same in batches of 32 images, noise alone too; gated and slot remember 32 samples of a\n"
    "class where a row does not say otherwise",
    "tier4batch512": "the same in batches of 512",
    "tier4cut1": "trained from scratch with one unit on the device, against a decoder of 4x64",
    "tier4cut3": "the same with three",
    "tiny": "180 classes of Tiny ImageNet at 32x32, networks of width 16, hardened",
    "faces": "40 people's faces at 64x64, networks of width 16, from scratch",
}


def fill(page, name, body):
    """Put `body` between <!-- name --> and <!-- /name --> of a page."""
    text = read_ours(page, lambda page: page.read_text(encoding="utf-8"))
    marked = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    if not re.search(marked, text, re.S):
        raise UserError(f"{page}: it has no <!-- {name} --> ... <!-- /{name} --> to fill; put them back.")
    write(page, re.sub(marked, lambda m: f"{m[1]}{body}\n{m[2]}", text, flags=re.S))


def fill_prose(page, found):
    """Numbers in prose. **...**<!-- gain A over B --> becomes what tier 1 has, with its interval; A@SETTING
    has another setting than the first table. With `bits` for `gain` it is B's leakage divided by A's at equal
    accuracy; with `in FAMILY` it is another family's, with `of seed N` that of one seed, with `at COST` that of
    their curves where they have cost so many points of accuracy. `cost A@SETTING`: points of accuracy below
    noise alone at σ = 0.1, mean ± standard deviation over the seeds."""
    text = read_ours(page, lambda page: page.read_text(encoding="utf-8"))
    of = {"gain": MSE, "bits": FEWER_BITS}

    def fill_in(m):
        mark, what, a, b, family, cost, seed = m.groups(default="")
        runs = [r for r in found if seed in ("", str(r["config"]["seed"]))]

        def side(words):
            method, _, setting = ("none" if words == "noise" else words).partition("@")
            if cost:
                return at_cost(runs, method, cost, of[what])
            return line(standing(runs, family or "tier1", method, setting), of[what])

        own, through = side(a), None if cost or b == "noise" else side("noise")
        of_seeds = line(select(runs, family="tier1", method=b if a == "noise" else a)) if cost else own
        return f"**{show_gain(own, side(b), len(of_seeds), through)}**<!-- {mark} -->"

    def fill_cost(m):
        method, _, setting = m[2].partition("@")
        own, start = accuracies(found, method, setting), accuracies(found)
        given_up = [100 * (start[seed] - own[seed]) for seed in own if seed in start]
        spread = f" ± {statistics.stdev(given_up):.1f}" if len(given_up) > 1 else ""
        return f"**{statistics.fmean(given_up):.1f}{spread}**<!-- {m[1]} -->" if given_up else m[0]

    text = re.sub(r"\*\*[^*]*\*\*<!-- (cost (\S+)) -->", fill_cost, text)
    marked = r"((gain|bits) (\S+) over (\S+)(?: in (\S+))?(?: at ([\d.]+))?(?: of seed (\d+))?)"
    write(page, re.sub(rf"\*\*[^*]*\*\*<!-- {marked} -->", fill_in, text))


def fill_readme(page, found, shapes, again):
    """README's first table, and what to expect of its first command: the range over all cells that ran it."""
    if found:
        columns = dict(list(COLUMNS.items())[:2])
        fill(page, "table", table(found, {}, ["none"], SHORT, columns))
    plain, again = select(shapes, method="none"), select(shapes, method="gated") + again
    if plain and again:
        of = {key: [round(1000 * r["figures"][key], 3) for r in again] for key in ("accuracy", "mse")}
        low = {key: math.floor(min(values)) for key, values in of.items()}
        high = {key: math.ceil(max(values)) for key, values in of.items()}
        accuracy = f"{low['accuracy'] / 10:.1f} to {high['accuracy'] / 10:.1f} %"
        mse = f"{low['mse'] / 1000:.3f} to {high['mse'] / 1000:.3f} on test images"
        without = f"{statistics.fmean(r['figures']['mse'] for r in plain):.3f} without a loss"
        runs = f"{without}; {len(again)} runs: seeds 0 to 2, on one and on two threads"
        fill(page, "expect", f"Expect an accuracy of {accuracy} and an MSE of {mse}\n({runs}).")


def report(root=ROOT):
    """Rewrite what stands between the markers of RESULTS.md and README.md, and the figures."""
    cells, first, rest = {preset: load_cells(preset, root) for preset in PRESETS}, [], []
    for preset, families, title, words, columns, *drawn in SECTIONS:
        found, blocks = cells[preset], first if title == SECTIONS[0][2] else rest
        there = dict.fromkeys(r["family"] for r in found if re.match(families, r["family"]))
        if there:
            named = [] if "rows" in columns else [family for family in there if family in FAMILIES]
            say_of = [f"{family}: {FAMILIES[family]}." for family in named]
            blocks += [
                f"## {title}",
                " ".join([f"`python -m bench run --preset {preset}`.", words, *say_of]),
                table(found, families=families, **columns),
            ]
            blocks += filter(None, (picture(found, root) for picture in drawn))
    rows = [[r["what"], f"{r['ratio']:.2f}"] for r in speed_rows(root)]
    words = "`python -m bench speed`. Ratios of times, both sides measured in turns in one run, medians."
    rest += ["## Speed", words, markdown(["what", "ratio"], rows)] if rows else []
    for name, blocks in (("first", first), ("rest", rest)):
        body = "\n\n".join(blocks) or "No cell has been run with this version yet."
        fill(root / "RESULTS.md", name, f"\n{body}\n")
    readmes = [page for page in (root.parent / "README.md", root.parent / "README.zh.md") if page.exists()]
    for page in (root / "RESULTS.md", *readmes):
        fill_prose(page, cells["cifar"] + cells["datasets"])
    for page in readmes:
        fill_readme(page, *(cells[preset] for preset in ("cifar", "shapes", "again")))
    pictures.equal_accuracy(cells["cifar"], root, "readme", PICTURED, 6)


def compare(folders, out):
    """One table of runs on the terminal, with the settings in which they differ, and one picture."""
    runs = {folder: read_cell(folder / "results.json") for folder in map(Path, folders)}
    configs = [r["config"] for r in runs.values()]
    differing = lambda key: any(c.get(key) != configs[0][key] for c in configs)
    names = [key for key in configs[0] if key not in OF_THE_PLACE and differing(key)]
    rows = [["run", *COLUMNS, "differs in"]]
    show = lambda v: "+".join(map(str, v if isinstance(v, list) else [v]))
    for folder, r in runs.items():
        differs = ", ".join(f"{k} {show(r['config'].get(k)) or 'none'}" for k in names)
        rows.append([folder.name, *figures([r]), differs])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        say("  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip())
    path = Path(out) / "compare.png"
    sheets = [(folder.name, folder / "reconstructions.png", r) for folder, r in runs.items()]
    drawn = pictures.stack_rows(path, sheets)
    say(f"-> {path}" if drawn else "no picture: none of these runs was attacked")
