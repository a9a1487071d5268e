"""What train.py promises, in runs of a second: the step, the statistics, hardening, report and files."""

import csv
import json
import math
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import SURROGATES, TINY, flags, go, picture_folder, small_world
from PIL import Image

import attack
import train
from cluster_cel import ClusterCEL
from gated_att_cel import GatedAttCEL
from harness import shapes
from harness.data import load_splits
from harness.evaluation import state_hash
from harness.files import read_checkpoint
from harness.monitor import spread_per_class
from harness.parts import make_surrogates

DEFENSES = ("none", "dropout", "distcorr", "patrol", "noise_arl", "dropout+noise_arl")
LEARNING = {"gated": "ess", "slot": "slots_used"}  # surrogates with parameters, and the figure of their own
SPREAD_OUT = "--lr 0.2 --epochs 3"  # so that features differ from image to image in a tiny run


def make_run(text=""):
    """A Run of TINY images and flags, not trained yet."""
    with small_world():
        args = flags(" ".join([*TINY, text]))
        args.processes, args.threads = 1, 1
        return train.Run(args, load_splits(args))


def train_run(run, epochs=None):
    """Trains it, or so many epochs of it, without files."""
    for _ in range(epochs or 0):
        run.train_epoch(lambda done: None)
        run.epoch += 1
    if epochs is None:
        run.train(lambda: None, lambda done: None)
    return run


def trained_run(text=""):
    return train_run(make_run(text))


@pytest.fixture(scope="module")
def plain():
    return trained_run()


def assert_equal(a, b):
    """The same tensors, bit for bit, in two state_dicts or modules."""
    a, b = (m if isinstance(m, dict) else m.state_dict() for m in (a, b))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def apart(a, b):
    """The largest difference between the weights of two networks."""
    a, b = a.state_dict(), b.state_dict()
    return max((a[k].double() - b[k].double()).abs().max().item() for k in a)


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def log_of(folder):
    return list(csv.DictReader((folder / "log.csv").open()))


# ------------------------------------------------------------ every surrogate, every defence


@pytest.mark.parametrize("name", SURROGATES)
def test_every_surrogate_trains_and_reports_finite_figures(trained, name):
    """Each with another defence, through the whole program."""
    defense = DEFENSES[list(SURROGATES).index(name) % len(DEFENSES)]
    folder = trained(f"{SURROGATES[name]} --defense {defense}")
    results, log = results_of(folder), log_of(folder)
    for split in ("train", "test"):
        m = results["attacks"]["decoder"][split]
        assert m["psnr"] == pytest.approx(10 * math.log10(1 / m["mse"])) and m["images"] > 0
        assert 0 < m["nmse"] < 5 and -1 <= m["ssim"] <= 1
    assert results["strongest"] == "decoder" and results["attacks"]["decoder"]["converged"] is None
    assert 0 <= results["accuracy"] <= 1 and results["chance"] == pytest.approx(0.1)
    assert math.isfinite(results["leakage"]["bits"]) and 0 < results["leakage"]["floor_factor"]
    assert results["leakage"]["stderr"] > 0 and results["leakage"]["dfil"] > 0
    assert results["encoder"]["params"] > 0 and results["encoder"]["flops"] > 0
    assert results["nonfinite_steps"] == 0 and results["base"] is None
    assert all(math.isfinite(v) for v in results["defense"].values())
    assert bool(results["defense"]) == (defense not in ("none", "dropout"))

    chosen = results["config"]["surrogate"]
    assert list(results["cel"]) == chosen and len(chosen) == len(results["config"]["lambd"])
    for surrogate, found in results["cel"].items():
        assert all(math.isfinite(v) for v in found.values())
        assert found["spread"] > 0 and 0 <= found["above_tau"] <= 1 and found["gradient ratio"] >= 0
        # the shutoff of [C] and [D] silences their own form on every call, and the report says so
        assert found["skipped"] == 1 if name == "slot documented" else found["skipped"] < 0.1
        assert found["gradient ratio"] > 0 or name in ("slot documented", "slot image")
        own = "ssim" if name == "slot image" else LEARNING.get(surrogate)
        assert own is None or found[own] > 0
        assert ("spread / tau" in found) == (surrogate not in ("gmm", "direct") and name != "slot image")
        assert {f"{surrogate}.{k}" for k in ("loss", "spread", "above_tau", "skipped")} <= set(log[-1])
    for row in log:
        assert {"epoch", "lr", "scale", "loss_d", "loss_cel", "train_accuracy", "val_accuracy"} <= set(row)
        assert {"gradient_ratio", "nonfinite_steps", "seconds"} <= set(row)
    assert [row["epoch"] for row in log] == ["1", "2"]
    state = read_checkpoint(folder / "checkpoint.pt")
    assert state["epoch"] == 2 and state["config"]["defense"] == defense
    assert len(state["spread"]) == (2 if chosen else 0)
    with Image.open(folder / "reconstructions.png") as picture:
        assert picture.size[1] == 2 * 3 * 32  # two rows: originals, decoder


@pytest.mark.parametrize("defense", ("dropout", "distcorr", "patrol", "noise_arl"))
@pytest.mark.parametrize("name", [name for name in SURROGATES if name != "none"])
def test_every_surrogate_with_every_defense(name, defense):
    run = trained_run(f"{SURROGATES[name]} --defense {defense} --train-size 72")
    assert all(t.isfinite().all() for t in (*run.net.state_dict().values(), *run.cels.state_dict().values()))
    row = run.log[-1]
    assert all(math.isfinite(v) for v in row.values()) and row["nonfinite_steps"] == 0
    assert row["loss_cel"] > 0 or name in ("slot documented", "slot image")  # shut off; below its threshold
    for part, figure in {"noise_arl": "proxy_mse", "patrol": "lipschitz", "distcorr": "dcor"}.items():
        assert part not in defense or row[f"{part}.{figure}"] > 0


# ------------------------------------------------------------ the step


@pytest.mark.parametrize(
    "text", ["--surrogate cluster", "--surrogate gated --defense patrol", "--surrogate direct+cluster"]
)
def test_both_stashes_train_the_same_network(text):
    cut, params = (trained_run(f"{text} --stash {how}") for how in ("cut", "params"))
    without = trained_run(f"{text} --lambd {'0+0' if '+' in text else '0'}")
    assert apart(cut.net, params.net) < 0.02 * apart(cut.net, without.net)


@pytest.mark.parametrize("name", [name for name in SURROGATES if name != "none"])
def test_a_weight_of_zero_is_a_plain_run_bit_for_bit(name, plain):
    run = trained_run(f"{SURROGATES[name]} --lambd {'0+0' if '+' in name else '0'}")
    assert_equal(run.net, plain.net)
    assert run.log[-1]["gradient_ratio"] == 0 and f"{run.args.surrogate[0]}.loss" in run.log[-1]


def test_momentum_decay_averages_the_encoders_gradient():
    """(1 − d) g at the first step, as from nothing: with d = ½ that of half the λ, to the bit."""
    one_step = "--surrogate gated --stash params --batch-size 100 --epochs 1 --warmup 0"
    half = trained_run(f"{one_step} --lambd 2 --momentum-decay 0.5")
    assert_equal(half.net, trained_run(f"{one_step} --lambd 1").net)
    assert apart(half.net, trained_run(f"{one_step} --lambd 2").net) > 0
    # then it remembers: later steps are those of no single λ
    decayed = trained_run("--surrogate gated --stash params --lambd 2 --momentum-decay 0.5")
    for lambd in ("1", "2"):
        assert apart(decayed.net, trained_run(f"--surrogate gated --stash params --lambd {lambd}").net) > 1e-6
    assert len(decayed.average) == len(list(decayed.net.encoder.parameters()))


def test_the_largest_gradient_is_clipped():
    free, clipped = (trained_run(f"--surrogate gated --clip {c}") for c in (0, 1e-4))
    assert 0 < clipped.log[-1]["gradient_ratio"] < 0.1 * free.log[-1]["gradient_ratio"]


def test_a_high_learning_rate_holds_the_regulariser_back():
    """r(η) = min(1, η_ref/η); at η_ref = 1e-9 hardly anything is left of λ."""
    ratios = [trained_run(f"--surrogate gated --eta-ref {r}").log[-1]["gradient_ratio"] for r in (0, 1e-9)]
    assert 0 < ratios[1] < 1e-4 * ratios[0]


def test_a_surrogate_that_is_not_finite_costs_its_step_and_is_counted(monkeypatch, tmp_path, plain):
    def forward(self, z, y, x=None):
        self.stats = {name: torch.ones(()) for name in ("loss", "spread", "above_tau", "skipped")}
        return z.sum() * math.nan

    monkeypatch.setattr(GatedAttCEL, "forward", forward)
    assert go(*TINY, "--surrogate", "gated", "--runs-dir", tmp_path, "--name", "nan", "--attack", "none") == 0
    assert results_of(tmp_path / "nan")["nonfinite_steps"] == 2 * 3
    assert_equal(read_checkpoint(tmp_path / "nan" / "checkpoint.pt")["weights"], plain.net)


# ------------------------------------------------------------ schedules


def test_learning_rates():
    args = flags("--lr 0.05")
    rates = [train.learning_rate(args, i / 1000) for i in range(1001)]
    assert max(rates) == pytest.approx(0.05, rel=1e-3) and rates[0] == pytest.approx(0.002)
    assert rates[-1] == pytest.approx(0, abs=1e-9) and rates.index(max(rates)) == 150
    args = flags("--lr 0.05 --schedule steps")
    rates = [train.learning_rate(args, s) for s in (0, 0.24, 0.25, 0.6, 0.7, 0.9)]
    assert rates == pytest.approx([0.05 * 0.2**k for k in (0, 0, 1, 2, 3, 4)])


def test_the_loss_scale_rises_behind_the_warm_up():
    args = flags("--epochs 10 --surrogate gated --warmup 2 --scale 0.2")
    assert [train.loss_scale(args, e) for e in range(6)] == pytest.approx([0, 0, 0.1, 0.2, 0.2, 0.2])
    args.init = "a base"  # whose features are worth measuring from the first step on
    args.warmup = 0
    assert [train.loss_scale(args, e) for e in range(3)] == pytest.approx([0.2, 0.2, 0.2])


@pytest.mark.parametrize("surrogate", LEARNING)
def test_the_warm_up_fits_the_attention_and_leaves_the_encoders_step_alone(surrogate):
    run, plain = make_run(f"--surrogate {surrogate} --warmup 1"), make_run()
    before = [p.clone() for p in run.cels.parameters()]
    train_run(run, epochs=1), train_run(plain, epochs=1)
    assert_equal(run.net, plain.net)
    moved = [not torch.equal(a, b) for a, b in zip(before, run.cels.parameters())]
    assert sum(moved) > 0.8 * len(moved)
    train_run(run, epochs=1), train_run(plain, epochs=1)
    assert apart(run.net, plain.net) > 1e-6


def test_the_fitted_attention_knows_the_features_better():
    """Features hardly move at lr 1e-9; the likelihood of samples that did not make the slots rises."""
    run = make_run("--surrogate slot --warmup 15 --epochs 16 --lr 1e-9")
    rows = [run.train_epoch(lambda done: None) for run.epoch in range(15)]
    assert rows[-1]["slot.nll"] < rows[0]["slot.nll"] - 0.01 and rows[-1]["scale"] == 0


# ------------------------------------------------------------ statistics of gmm and cluster


@pytest.mark.parametrize("surrogate", ("gmm", "cluster"))
@pytest.mark.parametrize("pool", (0, 2))
def test_statistics_are_those_of_the_training_features(surrogate, pool):
    """Behind the last refresh the first two moments of a class's mixture are those of its clean features."""
    run = trained_run(f"--surrogate {surrogate} --pool {pool} {SPREAD_OUT}")
    cel = run.cels[surrogate]
    z, y = run.victim.features(run.splits.train.x), run.splits.train.y
    z = (F.adaptive_avg_pool2d(z, pool) if pool else z).flatten(1)
    assert z.shape[1] == cel.dim == 2 * (pool or 8) ** 2
    means = cel.means if surrogate == "gmm" else cel.centers
    for c in range(10):
        own, weights = z[y == c], cel.weights[c] / cel.weights[c].sum()
        mean = weights @ means[c]
        assert torch.allclose(mean, own.mean(0), atol=1e-4)
        between = (means[c] - mean).square()
        within = cel.covs[c].sum(1) if surrogate == "gmm" else cel.variances[c]
        total = weights @ (within + between.sum(1))
        assert total.item() == pytest.approx(own.var(0, correction=0).sum().item(), rel=1e-3)
    share = torch.stack([(y == c).float().mean() for c in range(10)])
    whole = cel.weights.sum(1) if surrogate == "gmm" else cel.weights.sum(1) / 10
    assert torch.allclose(whole, share if surrogate == "gmm" else torch.full((10,), 0.1), atol=1e-5)
    assert int(cel.num_samples) == len(z)


def test_silent_before_the_first_refresh():
    run = trained_run("--surrogate cluster --warmup 0 --epochs 3")
    assert [row["loss_cel"] > 0 for row in run.log] == [False, True, True]


def test_refresh_every_and_a_cap_on_its_samples(monkeypatch):
    seen = []
    refresh = lambda self, z, y, num_samples: seen.append((len(z), num_samples))
    monkeypatch.setattr(ClusterCEL, "refresh", refresh)
    monkeypatch.setattr(train, "REFRESH_SAMPLES", 50)
    trained_run("--surrogate cluster --epochs 6 --refresh-every 2 --warmup 2")
    assert seen == [(50, 117)] * 3  # at the ends of epochs 2, 4 and 6


def test_batchnorm_makes_no_difference_that_matters():
    """Centres are fitted on eval-mode features and used on train-mode ones: the loss is nearly the same, and
    the gradient keeps its direction."""
    run = trained_run("--surrogate cluster --bottleneck 8 --epochs 10 --batch-size 16")
    x, y, found = run.splits.train.float(), run.splits.train.y, {}
    for mode in ("eval", "train"):
        run.net.train(mode == "train")
        with torch.no_grad():
            z = run.net.encoder(x)
        loss = run.cels["cluster"](z.requires_grad_(), y)
        found[mode] = loss.item(), torch.autograd.grad(loss, z)[0].flatten()
    assert found["train"][0] == pytest.approx(found["eval"][0], rel=0.1)
    assert torch.cosine_similarity(found["train"][1], found["eval"][1], dim=0) > 0.8


def test_pooling_keeps_the_noise_in_proportion():
    """The mean of n cells of z' has noise of variance σ²/n: a surrogate of the pooled z is told that."""
    cel = make_surrogates(flags("--surrogate gmm --pool 4 --sigma 0.2"), 10, (8, 8, 8), 32)["gmm"]
    noise = F.adaptive_avg_pool2d(0.2 * torch.randn(4000, 8, 8, 8), 4)
    assert cel.dim == 8 * 16 and cel.sigma == pytest.approx(0.1)
    assert noise.std().item() == pytest.approx(cel.sigma, rel=0.01)


def test_few_images_of_a_class_in_a_batch_are_remembered():
    for text, memory in (("", 32), ("--batch-size 40", 0), ("--memory 3", 3), ("--mode image", None)):
        args = flags(" ".join([*TINY, "--surrogate slot", text]))
        held = getattr(make_surrogates(args, 10, (2, 8, 8), 32)["slot"], "memory", None)
        assert (None if held is None else held.shape[1]) == memory


def test_the_papers_setting_is_reachable_by_flags():
    args = flags("--width 64 --sigma 0.025 --schedule steps --epochs 240 --lambd 16 --surrogate gmm")
    net, _, shape = train.make_network(args, 10, 32)
    cel = make_surrogates(args, 10, shape, 32)["gmm"]
    assert shape == (8, 8, 8) and (cel.dim, cel.sigma) == (512, 0.025)
    assert sum(p.numel() for p in net.encoder.parameters()) == pytest.approx(0.085e6, rel=0.01)


# ------------------------------------------------------------ --init: hardening


def harden(base, tmp_path, *more):
    return go(*TINY, "--init", base, "--runs-dir", tmp_path, "--name", "hard", "--epochs", 1, *more)


@pytest.mark.parametrize("more", ["", "--surrogate gated --lambd 0", "--surrogate gmm+slot --lambd 0+0 --scale 1"])
def test_hardening_with_nothing_returns_the_base_bit_for_bit(trained, tmp_path, more):
    base = trained(SPREAD_OUT)
    assert harden(base, tmp_path, "--lr", 0, "--attack", "none", *more.split()) == 0
    before, after = (read_checkpoint(f / "checkpoint.pt") for f in (base, tmp_path / "hard"))
    assert_equal(before["weights"], after["weights"])  # encoder, server, buffers
    results = results_of(tmp_path / "hard")
    net = train.SplitNet(**before["net"])
    net.load_state_dict(before["weights"])
    assert results["base"] == {"name": base.name, "hash": state_hash(net)}
    assert results["config"]["init"] == str(base) and results["config"]["warmup"] == 0
    assert results["accuracy"] == results_of(base)["accuracy"]


@pytest.mark.parametrize("name", ["gmm", "cluster", "gated", "adversarial", "slot", "direct"])
def test_one_epoch_of_hardening_lowers_the_measured_spread(trained, tmp_path, name):
    """Against the same epoch without the loss; direct leaves more of the picture unexplained instead."""
    base, spread, unexplained = trained(SPREAD_OUT), {}, {}
    lambd = {"gmm": 0.1, "cluster": 3, "gated": 30, "adversarial": 30, "slot": 12, "direct": 3}[name]
    for weight in (0, lambd):
        flag = [*SURROGATES[name].split(), "--lambd", weight, "--attack", "none", "--overwrite"]
        assert harden(base, tmp_path, *flag) == 0
        run = make_run(f"{SURROGATES[name]}")
        run.net.load_state_dict(read_checkpoint(tmp_path / "hard" / "checkpoint.pt")["weights"])
        spread[weight] = spread_per_class(run.victim, run.splits.train).mean().item()
        x, y = run.splits.train.float(), run.splits.train.y
        z = run.victim.features(run.splits.train.x)
        if name == "direct":
            with torch.no_grad():
                run.cels["direct"](z, y, x)
            unexplained[weight] = float(run.cels["direct"].stats["spread"])
    if name == "direct":
        assert unexplained[lambd] > unexplained[0]
    else:
        assert spread[lambd] < 0.97 * spread[0]


def test_the_attention_is_fitted_on_frozen_features_first(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "FIT_STEPS", 6)
    base = trained(SPREAD_OUT)
    run = make_run(f"--surrogate slot --init {base}")
    fresh = [p.clone() for p in run.cels.parameters()]
    run.start_from(base)
    moved = [not torch.equal(a, b) for a, b in zip(fresh, run.cels.parameters())]
    assert sum(moved) > 0.8 * len(moved) and not run.net.training
    assert_equal(run.net, read_checkpoint(base / "checkpoint.pt")["weights"])


@pytest.mark.parametrize("processes", (1, 2))
def test_the_attention_is_fitted_as_long_in_each_process(trained, monkeypatch, processes):
    """Each of them sees all images then; 117 of them, batches of 32."""
    base, calls, gradient = trained(SPREAD_OUT), [], train.cem.cel_gradient
    monkeypatch.setattr(train, "FIT_STEPS", 6)
    monkeypatch.setattr(train.parallel, "processes", lambda: processes)
    monkeypatch.setattr(train.parallel, "average_gradients", lambda parameters: None)
    monkeypatch.setattr(train.cem, "cel_gradient", lambda *args: calls.append(1) or gradient(*args))
    run = make_run(f"--surrogate slot --init {base}")
    run.start_from(base)
    assert len(calls) == 6 and run.steps == 3 // processes


def test_hardening_has_a_schedule_of_its_own_and_the_bases_network_and_images(trained):
    base = trained("--width 2 --seed 3")
    args = flags(f"--init {base} --surrogate cluster --defense dropout --sigma 0.3")
    assert (args.epochs, args.lr, args.warmup) == (3, 0.01, 0)
    assert (args.width, args.bottleneck, args.train_size, args.seed) == (2, 2, 130, 3)
    assert (args.sigma, args.defense) == (0.3, "dropout")


# ------------------------------------------------------------ files of a run


def test_a_finished_training_is_attacked_again_with_other_attack_flags(trained, tmp_path, monkeypatch):
    shutil.copytree(trained(), tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    monkeypatch.setattr(train.Run, "train_epoch", lambda self, tick: pytest.fail("nothing is left to train"))
    argv = [*TINY, "--runs-dir", tmp_path, "--name", "run"]
    attacked = "--attack-size 2x4 --looks 3 --attack-epochs 2 --attack decoder,gan --resume".split()
    assert go(*argv, *attacked) == 0
    after = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    for name in ("checkpoint.pt", "log.csv"):
        assert before[name] == after[name], name
    old, new = json.loads(before["results.json"]), json.loads(after["results.json"])
    assert new["config"]["looks"] == 3 and list(new["attacks"]) == ["decoder", "gan"]
    assert new["attacks"]["decoder"]["epochs"] == 2 and new["accuracy"] == old["accuracy"]
    assert new["attacks"]["decoder"]["params"] != old["attacks"]["decoder"]["params"]
    assert new["seconds"]["train"] == old["seconds"]["train"]


def test_no_run_is_overwritten_unasked(trained, tmp_path, capsys):
    folder = shutil.copytree(trained(), tmp_path / "run")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    argv = [*TINY, "--runs-dir", tmp_path, "--name", "run", "--sigma", "0.2"]
    assert go(*argv) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    (folder / "notes.txt").write_text("mine")
    assert go(str(folder), "--attack", "decoder", main=attack.main) == 0  # attack.json, attack.png
    assert go(*argv, "--attack", "none", "--surrogate", "none", "--overwrite") == 0
    ours = {"checkpoint.pt", "log.csv", "results.json", "reconstructions.png", ".lock"}
    assert {p.name for p in folder.iterdir()} == {*ours, "notes.txt"}
    assert results_of(folder)["config"]["sigma"] == 0.2 and results_of(folder)["attacks"] == {}


def test_what_is_overwritten_goes_before_the_first_step(trained, tmp_path, monkeypatch):
    folder = shutil.copytree(trained(), tmp_path / "run")

    def interrupted(self, tick):
        raise KeyboardInterrupt

    monkeypatch.setattr(train.Run, "train_epoch", interrupted)
    assert go(*TINY, "--runs-dir", tmp_path, "--name", "run", "--overwrite") == 130
    assert {p.name for p in folder.iterdir()} == {".lock"}


def test_other_settings_have_other_folders_and_the_same_have_one(tmp_path, capsys):
    argv = [*TINY, "--runs-dir", tmp_path, "--attack", "none", "--epochs", 1]
    for more in ([], ["--sigma", "0.1000001"], ["--surrogate", "gated", "--warmup", 0]):
        assert go(*argv, *more) == 0
    assert len(list(tmp_path.iterdir())) == 3
    assert go(*argv, "--attack-epochs", 7) == 2  # the attack is not part of the name
    assert "holds a run" in capsys.readouterr().err and len(list(tmp_path.iterdir())) == 3


def test_a_run_says_what_it_does(tmp_path, capsys):
    argv = [*TINY, "--surrogate", "cluster", "--sigma", "0.2", "--runs-dir", tmp_path, "--name", "run"]
    assert go(*argv) == 0
    out = capsys.readouterr().out
    assert "117 train, 13 val, 30 test images of 10 classes" in out
    assert "lambda 0.2, scale 1, warm-up 1 of 2 epochs, tau 0.005 per dimension" in out
    assert out.count("epoch   ") == 2 and "spread/tau" in out and "gradient ratio" in out
    results = results_of(tmp_path / "run")
    assert ("near chance, which is 10.0 %" in out) == (results["accuracy"] < 0.2)
    assert f"{results['attacks']['decoder']['test']['mse']:.4f}" in out
    command = results["environment"]["command"]
    assert command.startswith("python train.py --width 4") and command.endswith("--name run")


def test_on_a_terminal_the_progress_is_one_live_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert go(*TINY, "--runs-dir", tmp_path, "--name", "run") == 0
    assert capsys.readouterr().out.count("\rtrain") == 2 * 3  # a step each


def test_curves_are_drawn_where_matplotlib_is_installed(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    argv = [*TINY, "--surrogate", "gated", "--attack", "none", "--runs-dir", tmp_path, "--name", "run"]
    assert go(*argv, pictures=True) == 0
    for name in ("training.png", "spread.png"):
        with Image.open(tmp_path / "run" / name) as picture:
            assert min(picture.size) > 200 and len(set(picture.convert("L").tobytes())) > 10
    first = {p.name: p.read_bytes() for p in (tmp_path / "run").glob("*.png")}
    assert go(*argv, "--resume", pictures=True) == 0  # drawn again, the same
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").glob("*.png")} == first


def test_without_matplotlib_there_is_a_sentence_for_each_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    argv = [*TINY, "--surrogate", "gated", "--attack", "none", "--runs-dir", tmp_path, "--name", "run"]
    assert go(*argv, pictures=True) == 0
    out = capsys.readouterr().out
    assert out.count("drawing it needs matplotlib") == 2 and "training.png is left out" in out
    assert not (tmp_path / "run" / "training.png").exists() and results_of(tmp_path / "run")["cel"]["gated"]


# ------------------------------------------------------------ images


def test_another_seed_and_the_same_seed(trained, tmp_path):
    for seed, same in ((0, True), (1, False)):
        assert go(*TINY, "--seed", seed, "--runs-dir", tmp_path, "--name", f"run{seed}") == 0
        old, new = (read_checkpoint(f / "checkpoint.pt") for f in (trained(), tmp_path / f"run{seed}"))
        equal = all(torch.equal(a, b) for a, b in zip(old["weights"].values(), new["weights"].values()))
        assert equal == same == (old["data"] == new["data"])
        found = [results_of(f)["attacks"]["decoder"] for f in (trained(), tmp_path / f"run{seed}")]
        assert (found[0] == found[1]) == same


def test_an_attacker_with_images_of_its_own(trained):
    results = results_of(trained("--attacker-data aux"))
    assert results["attacks"]["decoder"]["fit_images"] == 29  # of a quarter of 130, without those it stops on


def test_a_folder_of_images_from_the_command_line(tmp_path):
    picture_folder(tmp_path / "images", train=20, test=4)
    argv = [*TINY, "--surrogate", "gated", "--dataset", tmp_path / "images", "--data-dir", tmp_path / "cache"]
    assert go(*argv, "--batch-size", 16, "--train-size", 40, "--runs-dir", tmp_path, "--name", "run") == 0
    results = results_of(tmp_path / "run")
    assert results["attacks"]["decoder"]["test"]["images"] == 8 and results["cel"]["gated"]["skipped"] == 0
    assert not list((tmp_path / "images").glob(".*"))  # the cache is in --data-dir


def test_a_checkpoint_belongs_to_its_images(trained, tmp_path, capsys, monkeypatch):
    shutil.copytree(trained(), tmp_path / "run")
    old = shutil.copytree(trained(), tmp_path / "old") / "results.json"
    monkeypatch.setattr(shapes, "TINT", 0.2)
    for argv, main in (
        ([*TINY, "--runs-dir", tmp_path, "--name", "run", "--resume"], train.main),
        ([tmp_path / "run"], attack.main),
        (
            [*TINY, "--init", tmp_path / "run", "--runs-dir", tmp_path, "--name", "old", "--overwrite"],
            train.main,
        ),
    ):
        assert go(*argv, main=main) == 2 and old.exists()
        error = capsys.readouterr().err
        assert "was made with other images" in error and error.count("\n") == 1
