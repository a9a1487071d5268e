"""The command line, called in the process, at a size that takes seconds."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import data
import shapes
import train
from data import draw_shapes
from options import parse
from report import read_checkpoint

ROOT = Path(train.__file__).parent
TINY = ["--width", "4", "--train-size", "260", "--batch-size", "64", "--epochs", "3", "--warmup", "1", "--attack-epochs", "1",
        "--bottleneck", "2", "--attack-blocks", "1", "--attack-channels", "8"]
SURROGATES = ("none", "gmm", "cluster", "gated", "slot")
DEFENSES = ("none", "dropout", "distcorr", "patrol", "noise_arl")


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch):
    monkeypatch.setattr(data, "SHAPES_TRAIN", 300)
    monkeypatch.setattr(data, "SHAPES_TEST", 60)


def go(tmp_path, *flags, name="run", expect=0):
    assert train.main([*TINY, "--runs-dir", str(tmp_path), "--out", name, *flags]) == expect
    folder = tmp_path / name
    return json.loads((folder / "results.json").read_text()) if expect == 0 else None


def without_times(results):
    results = json.loads(json.dumps(results))
    del results["seconds"], results["encoder"]["latency_ms"], results["config"]["runs_dir"], results["config"]["out"], results["environment"]
    return results


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("defense", DEFENSES)
def test_every_surrogate_with_every_defense(tmp_path, surrogate, defense):
    results = go(tmp_path, "--surrogate", surrogate, "--defense", defense)
    for split in ("train", "test"):
        m = results["attacks"]["decoder"][split]
        assert m["psnr"] == pytest.approx(10 * math.log10(1 / m["mse"])) and 0 < m["nmse"] < 3 and -1 <= m["ssim"] <= 1
    assert 0 <= results["accuracy"] <= 1 and results["leakage"]["bits"] > 0
    assert results["encoder"]["params"] > 0 and results["encoder"]["latency_ms"] > 0
    cel = results["cel"]
    if surrogate == "none":
        assert cel["active_share"] is None
    else:
        assert cel["active_share"] > 0 and cel["grad_ratio"] > 0 and cel["nonfinite_steps"] == 0
    rows = list(csv.DictReader((tmp_path / "run" / "log.csv").open()))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"] and float(rows[0]["scale"]) == 0
    state = read_checkpoint(tmp_path / "run" / "checkpoint.pt")
    assert state["epoch"] == 3 and state["config"]["surrogate"] == surrogate
    from PIL import Image
    with Image.open(tmp_path / "run" / "reconstructions.png") as picture:
        assert picture.size[1] == 2 * 3 * 32  # two rows: originals, decoder


def test_same_command_same_results(tmp_path):
    first = go(tmp_path, "--surrogate", "slot", "--defense", "dropout", name="one")
    second = go(tmp_path, "--surrogate", "slot", "--defense", "dropout", name="two")
    assert without_times(first) == without_times(second)
    a, b = (read_checkpoint(tmp_path / name / "checkpoint.pt")["weights"] for name in ("one", "two"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_another_seed_gives_other_results(tmp_path):
    assert without_times(go(tmp_path, name="one")) != without_times(go(tmp_path, "--seed", "1", name="two"))


@pytest.mark.parametrize("surrogate, defense", [("gmm", "noise_arl"), ("slot", "patrol"), ("cluster", "none")])
def test_resumed_is_uninterrupted(tmp_path, monkeypatch, surrogate, defense):
    """Interrupted in the second epoch, resumed: the same weights and results, bit for bit."""
    flags = ["--surrogate", surrogate, "--defense", defense]
    whole = go(tmp_path, *flags, name="whole")
    epoch, calls = train.Run.train_epoch, []

    def interrupted(self, tick):
        calls.append(self.epoch)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return epoch(self, tick)
    monkeypatch.setattr(train.Run, "train_epoch", interrupted)
    go(tmp_path, *flags, name="halves", expect=130)
    resumed = go(tmp_path, *flags, "--resume", name="halves")
    assert calls == [0, 1, 1, 2] and without_times(resumed) == without_times(whole)
    a, b = (read_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("whole", "halves"))
    assert all(torch.equal(a["weights"][k], b["weights"][k]) for k in a["weights"])
    assert all(torch.equal(a["surrogate"][k], b["surrogate"][k]) for k in a["surrogate"])


def test_resume_refuses_other_settings_and_starts_where_there_is_nothing(tmp_path, capsys):
    go(tmp_path, "--resume", "--attack", "none")
    assert "nothing to resume" in capsys.readouterr().out
    before = (tmp_path / "run" / "results.json").read_bytes()
    go(tmp_path, "--resume", "--attack", "none", "--lr", "0.01", expect=2)
    assert "--lr" in capsys.readouterr().err and (tmp_path / "run" / "results.json").read_bytes() == before
    go(tmp_path, "--resume", "--attack", "none")
    assert without_times(json.loads(before)) == without_times(json.loads((tmp_path / "run" / "results.json").read_text()))


@pytest.mark.parametrize("surrogate", ("cluster", "gated"))
def test_both_stashes_train_the_same_network(tmp_path, surrogate):
    for how in ("cut", "params"):
        go(tmp_path, "--surrogate", surrogate, "--stash", how, "--attack", "none", name=how)
    a, b = (read_checkpoint(tmp_path / how / "checkpoint.pt")["weights"] for how in ("cut", "params"))
    assert all(torch.allclose(a[k].double(), b[k].double(), atol=2e-3) for k in a)


def test_a_weight_of_zero_is_a_plain_run(tmp_path):
    """With λ = 0 a surrogate leaves no trace in the weights."""
    go(tmp_path, "--surrogate", "gated", "--lambd", "0", "--attack", "none", name="warm")
    go(tmp_path, "--attack", "none", name="plain")
    a, b = (read_checkpoint(tmp_path / name / "checkpoint.pt")["weights"] for name in ("warm", "plain"))
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("surrogate", ("cluster", "gmm"))
def test_statistics_are_those_of_the_training_features(tmp_path, surrogate):
    """After the last refresh the weighted mean of a class's centres is the mean of its clean eval-mode features."""
    go(tmp_path, "--surrogate", surrogate, "--attack", "none")
    state = read_checkpoint(tmp_path / "run" / "checkpoint.pt")
    args = parse([*TINY, "--surrogate", surrogate])
    run = train.Run(args, data.load("shapes", train_size=260))
    run.load(state)
    run.net.eval()
    z, y = run.victim.features(run.splits.train.x).flatten(1), run.splits.train.y
    centers = run.cel.centers if surrogate == "cluster" else run.cel.means
    for c in range(10):
        weights = run.cel.weights[c] / run.cel.weights[c].sum()
        assert torch.allclose(weights @ centers[c], z[y == c].mean(0), atol=1e-4)


def test_batchnorm_makes_no_difference_that_matters(tmp_path):
    """Centres are fitted on eval-mode features and used on train-mode ones: on the same images the loss is the same within
    a few percent and the gradient keeps its direction. (In this tiny run the cosine is 0.87; in the default run 0.99.)"""
    go(tmp_path, "--surrogate", "cluster", "--bottleneck", "8", "--attack", "none", "--epochs", "8", "--train-size", "300", "--batch-size", "32")
    args = parse([*TINY, "--surrogate", "cluster", "--bottleneck", "8", "--train-size", "300", "--batch-size", "32"])
    run = train.Run(args, data.load("shapes", train_size=300))
    run.load(read_checkpoint(tmp_path / "run" / "checkpoint.pt"))
    x, y = run.splits.train.float(), run.splits.train.y
    losses, grads = {}, {}
    for mode in ("eval", "train"):
        run.net.train(mode == "train")
        with torch.no_grad():
            z = torch.cat([run.net.encoder(part) for part in x.split(90)])
        z.requires_grad_()
        loss = run.cel(z, y)
        losses[mode], (grads[mode],) = loss.item(), torch.autograd.grad(loss, z)
    assert losses["train"] == pytest.approx(losses["eval"], rel=0.05)
    assert torch.cosine_similarity(grads["train"].flatten(), grads["eval"].flatten(), dim=0) > 0.8


def test_three_attackers_and_attacking_a_checkpoint_again(tmp_path, capsys):
    import attack as attack_program
    small = ["--whitebox-images", "6", "--whitebox-steps", "8"]
    first = go(tmp_path, "--attack", "decoder,gan,whitebox", *small)
    assert list(first["attacks"]) == ["decoder", "gan", "whitebox"]
    assert first["attacks"]["whitebox"]["test"]["images"] == 6 and first["attacks"]["gan"]["test"]["images"] == 60
    for split in ("train", "test"):
        common = {name: r[split]["mse_common"] for name, r in first["attacks"].items()}
        assert first["strongest"][split] == min(common, key=common.get)
    from PIL import Image
    with Image.open(tmp_path / "run" / "reconstructions.png") as picture:
        assert picture.size[1] == 4 * 3 * 32
    # the decoder alone, on the saved checkpoint: the same victim, the same random numbers, the same figures
    assert attack_program.main([str(tmp_path / "run"), "--attack", "decoder", *small]) == 0
    again = json.loads((tmp_path / "run" / "attack.json").read_text())
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == first  # the run's own results stay
    assert again["accuracy"] == first["accuracy"]
    for split in ("train", "test"):
        assert again["attacks"]["decoder"][split]["mse"] == first["attacks"]["decoder"][split]["mse"]
    # a run that was trained without an attack is attacked by the decoder
    go(tmp_path, "--attack", "none", name="quiet")
    assert attack_program.main([str(tmp_path / "quiet"), *small]) == 0
    assert list(json.loads((tmp_path / "quiet" / "attack.json").read_text())["attacks"]) == ["decoder"]
    capsys.readouterr()
    for argv, words in (([], "runs/NAME"), ([str(tmp_path / "nothing")], "no such checkpoint"),
                        ([str(tmp_path / "run"), "--sigma", "1"], "--sigma"),
                        ([str(tmp_path / "run"), "--attacker-data", "aux"], "--attacker-data aux")):
        assert attack_program.main(argv) == 2
        error = capsys.readouterr().err
        assert words in error and len(error.strip().splitlines()) == 1
    assert json.loads((tmp_path / "run" / "attack.json").read_text()) == again


def test_surrogate_is_silent_before_the_first_refresh(tmp_path):
    results = go(tmp_path, "--surrogate", "cluster", "--warmup", "0", "--ramp", "0", "--attack", "none")
    rows = list(csv.DictReader((tmp_path / "run" / "log.csv").open()))
    assert float(rows[0]["loss_cel"]) == 0 < float(rows[1]["loss_cel"])
    assert results["cel"]["counted_steps"] == 2 * 3


def test_refresh_every_and_sample_cap(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(train.ClusterCEL, "refresh", lambda self, z, y: seen.append(len(z)))
    go(tmp_path, "--surrogate", "cluster", "--epochs", "5", "--refresh-every", "2", "--refresh-samples", "50", "--attack", "none")
    assert seen == [50, 50, 50]  # at the ends of epochs 1, 3 and 5


def test_nonfinite_surrogate_costs_its_step_and_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(train.GatedAttCEL, "forward", lambda self, z, y: (setattr(self, "stats", {k: torch.ones(()) for k in ("active", "skipped", "nonfinite")}), z.sum() * math.nan)[1])
    results = go(tmp_path, "--surrogate", "gated", "--attack", "none", name="nan")
    assert results["cel"]["nonfinite_steps"] == results["cel"]["counted_steps"] > 0
    go(tmp_path, "--attack", "none", name="plain")
    a, b = (read_checkpoint(tmp_path / name / "checkpoint.pt")["weights"] for name in ("nan", "plain"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_schedules_and_scale():
    args = parse(["--epochs", "10", "--surrogate", "gated", "--warmup", "2", "--ramp", "4", "--scale", "0.2", "--lr", "0.05"])
    assert [round(train.loss_scale(args, e), 4) for e in range(8)] == [0, 0, 0.05, 0.1, 0.15, 0.2, 0.2, 0.2]
    rates = [train.learning_rate(args, i / 1000) for i in range(1001)]
    assert max(rates) == pytest.approx(0.05, rel=1e-3) and rates[-1] == pytest.approx(0, abs=1e-9) and rates[0] == pytest.approx(0.002)
    args.schedule = "steps"
    assert [train.learning_rate(args, s) for s in (0, 0.3, 0.6, 0.7, 0.9)] == pytest.approx([0.05 * 0.2 ** k for k in range(5)])


def test_warmup_is_scaled_down_for_short_runs():
    assert [parse(["--surrogate", "gated", "--epochs", str(e)]).warmup for e in (1, 5, 10, 25, 240)] == [0, 1, 2, 5, 5]
    assert parse(["--surrogate", "slot", "--epochs", "240"]).warmup == 3
    assert parse(["--surrogate", "cluster", "--epochs", "2"]).warmup == 1


def test_runs_of_other_settings_have_other_names():
    flags = [[], ["--epochs", "9"], ["--surrogate", "gated"], ["--surrogate", "gated", "--attention", "joint"], ["--sigma", "0.2"], ["--attacker-data", "aux"]]
    assert len({parse(f).out for f in flags}) == len(flags)
    assert parse(["--verbose"]).out == parse([]).out


def test_pooling_keeps_the_noise_in_proportion(tmp_path):
    """The mean of n cells of z' has noise of variance σ²/n: that is what a surrogate of the pooled z is told."""
    args = parse(["--surrogate", "gmm", "--pool", "4", "--sigma", "0.2"])
    cel = train.build(args, 10, 32)[2]
    noise = train.pooled(0.2 * torch.randn(4000, 8, 8, 8), 4)
    assert cel.dim == 8 * 16 and cel.sigma == pytest.approx(0.1) == pytest.approx(noise.std().item(), rel=0.01)
    go(tmp_path, "--surrogate", "gated", "--pool", "2", "--attack", "none")


def test_a_checkpoint_belongs_to_its_images_and_must_be_finished(tmp_path, capsys, monkeypatch):
    import attack as attack_program
    go(tmp_path, "--attack", "none")
    monkeypatch.setattr(shapes, "TINT", 0.2)
    assert attack_program.main([str(tmp_path / "run"), "--attack", "decoder"]) == 2
    assert "not those of the checkpoint" in capsys.readouterr().err
    state = read_checkpoint(tmp_path / "run" / "checkpoint.pt")
    torch.save({**state, "epoch": 2}, tmp_path / "run" / "checkpoint.pt")
    assert attack_program.main([str(tmp_path / "run")]) == 2
    assert "after epoch 2 of 3" in capsys.readouterr().err


def test_the_papers_setting_is_reachable_by_flags():
    args = parse(["--width", "64", "--sigma", "0.025", "--lr", "0.05", "--schedule", "steps", "--epochs", "240", "--lambd", "16", "--surrogate", "gmm"])
    net, _, cel, shape = train.build(args, 10, 32)
    assert shape == (8, 8, 8) and cel.dim == 512 and cel.sigma == 0.025
    assert sum(p.numel() for p in net.encoder.parameters()) == pytest.approx(0.085e6, rel=0.01)


def test_attack_on_auxiliary_images(tmp_path):
    results = go(tmp_path, "--attacker-data", "aux")
    assert results["config"]["aux_share"] == 0.25 and results["attacks"]["decoder"]["fit_images"] < 65


def test_a_folder_of_images_from_the_command_line(tmp_path):
    from PIL import Image
    pictures = draw_shapes(80)
    for i, (x, y) in enumerate(zip(pictures.x, pictures.y)):
        folder = tmp_path / "images" / ("train" if i < 60 else "test") / f"class{int(y) % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x.permute(1, 2, 0).contiguous().numpy()).save(folder / f"{i}.png")
    results = go(tmp_path, "--dataset", str(tmp_path / "images"), "--batch-size", "16", "--surrogate", "gated")
    assert results["config"]["dataset"].endswith("images") and results["attacks"]["decoder"]["test"]["mse"] > 0


@pytest.mark.parametrize("flags, words", [
    (["--sigma", "0", "--surrogate", "gmm"], "--sigma 0"), (["--sigma", "-1"], "--sigma"), (["--cut", "9"], "--cut 9"),
    (["--dataset", "nowhere"], "nowhere"), (["--out", "../escape"], "--out"), (["--defense", "prayer"], "prayer"),
    (["--attack", "luck"], "luck"), (["--defense", "dropout,patrol"], "dropout,patrol"), (["--seed", "-1"], "--seed"), (["--device", "abacus"], "abacus"),
    (["--surrogate", "gated", "--warmup", "3"], "never act"), (["--surrogate", "gated", "--clusters", "5"], "--clusters"), (["--epoch", "3"], "--epoch"),
    (["--surrogate", "gated", "--pool", "16"], "--pool 16"), (["--surrogate", "slot", "--off", "class_gat"], "class_gate"), (["--batch-size", "5000"], "--batch-size 5000"), (["--surrogate", "magic"], "magic"),
])
def test_a_users_mistake_is_one_sentence(tmp_path, capsys, flags, words):
    go(tmp_path, *flags, expect=2) if "--out" not in flags else None
    if "--out" in flags:
        assert train.main([*TINY, *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1 and "Traceback" not in error


def test_pixel_variance_and_default_budget_are_as_stated():
    images = draw_shapes(1000, seed=1)
    assert images.float().var() >= 0.03
    args = parse([])
    assert (args.surrogate, args.dataset, args.sigma) == ("none", "shapes", 0.1)


def test_the_program_runs_as_a_command(tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), "--width", "4", "--train-size", "200", "--epochs", "1", "--batch-size", "64",
               "--attack", "none", "--runs-dir", str(tmp_path), "--out", "run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout and (tmp_path / "run" / "results.json").is_file()
