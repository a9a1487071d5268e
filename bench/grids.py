"""The grids: {name of a cell: flags of train.py}, a function each, the most useful cells first.

A name is [FAMILY-]METHOD[-SETTING]-seedN; a family has its own cells of noise alone (`none`) beside it, but
for tier2, which stands beside tier1's. Two flags are filled in where a cell is run: --dataset NAME
is the folder NAME of --data if there is one, --init BASE/NAME is the network NAME of the grid `bases`.

How λ is chosen. Three λ of every method stand below, around the 1.5 points of validation accuracy that the
rule asks for, guessed from runs of seed 0 before these cells were run; `direct` 0.1, Noise-ARL 0.45 and all
of Noise-ARL with `direct` but (0.6, 0.8) came later, where curves had a gap. All tiers but the first have
room for one λ alone, the middle one. In the first table a method stands at the λ that `choose_lambda` takes
from its validation accuracies, once all are run with three seeds. A test compares POINTS with that.
"""

import re
from pathlib import Path

from harness.files import UserError
from harness.options import DEFAULTS, OF_THE_ATTACK, OF_THE_BASE, OF_THE_PLACE, parse_flags

SEEDS = (0, 1, 2)
RELEASED, ON_IMAGE = "cluster --form released --clusters 5", "slot --mode image"
ARL = "--defense noise_arl --strength {0}"
# how a method is varied: what, its flags, its values in tier 1
METHODS = {
    "none": ("sigma", "--sigma {0}", (0.1, 0.15, 0.2, 0.25, 0.3)),
    "gmm": ("lambda", "--surrogate gmm --lambd {0}", (0.0008, 0.0016, 0.0024)),
    "cluster": ("lambda", "--surrogate cluster --lambd {0}", (0.2, 0.3, 0.4)),
    "released": ("lambda", f"--surrogate {RELEASED} --lambd {{0}}", (6, 12, 24)),
    "gated": ("lambda", "--surrogate gated --lambd {0}", (2, 3, 4)),
    "slot": ("lambda", "--surrogate slot --lambd {0}", (1, 1.5, 2)),
    "slot_image": ("lambda", f"--surrogate {ON_IMAGE} --lambd {{0}}", (0.3, 0.6, 1.2)),
    "direct": ("lambda", "--surrogate direct --lambd {0}", (0.1, 0.4, 0.8, 1.6)),
    "direct+cluster": ("lambda", "--surrogate direct+cluster --lambd {0}+{0}", (0.1, 0.2, 0.3)),
    "direct+slot_image": ("lambda", f"--surrogate direct+{ON_IMAGE} --lambd {{0}}+{{0}}", (0.2, 0.4, 0.8)),
    "noise_arl": ("strength", ARL, (0.3, 0.45, 0.6, 1.2)),
    "noise_arl+direct": ("strength,lambda", f"{ARL} --surrogate direct --lambd {{1}}",
                         ((0.3, 0.1), (0.3, 0.3), (0.3, 0.8), (0.6, 0.8), (1.2, 0.8))),
}
MIDDLE = {name: values[len(values) // 2] for name, (_, _, values) in METHODS.items()}
MIDDLE |= {"noise_arl+direct": (0.6, 0.8)}  # the first that was run
POINTS = MIDDLE | {"noise_arl": 0.45, "noise_arl+direct": (0.3, 0.1)}  # and what the rule takes instead
NOISES = (0.1, 0.15, 0.2, 0.25)  # of noise alone, where the others have one point
FEW = (0.1, 0.2, 0.3)  # where a network is trained from scratch
AROUND = (0.15, 0.2, 0.25)  # and against stronger attackers: the accuracies of the others lie between
BEST = "slot_image"  # plugged into the baselines: the single surrogate of the largest gain on seed 0
BASELINES = {"dropout": 0.1, "distcorr": 1, "noise_arl": MIDDLE["noise_arl"], "patrol": 0.3}  # strengths
# The decoder of the tables. All methods get the same number of epochs, so that no rule for stopping favours
# one; what a longer training or another size would bring is tier 3's to say.
ATTACK = "--attack-size 4x64 --attack-epochs 10"
SMALL_ATTACK = "--attack-size 2x48 --attack-epochs 10"  # half the time: for ablations and other images
ATTACKERS = {
    "attackers": f"{ATTACK} --attack decoder,gan,whitebox",
    "size2x48": SMALL_ATTACK,
    "epochs20": "--attack-size 4x64 --attack-epochs 20",
    "size8x64": "--attack-size 8x64 --attack-epochs 20",  # the paper's
    "looks10": f"{SMALL_ATTACK} --looks 10",
}
BF16 = "--precision bfloat16"  # 1.8 times the speed at width 32
RECIPE = f"--dataset cifar10 --lr 0.1 --label-smoothing 0.1 {BF16}"
# two epochs, with the base's label smoothing
HARDEN = f"--epochs 2 --lr 0.01 --warmup 0 --label-smoothing 0.1 {BF16}"
SMALL = f"{RECIPE} --width 16"
# as documented the SNR gate shuts the loss off, so that the other parts can change something without it only
PARTS = ("", "+cross_attention", "+per_dim_gate", "+slot_mass", "+class_gate")
DOCUMENTED = ("mode=documented", *(f"mode=documented,off=snr_gate{part}" for part in PARTS))
# three seeds of these, and of noise alone at these σ
CONCLUDED, BESIDE = ("mode=documented", "mode=documented,variance=trace"), (0.1, 0.25, 0.35)
ABLATIONS = {
    "gmm": ("clusters=1", "clusters=8", "covariance=full"),
    "cluster": ("clusters=1", "clusters=8", "variance=trace"),
    "gated": ("mode=adversarial", *CONCLUDED, "variance=trace"),
    "slot": ("slots=2", "slots=16", *DOCUMENTED),
}
TINY = f"--dataset tiny-imagenet-180 --image-size 32 --lr 0.1 --label-smoothing 0.1 {BF16}"
FACES = "--dataset orl-faces --image-size 64 --cut 3 --batch-size 96 --epochs 120 --attack-epochs 300"
# attacked in tier 3
STRONGER = ("none", "slot_image", "direct", "direct+slot_image", "noise_arl", "noise_arl+direct")
# from scratch, and on Tiny ImageNet
FEWER = [name for name in METHODS if name not in ("none", "released", "direct+cluster", "direct+slot_image")]
OF_FACES = ("none", "cluster", "gated", "direct", "noise_arl")


def choose_lambda(val_accuracy, noise_alone, cost=0.015):
    """The λ of {λ: validation accuracy} that costs 1.5 points of it.

    The rule, written before any cell was run: the cost of a λ is the validation accuracy of noise alone at
    σ = 0.1 minus its own, both the means of the same seeds. Taken is the λ whose cost is nearest to 1.5
    points; of two that are equally near, the smaller. No test image and no attacker has a say.
    """
    return min(sorted(val_accuracy), key=lambda v: round(abs(noise_alone - val_accuracy[v] - cost), 9))


def vary(method, *values):
    """[(METHOD-SETTING, flags)] of a method at these values."""
    knobs, flags, *_ = METHODS[method]
    numbers = [[f"{v:g}" for v in (value if isinstance(value, tuple) else (value,))] for value in values]
    setting = lambda given: ",".join(knob + v for knob, v in zip(knobs.split(","), given))
    return [(f"{method}-{setting(given)}", flags.format(*given)) for given in numbers]


def points(methods=METHODS, noises=NOISES, at=MIDDLE):
    return [c for m in methods for c in vary(m, *(noises if m == "none" else [at[m]]))]


def harden(seed, base="w32", attack=ATTACK):
    # every flag that has another default with --init is given, so that `settings` needs no trained base
    return f"--init BASE/{base}-seed{seed} {HARDEN} {attack}"


def scratch(seed):
    # as many epochs as a small base and its hardening have
    return f"{SMALL} --epochs 16 {ATTACK} --seed {seed}"


def grid(family, start, found, seeds=SEEDS):
    return {f"{family}{name}-seed{n}": f"{start(n)} {flags}" for n in seeds for name, flags in found}


def shapes():
    """The default run of every surrogate on the drawn images; one without noise: the decoder at its best."""
    found = [(name, f"--surrogate {name}") for name in ("none", *DEFAULTS)]
    seeded = "--seed {}".format
    return grid("", seeded, found) | grid("", seeded, [("clean", "--sigma 0")], [0])


def again():
    """README's first command with three seeds, on another number of threads than the cells of `shapes`."""
    return {name: flags for name, flags in shapes().items() if name.startswith("gated")}


def bases():
    """Networks that others start from, trained without a surrogate on all training images but a tenth: those
    of width 16 for the ablations of tier 4, `tiny` for tier 5."""
    recipes = {"w32": f"{RECIPE} --width 32 --epochs 36", "w16": f"{SMALL} --epochs 14"}
    recipes["tiny"] = f"{TINY} --epochs 50"
    return {f"{w}-seed{n}": f"{of} --attack none --seed {n}" for w, of in recipes.items() for n in SEEDS}


def cifar():
    """Tier 1: every method as a curve. Tier 2: the baselines, alone and with a surrogate. Scratch: smaller
    networks trained with their method from the start; PATROL changes the network and has no other way, and
    three seeds. Tier 3: one seed, one point a method, against stronger attackers. Tier 4: smaller networks
    hardened, one thing changed at a time; one seed but for what is CONCLUDED."""
    curves = [cell for method, (_, _, values) in METHODS.items() for cell in vary(method, *values)]
    found = grid("tier1-", harden, points()) | grid("tier1-", harden, curves)  # one point each comes first
    [(best, plugged_in)] = points([BEST])
    for name, strength in BASELINES.items():
        alone = f"--defense {name} --strength {strength:g}"
        pair = [(f"{name}-strength{strength:g}", alone), (f"{name}+{best}", f"{alone} {plugged_in}")]
        if name == "patrol":
            found |= grid("scratch-", scratch, [*points(["none"], FEW), *pair])
            found |= grid("scratch-", scratch, points(FEWER), [0])
        else:
            found |= grid("tier2-", harden, pair[name in METHODS :])
    for family, how in ATTACKERS.items():
        start = lambda n, how=how: harden(n, attack=how)
        found |= grid(f"tier3{family}-", start, points(STRONGER, AROUND), [0])
    small = lambda n: harden(n, "w16", SMALL_ATTACK)
    found |= grid("tier4-", small, points(("none", *ABLATIONS)), [0])
    for method, changes in ABLATIONS.items():
        for change in changes:
            flag = lambda m: f" --{m[1].replace('_', '-')} {m[2].replace('+', ',')}"
            words = re.sub(r"(\w+)=([\w+]+),?", flag, change)
            changed = [(f"{method}-{change}", flags + words) for _, flags in points([method])]
            found |= grid("tier4-", small, changed, SEEDS if change in CONCLUDED else [0])
    found |= grid("tier4-", small, points(["none"], BESIDE))
    for size in (32, 512):
        batched = points(("none", "cluster", "gated", "slot"), FEW[:2])
        # in batches of 32 gated and slot remember samples of a class unless told not to
        for method in ("gated", "slot") if size == 32 else ():
            batched += [(f"{method}-memory=0", f"{flags} --memory 0") for _, flags in points([method])]
        found |= grid(f"tier4batch{size}-", lambda n: f"{small(n)} --batch-size {size}", batched, [0])
    for cut in (1, 3):
        behind = [(name, f"{flags} --cut {cut}") for name, flags in points(("none", "cluster"), FEW[:2])]
        found |= grid(f"tier4cut{cut}-", scratch, behind, [0])
    return found


def datasets():
    """Tier 5: 180 classes of Tiny ImageNet, made smaller, hardened; and the faces, from scratch."""
    tiny, faces = lambda n: harden(n, "tiny", SMALL_ATTACK), lambda n: f"{FACES} --seed {n}"
    found = grid("tiny-", tiny, points(("none", *FEWER), FEW[:2]))
    return found | grid("faces-", faces, points(OF_FACES, FEW[:2]))


PRESETS = {grid.__name__: grid for grid in (shapes, again, bases, cifar, datasets)}


def cells(preset, shard="1/1", only=""):
    """-> [(name, flags)] of one shard, in order."""
    if preset not in PRESETS:
        raise UserError(f"--preset {preset}: unknown; use {', '.join(PRESETS)}.")
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--shard {shard}: write I/N with 1 <= I <= N, as in 2/4.")
    grid = PRESETS[preset]()
    chosen = [cell for cell in grid.items() if (cell[0] == only if only in grid else only in cell[0])]
    if not chosen:
        raise UserError(f"--only {only}: no cell of {preset} has that in its name; `list` shows them.")
    return chosen[int(match[1]) - 1 :: int(match[2])]


def settings(flags):
    """{setting: value} that train.py makes of a cell's flags; the base need not be trained for that."""
    words = flags.split()
    if "--init" not in words:
        return vars(parse_flags(words))
    i = words.index("--init")
    own, base = parse_flags(words[:i] + words[i + 2 :]), words[i + 1].removeprefix("BASE/")
    of_base = settings(PRESETS["bases"]()[base])
    return {**vars(own), **{k: of_base[k] for k in OF_THE_BASE}, "init": base}


def made_by(cell, flags):
    """Whether the results `cell` were made with these flags and the defaults of today, wherever that was."""
    have = dict(cell["config"])
    have |= {k: Path(have[k]).name for k in ("dataset", "init") if have.get(k)}  # a folder there, a name here
    free = OF_THE_PLACE if have["attack"] else (*OF_THE_PLACE, *OF_THE_ATTACK[1:])  # how, if there was none
    return all(have.get(k) == v for k, v in settings(flags).items() if k not in free)
