"""The README's tables and figures, from the finished cells in results/ alone."""

import json
import re
import statistics
from pathlib import Path

import speed
from attack import ATTACKS
from gain import front, gain_interval, gains_by_seed, mean_points, whole_curves
from options import DEFAULTS, NOT_SETTINGS, parse
from report import LABEL_WIDTH, UserError, write, write_atomic

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
SURROGATES, ATTACKERS = tuple(DEFAULTS), tuple(ATTACKS)
METHODS = (*SURROGATES, "cluster_k1", "distcorr", "distcorr_cluster", "noise_arl", "noise_arl_cluster", "patrol",
           "patrol_cluster")  # rows of the CIFAR-10 tables; cluster_k1 is cluster with K = 1
OF_SURROGATE = ("lambd", "scale", "warmup", "ramp", "eta_ref", "clip", "stash", "var_threshold", "floor", "pool", "refresh_every", "refresh_samples",
                "variance")  # settings that mean nothing without one
PICTURED = ("shapes", "cpu")  # grids whose first seed's pictures stand in a figure
UNDEFENDED = ("none-sigma0.1-seed0", "cluster-lambda0.2-seed0")  # what the baselines are compared with: the same, without a defence
COMPARED = ("none", "gmm", "cluster")  # what a curve is compared with
POINT_HEADER = ["accuracy %", "decoder MSE (test)", "gain over noise alone", "leakage, bits ≤", "n"]
TOPICS = {"form": ("variance", "form", "floor", "var-threshold", "covariance"), "clusters": ("clusters",), "schedule": ("eta-ref", "warmup"),
          "batch": ("batch-size",), "attention": ("attention", "measure-on"), "slots": ("slots",), "gates": ("off",), "depth": ("cut",),
          "noise": ("sigma",)}  # of the ablations


def read_cell(path):
    """The cell's results, or None where it is missing or not whole."""
    try:
        cell = json.loads(path.read_text())
        return cell if "accuracy" in cell else None
    except (OSError, ValueError):
        return None


def finished(path, flags):
    """Whether the cell is there and whole, and was made by `flags` with the defaults of today."""
    cell = read_cell(path)
    if cell is None or cell["environment"]["command"] != f"python train.py {flags}":
        return False
    wanted = vars(parse(flags.split()))
    ignored = NOT_SETTINGS if wanted["surrogate"] != "none" else (*NOT_SETTINGS, *OF_SURROGATE)
    return all(cell["config"].get(k, v) == v for k, v in wanted.items() if k not in ignored)


def load_cells(preset, results=RESULTS):
    """-> {name: results} of the finished cells."""
    found = {path.stem: read_cell(path) for path in sorted((results / preset).glob("*.json"))}
    return {name: cell for name, cell in found.items() if cell is not None}


def by_setting(found):
    """{name without its seed: [results of every seed]}"""
    groups = {}
    for name, r in found.items():
        groups.setdefault(re.sub(r"-seed\d+$", "", name), []).append(r)
    return groups


def point(r):
    return r["accuracy"], r["attacks"]["decoder"]["test"]["mse"]


def bits_point(r):
    """(accuracy, 1 / bits): as for the error, more is better. Less than one bit counts as one."""
    return r["accuracy"], 1 / max(r["leakage"]["bits"], 1)


def curves(found, point=point):
    """{method: {seed: [(accuracy, decoder MSE on test)]}}, or another `point`, from {name: results}; the method is the name's first word."""
    found_curves = {}
    for name, r in found.items():
        found_curves.setdefault(name.split("-")[0], {}).setdefault(r["config"]["seed"], []).append(point(r))
    return found_curves


def noise_alone(found):
    """{seed: points} of the cells without a surrogate."""
    return curves(found).get("none", {})


def own_points(results):
    """{seed: [its point]} of one setting."""
    return {r["config"]["seed"]: [point(r)] for r in results}


def show_gain(mean, low, high, n, runs=0):
    """With the number of seeds it stands on where that is less than `runs`: the others lie outside the other curve."""
    few = f" [{n} of {runs} seeds]" if 0 < n < runs else ""
    return "–" if mean is None else (f"{mean:.2f}" if low is None else f"{mean:.2f} ({low:.2f} to {high:.2f})") + few


def spearman(a, b):
    """Rank correlation; equal values share the mean of their ranks."""
    def ranks(values):
        return [sum(w < v for w in values) + (values.count(v) - 1) / 2 for v in values]
    return statistics.correlation(ranks(list(a)), ranks(list(b)))


# ------------------------------------------------------------------------------------------------ tables

def markdown(header, rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def mean_std(values, scale=1.0, digits=2):
    values = [v * scale for v in values if v is not None]
    if not values:
        return "–"
    return f"{statistics.fmean(values):.{digits}f}" + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def strongest_mse(r):
    """Test error of the strongest attacker, on the images that all attackers of the run reconstructed."""
    return r["attacks"][r["strongest"]["test"]]["test"]["mse_common"]


def summary_table(groups):
    """From {label: [results]}; the MSE is compared with that of `none`, or of the first group."""
    groups = {label: groups[label] for label in sorted(groups, key=lambda label: label != "none")}
    base, rows = None, []
    several = any(len(r["attacks"]) > 1 for found in groups.values() for r in found)
    for label, found in groups.items():
        error = [r["attacks"]["decoder"]["test"]["mse"] for r in found]
        base = base or statistics.fmean(error)
        cel = [r["cel"] for r in found]
        rows.append([label, mean_std([r["accuracy"] for r in found], 100), mean_std(error, digits=4), f"{statistics.fmean(error) / base:.2f}",
                     *([mean_std([strongest_mse(r) for r in found if len(r["attacks"]) > 1], digits=4)] if several else []),
                     mean_std([r["attacks"]["decoder"]["test"]["ssim"] for r in found], digits=3),
                     mean_std([r["leakage"]["bits"] for r in found], digits=0), mean_std([c["active_share"] for c in cel]),
                     mean_std([c["grad_ratio"] for c in cel], digits=3), f"{statistics.fmean(r['encoder']['flops'] for r in found) / 1e6:.2f}",
                     str(len(found))])
    return markdown(["method", "accuracy %", "decoder MSE (test)", "×", *(["strongest MSE"] if several else []), "SSIM", "leakage, bits ≤", "active",
                     "gradient ratio", "encoder MFLOP", "n"], rows)


def results_table(found, step_cost):
    """The settings that several attackers were tried on; the gain is at each one's own accuracy. `step_cost`: {surrogate: ratio}."""
    noise, rows = noise_alone(found), []
    for label, results in by_setting(found).items():
        attacked = [r for r in results if len(r["attacks"]) > 1]
        if attacked:
            method, setting = label.split("-", 1)
            accuracy, error, own_gain, bits, n = point_columns(results, noise)
            of = method.split("_")[0]  # cluster_k1 costs what cluster does
            cost = "1" if method == "none" else f"{step_cost[of]:.2f}" if of in step_cost else "–"
            rows.append((METHODS.index(method), [
                method, setting, accuracy, error,
                f"{mean_std([strongest_mse(r) for r in attacked], digits=4)} ({', '.join(sorted({r['strongest']['test'] for r in attacked}))})",
                mean_std([r["attacks"]["decoder"]["test"]["ssim"] for r in results], digits=3), bits,
                cost, "1" if method == "none" else own_gain, n]))
    return markdown(["method", "setting", "accuracy %", "decoder MSE (test)", "strongest MSE (its images, first seed)", "SSIM", "leakage, bits ≤",
                     "cost of a step", "gain over noise alone (95 %)", "n"], [row for _, row in sorted(rows)])


def gain_table(found):
    """Every method's curve, its gain at equal accuracy over noise alone and over the statistical surrogates, and its leakage beside that of noise alone."""
    by_method, bits = ({method: whole_curves(seeds) for method, seeds in curves(found, of).items()} for of in (point, bits_point))
    rows = []
    for method in [s for s in METHODS if s in by_method]:
        seeds = by_method[method]
        over = [show_gain(*gain_interval(seeds, by_method.get(other, {}))) if other != method else "1" for other in COMPARED]
        fewer = "1" if method == "none" else show_gain(*gain_interval(bits[method], bits.get("none", {})))
        rows.append([method, ", ".join(f"{100 * a:.1f}: {m:.4f}" for a, m in front(seeds[min(seeds)])), *over, fewer, str(len(seeds))])
    return markdown(["method", "front (accuracy %: MSE), first seed", *(f"gain over {'noise alone' if c == 'none' else c}" for c in COMPARED),
                     "leakage bits of noise alone / its own", "seeds"], rows)


def audit_table(found):
    """Leakage bits beside every attacker's error, by falling bits, and their rank correlation."""
    ordered = sorted(by_setting(found).items(), key=lambda item: -item[1][0]["leakage"]["bits"])
    rows = [[label, f"{100 * r['accuracy']:.1f}", f"{r['leakage']['bits']:.1f} ± {r['leakage']['stderr']:.1f}",
             *(f"{r['attacks'][name]['test']['mse_common']:.4f}" if name in r["attacks"] else "–" for name in ATTACKERS),
             f"{strongest_mse(r):.4f} ({r['strongest']['test']})"] for label, (r, *_) in ordered]
    bits, errors = zip(*((r["leakage"]["bits"], strongest_mse(r)) for _, (r, *_) in ordered))
    correlation = f"{spearman(bits, errors):.2f}" if len(rows) > 1 else "–"
    return markdown(["setting", "accuracy %", "leakage, bits ≤", *ATTACKERS, "strongest MSE"], rows) + \
        f"\n\nRank correlation (Spearman) of the bits with the strongest attacker's MSE over these {len(rows)} settings: {correlation}."


def point_columns(results, noise):
    """The columns of POINT_HEADER: a setting's point, and its gain over noise alone at its own accuracy (`noise`: {seed: points})."""
    return [mean_std([r["accuracy"] for r in results], 100, 1), mean_std([point(r)[1] for r in results], digits=4),
            show_gain(*gain_interval(own_points(results), noise), len(results)),
            mean_std([r["leakage"]["bits"] for r in results], digits=0), str(len(results))]


def points_table(found, noise):
    """One row a setting, and what the strongest attacker made of it."""
    rows = [[label, mean_std([strongest_mse(r) for r in results], digits=4), *point_columns(results, noise)]
            for label, results in by_setting(found).items()]
    return markdown(["setting", "strongest MSE (its images)", *POINT_HEADER], rows)


def datasets_table(found):
    """One row a setting, each data set beside its own noise alone; a cell is DATASET-METHOD..."""
    rows = []
    for label, results in by_setting(found).items():
        dataset, setting = label.split("-", 1)
        noise = {name.split("-", 1)[1]: r for name, r in found.items() if name.startswith(f"{dataset}-none")}
        rows.append([dataset, setting, *point_columns(results, noise_alone(noise))])
    return markdown(["images", "setting", *POINT_HEADER], rows)


def ablation_tables(found, reference):
    """-> {topic: table}; every changed setting below the unchanged one (from `reference`, the cells of the curves), and its gain over that
    one's, the mean of the seeds that have both. The gain of a cell behind another cut is over noise alone behind that cut."""
    groups, noise, by_topic, unchanged = by_setting(found), noise_alone(reference), {}, {}
    for label, results in by_setting(reference).items():
        if any(len(r["attacks"]) > 1 for r in results):
            method, setting = label.split("-", 1)
            unchanged.setdefault(method, {})["nothing" if method != "none" else setting.replace("sigma", "sigma=")] = results
    for topic, knobs in TOPICS.items():
        rows = []
        for method in SURROGATES:
            changed = {label.split("-", 1)[1]: r for label, r in groups.items() if re.match(f"{method}-({'|'.join(knobs)})=", label)}
            before = gains_by_seed(own_points(unchanged.get(method, {}).get("nothing", [])), noise)
            if changed:
                rows += [[method, setting, *point_columns(r, noise), "1"] for setting, r in unchanged.get(method, {}).items()]
            for change, results in changed.items():
                cut = re.search(r"cut=\d+", change)
                beside = noise_alone({name: r for name, r in found.items() if name.startswith(f"none-{cut[0]},")}) if cut else noise
                after = gains_by_seed(own_points(results), beside)
                rows.append([method, change, *point_columns(results, beside), mean_std([after[s] / before[s] for s in after if s in before])])
        if rows:
            by_topic[topic] = markdown(["surrogate", "changed", *POINT_HEADER, "gain / unchanged, same seeds"], rows)
    return by_topic


def strength_table(found):
    rows = []
    for label, (r, *_) in by_setting(found).items():
        for name, result in r["attacks"].items():
            m = result["test"]
            rows.append([label, name, f"{m['mse']:.4f}", f"{m['mse_common']:.4f}", f"{m['nmse']:.3f}", f"{m['ssim']:.3f}", str(m["images"])])
    return markdown(["what is sent", "attacker", "MSE (test)", "MSE, the images all saw", "NMSE", "SSIM", "images"], rows)


# ------------------------------------------------------------------------------------------------ figures

def stack_rows(pictures, path, columns=10):
    """One sheet from reconstructions.png files: the originals of the first, then the decoder's row of each {label: file} that is there."""
    from PIL import Image, ImageDraw  # comes with torchvision
    sheets = {label: Image.open(file) for label, file in pictures.items() if file.exists()}
    if not sheets:
        return
    first = next(iter(sheets.values()))
    side = (first.width - LABEL_WIDTH) // columns
    out = Image.new("RGB", (first.width, side * (len(sheets) + 1)), "white")
    rows = [("original", first, 0)] + [(label, sheet, 1) for label, sheet in sheets.items()]
    for i, (label, sheet, row) in enumerate(rows):
        out.paste(sheet.crop((LABEL_WIDTH, row * side, first.width, (row + 1) * side)), (LABEL_WIDTH, i * side))
        ImageDraw.Draw(out).text((5, i * side + side // 2 - 5), label, fill="black")
    write_atomic(path, lambda temporary: out.save(temporary, format="PNG"))


def picture_label(name):
    """none-sigma0.1-seed0 -> none, sigma 0.1; noise_arl_cluster-lambda0.2-seed0 -> noise_arl, + cluster; a comma is a new line."""
    method, setting = name.split("-")[:2]
    return method.replace("_cluster", "\n+ cluster") + (setting.replace("sigma", "\nsigma ") if method == "none" else "")


def draw_curves(by_method, path):
    """Accuracy against MSE from {method: {seed: points}}: every seed a thin line, and a thick one through the means of the seeds that ran every
    setting; without matplotlib one line says what is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path.name} is left as it is: drawing it needs matplotlib (pip install matplotlib).")
        return
    figure = Figure(figsize=(7, 4.5))
    axes = figure.add_subplot()
    for i, method in enumerate(s for s in METHODS if s in by_method):
        for points, look in [*((points, dict(linewidth=0.6, markersize=1.5, alpha=0.4)) for points in by_method[method].values()),
                             (mean_points(by_method[method]), dict(linewidth=1.8, markersize=5, label=method))]:
            accuracies, errors = zip(*front(points))
            axes.plot([100 * a for a in accuracies], errors, "o-", color=f"C{i}", **look)
    axes.set(xlabel="accuracy on test images, %", ylabel="decoder's MSE on test images", yscale="log")
    axes.yaxis.set_major_formatter("{x:.3f}")
    axes.yaxis.set_minor_formatter("{x:.3f}")
    axes.legend()
    axes.grid(alpha=0.3)
    write_atomic(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120, bbox_inches="tight", metadata={"Software": None}))


# ------------------------------------------------------------------------------------------------ the README

def fill(readme, name, text):
    """Replace what stands between <!-- name --> and <!-- /name --> in the README."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
    if not pattern.search(readme):
        raise UserError(f"README.md has no <!-- {name} --> ... <!-- /{name} --> to fill.")
    return pattern.sub(lambda m: m[1] + text + "\n" + m[2], readme)


def report(results=RESULTS, readme_path=ROOT / "README.md"):
    """Rebuild every table and figure of the README from the finished cells."""
    readme = readme_path.read_text()
    shapes = by_setting(load_cells("shapes", results))
    groups = {s: shapes[s] for s in SURROGATES if s in shapes}
    if groups:
        readme = fill(readme, "shapes", summary_table(groups))
        stack_rows({s: results / "shapes" / f"{s}-seed0.png" for s in groups}, results / "first-screen.png")
    measured = speed.load(results)
    if measured:
        readme = fill(readme, "speed", speed.table(measured))
    cifar, short = load_cells("cpu", results), load_cells("short", results)
    if short:
        readme = fill(readme, "short", results_table(short, speed.step_cost(measured)))
    if cifar:
        readme = fill(readme, "cpu", results_table(cifar, speed.step_cost(measured)))
        readme = fill(readme, "gain", gain_table(cifar))
        draw_curves(curves(cifar), results / "curves.png")
        in_table = [name for name, r in cifar.items() if name.endswith("-seed0") and len(r["attacks"]) > 1]
        in_table.sort(key=lambda name: METHODS.index(name.split("-")[0]))
        stack_rows({picture_label(name): results / "cpu" / f"{name}.png" for name in in_table}, results / "cifar.png")
    for topic, table in ablation_tables(load_cells("ablations", results), short).items():
        readme = fill(readme, topic, table)
    again = ablation_tables(load_cells("long", results), cifar)
    if again:
        readme = fill(readme, "long", "\n\n".join(again.values()))
    undefended = {name: short[name] for name in UNDEFENDED if name in short}
    compared = lambda found: points_table(undefended | dict(sorted(found.items(), key=lambda item: item[0].split("-"))), noise_alone(short))
    for name, table in (("defenses", lambda found: summary_table(by_setting(found))), ("datasets", datasets_table),
                        ("audit", audit_table), ("strength", strength_table), ("baselines", compared)):
        found = load_cells(name, results)
        if found:
            readme = fill(readme, name, table(found))
    write(readme_path, readme)
