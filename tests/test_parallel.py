"""Two processes under torchrun: one step for both, equal weights and statistics, one writer, one sentence for
a mistake. Without torchrun nothing happens, whatever the environment says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SHAPES, TINY

import train
from harness import parallel

ROOT = Path(train.__file__).parent
RUNS = {
    "statistics": "--surrogate gmm+cluster --defense noise_arl",
    "attention": "--surrogate slot+gated --scale 0.25 --memory 8 --defense patrol",
    "x": "--surrogate direct --defense dropout --stash params --momentum-decay 0.5",
}

# Runs in both processes; what each saw and did goes to FOLDER/NAME-RANK.pt. One launch for all tests.
CLIENT = """
import contextlib, io, json, os, sys, weakref
import torch
import train
from harness import data, files, parallel

folder, runs, tiny = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3].split()
data.SHAPES_TRAIN, data.SHAPES_TEST = SHAPES
rank, made, own, averaged, orders, written, before, after = int(os.environ["RANK"]), *([] for _ in range(7))
init, average, deal = train.Run.__init__, parallel.average_gradients, train.Run.epoch_order
put, stop, agree = files.write_atomic, parallel.stop, parallel.average_statistics

def flat(parameters):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])

def remember(self, *args):
    init(self, *args)
    made.append(self)

def average_gradients(parameters):
    parameters = list(parameters)
    own.append(flat(parameters))
    average(parameters)
    averaged.append(flat(parameters))

def epoch_order(self):
    orders.append(deal(self))
    return orders[-1]

def average_statistics(module):
    mine = {k: v.clone() for k, v in module.named_buffers()}
    agree(module)
    before.append(mine), after.append({k: v.clone() for k, v in module.named_buffers()})

def write_atomic(path, write):
    written.append(str(path))
    put(path, write)

train.Run.__init__, train.Run.epoch_order = remember, epoch_order
parallel.average_gradients, parallel.average_statistics = average_gradients, average_statistics
files.write_atomic = write_atomic
parallel.stop = lambda: None  # one group for everything below

def go(name, *flags):
    for seen in (own, averaged, orders, written, before, after):
        seen.clear()
    shown = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown[0]), contextlib.redirect_stderr(shown[1]):
        status = train.main([*tiny, *flags, "--runs-dir", folder, "--name", name])
    out, err = (stream.getvalue() for stream in shown)
    return {"status": status, "out": out, "err": err, "written": list(written)}

for name, flags in runs.items():
    result, run = go(name, *flags.split()), made[-1]
    tensors = lambda module: {k: v for k, v in module.state_dict().items() if torch.is_tensor(v)}
    parts = {"net": tensors(run.net), "cels": tensors(run.cels), "defense": tensors(run.defense)}
    momentum = [s["momentum_buffer"] for s in run.optimizer.state.values()]
    seen = {"own": own, "averaged": averaged, "orders": orders, "momentum": momentum, "average": run.average}
    seen |= {"before": before, "after": after}  # net, defence, surrogates, epoch by epoch
    torch.save({**result, **parts, **seen}, f"{folder}/{name}-{rank}.pt")

# mistakes: one that both processes see, and two that only the first can
wrong = {
    "flag": go("a", "--lr", "nan"),
    "images": go("a", "--batch-size", "100"),
    "folder": go("statistics", *runs["statistics"].split()),
    "base": go("x", "--init", f"{folder}/x-2processes", "--overwrite"),
}

def fail():
    raise files.UserError("only the first tries.")

helpers, calls = {"alone": parallel.first_alone(lambda: f"made by {rank}")}, []
helpers["of first"] = parallel.from_first(f"held by {rank}")
helpers["both"] = parallel.first_then_others(lambda: calls.append(rank) or rank)
helpers["calls"] = calls
try:
    parallel.first_alone(fail)
except files.UserError as error:
    helpers["error"] = str(error)
t, whole = torch.tensor([1.0 + rank, 10.0 * rank]), torch.tensor([rank])
parallel.average([t, whole])
helpers["mean"], helpers["whole"] = t, whole
parallel.copy_from_first([whole])
helpers["copied"] = whole.clone()
p = torch.nn.Parameter(torch.ones(2))
p.grad = torch.full((2,), 4.0) if rank == 0 else None
average([p])
helpers["missing gradient"] = p.grad
helpers["count"], helpers["rank"] = parallel.processes(), parallel.rank()
group = weakref.ref(torch.distributed.distributed_c10d._get_default_group())
stop()
helpers["group left"] = group() is not None
torch.save({"wrong": wrong, **helpers}, f"{folder}/helpers-{rank}.pt")
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """{name: [what the first process saw, what the second saw]}, and the folder of the runs"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    folder = tmp_path_factory.mktemp("clients")
    (folder / "client.py").write_text(CLIENT.replace("SHAPES\n", f"{SHAPES}\n"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(folder / "client.py"), str(folder), json.dumps(RUNS), " ".join(TINY)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    load = lambda name, rank: torch.load(folder / f"{name}-{rank}.pt", weights_only=True)
    return {name: [load(name, 0), load(name, 1)] for name in (*RUNS, "helpers")}, folder


@pytest.mark.parametrize("name", RUNS)
def test_a_step_is_the_mean_of_the_processes_own_gradients(seen, name):
    first, second = seen[0][name]
    # 117 training images, 58 a process, 1 batch of 32; behind the last all is one epoch further
    assert len(first["own"]) == len(second["own"]) == 2
    for a, b, mean_a, mean_b in zip(first["own"], second["own"], first["averaged"], second["averaged"]):
        assert (a - b).abs().max() > 1e-3 * a.abs().max()  # two clients, two batches
        assert torch.equal(mean_a, mean_b) and (mean_a - (a + b) / 2).abs().max() <= 1e-6


@pytest.mark.parametrize("name", RUNS)
def test_weights_and_statistics_stay_the_same_on_both(seen, name):
    first, second = seen[0][name]
    for part in ("net", "cels", "defense"):
        assert first[part].keys() == second[part].keys()
        assert all(torch.equal(first[part][k], second[part][k]) for k in first[part]), part
    for part in ("momentum", "average"):
        assert all(torch.equal(a, b) for a, b in zip(first[part], second[part], strict=True)), part
    assert bool(first["average"]) == (name == "x")


def test_running_statistics_are_averaged_and_remembered_samples_are_not(seen):
    """The mean of two processes' samples would be no sample: it has half the variance of one."""
    first, second = seen[0]["attention"]
    net, _, cels = zip(*(part for who in (first, second) for part in (who["before"][3:], who["after"][3:])))
    mine, agreed, theirs, agreed_too = net  # of the last epoch: before and after, in both
    mean = "encoder.0.1.running_mean"
    assert torch.equal(agreed[mean], agreed_too[mean]) and not torch.equal(mine[mean], theirs[mean])
    assert torch.allclose(agreed[mean], (mine[mean] + theirs[mean]) / 2, atol=1e-6)
    mine, agreed, theirs, agreed_too = cels
    for name in ("slot.memory", "gated.memory", "slot.stored", "gated.stored", "slot.calls"):
        assert torch.equal(agreed[name], mine[name]) and torch.equal(agreed_too[name], mine[name])
        assert name == "slot.calls" or not torch.equal(theirs[name], mine[name])


def test_every_image_goes_to_one_process_an_epoch(seen):
    for first, second in (seen[0][name] for name in RUNS):
        assert len(first["orders"]) == 2
        for a, b in zip(first["orders"], second["orders"]):
            assert len(a) == len(b) == 58 and len(set(a.tolist()) | set(b.tolist())) == 116


def test_the_first_process_alone_writes_and_prints(seen):
    found, folder = seen
    for name in RUNS:
        first, second = found[name]
        assert (first["status"], second["status"], first["err"], second["err"]) == (0, 0, "", "")
        assert second["out"] == "" and second["written"] == []
        assert "2 processes" in first["out"].splitlines()[0] and first["out"].count("\naccuracy") == 1
        run = folder / f"{name}-2processes"  # the number is part of the name
        assert {"checkpoint.pt", "log.csv", "results.json", "reconstructions.png"} <= set(os.listdir(run))
        results = json.loads((run / "results.json").read_text())
        assert results["config"]["processes"] == 2
        assert results["environment"]["command"].startswith("torchrun --nproc_per_node=2 train.py")


def test_a_users_mistake_is_one_sentence_of_the_first_process_and_ends_both(seen):
    first, second = (part["wrong"] for part in seen[0]["helpers"])
    words = {"flag": "--lr: nan", "images": "--batch-size 100", "folder": "holds a run"}
    words["base"] = "would be replaced"
    for case, text in words.items():
        # torchrun ends the first process when another fails: before it could say why
        assert (first[case]["status"], second[case]["status"]) == (2, 0), case
        assert (
            text in first[case]["err"] and first[case]["err"].count("\n") == 1 and second[case]["err"] == ""
        )


def test_the_helpers(seen):
    first, second = seen[0]["helpers"]
    assert (first["alone"], second["alone"]) == ("made by 0", None)
    assert first["of first"] == second["of first"] == "held by 0"
    assert (first["both"], second["both"], first["calls"], second["calls"]) == (0, 1, [0], [1])
    assert first["error"] == second["error"] == "only the first tries."
    assert (first["count"], second["count"], first["rank"], second["rank"]) == (2, 2, 0, 1)
    assert first["mean"].tolist() == second["mean"].tolist() == [1.5, 5.0]
    assert first["copied"].tolist() == second["copied"].tolist() == [0] == first["whole"].tolist()
    assert first["missing gradient"].tolist() == second["missing gradient"].tolist() == [2.0, 2.0]


def test_the_group_ends_with_stop(seen):
    """Its threads end with it. One that lived on could abort the process while Python ends."""
    assert [part["group left"] for part in seen[0]["helpers"]] == [False, False]


# -------------------------------------------------------------------------------- without torchrun


@pytest.fixture(params=["nothing", "RANK=1"])
def environment(request, monkeypatch):
    if request.param == "RANK=1":  # as a cluster's batch system may leave it
        for name, value in {
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "nowhere",
        }.items():
            monkeypatch.setenv(name, value)


def test_without_torchrun_nothing_happens(environment):
    p, t = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    parallel.average_gradients([p])
    parallel.average([t])
    parallel.average_statistics(torch.nn.BatchNorm2d(3))
    parallel.copy_from_first([t])
    assert p.grad is None and t.tolist() == [1, 1]
    assert (parallel.start("cpu"), parallel.rank(), parallel.processes(), parallel.is_first()) == (
        "cpu",
        0,
        1,
        True,
    )
    assert (
        parallel.first_then_others(lambda: 5)
        == parallel.first_alone(lambda: 5)
        == parallel.from_first(5)
        == 5
    )
    with pytest.raises(KeyError):
        parallel.first_alone(lambda: {}["a"])


def test_a_rank_in_the_environment_is_no_second_process(tmp_path, few_shapes, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1"), monkeypatch.setenv("WORLD_SIZE", "2")
    command = [*TINY, "--attack", "none", "--runs-dir", str(tmp_path), "--name", "run"]
    assert train.main(command) == 0
    assert "accuracy" in capsys.readouterr().out and (tmp_path / "run" / "results.json").exists()
