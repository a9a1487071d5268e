"""It holds: killed runs go on bit for bit, wrong uses end in one sentence, one command gives one result, files run no code.

Reproducibility has no number of workers to depend on: all images are in memory and there is no --workers flag.
"""

import csv
import errno
import importlib.util
import io
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
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import attack
import bench
import data
import report
import train

ROOT = Path(train.__file__).parent
TINY = ["--width", "4", "--train-size", "130", "--batch-size", "32", "--epochs", "3", "--warmup", "0", "--bottleneck", "2", "--attack-epochs", "2",
        "--attack-blocks", "1", "--attack-channels", "8"]
SHAPES = (140, 30)
CONFIGS = {"gmm+noise_arl": ["--surrogate", "gmm", "--defense", "noise_arl"], "slot+patrol": ["--surrogate", "slot", "--defense", "patrol"],
           "cluster": ["--surrogate", "cluster"]}


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
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


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
    a, b = ([{**row, "seconds": ""} for row in csv.DictReader((folder / "log.csv").open())] for folder in (one, two))
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
    server = subprocess.Popen([sys.executable, str(folder / "client.py")], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(when, how, program, *argv, out=folder / "out"):
        request = {"when": when, "how": how, "program": program, "argv": [*map(str, argv)], "out": str(out), "err": str(folder / "err")}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return Done(code, (folder / "out").read_text() if out == folder / "out" else "", (folder / "err").read_text())
    yield run
    server.stdin.close()
    assert server.wait(30) == 0


def go(*flags, main=train.main):
    """main in this process, with one thread as the clients."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return main(list(map(str, flags)))
    finally:
        torch.set_num_threads(before)


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


@pytest.mark.parametrize("config, when, epochs", [
    ("gmm+noise_arl", "mid-epoch", 1), ("gmm+noise_arl", "checkpoint half written", 1), ("gmm+noise_arl", "attack", 3),
    ("slot+patrol", "mid-epoch", 1), ("slot+patrol", "between checkpoint and log", 3), ("slot+patrol", "before the rename", 1),
    ("cluster", "refresh", 1), ("cluster", "results half written", 3)])
def test_killed_and_resumed_is_uninterrupted(tmp_path, client, whole, config, when, epochs):
    flags = [*TINY, *CONFIGS[config], "--runs-dir", tmp_path, "--out", "run"]
    assert client(when, "SIGKILL", "train.py", *flags).code == -signal.SIGKILL
    whole_files(tmp_path / "run")
    assert report.read_checkpoint(tmp_path / "run" / "checkpoint.pt")["epoch"] == epochs
    left = [path for path in (tmp_path / "run").glob(".*.tmp") if path.stat().st_size]
    assert bool(left) == (when in ("checkpoint half written", "before the rename", "between checkpoint and log", "results half written"))
    assert go(*flags, "--resume") == 0
    assert_same_run(whole(config), tmp_path / "run")


@pytest.mark.parametrize("when", ("mid-epoch", "attack", "results half written"))
def test_ctrl_c_ends_in_one_line_that_resumes(tmp_path, client, whole, when):
    flags = [*TINY, *CONFIGS["cluster"], "--runs-dir", tmp_path / "a folder", "--out", "run"]
    done = client(when, "SIGINT", "train.py", *flags)
    assert done.code == 130
    line, = done.err.splitlines()
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
    line, = done.err.splitlines()
    assert line == f"interrupted; start again with: python attack.py {run} --attack-epochs 3"
    assert contents(run) == before


# ------------------------------------------------------------------------------------------------ reproducible

@pytest.mark.parametrize("how", ("pipe", "verbose", "terminal"))
def test_one_command_one_result_in_any_process(tmp_path, client, whole, how):
    flags = [*TINY, *CONFIGS["slot+patrol"], "--runs-dir", tmp_path, "--out", "run"]
    if how == "pipe":  # a new interpreter
        code = f"import sys, data, train; data.SHAPES_TRAIN, data.SHAPES_TEST = {SHAPES}; sys.exit(train.main(sys.argv[1:]))"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", code, *map(str, flags)], env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == "" and "\r" not in done.stdout
    elif how == "verbose":
        done = client("never", "SIGKILL", "train.py", *flags, "--verbose")
        assert done.code == 0 and done.err == "" and "active" in done.out.split("accuracy")[0]
    else:
        ours, theirs = pty.openpty()
        reader = subprocess.Popen(["cat"], stdin=ours, stdout=(tmp_path / "screen").open("w"), stderr=subprocess.DEVNULL)
        assert client("never", "SIGKILL", "train.py", *flags, out=os.ttyname(theirs)).code == 0
        os.close(theirs), os.close(ours)
        reader.wait(30)
        assert (tmp_path / "screen").read_text().count("\rtrain") > 4  # the live line
    assert_same_run(whole("slot+patrol"), tmp_path / "run")


def test_the_environment_is_in_the_results(tmp_path, whole):
    found = json.loads((whole("cluster") / "results.json").read_text())["environment"]
    assert found["torch"] == torch.__version__ and found["python"] == ".".join(map(str, sys.version_info[:3])) and found["threads"] == 1
    assert found["command"].startswith("python train.py --width 4 ") and found["command"].endswith("--out cluster")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
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
