"""Killed runs go on bit for bit, wrong uses end in one sentence, no output problem costs a run, no file runs code."""
# ruff: noqa: E501 (a wrong use is one line)

import csv
import errno
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import TINY, RunsCode, go, picture_folder, random_pixels, save_picture

import attack
import train
from harness import files
from harness.files import read_checkpoint

ROOT = Path(train.__file__).parent
LONG = "--epochs 3"  # three epochs of three steps
CONFIGS = {
    "gmm": f"{LONG} --surrogate gmm --defense noise_arl",
    "slot": f"{LONG} --surrogate slot --defense patrol --memory 4 --warmup 1",
    "cluster": f"{LONG} --surrogate cluster --stash params --momentum-decay 0.5",
    "hardened": f"{LONG} --surrogate gated --memory 4 --init BASE",
}
OURS = {"checkpoint.pt", "log.csv", "reconstructions.png", "results.json"}


@dataclass
class Done:
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """elsewhere(PROGRAM, *argv, when=..., how=...) -> Done: in a process of its own; see forks.py."""
    folder = tmp_path_factory.mktemp("elsewhere")
    places = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "forks.py")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(program, *argv, when="never", how="SIGKILL", out=None, encoding="utf-8", **variables):
        out, err = out or str(folder / "out"), str(folder / "err")
        request = {"program": program, "argv": [*map(str, argv)], "out": out, "err": err}
        request |= {"when": when, "how": how, "encoding": encoding, "environment": variables}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        shown = Path(out).read_text(encoding) if Path(out).is_file() else ""
        return Done(status, shown, Path(err).read_text(encoding))

    yield run
    server.stdin.close()
    assert server.wait(60) == 0


def flags_of(config, trained):
    """Flags of CONFIGS, in words."""
    return CONFIGS[config].replace("BASE", str(trained(""))).split()


def flat(value, path=""):
    """{path: leaf} of nested dicts and lists."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, part in items for k, v in flat(part, f"{path}/{key}").items()}
    return {path: value}


def without_times(folder):
    """What must not differ between two runs of the same settings."""
    results = json.loads((folder / "results.json").read_text())
    del results["seconds"], results["environment"]["command"]
    for name in ("runs_dir", "name", "resume", "overwrite"):
        del results["config"][name]
    return results


def assert_same_run(one, two):
    """The same weights, optimisers, statistics, figures, log and pictures, bit for bit, and no other file."""
    a, b = (flat(read_checkpoint(folder / "checkpoint.pt")) for folder in (one, two))
    assert a.keys() == b.keys()
    for key, value in a.items():
        if not re.search(r"/seconds|^/config/(runs_dir|name|resume|overwrite)", key):
            assert torch.equal(value, b[key]) if torch.is_tensor(value) else value == b[key], key
    assert without_times(one) == without_times(two)
    rows = [[{**r, "seconds": ""} for r in csv.DictReader((f / "log.csv").open())] for f in (one, two)]
    assert rows[0] == rows[1] and len(rows[0]) == read_checkpoint(one / "checkpoint.pt")["epoch"]
    assert (one / "reconstructions.png").read_bytes() == (two / "reconstructions.png").read_bytes()
    assert set(os.listdir(two)) == {*OURS, ".lock"}


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


# ------------------------------------------------------------ interruptions


def assert_whole_files(folder):
    """Every file under a final name can be read to its end."""
    for path in folder.iterdir():
        if path.name == "checkpoint.pt":
            read_checkpoint(path)
        elif path.name == "log.csv":
            assert path.read_text().endswith("\n")
        else:
            assert path.name in ("reconstructions.png", ".lock") or re.fullmatch(r"\..*\.cem-tmp", path.name)


@pytest.mark.parametrize(
    "config, when, epochs",
    [
        ("gmm", "mid-epoch", 1),
        ("gmm", "checkpoint half written", 1),
        ("gmm", "attack", 3),
        ("slot", "between checkpoint and log", 3),
        ("slot", "before the rename", 1),
        ("cluster", "mid-epoch", 1),
        ("cluster", "refresh", 1),
        ("cluster", "results half written", 3),
        ("hardened", "fit", None),
        ("hardened", "checkpoint half written", 1),
    ],
)
def test_killed_and_resumed_is_uninterrupted(tmp_path, elsewhere, trained, config, when, epochs):
    words = flags_of(config, trained)
    flags = [*TINY, *words, "--runs-dir", tmp_path, "--name", "run"]
    assert elsewhere("train.py", *flags, when=when).status == -signal.SIGKILL
    assert_whole_files(tmp_path / "run")
    if epochs is None:
        assert not (tmp_path / "run" / "checkpoint.pt").exists()
    else:
        assert read_checkpoint(tmp_path / "run" / "checkpoint.pt")["epoch"] == epochs
    left = [path for path in (tmp_path / "run").glob(".*.cem-tmp") if path.stat().st_size]
    assert bool(left) == any(word in when for word in ("written", "rename", "between"))
    assert go(*flags, "--resume") == 0
    assert_same_run(trained(" ".join(words)), tmp_path / "run")


@pytest.mark.parametrize("when", ("mid-epoch", "attack", "results half written"))
def test_ctrl_c_ends_in_one_line_that_resumes(tmp_path, elsewhere, trained, when):
    words = flags_of("cluster", trained)
    flags = [*TINY, *words, "--runs-dir", tmp_path / "a folder", "--name", "run", "--overwrite"]
    done = elsewhere("train.py", *flags, when=when, how="SIGINT")
    assert done.status == 130
    (line,) = done.err.splitlines()
    again = shlex.split(line.removeprefix("interrupted; go on with: python train.py "))
    assert again[-1] == "--resume" and "--overwrite" not in again
    assert not list((tmp_path / "a folder" / "run").glob(".*.cem-tmp"))
    assert go(*again) == 0  # the line as it is printed
    assert_same_run(trained(" ".join(words)), tmp_path / "a folder" / "run")
    if when == "attack":  # interrupted again: --resume is named once
        done = elsewhere("train.py", *again, when=when, how="SIGINT")
        assert done.status == 130 and done.err.count("--resume") == 1


def test_ctrl_c_in_attack_py(tmp_path, elsewhere, trained):
    run = shutil.copytree(trained(""), tmp_path / "run")
    before = contents(run)
    done = elsewhere("attack.py", run, "--attack-epochs", 3, when="attack", how="SIGINT")
    assert done.status == 130
    assert done.err == f"interrupted; go on with: python attack.py {run} --attack-epochs 3\n"
    assert contents(run) == before


# ------------------------------------------------------------ one command, one result


def test_the_same_command_gives_the_same_result_in_a_fresh_process(tmp_path, trained):
    """A new interpreter, as a user starts it; a folder of pictures, so that nothing has to be made small."""
    picture_folder(tmp_path / "images", train=40, test=5)
    flags = [*TINY, "--train-size", 72, "--dataset", tmp_path / "images", "--data-dir", tmp_path / "cache"]
    flags += ["--surrogate", "slot", "--defense", "dropout", "--runs-dir", tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "train.py"), *map(str, flags), "--name", "fresh"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and "\r" not in done.stdout, done.stderr
    assert "-> " in done.stdout.splitlines()[-1]
    assert go(*flags, "--name", "here") == 0
    fresh, here = without_times(tmp_path / "fresh"), without_times(tmp_path / "here")
    assert fresh["encoder"].pop("latency_ms") > 0 and here["encoder"].pop("latency_ms") == 1
    assert fresh == here
    a, b = (read_checkpoint(tmp_path / name / "checkpoint.pt")["weights"] for name in ("fresh", "here"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_rank_in_the_environment_changes_nothing(tmp_path, elsewhere, trained):
    """RANK without torchrun is somebody else's."""
    flags = [*TINY, "--runs-dir", tmp_path, "--name", "run"]
    done = elsewhere("train.py", *flags, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert done.status == 0 and "decoder on test" in done.out and done.err == ""
    assert_same_run(trained(""), tmp_path / "run")


@pytest.mark.parametrize(
    "how",
    [
        {"out": "/dev/full"},
        {"out": "broken pipe"},  # as in | head -1
        {"out": "closed"},
        {"encoding": "ascii"},
        {"encoding": "latin-1"},
    ],
    ids=lambda how: next(iter(how.values())),
)
def test_an_output_problem_never_costs_a_run(tmp_path, elsewhere, trained, how):
    done = elsewhere("train.py", *TINY, "--runs-dir", tmp_path, "--name", "run", **how)
    assert (done.status, done.err) == (0, "")
    assert_same_run(trained(""), tmp_path / "run")


def test_a_narrow_resnet_does_not_crash(tmp_path, elsewhere):
    """In a process of its own: with a strided 1x1 convolution torch ends here by a signal (see split_net.py)."""
    narrow = "--arch resnet20 --cut 5 --epochs 1 --width 2 --attack none".split()
    done = elsewhere("train.py", *TINY, *narrow, "--runs-dir", tmp_path, "--name", "run")
    assert done.status == 0, done.err


# ------------------------------------------------------------ wrong uses


class Place:
    """A finished run in a working directory of its own, and what spoils it."""

    def __init__(self, tmp, monkeypatch):
        self.tmp, self.patch, self.run = tmp, monkeypatch, tmp / "runs" / "run"

    def images(self, change=lambda folder: None, **shape):
        folder = self.tmp / "images"
        picture_folder(folder, **{"train": 20, **shape})
        change(folder)
        return ["--dataset", folder, "--batch-size", 8, "--train-size", 40]

    def file(self):
        (self.tmp / "file").write_text("")
        return self.tmp / "file"

    def base(self, **entries):
        """--init of a copy of the run whose checkpoint has other entries."""
        shutil.copytree(self.run, self.tmp / "base")
        state = read_checkpoint(self.run / "checkpoint.pt")
        torch.save({**state, **entries}, self.tmp / "base" / "checkpoint.pt")
        return ["--init", self.tmp / "base"]

    def full_disk(self, error):
        def save(state, path):
            Path(path).write_bytes(b"half")
            raise error

        self.patch.setattr(torch, "save", save)
        return ["--name", "other"]

    def no_memory(self):
        def refresh(self):
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

        self.patch.setattr(train.Run, "refresh", refresh)
        return ["--name", "other", "--surrogate", "gmm"]

    def link_to_nowhere(self):
        (self.tmp / "runs" / "link").symlink_to(self.tmp / "nowhere" / "at all")
        return ["--name", "link"]


def same_picture(folder):
    for path in folder.rglob("*.png"):
        save_picture(path, random_pixels(0))


# {flags, or a function of a Place that makes them: (what the sentence names, what it advises)}
# fmt: off
WRONG = {
    # images
    "unknown data set": ("--dataset cifar11", "cifar11", "use shapes, cifar10"),
    "a file for a data set": (lambda p: ["--dataset", p.file()], "file", "use shapes"),
    "tiny imagenet that is not there": ("--dataset tinyimagenet --data-dir nowhere", "nowhere/tiny-imagenet-200", "use shapes"),
    "class missing in train": (lambda p: p.images(lambda f: shutil.rmtree(f / "train" / "bee")), "bee", "class folders"),
    "one class": (lambda p: p.images(classes=("ant",)), "found 1 class", "at least 2"),
    "fewer images than a batch": (lambda p: p.images(train=4), "--batch-size 8: there are only 7", "lower it"),
    "small images": (lambda p: p.images(size=16), "16 pixels a side", "--image-size 32"),
    "a broken image": (lambda p: p.images(lambda f: (f / "train/ant/5.png").write_text("an ant")), "ant/5.png", "replace or delete it"),
    "one picture again and again": (lambda p: p.images(same_picture), "--attacker-data train", "give it more"),
    "odd size, decoder": (lambda p: [*p.images(), "--image-size", 33], "--image-size 33", "use 32"),
    "odd size, proxy": (lambda p: [*p.images(), *"--image-size 33 --attack none --defense noise_arl".split()], "--image-size 33", "use 32"),
    "shapes in another size": ("--image-size 48", "--image-size 48", "leave the flag out"),
    "images too small": ("--image-size 31", "--image-size: 31", "at least 32"),
    "images too large": ("--image-size 1000000", "--image-size: 1000000", "at most 4096"),
    "no training images": ("--train-size 0", "--train-size: 0", "at least 1"),
    "fewer images than classes": ("--train-size 5 --batch-size 1", "--train-size 5: there are 10 classes", "use at least"),
    # network
    "cut at 0": ("--cut 0", "--cut: 0", "at least 1"),
    "cut behind the end": ("--arch resnet20 --cut 10", "--cut 10", "cut after 1 to 9"),
    "no unit left for patrol": ("--cut 7 --defense patrol", "--cut 7: patrol", "lower it"),
    "negative bottleneck": ("--bottleneck=-1", "--bottleneck: -1", "at least 0"),
    "width 0": ("--width 0", "--width: 0", "at least 1"),
    "width beyond any machine": (f"--width {10**30}", "--width: 1000", "at most"),
    "unknown network": ("--arch vgg12", "--arch", "vgg11"),
    # training
    "no epochs": ("--epochs 0", "--epochs: 0", "at least 1"),
    "half an epoch": ("--epochs 0.5", "--epochs", "see --help"),
    "batch larger than the images": ("--batch-size 5000", "--batch-size 5000", "lower it"),
    "rate that is no number": ("--lr nan", "--lr: nan", "at least 0"),
    "infinite rate": ("--lr inf", "--lr: inf", "at most"),
    "training that diverges": ("--lr 1e9 --name other", "training diverged", "lower --lr"),
    "seed too large": (f"--seed {2**31}", "--seed: 2147483648", "at most 2147483647"),
    "no such device": ("--device cuda:99", "--device cuda:99", "use cpu or auto"),
    "device without memory": ("--device meta", "--device meta", "use cpu or auto"),
    "device of another build": ("--device hpu", "--device hpu", "use cpu or auto"),
    "unknown device": ("--device abacus", "--device abacus", "use cpu or auto"),
    "no memory": (lambda p: p.no_memory(), "not enough memory", "lower --batch-size"),
    # --init
    "base that is not there": ("--init nowhere", "nowhere/checkpoint.pt: there is no such file", "train first"),
    "base of another network": (lambda p: [*p.base(), "--width", 8], "--width 8: the base of --init has 4", "leave the flag out"),
    "base of another cut": (lambda p: [*p.base(), "--cut", 3], "--cut 3: the base of --init has 2", "leave the flag out"),
    "base of other images": (lambda p: [*p.base(), "--train-size", 100], "--train-size 100: the base of --init has 130", "leave the flag out"),
    "base of another seed": (lambda p: [*p.base(), "--seed", 4], "--seed 4: the base of --init has 0", "leave the flag out"),
    "base of images that changed": (lambda p: [*p.base(data="0" * 64), "--name", "other"], "made with other images", "restore them"),
    "unfinished base": (lambda p: p.base(epoch=1), "its training is not finished", "train.py --resume"),
    "patrol from a base": (lambda p: [*p.base(), "--defense", "patrol"], "patrol changes the network", "from scratch"),
    "patrol as a base": (lambda p: p.base(config={**read_checkpoint(p.run / "checkpoint.pt")["config"], "defense": "patrol"}), "patrol changes the network", "from scratch"),
    "base in the place of the run": ("--init runs/run", "--init runs/run: it would be replaced", "choose a --name"),
    # privacy
    "negative noise": ("--sigma=-0.1", "--sigma: -0.1", "must be 0, or at least"),
    "noise below rounding": ("--sigma 1e-30", "--sigma: 1e-30", "must be 0, or at least"),
    "noise that is no number": ("--sigma nan", "--sigma: nan", "must be 0, or at least"),
    "surrogate without noise": ("--sigma 0 --surrogate gmm", "--sigma 0", "give a positive --sigma"),
    "negative weight": ("--surrogate gmm --lambd=-1", "--lambd: -1", "at least 0"),
    "infinite weight": ("--surrogate gated --lambd inf", "--lambd: inf", "at most"),
    "two weights for one": ("--surrogate gated --lambd 1+2", "--lambd: give one number for each of the 1", "joined by +"),
    "threshold 0": ("--surrogate cluster --var-threshold 0", "--var-threshold: 0", "greater than 0"),
    "floor 0": ("--surrogate gated --floor 0", "--floor: 0", "greater than 0"),
    "rate of the statistics 0": ("--surrogate gmm --update-scale 0", "--update-scale: 0", "greater than 0"),
    "no slots": ("--surrogate slot --slots 0", "--slots: 0", "at least 1"),
    "another surrogate's flag": ("--surrogate gated --slots 4", "--slots: only slot takes it", "leave it out"),
    "another surrogate's mode": ("--surrogate gated --mode image", "--mode image: gated has fit", "choose one"),
    "unknown gate": ("--surrogate slot --mode documented --off garden_gate", "garden_gate", "class_gate"),
    "gate that is off already": ("--surrogate slot --off snr_gate", "change nothing", "documented"),
    "memory of pictures": ("--surrogate slot --mode image --memory 4", "memory", "image"),
    "pool beyond the features": ("--surrogate gated --pool 16", "--pool 16: the features are 8x8", "divides 8"),
    "cells of unequal size": ("--surrogate gated --pool 3", "--pool 3: the features are 8x8", "divides 8"),
    "cells that lie across pixels": (lambda p: [*p.images(), *"--image-size 33 --attack none --surrogate direct".split()], "8x8 cells do not divide 33x33 pixels", "change --pool"),
    "cells that lie across pixels, slot": (lambda p: [*p.images(), *"--image-size 33 --attack none --surrogate slot --mode image".split()], "8x8 cells do not divide 33x33 pixels", "change --pool"),
    "each another scale": ("--surrogate gated+cluster", "--surrogate gated+cluster: each has another γ", "--scale"),
    "warm-up to the end": ("--surrogate gated --warmup 3", "--epochs 2: the first 3 are warm-up", "raise it"),
    "momentum without its stash": ("--surrogate gated --momentum-decay 0.9", "--momentum-decay", "add --stash params"),
    "unknown surrogate": ("--surrogate magic", "--surrogate: magic", "use none, or"),
    "a surrogate twice": ("--surrogate gmm+gmm", "--surrogate: gmm+gmm", "different"),
    "unknown defence": ("--defense prayer", "--defense prayer", "use one of"),
    "a defence twice": ("--defense dropout+dropout", "--defense dropout+dropout", "use one of"),
    "dropout of everything": ("--defense dropout --strength 1", "--strength 1: dropout", "below 1"),
    "strength that is no number": ("--defense distcorr --strength nan", "--strength: nan", "at least 0"),
    "strength of no defence": ("--strength 1", "--strength", "leave it out"),
    # attack
    "unknown attacker": ("--attack luck", "--attack: luck", "decoder, gan, whitebox"),
    "no attacker, not even none": ("--attack=", "--attack", "use none, or"),
    "size in one number": ("--attack-size 48", "--attack-size: 48", "as in 2x48"),
    "half an epoch of attack": ("--attack-epochs soon", "--attack-epochs", "see --help"),
    "no look": ("--looks 0", "--looks: 0", "at least 1"),
    # output
    "unknown flag": ("--workers 4", "--workers", "see --help"),
    "flag cut short": ("--epoch 3", "--epoch", "see --help"),
    "stray word": ("fast", "fast", "see --help"),
    "flag without its value": ("--epochs", "--epochs", "see --help"),
    "--name with a newline": (["--name", "run\n"], "--name run?", "use letters"),
    "--name in another folder": ("--name ../escape", "--name ../escape", "use letters"),
    "--name too long for a file": (f"--name {'x' * 300}", "cannot be written", "--name"),
    "--name is a link to nowhere": (lambda p: p.link_to_nowhere(), "runs/link: cannot be written", "--name"),
    "a file for --runs-dir": (lambda p: ["--runs-dir", p.file()], "file/run: cannot be written", "choose another --runs-dir"),
    "full disk": (lambda p: p.full_disk(OSError(errno.ENOSPC, "No space left")), "checkpoint.pt: cannot be written ([Errno 28]", "free some space"),
    "full disk as torch reports it": (lambda p: p.full_disk(RuntimeError("PytorchStreamWriter failed")), "checkpoint.pt: cannot be written", "free some space"),
}
# with --resume over a finished run
WRONG_RESUME = {
    "other data set": (lambda p: p.images(), "another --dataset", "choose a --name"),
    "other network": ("--arch resnet20", "another --arch", "choose a --name"),
    "other surrogate": ("--surrogate gated", "another --", "choose a --name"),
    "other seed": ("--seed 1", "another --seed", "choose a --name"),
    "other noise": ("--sigma 0.2", "another --sigma", "choose a --name"),
    "other attacker's images": ("--attacker-data aux", "another --attacker-data", "choose a --name"),
}
WRONG_ATTACK = {
    "no run": (lambda run: [], "runs/NAME", "name the run's folder first"),
    "flags first": (lambda run: ["--attack", "gan", run], "runs/NAME", "name the run's folder first"),
    "no such run": (lambda run: [run / "nothing"], "nothing/checkpoint.pt: there is no such file", "train first"),
    "file for a run": (lambda run: [run / "log.csv"], "log.csv/checkpoint.pt: there is no such file", "train first"),
    "two runs": (lambda run: [run, run], "unrecognized arguments", "see --help"),
    "unknown attacker": (lambda run: [run, "--attack", "luck"], "--attack: luck", "decoder, gan"),
    "no epochs": (lambda run: [run, "--attack-epochs", "0"], "--attack-epochs: 0", "at least 1"),
    "flag of the training": (lambda run: [run, "--sigma", "1"], "--sigma: belongs to training", "--looks"),
    "flag of the training, with =": (lambda run: [run, "--lr=1"], "--lr: belongs to training", "--looks"),
    "another folder": (lambda run: [run, "--name", "elsewhere"], "--name: belongs to training", "--looks"),
    "images that were not kept": (lambda run: [run, "--attacker-data", "aux"], "--attacker-data: belongs to training", "--looks"),
    "no such device": (lambda run: [run, "--device", "cuda:99"], "--device cuda:99", "use cpu or auto"),
}
# fmt: on


def assert_one_sentence(capfd, names, advice):
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and err.rstrip("\n").isprintable(), err
    assert err.endswith(".\n") or ", as in: python " in err  # no full stop behind a command
    assert names in err and advice in err and "Traceback" not in err + out, err
    assert err.strip() not in out and len(err) < 1000


@pytest.fixture
def place(tmp_path, monkeypatch, trained):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained(""), tmp_path / "runs" / "run")
    return Place(tmp_path, monkeypatch)


def flags_at(place, flags):
    return flags(place) if callable(flags) else flags if isinstance(flags, list) else flags.split()


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_use_is_one_sentence_and_leaves_earlier_results(place, capfd, case):
    """Over a finished run of the same name, even with --overwrite: status 2, one line, its files stay."""
    flags, names, advice = WRONG[case]
    before, flags = contents(place.run), flags_at(place, flags)
    capfd.readouterr()
    assert go(*TINY, "--runs-dir", "runs", "--name", "run", "--overwrite", *flags) == 2
    assert_one_sentence(capfd, names, advice)
    assert contents(place.run) == before


@pytest.mark.parametrize("case", WRONG_RESUME)
def test_a_run_is_resumed_with_its_own_settings_only(place, capfd, case):
    flags, names, advice = WRONG_RESUME[case]
    before, flags = contents(place.run), flags_at(place, flags)
    capfd.readouterr()
    assert go(*TINY, "--runs-dir", "runs", "--name", "run", "--resume", *flags) == 2
    assert_one_sentence(capfd, names, advice)
    assert contents(place.run) == before


@pytest.mark.parametrize("case", WRONG_ATTACK)
def test_a_wrong_use_of_attack_py(place, capfd, case):
    argv, names, advice = WRONG_ATTACK[case]
    before = contents(place.run)
    assert go(*argv(place.run), main=attack.main) == 2
    assert_one_sentence(capfd, names, advice)
    assert contents(place.run) == before


def test_a_second_live_run_in_the_same_folder(place, capfd):
    lock = files.claim_folder(place.run)
    for how in ("--resume", "--overwrite"):
        assert go(*TINY, "--runs-dir", "runs", "--name", "run", how) == 2
        assert_one_sentence(capfd, "another run is writing there now", "choose another --name")
    lock.close()
    assert go(*TINY, "--runs-dir", "runs", "--name", "run", "--resume") == 0


def test_resuming_on_another_number_of_threads_says_what_holds(place, capfd):
    state = read_checkpoint(place.run / "checkpoint.pt")
    torch.save({**state, "config": {**state["config"], "threads": 7}}, place.run / "checkpoint.pt")
    assert go(*TINY, "--runs-dir", "runs", "--name", "run", "--resume", "--attack", "none") == 0
    assert "begun on 7 threads, now 1; bit-equality holds for the same number only" in capfd.readouterr().out


# ------------------------------------------------------------ crafted checkpoints

USES = {  # of runs/run
    "--resume": (train.main, [*TINY, "--runs-dir", "runs", "--name", "run", "--resume"]),
    "attack.py": (attack.main, ["runs/run"]),
    "--init": (train.main, [*TINY, "--runs-dir", "runs", "--name", "other", "--init", "runs/run"]),
}
DAMAGE = {
    "truncated": lambda path, state: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path, state: path.write_bytes(b""),
    "text": lambda path, state: path.write_text("weights"),
    "a folder": lambda path, state: (path.unlink(), path.mkdir()),
    "a pickle": lambda path, state: path.write_bytes(pickle.dumps(state["log"])),
    "weights alone": lambda path, state: torch.save(state["weights"], path),
    "a list": lambda path, state: torch.save([state], path),
    "a number": lambda path, state: torch.save(5, path),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_no_checkpoint(place, capfd, use, damage):
    path, (main, argv) = place.run / "checkpoint.pt", USES[use]
    DAMAGE[damage](path, read_checkpoint(path))
    before = contents(place.run)
    assert go(*argv, main=main) == 2
    assert_one_sentence(capfd, "checkpoint.pt: damaged or not made by this version", "delete it")
    assert contents(place.run) == before


WEIGHT = "encoder.0.0.weight"
CRAFTED = {  # field: what stands there
    "another version's": ("format", 0),
    "weights of another network": ("weights", {"layer": torch.ones(3)}),
    "no weights": ("weights", {}),
    "a weight of another shape": (f"weights/{WEIGHT}", torch.ones(3)),
    "a weight that is a word": (f"weights/{WEIGHT}", "heavy"),
    "shape of another network": ("net", {"arch": "vgg11", "num_classes": 7, "width": 3}),
    "no shape": ("net", {}),
    "a shape of words": ("net", {"arch": "vgg11", "num_classes": "ten"}),
    "a cut beyond the network": ("net/cut", 99),
    "a network beyond any machine": ("net/width", 10**9),
    "settings of another type": ("config", []),
    "a setting of another type": ("config/sigma", "much"),
    "a setting that is a list": ("config/width", [4]),
    "epochs that are words": ("config/epochs", "two"),
    "no settings": ("config", {}),
    "an epoch that is a word": ("epoch", "two"),
    "a log that is no list": ("log", {}),
    "time that is a word": ("seconds", "long"),
}
NOT_RESUMED = {  # what --resume does not read
    "an attack that is a number": ("config/attack", 5),
    "a list of numbers for names": ("config/attack", [5]),
}
ONLY_RESUMED = {  # what attack.py and --init do not read
    "optimiser of another network": ("optimizer", {"state": {}, "param_groups": []}),
    "no optimiser": ("optimizer", None),
    "surrogate of another run": ("cels", {"centers": torch.ones(3)}),
    "a defence that is a number": ("defense", 5),
    "an empty log": ("log", []),
    "a log of numbers": ("log", [1, 2]),
    "a log without figures": ("log", [{}, {}]),
    "a log of words": ("log", [{"epoch": "one", "nonfinite_steps": "none"}] * 2),
    "an average of words": ("average", ["one"]),
    "a spread of words": ("spread", ["wide"]),
    "an epoch below 0": ("epoch", -1),
}


def replaced(state, path, value):
    name, _, rest = path.partition("/")
    return {**state, name: replaced(state[name], rest, value) if rest else value}


@pytest.mark.parametrize(
    "use, case",
    [(use, case) for use in USES for case in CRAFTED]
    + [(use, case) for use in ("attack.py", "--init") for case in NOT_RESUMED]
    + [("--resume", case) for case in ONLY_RESUMED],
)
def test_a_crafted_checkpoint(place, capfd, use, case):
    path, (main, argv) = place.run / "checkpoint.pt", USES[use]
    torch.save(replaced(read_checkpoint(path), *{**CRAFTED, **NOT_RESUMED, **ONLY_RESUMED}[case]), path)
    before = contents(place.run)
    assert go(*argv, main=main) == 2
    assert_one_sentence(capfd, "checkpoint.pt", "")
    assert contents(place.run) == before


@pytest.mark.parametrize("field", ("weights", "optimizer", "cels", "defense", "config", "log", "net", "base"))
def test_part_of_a_checkpoint(place, capfd, field):
    state = read_checkpoint(place.run / "checkpoint.pt")
    torch.save({k: v for k, v in state.items() if k != field}, place.run / "checkpoint.pt")
    before = contents(place.run)
    main, argv = USES["--resume"]
    assert go(*argv, main=main) == 2
    assert_one_sentence(capfd, "checkpoint.pt: damaged or not made by this version", "delete it")
    assert contents(place.run) == before


@pytest.mark.parametrize("how", ("torch", "pickle"))
@pytest.mark.parametrize("use", USES)
def test_a_checkpoint_that_would_run_code_is_refused(place, tmp_path, capfd, use, how):
    path, (main, argv) = place.run / "checkpoint.pt", USES[use]
    state = {**read_checkpoint(path), "log": RunsCode(tmp_path / "ran")}
    torch.save(state, path) if how == "torch" else path.write_bytes(pickle.dumps(state))
    before = contents(place.run)
    assert go(*argv, main=main) == 2
    assert_one_sentence(capfd, "checkpoint.pt: damaged or not made by this version", "delete it")
    assert contents(place.run) == before and not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False) if how == "torch" else pickle.loads(path.read_bytes())
    assert (tmp_path / "ran").exists()  # it would have
