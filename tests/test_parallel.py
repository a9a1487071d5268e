"""Two processes under torchrun: one step for both, the same weights and statistics on both, one writer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import parallel
import train

ROOT = Path(train.__file__).parent
CONFIGS = [("gmm", "noise_arl"), ("cluster", "none"), ("slot", "patrol"), ("gated", "dropout")]
FLAGS = ["--width", "4", "--bottleneck", "2", "--train-size", "301", "--batch-size", "32", "--epochs", "3", "--attack-epochs", "1", "--attack-blocks", "1",
         "--attack-channels", "8"]

# What each process saw and did, saved to FOLDER/SURROGATE-RANK.pt: its own gradients and the averaged ones of every step.
CLIENT = """
import os, sys, torch
import audit, data, parallel, train

folder, rank = sys.argv[1], int(os.environ["RANK"])
data.SHAPES_TRAIN, data.SHAPES_TEST = 400, 60
runs, own, averaged, batches, written = [], [], [], [], []
init, average, deal, write = train.Run.__init__, parallel.average_gradients, data.batches, train.write

def remember(self, *args):
    init(self, *args)
    runs.append(self)

def average_gradients(parameters):
    parameters = list(parameters)
    own.append(torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters]))
    average(parameters)
    averaged.append(torch.cat([p.grad.flatten() for p in parameters]))

def recorded(*args, **kwargs):
    if kwargs.get("order") is not None:
        batches.append(kwargs["order"])
    return deal(*args, **kwargs)

def writing(path, what):
    written.append(str(path))
    write(path, what)

train.Run.__init__, parallel.average_gradients, data.batches = remember, average_gradients, recorded
train.write = audit.write = writing
stop, parallel.stop = parallel.stop, lambda: None  # one group for all of the runs below
for config in sys.argv[2].split(","):
    surrogate, defense = config.split("/")
    for seen in (own, averaged, batches, written):
        seen.clear()
    assert train.main([*sys.argv[3:], "--surrogate", surrogate, "--defense", defense, "--runs-dir", folder, "--out", surrogate]) == 0
    run = runs[-1]
    cel = {k: v for k, v in run.cel.state_dict().items()}
    proxy = {k: v for k, v in run.defense.state_dict().items() if torch.is_tensor(v)}
    torch.save({"own": own, "averaged": averaged, "order": batches, "written": written, "weights": run.net.state_dict(), "cel": cel,
                "proxy": proxy, "momentum": [s["momentum_buffer"] for s in run.optimizer.state.values()]},
               f"{folder}/{surrogate}-{rank}.pt")
stop()
"""


def launch(*command):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *map(str, command)],
                          capture_output=True, text=True, env=env, timeout=300)


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    (folder / "client.py").write_text(CLIENT)
    done = launch(folder / "client.py", folder, ",".join(f"{s}/{d}" for s, d in CONFIGS), *FLAGS)
    assert done.returncode == 0, done.stderr[-2000:]
    return {s: [torch.load(folder / f"{s}-{rank}.pt", weights_only=True) for rank in (0, 1)] for s, _ in CONFIGS}, folder


@pytest.mark.parametrize("surrogate, defense", CONFIGS)
def test_a_step_is_the_mean_of_the_processes_own_gradients(clients, surrogate, defense):
    first, second = clients[0][surrogate]
    # 271 training images, 135 a process, 4 batches of 32
    assert len(first["own"]) == 3 * 4
    for a, b, mean_a, mean_b in zip(first["own"], second["own"], first["averaged"], second["averaged"]):
        assert (a - b).abs().max() > 1e-3 * a.abs().max()  # two clients, two batches
        assert torch.equal(mean_a, mean_b) and (mean_a - (a + b) / 2).abs().max() <= 1e-6


@pytest.mark.parametrize("surrogate", [s for s, _ in CONFIGS])
def test_weights_and_statistics_stay_the_same_on_both(clients, surrogate):
    first, second = clients[0][surrogate]
    for part in ("weights", "cel", "proxy"):
        assert first[part].keys() == second[part].keys()
        assert all(torch.equal(first[part][k], second[part][k]) for k in first[part]), part
    assert all(torch.equal(a, b) for a, b in zip(first["momentum"], second["momentum"], strict=True))


def test_every_image_goes_to_one_process_an_epoch(clients):
    for first, second in clients[0].values():
        assert len(first["order"]) == 3
        for a, b in zip(first["order"], second["order"]):
            assert len(a) == len(b) == 135 and len(set(a.tolist()) | set(b.tolist())) == 270


def test_one_process_writes(clients):
    found, folder = clients
    for surrogate, (first, second) in found.items():
        assert second["written"] == [] and len(first["written"]) == 2 * 3 + 2
        assert sorted(p.name for p in (folder / surrogate).iterdir()) == ["checkpoint.pt", "log.csv", "reconstructions.png", "results.json"]
        results = json.loads((folder / surrogate / "results.json").read_text())
        assert results["config"]["processes"] == 2 and results["cel"]["active_share"] > 0


def test_torchrun_train_py_as_the_readme_says(tmp_path):
    done = launch(ROOT / "train.py", *FLAGS, "--attack", "none", "--runs-dir", tmp_path, "--out", "run")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("accuracy") == 1  # one process prints
    # as many processes must resume it
    assert train.main([*FLAGS, "--attack", "none", "--runs-dir", str(tmp_path), "--out", "run", "--resume"]) == 2


def test_without_torchrun_nothing_happens():
    p = torch.nn.Parameter(torch.ones(2))
    parallel.average_gradients([p])
    t = torch.ones(2)
    parallel.average([t])
    parallel.copy_from_first([t])
    assert p.grad is None and t.tolist() == [1, 1] and (parallel.rank(), parallel.processes()) == (0, 1)
    assert parallel.first_then_others(lambda: 5) == 5 and parallel.start("cpu") == "cpu"
