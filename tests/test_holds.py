"""It holds: killed runs go on bit for bit, wrong uses end in one sentence, one command gives one result, files run no code.

Reproducibility has no number of workers to depend on: all images are in memory and there is no --workers flag.
"""

import csv
import errno
import json
import os
import pickle
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import attack
import bench
import data
import options
import report
import train

ROOT = Path(train.__file__).parent
TINY = [
    "--width",
    "4",
    "--train-size",
    "130",
    "--batch-size",
    "32",
    "--epochs",
    "3",
    "--warmup",
    "0",
    "--bottleneck",
    "2",
    "--attack-epochs",
    "2",
    "--attack-blocks",
    "1",
    "--attack-channels",
    "8",
]
SHAPES = (140, 30)
CONFIGS = {
    "gmm+noise_arl": ["--surrogate", "gmm", "--defense", "noise_arl"],
    "slot+patrol": ["--surrogate", "slot", "--defense", "patrol"],
    "cluster": ["--surrogate", "cluster"],
}


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch):
    monkeypatch.setattr(data, "SHAPES_TRAIN", SHAPES[0])
    monkeypatch.setattr(data, "SHAPES_TEST", SHAPES[1])


def without_times(results):
    """What must not differ between two runs of the same settings."""
    results = json.loads(json.dumps(results))
    del results["seconds"], results["encoder"]["latency_ms"], results["environment"]["command"]
    for name in ("runs_dir", "out", "verbose"):
        del results["config"][name]
    return results


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def flat(value, path=""):
    """{path: leaf} of nested dicts and lists."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, part in items for k, v in flat(part, f"{path}/{key}").items()}
    return {path: value}


def assert_same_run(one, two):
    """The same weights, optimiser, statistics, figures, log and pictures, bit for bit; no file that should not be there."""
    a, b = (flat(report.read_checkpoint(folder / "checkpoint.pt")) for folder in (one, two))
    assert a.keys() == b.keys()
    for key, value in a.items():
        if not re.search(r"/seconds|^/config/(runs_dir|out|verbose|resume)", key):
            assert torch.equal(value, b[key]) if torch.is_tensor(value) else value == b[key], key
    a, b = (without_times(json.loads((folder / "results.json").read_text())) for folder in (one, two))
    assert a == b
    a, b = (
        [{**row, "seconds": ""} for row in csv.DictReader((folder / "log.csv").open())]
        for folder in (one, two)
    )
    assert a == b and len(a) == 3
    assert (one / "reconstructions.png").read_bytes() == (two / "reconstructions.png").read_bytes()
    assert sorted(os.listdir(two)) == ["checkpoint.pt", "log.csv", "reconstructions.png", "results.json"]


# ------------------------------------------------------------------------------------------------ interruption

# A process that imports the program once and then forks: each request {when, how, program, argv, out, err} is a run in a
# process of its own, with few images, that goes down by itself at a chosen point (when) by a signal (how).
CLIENT = """
import json, os, signal, sys
import data, report, train, attack, split_net
import torch

data.SHAPES_TRAIN, data.SHAPES_TEST = {shapes}
split_net.count_flops(split_net.SplitNet(width=1).encoder, 32)  # imports what is imported late
programs, calls = {{"train.py": train.main, "attack.py": attack.main}}, {{}}


def down():
    os.kill(os.getpid(), how)


def at(name, count, work):
    # go down at the count-th call of work
    def wrapped(*args, **kwargs):
        calls[name] = calls.get(name, 0) + 1
        if calls[name] == count:
            down()
        return work(*args, **kwargs)
    return wrapped


save, replace, write_text = torch.save, os.replace, report.Path.write_text

def half_save(state, path):
    calls["save"] = calls.get("save", 0) + 1
    save(state, path)
    if calls["save"] == 2:
        os.truncate(path, os.path.getsize(path) // 2)
        down()

def half_text(path, text):
    if "results.json" in path.name:
        write_text(path, text[:len(text) // 2])
        down()
    return write_text(path, text)

def half_replace(name, count, source, target):
    if str(target).endswith(name):
        calls[name] = calls.get(name, 0) + 1
        if calls[name] == count:
            down()
    return replace(source, target)

def arm(when):
    if when == "mid-epoch":
        data.crop_and_flip = at("batch", 3 + 2, data.crop_and_flip)  # the second batch of the second epoch
    if when == "refresh":
        train.Run.refresh = at("refresh", 2, train.Run.refresh)
    if when == "checkpoint half written":
        torch.save = half_save
    if when == "before the rename":
        os.replace = lambda a, b: half_replace("checkpoint.pt", 2, a, b)
    if when == "between checkpoint and log":
        os.replace = lambda a, b: half_replace("log.csv", 3, a, b)
    if when == "attack":
        schedule = torch.optim.lr_scheduler.LambdaLR
        schedule.step = at("step", 4, schedule.step)
    if when == "results half written":
        report.Path.write_text = half_text


for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, name in ((1, request["out"]), (2, request["err"])):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOCTTY), number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        how = getattr(signal, request["how"])
        arm(request["when"])
        code = programs[request["program"]](request["argv"])
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """client(WHEN, HOW, PROGRAM, flags) -> Done"""
    folder = tmp_path_factory.mktemp("client")
    (folder / "client.py").write_text(CLIENT.format(shapes=SHAPES))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, str(folder / "client.py")],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(when, how, program, *argv, out=folder / "out"):
        request = {
            "when": when,
            "how": how,
            "program": program,
            "argv": [*map(str, argv)],
            "out": str(out),
            "err": str(folder / "err"),
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return Done(
            code, (folder / "out").read_text() if out == folder / "out" else "", (folder / "err").read_text()
        )

    yield run
    server.stdin.close()
    assert server.wait(30) == 0


def go(*flags, main=train.main):
    """main in this process, with one thread as the clients; a warning would be a line on stderr."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", UserWarning)
            code = main(list(map(str, flags)))
    finally:
        torch.set_num_threads(before)
    assert [w.message for w in seen if issubclass(w.category, (UserWarning, RuntimeWarning))] == []
    return code


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """config -> the folder of its uninterrupted run, made once, in this process."""
    folder = tmp_path_factory.mktemp("whole")

    def made(config):
        if not (folder / config).exists():
            assert go(*TINY, *CONFIGS[config], "--runs-dir", folder, "--out", config) == 0
        return folder / config

    return made


def whole_files(folder):
    """Every file under a final name can be read to its end."""
    for path in folder.iterdir():
        if path.name == "checkpoint.pt":
            report.read_checkpoint(path)
        elif path.name == "log.csv":
            assert path.read_text().endswith("\n")
        else:
            assert path.name == "reconstructions.png" or re.fullmatch(r"\..*\.tmp", path.name), path


@pytest.mark.parametrize(
    "config, when, epochs",
    [
        ("gmm+noise_arl", "mid-epoch", 1),
        ("gmm+noise_arl", "checkpoint half written", 1),
        ("gmm+noise_arl", "attack", 3),
        ("slot+patrol", "mid-epoch", 1),
        ("slot+patrol", "between checkpoint and log", 3),
        ("slot+patrol", "before the rename", 1),
        ("cluster", "refresh", 1),
        ("cluster", "results half written", 3),
    ],
)
def test_killed_and_resumed_is_uninterrupted(tmp_path, client, whole, config, when, epochs):
    flags = [*TINY, *CONFIGS[config], "--runs-dir", tmp_path, "--out", "run"]
    assert client(when, "SIGKILL", "train.py", *flags).code == -signal.SIGKILL
    whole_files(tmp_path / "run")
    assert report.read_checkpoint(tmp_path / "run" / "checkpoint.pt")["epoch"] == epochs
    left = [path for path in (tmp_path / "run").glob(".*.tmp") if path.stat().st_size]
    assert bool(left) == (
        when
        in (
            "checkpoint half written",
            "before the rename",
            "between checkpoint and log",
            "results half written",
        )
    )
    assert go(*flags, "--resume") == 0
    assert_same_run(whole(config), tmp_path / "run")


@pytest.mark.parametrize("when", ("mid-epoch", "attack", "results half written"))
def test_ctrl_c_ends_in_one_line_that_resumes(tmp_path, client, whole, when):
    flags = [*TINY, *CONFIGS["cluster"], "--runs-dir", tmp_path / "a folder", "--out", "run"]
    done = client(when, "SIGINT", "train.py", *flags)
    assert done.code == 130
    (line,) = done.err.splitlines()
    words = shlex.split(line.split("with: python train.py ")[1])
    assert line.startswith("interrupted; go on with: ") and words[-1] == "--resume"
    assert not list((tmp_path / "a folder" / "run").glob(".*"))
    assert go(*words) == 0  # the line as it is printed
    assert_same_run(whole("cluster"), tmp_path / "a folder" / "run")
    if when == "attack":  # interrupted again: --resume is named once
        done = client(when, "SIGINT", "train.py", *words)
        assert done.code == 130 and done.err.count("--resume") == 1


def test_ctrl_c_in_attack_py(tmp_path, client, whole):
    run = shutil.copytree(whole("cluster"), tmp_path / "run")
    before = contents(run)
    done = client("attack", "SIGINT", "attack.py", run, "--attack-epochs", "3")
    assert done.code == 130
    (line,) = done.err.splitlines()
    assert line == f"interrupted; start again with: python attack.py {run} --attack-epochs 3"
    assert contents(run) == before


# ------------------------------------------------------------------------------------------------ reproducible


@pytest.mark.parametrize("how", ("pipe", "verbose", "terminal"))
def test_one_command_one_result_in_any_process(tmp_path, client, whole, how):
    flags = [*TINY, *CONFIGS["slot+patrol"], "--runs-dir", tmp_path, "--out", "run"]
    if how == "pipe":  # a new interpreter
        code = f"import sys, data, train; data.SHAPES_TRAIN, data.SHAPES_TEST = {SHAPES}; sys.exit(train.main(sys.argv[1:]))"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", code, *map(str, flags)], env=env, capture_output=True)
        assert done.returncode == 0 and done.stderr == b"" and b"\r" not in done.stdout
    elif how == "verbose":
        done = client("never", "SIGKILL", "train.py", *flags, "--verbose")
        assert done.code == 0 and done.err == "" and "active" in done.out.split("accuracy")[0]
    else:
        ours, theirs = pty.openpty()
        reader = subprocess.Popen(
            ["cat"], stdin=ours, stdout=(tmp_path / "screen").open("w"), stderr=subprocess.DEVNULL
        )
        assert client("never", "SIGKILL", "train.py", *flags, out=os.ttyname(theirs)).code == 0
        os.close(theirs), os.close(ours)
        reader.wait(30)
        assert (tmp_path / "screen").read_bytes().count(b"\rtrain") > 4  # the live line
    assert_same_run(whole("slot+patrol"), tmp_path / "run")


def test_the_environment_is_in_the_results(tmp_path, whole):
    found = json.loads((whole("cluster") / "results.json").read_text())["environment"]
    assert (
        found["torch"] == torch.__version__
        and found["python"] == ".".join(map(str, sys.version_info[:3]))
        and found["threads"] == 1
    )
    assert found["command"].startswith("python train.py --width 4 ") and found["command"].endswith(
        "--out cluster"
    )
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    assert found["commit"] == (head or None)
    # a copy of the files without .git: no commit, and nothing on stderr about it
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, copy)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    code = "import json, report; print(json.dumps(report.environment('train.py', ['--sigma', '0.1'])))"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, env=env, capture_output=True, text=True)
    assert done.stderr == ""
    assert json.loads(done.stdout) == {**found, "command": "python train.py --sigma 0.1", "commit": None}


# ------------------------------------------------------------------------------------------------ bad input


def pixels(seed, height=32, width=32):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def image_folder(root, classes=("ant", "bee"), train_images=20, test_images=2, size=32):
    for name in classes:
        for split, count in (("train", train_images), ("test", test_images)):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels(zlib.crc32(f"{name} {split} {i}".encode()), size, size).save(
                    root / split / name / f"{i}.png"
                )
    return root


def tiny_imagenet(root, annotations):
    for name in ("n01", "n02"):
        (root / "train" / name / "images").mkdir(parents=True)
        for i in range(20):
            pixels(i).save(root / "train" / name / "images" / f"{i}.png")
    (root / "val" / "images").mkdir(parents=True)
    pixels(99).save(root / "val" / "images" / "a.png")
    (root / "val" / "val_annotations.txt").write_bytes(annotations)
    (root / "wnids.txt").write_text("n01\nn02\n")
    return root


def spoiled(change):
    """Flags of a folder of images after `change(folder)`; IMAGE is one of its training images."""

    def prepare(tmp, monkeypatch):
        folder = image_folder(tmp / "images")
        change(folder)
        return ["--dataset", folder, "--batch-size", "8"]

    return prepare


def image(make):
    """A training image replaced by what `make(path)` puts in its place."""

    def change(folder):
        (folder / "train" / "ant" / "5.png").unlink()
        make(folder / "train" / "ant" / "5.png")

    return spoiled(change)


def of(**shape):
    return lambda tmp, monkeypatch: ["--dataset", image_folder(tmp / "images", **shape), "--batch-size", "8"]


def annotated(text):
    return lambda tmp, monkeypatch: ["--dataset", tiny_imagenet(tmp / "images", text), "--batch-size", "8"]


def grey_float(value):
    return image(lambda path: Image.fromarray(np.full((32, 32), value, np.float32)).save(path, format="TIFF"))


def named(name):
    """A class whose name no terminal should see, with a broken image."""

    def change(folder):
        for split in ("train", "test"):
            os.rename(folder / split / "ant", os.path.join(os.fsencode(folder / split), name))
        Path(os.fsdecode(os.path.join(os.fsencode(folder / "train"), name, b"5.png"))).write_bytes(b"")

    return spoiled(change)


class Runs:
    """A pickle that leaves a file behind where it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def checkpoint(change, *flags):
    """--resume over a finished run's checkpoint after `change(path, state)`."""

    def prepare(tmp, monkeypatch):
        path = tmp / "runs" / "cluster" / "checkpoint.pt"
        change(path, report.read_checkpoint(path))
        return ["--resume", *flags]

    return prepare


def with_state(**entries):
    return checkpoint(lambda path, state: torch.save({**state, **entries}, path))


def full_disk(error):
    def prepare(tmp, monkeypatch):
        def save(state, path):
            Path(path).write_bytes(b"half")
            raise error

        monkeypatch.setattr(torch, "save", save)
        return []

    return prepare


def file_as(flag, *more):
    """A file where `flag` needs a folder."""

    def prepare(tmp, monkeypatch):
        (tmp / "file").write_text("")
        return [flag, tmp / "file", *more]

    return prepare


def broken_link(tmp, monkeypatch):
    (tmp / "runs" / "link").symlink_to(tmp / "nowhere" / "at all")
    return ["--out", "link"]


def no_memory(tmp, monkeypatch):
    def refresh(self):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
        )

    monkeypatch.setattr(train.Run, "refresh", refresh)
    return []


# (flags, or a function of (tmp_path, monkeypatch) that makes them; what the sentence must name; what it must advise)
WRONG = {
    # images
    "unknown data set": (
        ["--dataset", "cifar11"],
        "--dataset: there is no folder cifar11",
        "use shapes, cifar10",
    ),
    "data set without a name": (["--dataset", ""], "there is no folder train", "expected train/CLASS"),
    "a name too long for a folder": (["--dataset", "x" * 5000], "--dataset", "use shapes"),
    "a file for a data set": (file_as("--dataset"), "--dataset: there is no folder", "use shapes"),
    "cifar in a file": (file_as("--data-dir", "--dataset", "cifar10"), "--dataset cifar10", "as --data-dir"),
    "tiny imagenet that is not there": (
        ["--dataset", "tinyimagenet", "--data-dir", "nowhere"],
        "nowhere/tiny-imagenet-200",
        "use shapes",
    ),
    "empty folder": (
        spoiled(lambda f: (shutil.rmtree(f / "train"), shutil.rmtree(f / "test"))),
        "train",
        "expected train/CLASS",
    ),
    "no class folders": (
        spoiled(lambda f: (shutil.rmtree(f / "train"), (f / "train").mkdir())),
        "train has no class folders",
        "expected train/CLASS",
    ),
    "empty class": (
        spoiled(lambda f: [p.unlink() for p in (f / "train" / "bee").iterdir()]),
        "train/bee: this class has no images",
        "add some or remove",
    ),
    "class missing in test": (
        spoiled(lambda f: shutil.rmtree(f / "test" / "bee")),
        "test/bee",
        "add some or remove",
    ),
    "class missing in train": (
        spoiled(lambda f: shutil.rmtree(f / "train" / "bee")),
        "class bee is in test but not in train",
        "the same class folders",
    ),
    "one class": (of(classes=("ant",)), "found 1 class", "at least 2"),
    "fewer images than a batch": (of(train_images=4), "--batch-size 8: there are only 7", "lower it"),
    "small images": (of(size=16), "its images have 16 pixels a side", "--image-size 32"),
    "empty file": (
        image(lambda p: p.write_bytes(b"")),
        "ant/5.png: not a readable image",
        "replace or delete it",
    ),
    "text for an image": (
        image(lambda p: p.write_text("a picture of an ant")),
        "ant/5.png: not a readable image",
        "replace or delete it",
    ),
    "half an image": (
        image(lambda p: (pixels(0).save(p), p.write_bytes(p.read_bytes()[:700]))),
        "ant/5.png: not a readable image",
        "replace or delete it",
    ),
    "damaged tiff": (
        image(lambda p: p.write_bytes(b"II*\0\x08\0\0\0" + bytes(range(40, 240)))),
        "ant/5.png: not a readable image",
        "replace or delete it",
    ),
    "enormous image": (
        image(lambda p: p.write_bytes(b"P6\n99999999 99999999\n255\n1")),
        "ant/5.png: not a readable image",
        "replace or delete it",
    ),
    "endless image": (
        image(lambda p: pixels(0, 1, 200_000).save(p)),
        "ant/5.png: not a readable image (200000x1 is too long",
        "replace or delete it",
    ),
    "NaN image": (
        grey_float(np.nan),
        "ant/5.png: not a readable image (floating-point pixels",
        "save it with 8 bits",
    ),
    "infinite image": (
        grey_float(np.inf),
        "ant/5.png: not a readable image (floating-point pixels",
        "save it with 8 bits",
    ),
    "broken link": (
        image(lambda p: p.symlink_to("nowhere")),
        "ant/5.png: not a file",
        "replace or delete it",
    ),
    "link to itself": (
        image(lambda p: p.symlink_to(p.name)),
        "ant/5.png: not a file",
        "replace or delete it",
    ),
    "folder for an image": (image(lambda p: p.mkdir()), "ant/5.png: not a file", "replace or delete it"),
    "pipe for an image": (image(os.mkfifo), "ant/5.png: not a file", "replace or delete it"),
    "newline in a name": (
        named(b"a\nb\x1b[2J"),
        "a?b?[2J/5.png: not a readable image",
        "replace or delete it",
    ),
    "name that is no text": (named(b"\xff\xfe"), "5.png: not a readable image", "replace or delete it"),
    "label out of range": (annotated(b"a.png\tn03\t0\n"), "line 1 of", "unpack the original archive again"),
    "label missing": (annotated(b"a.png n01\n"), "val_annotations.txt", "unpack the original archive again"),
    "labels that are no text": (
        annotated(b"\xff\xfe\0a.png"),
        "val_annotations.txt",
        "unpack the original archive again",
    ),
    "test image elsewhere": (
        annotated(b"../../train/n01/images/0.png\tn01\n"),
        "line 1 of",
        "unpack the original archive again",
    ),
    "no test image": (
        annotated(b"\n"),
        "val_annotations.txt is missing or empty",
        "unpack the original archive again",
    ),
    "odd size, decoder": (
        lambda tmp, m: ["--dataset", image_folder(tmp / "images"), "--batch-size", "8", "--image-size", "33"],
        "--image-size 33",
        "use 32",
    ),
    "odd size, proxy": (
        lambda tmp, m: [
            "--dataset",
            image_folder(tmp / "images"),
            "--batch-size",
            "8",
            "--image-size",
            "33",
            "--attack",
            "none",
            "--defense",
            "noise_arl",
        ],
        "--image-size 33",
        "use 32",
    ),
    "shapes in another size": (["--image-size", "48"], "--image-size 48", "leave the flag out"),
    "images too small": (["--image-size", "31"], "--image-size 31", "between 32 and 4096"),
    "images too large": (["--image-size", "1000000"], "--image-size 1000000", "between 32 and 4096"),
    "no training images": (["--train-size", "0"], "--train-size 0", "at least 1"),
    "fewer images than classes": (
        ["--train-size", "5", "--batch-size", "1"],
        "--train-size 5: there are 10 classes",
        "use at least",
    ),
    "nothing left to train on": (["--val-share", "0.9999"], "--dataset shapes", "--val-share"),
    "nothing left to validate on": (["--val-share", "0.0001"], "--dataset shapes", "--val-share"),
    "share beyond 1": (["--val-share", "1"], "--val-share 1", "between 0 and 1"),
    "one picture again and again": (
        spoiled(lambda f: [pixels(0).save(p) for p in f.rglob("*.png")]),
        "--attacker-data train",
        "give it more",
    ),
    # network
    "cut at 0": (["--cut", "0"], "--cut 0", "cut after 1 to 7"),
    "cut behind the end": (["--arch", "resnet20", "--cut", "10"], "--cut 10", "cut after 1 to 9"),
    "no unit left for patrol": (
        ["--cut", "7", "--defense", "patrol"],
        "--cut 7: --defense patrol",
        "lower it",
    ),
    "negative bottleneck": (["--bottleneck", "-1"], "--bottleneck -1", "at least 0"),
    "width 0": (["--width", "0"], "--width 0", "at least 1"),
    "width beyond any machine": (["--width", str(10**30)], "--width 1" + "0" * 30, "below 2147483648"),
    "unknown network": (["--arch", "vgg12"], "--arch", "vgg11"),
    # training
    "no epochs": (["--epochs", "0"], "--epochs 0", "greater than 0"),
    "half an epoch": (["--epochs", "0.5"], "--epochs", "see --help"),
    "batch larger than the images": (["--batch-size", "5000"], "--batch-size 5000", "lower it"),
    "rate that is no number": (["--lr", "nan"], "--lr nan", "greater than 0"),
    "infinite rate": (["--lr", "inf"], "--lr inf", "greater than 0"),
    "rate that is too high": (["--lr", "1e308"], "--lr 1e+308", "below 2147483648"),
    "training that diverges": (["--lr", "1e9"], "training diverged", "lower --lr"),
    "momentum 1": (["--momentum", "1"], "--momentum 1", "less than 1"),
    "negative decay": (["--weight-decay", "-0.1"], "--weight-decay -0.1", "not be negative"),
    "seed too large": (["--seed", str(2**31)], "--seed 2147483648", "between 0 and 2147483647"),
    "no such device": (["--device", "cuda:99"], "--device cuda:99", "use cpu or auto"),
    "device without memory": (["--device", "meta"], "--device meta", "use cpu or auto"),
    "device of another build": (["--device", "hpu"], "--device hpu", "use cpu or auto"),
    "no memory": (no_memory, "not enough memory", "lower --batch-size"),
    # privacy
    "negative noise": (["--sigma", "-0.1"], "--sigma -0.1", "must be 0 or lie between"),
    "noise below rounding": (["--sigma", "1e-30"], "--sigma 1e-30", "must be 0 or lie between"),
    "noise that is no number": (["--sigma", "nan"], "--sigma nan", "must be 0 or lie between"),
    "surrogate without noise": (
        ["--sigma", "0", "--surrogate", "gmm"],
        "--sigma 0",
        "give a positive --sigma",
    ),
    "negative weight": (["--lambd", "-1"], "--lambd -1", "not be negative"),
    "infinite weight": (["--surrogate", "gated", "--lambd", "inf"], "--lambd inf", "not be negative"),
    "threshold 0": (
        ["--surrogate", "cluster", "--var-threshold", "0"],
        "--var-threshold 0",
        "greater than 0",
    ),
    "negative threshold": (
        ["--surrogate", "slot", "--var-threshold", "-1"],
        "--var-threshold -1",
        "greater than 0",
    ),
    "floor 0": (["--surrogate", "gated", "--floor", "0"], "--floor 0", "greater than 0"),
    "rate of the statistics 0": (
        ["--surrogate", "gmm", "--update-scale", "0"],
        "--update-scale 0",
        "greater than 0",
    ),
    "more clusters than images": (
        ["--surrogate", "cluster", "--clusters", "500"],
        "--clusters 500: the largest class has",
        "lower it",
    ),
    "more components than images": (
        ["--surrogate", "gmm", "--clusters", "500"],
        "--clusters 500: the largest class has",
        "lower it",
    ),
    "more components than refreshed": (
        ["--surrogate", "gmm", "--clusters", "5", "--refresh-samples", "4"],
        "--clusters 5",
        "lower it",
    ),
    "no slots": (["--surrogate", "slot", "--slots", "0"], "--slots 0", "at least 1"),
    "another surrogate's flag": (
        ["--surrogate", "gated", "--slots", "4"],
        "--slots: --surrogate gated",
        "leave it out",
    ),
    "unknown gate": (
        ["--surrogate", "slot", "--off", "garden_gate"],
        "--off garden_gate",
        "use cross_attention",
    ),
    "pool beyond the features": (["--surrogate", "gated", "--pool", "9"], "--pool 9", "pool to fewer"),
    "warm-up to the end": (["--surrogate", "gated", "--warmup", "3"], "--epochs 3", "lower --warmup"),
    "unknown surrogate": (["--surrogate", "magic"], "--surrogate", "choose from"),
    "unknown defence": (["--defense", "prayer"], "--defense prayer", "use one of"),
    "a defence twice": (
        ["--defense", "dropout+dropout"],
        "--defense dropout+dropout",
        "several different ones",
    ),
    "dropout of everything": (["--defense", "dropout", "--dropout", "1"], "--dropout 1", "below 1"),
    "strength that is no number": (
        ["--defense", "distcorr", "--distcorr", "nan"],
        "--distcorr nan",
        "must be a number",
    ),
    "strength of no defence": (["--patrol", "1"], "--patrol 1", "leave the flag out"),
    # attack
    "unknown attacker": (["--attack", "luck"], "--attack luck", "use decoder, gan, whitebox"),
    "no attacker, not even none": (["--attack", ""], "--attack", "or none"),
    "attacker with nothing to learn from": (
        ["--attacker-data", "aux", "--aux-share", "0.001"],
        "--attacker-data aux: 0 images",
        "give it more",
    ),
    "attacker without steps": (["--whitebox-steps", "0"], "--whitebox-steps 0", "greater than 0"),
    # output
    "unknown flag": (["--workers", "4"], "--workers", "see --help"),
    "flag cut short": (["--epoch", "3"], "--epoch", "see --help"),
    "stray word": (["fast"], "fast", "see --help"),
    "flag without its value": (["--epochs"], "--epochs", "see --help"),
    "newline in --out": (["--out", "run\n"], "--out run?", "use a plain name"),
    "--out too long for a file": (["--out", "x" * 300], "cannot be written", "--out"),
    "--out is a link to nowhere": (broken_link, "runs/link: cannot be written", "--out"),
    "a file for --runs-dir": (
        file_as("--runs-dir"),
        "file/cluster: cannot be written",
        "choose another --runs-dir",
    ),
    "--runs-dir no folder can have": (
        ["--runs-dir", "a\0b"],
        "a?b/cluster: cannot be written",
        "choose another --runs-dir",
    ),
    "full disk": (
        full_disk(OSError(errno.ENOSPC, "No space left on device")),
        "checkpoint.pt: cannot be written ([Errno 28]",
        "free some space",
    ),
    "full disk as torch reports it": (
        full_disk(RuntimeError("PytorchStreamWriter failed writing file")),
        "checkpoint.pt: cannot be written",
        "free some space",
    ),
    # --resume
    "truncated checkpoint": (
        checkpoint(lambda path, state: os.truncate(path, path.stat().st_size // 2)),
        "checkpoint.pt: damaged",
        "delete it",
    ),
    "empty checkpoint": (
        checkpoint(lambda path, state: path.write_bytes(b"")),
        "checkpoint.pt: damaged",
        "delete it",
    ),
    "text for a checkpoint": (
        checkpoint(lambda path, state: path.write_text("weights")),
        "checkpoint.pt: damaged",
        "delete it",
    ),
    "folder for a checkpoint": (
        checkpoint(lambda path, state: (path.unlink(), path.mkdir())),
        "checkpoint.pt: damaged",
        "delete it",
    ),
    "a pickle": (
        checkpoint(lambda path, state: path.write_bytes(pickle.dumps(state["log"]))),
        "checkpoint.pt: ",
        "delete it",
    ),
    "weights alone": (
        checkpoint(lambda path, state: torch.save(state["weights"], path)),
        "checkpoint.pt: not a checkpoint of this version",
        "delete it",
    ),
    "another version's": (
        with_state(format=0),
        "checkpoint.pt: not a checkpoint of this version",
        "delete it",
    ),
    "part of a checkpoint": (
        checkpoint(
            lambda path, state: torch.save({k: v for k, v in state.items() if k != "optimizer"}, path)
        ),
        "checkpoint.pt: not a checkpoint of this version",
        "delete it",
    ),
    "weights of another network": (
        with_state(weights={"layer": torch.ones(3)}),
        "checkpoint.pt: does not fit",
        "delete it",
    ),
    "shape of another network": (
        with_state(net={"arch": "vgg11", "num_classes": 7, "width": 3}),
        "checkpoint.pt: does not fit",
        "delete it",
    ),
    "optimiser of another network": (
        with_state(optimizer={"state": {}, "param_groups": []}),
        "checkpoint.pt: does not fit",
        "delete it",
    ),
    "surrogate of another": (
        with_state(surrogate={"centers": torch.ones(3)}),
        "checkpoint.pt: does not fit",
        "delete it",
    ),
    "checkpoint of other images": (
        with_state(data="0" * 64),
        "--dataset shapes: its images are not those of the checkpoint",
        "restore them",
    ),
    "other data set": (
        lambda tmp, m: ["--resume", "--dataset", image_folder(tmp / "images"), "--batch-size", "32"],
        "another --dataset",
        "choose another --out",
    ),
    "other network": (["--resume", "--arch", "resnet20"], "another --arch", "choose another --out"),
    "other surrogate": (["--resume", "--surrogate", "gated"], "another --", "choose another --out"),
    "other seed": (["--resume", "--seed", "1"], "another --seed", "choose another --out"),
}

# attack.py RUN ... and bench.py ...
WRONG_ATTACK = {
    "no run": (lambda run: [], "runs/NAME", "name the run's folder first"),
    "flags first": (lambda run: ["--attack", "gan", run], "runs/NAME", "name the run's folder first"),
    "no such run": (
        lambda run: [run / "nothing"],
        "nothing/checkpoint.pt: no such checkpoint",
        "train first",
    ),
    "file for a run": (
        lambda run: [run / "log.csv"],
        "log.csv/checkpoint.pt: no such checkpoint",
        "train first",
    ),
    "two runs": (lambda run: [run, run], "unrecognized arguments", "see --help"),
    "unknown attacker": (lambda run: [run, "--attack", "luck"], "--attack luck", "use decoder"),
    "no epochs": (lambda run: [run, "--attack-epochs", "0"], "--attack-epochs 0", "greater than 0"),
    "flag of the training": (
        lambda run: [run, "--sigma", "1"],
        "--sigma: fixed when the run was trained",
        "attack.py takes",
    ),
    "flag of the training, with =": (
        lambda run: [run, "--lr=1"],
        "--lr: fixed when the run was trained",
        "attack.py takes",
    ),
    "another folder": (lambda run: [run, "--out", "elsewhere"], "--out: fixed", "attack.py takes"),
    "images that were not kept": (
        lambda run: [run, "--attacker-data", "aux"],
        "--attacker-data aux",
        "train it again",
    ),
    "no such device": (lambda run: [run, "--device", "cuda:99"], "--device cuda:99", "use cpu or auto"),
    "rate that is no number": (lambda run: [run, "--attack-lr", "nan"], "--attack-lr nan", "greater than 0"),
}
WRONG_BENCH = {
    "nothing to do": ([], "command", "see --help"),
    "unknown command": (["walk"], "walk", "choose from"),
    "unknown grid": (["list", "--preset", "nothing"], "--preset nothing", "use shapes"),
    "shard 0": (["list", "--shard", "0/4"], "--shard 0/4", "as in 2/4"),
    "shard beyond": (["list", "--shard", "5/4"], "--shard 5/4", "as in 2/4"),
    "shard in words": (["list", "--shard", "half"], "--shard half", "as in 2/4"),
    "no such cell": (["list", "--only", "nothing"], "--only nothing", "bench.py list"),
    "no images": (
        ["run", "--preset", "cpu", "--data", "nowhere", "--runs-dir", "TMP/new"],
        "--data nowhere: there is no folder nowhere/cifar10",
        "give the folder",
    ),
    "file for a folder": (
        ["run", "--preset", "paper", "--runs-dir", "TMP/file"],
        "file/bench/paper: cannot be written",
        "choose another --runs-dir",
    ),
    "unknown flag": (["run", "--workers", "4"], "--workers", "see --help"),
}


def assert_one_sentence(capfd, names, advice):
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and err.endswith("\n") and err.rstrip("\n").isprintable(), err
    assert names in err and advice in err and "Traceback" not in err + out, err
    assert err.strip() not in out and len(err) < 6000


@pytest.fixture
def finished(tmp_path, monkeypatch, whole):
    """A finished run in a working directory of its own. -> its folder"""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(whole("cluster"), tmp_path / "runs" / "cluster")


def test_there_are_enough_wrong_uses():
    assert len(WRONG) + len(WRONG_ATTACK) + len(WRONG_BENCH) >= 40


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_use_is_one_sentence_and_leaves_earlier_results(tmp_path, monkeypatch, capfd, finished, case):
    """Over a finished run with the same --out: status 2, one line on stderr, the run's files as they were."""
    flags, names, advice = WRONG[case]
    flags = flags(tmp_path, monkeypatch) if callable(flags) else flags
    before = contents(finished)
    capfd.readouterr()
    assert go(*TINY, *CONFIGS["cluster"], "--runs-dir", "runs", "--out", "cluster", *flags) == 2
    assert_one_sentence(capfd, names, advice)
    kept = (
        ("results.json", "reconstructions.png") if case == "training that diverges" else before
    )  # it ended behind its first checkpoint
    assert {name: contents(finished)[name] for name in kept} == {name: before[name] for name in kept}
    assert contents(finished).keys() == before.keys()


@pytest.mark.parametrize("case", WRONG_ATTACK)
def test_a_wrong_use_of_attack_py(capfd, finished, case):
    argv, names, advice = WRONG_ATTACK[case]
    before = contents(finished)
    assert go(*argv(finished), main=attack.main) == 2
    assert_one_sentence(capfd, names, advice)
    assert contents(finished) == before


@pytest.mark.parametrize(
    "change, names, advice",
    [
        (lambda state: {"epoch": 2}, "training stopped after epoch 2 of 3", "finish it first"),
        (lambda state: {"weights": {}}, "checkpoint.pt: does not fit", "delete it"),
        (lambda state: {"data": "0"}, "not those of the checkpoint", "restore them"),
    ],
)
def test_a_run_that_attack_py_cannot_use(capfd, finished, change, names, advice):
    state = report.read_checkpoint(finished / "checkpoint.pt")
    torch.save({**state, **change(state)}, finished / "checkpoint.pt")
    before = contents(finished)
    assert go(finished, main=attack.main) == 2
    assert_one_sentence(capfd, names, advice)
    assert contents(finished) == before


@pytest.mark.parametrize("case", WRONG_BENCH)
def test_a_wrong_use_of_bench_py(tmp_path, monkeypatch, capfd, case):
    argv, names, advice = WRONG_BENCH[case]
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(bench.subprocess, "run", lambda *a, **k: pytest.fail("nothing may be run"))
    assert bench.main([word.replace("TMP", str(tmp_path)) for word in argv]) == 2
    assert_one_sentence(capfd, names, advice)
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_ctrl_c_in_bench_py(tmp_path, monkeypatch, capfd):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.subprocess, "run", interrupted)
    argv = ["run", "--preset", "paper", "--runs-dir", str(tmp_path / "a folder")]
    assert bench.main(argv) == 130
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"interrupted; what is finished stays, go on with: python bench.py {shlex.join(argv)}"


def test_every_cell_of_every_grid_can_be_started():
    """Flags and names that train.py takes, also where --data has a blank in it."""
    for preset in bench.PRESETS:
        for name, flags in bench.cells(preset):
            assert options.parse([*flags.split(), "--out", name]).out == name


@pytest.mark.parametrize("cut", (1, 5, 9))
def test_a_narrow_resnet_does_not_crash(tmp_path, client, cut):
    """In a process of its own: with a strided 1x1 convolution torch ended here by a signal (see split_net.ResidualBlock)."""
    flags = [
        *TINY,
        "--arch",
        "resnet20",
        "--cut",
        cut,
        "--epochs",
        "1",
        "--width",
        "2",
        "--attack",
        "none",
        "--runs-dir",
        tmp_path,
        "--out",
        "run",
    ]
    assert client("never", "SIGKILL", "train.py", *flags).code == 0


def test_unusual_pictures_are_read(tmp_path, capfd):
    """One pixel, long and thin, 16 bits, a palette, CMYK, animated: none of them is a mistake."""
    folder = image_folder(tmp_path / "images")
    for split in ("train", "test"):
        (folder / split / "bee").rename(folder / split / "bü\n☃")
    ant = folder / "train" / "ant"
    (
        pixels(0, 1, 1).save(ant / "x1.png"),
        pixels(0, 1, 3000).save(ant / "x2.png"),
        pixels(0).convert("P").save(ant / "x3.png"),
    )
    (
        Image.fromarray(np.full((32, 32), 40000, np.uint16)).save(ant / "x4.png"),
        pixels(0).convert("CMYK").save(ant / "x5.jpg"),
    )
    pixels(0).save(ant / "x6.webp", save_all=True, append_images=[pixels(1)])
    pixels(0).save(ant / "x7.png", format="GIF", save_all=True, append_images=[pixels(1)])
    flags = [
        *TINY,
        "--dataset",
        folder,
        "--batch-size",
        "8",
        "--epochs",
        "1",
        "--runs-dir",
        tmp_path,
        "--out",
        "run",
    ]
    assert go(*flags) == 0 and capfd.readouterr().err == ""
    assert sum(len(part) for part in (lambda s: (s.train, s.val))(data.load(str(folder)))) == 47


# ------------------------------------------------------------------------------------------------ safe


def saved_as(how, path, thing):
    if how == "torch":
        torch.save(thing, path)
    else:
        path.write_bytes(pickle.dumps(thing))


@pytest.mark.parametrize("how", ("torch", "pickle"))
@pytest.mark.parametrize(
    "main, argv",
    [
        (train.main, [*TINY, *CONFIGS["cluster"], "--runs-dir", "runs", "--out", "cluster", "--resume"]),
        (attack.main, ["runs/cluster"]),
    ],
)
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, capfd, finished, how, main, argv):
    state = report.read_checkpoint(finished / "checkpoint.pt")
    saved_as(how, finished / "checkpoint.pt", {**state, "log": Runs(tmp_path / "ran")})
    before = contents(finished)
    assert go(*argv, main=main) == 2
    assert_one_sentence(capfd, "checkpoint.pt: damaged or not a checkpoint", "delete it")
    assert contents(finished) == before and not (tmp_path / "ran").exists()
    torch.load(finished / "checkpoint.pt", weights_only=False) if how == "torch" else pickle.loads(
        before["checkpoint.pt"]
    )
    assert (tmp_path / "ran").exists()  # it would have


@pytest.mark.parametrize("how", ("torch", "pickle"))
def test_a_cache_that_would_run_code_is_not_used(tmp_path, how):
    folder = image_folder(tmp_path / "images")
    first = data.load_folder(folder, None, tmp_path / "cache")
    (cache,) = folder.glob(".cem-cache-*.pt")
    saved_as(how, cache, {**torch.load(cache, weights_only=True), "more": Runs(tmp_path / "ran")})
    again = data.load_folder(folder, None, tmp_path / "cache")
    assert (
        torch.equal(first[0].x, again[0].x)
        and torch.equal(first[0].y, again[0].y)
        and not (tmp_path / "ran").exists()
    )
    torch.load(cache, weights_only=True)  # rebuilt


@pytest.mark.parametrize(
    "entry",
    [
        {"train_y": torch.full((40,), 9)},
        {"test_x": torch.zeros(3, 32, 32, 3, dtype=torch.uint8)},
        {"train_x": None},
        {"train_x": torch.full((40, 32, 32, 3), float("nan"))},
    ],
)
def test_a_cache_with_wrong_labels_or_images_is_not_used(tmp_path, entry):
    folder = image_folder(tmp_path / "images")
    first = data.load_folder(folder, None, tmp_path / "cache")
    (cache,) = folder.glob(".cem-cache-*.pt")
    torch.save({**torch.load(cache, weights_only=True), **entry}, cache)
    again = data.load_folder(folder, None, tmp_path / "cache")
    for a, b in zip(first[:2], again[:2]):
        assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y)


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "",
        "/abs",
        "a/b",
        "a/../b",
        "../run",
        "..\\run",
        "a\\b",
        "~",
        "~root",
        ".hidden",
        "a\0b",
        "a b",
        "$HOME",
        "a\nb",
        "C:run",
        "a*",
        "ä",
        " run",
        "run/",
        "//",
    ],
)
def test_out_stays_in_its_folder(tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    assert go(*TINY, "--runs-dir", "runs/here", f"--out={name}") == 2
    assert_one_sentence(capfd, "--out", "use a plain name")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dataset", ["../..", "/", "a/../..", ".", "..", "x\ny", "ä ö"])
def test_a_name_made_from_the_data_set_stays_in_its_folder(dataset):
    out = options.parse(["--dataset", dataset]).out
    assert Path(out).name == out and not out.startswith(".")
