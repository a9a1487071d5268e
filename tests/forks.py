"""Runs of the program in processes of their own that go down at a chosen point, without an import for each.

A server that imports the program once and forks. Started by the fixture `elsewhere` of test_hostile_use.py; a
request is a line of JSON on stdin, the answer is the exit status on stdout.

    program, argv   what to run: "train.py" or "attack.py"
    out, err        files that get what it prints; out may be "closed" or "broken pipe"
    encoding        of what it prints
    environment     variables to set
    when, how       where it goes down, by which signal; see `arm`
"""

import gc
import io
import json
import os
import signal
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import torch
from conftest import TINY, small_world

import attack
import train
from harness import data

PROGRAMS = {"train.py": train.main, "attack.py": attack.main}
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def arm(when, down):
    """Go down in the second epoch's second batch, in the second refresh, ..."""
    calls = {}

    def is_call(name, number):
        calls[name] = calls.get(name, 0) + 1
        return calls[name] == number

    def at(owner, name, number, so=lambda *args: True):
        """Replace owner.name by itself, but for the number-th call whose arguments are so."""
        work = getattr(owner, name)

        def wrapped(*args, **kwargs):
            if so(*args) and is_call(name, number):
                down()
            return work(*args, **kwargs)

        setattr(owner, name, wrapped)

    def half_written(owner, name, number, so, spoil):
        work = getattr(owner, name)

        def wrapped(*args, **kwargs):
            result = work(*args, **kwargs)
            if so(*args) and is_call(name, number):
                spoil(*args)
                down()
            return result

        setattr(owner, name, wrapped)

    to = lambda name: lambda source, target: str(target).endswith(name)
    if when == "mid-epoch":
        at(data, "crop_and_flip", 3 + 2)
    elif when == "refresh":
        at(train.Run, "refresh", 2)
    elif when == "fit":  # of the attention, before the first step of a hardening
        at(train.Run, "cel_losses", 3)
    elif when == "checkpoint half written":
        halve = lambda state, path: os.truncate(path, os.path.getsize(path) // 2)
        half_written(torch, "save", 2, lambda *args: True, halve)
    elif when == "before the rename":
        at(os, "replace", 2, to("checkpoint.pt"))
    elif when == "between checkpoint and log":
        at(os, "replace", 3, to("log.csv"))
    elif when == "attack":
        fit = attack.fit_decoder

        def interrupted(decoder, pairs, *rest):
            def some():
                for pair in pairs():
                    yield pair
                    down()  # behind the first step

            return fit(decoder, some, *rest)

        attack.fit_decoder = interrupted
    elif when == "results half written":
        halve = lambda path, text, **how: os.truncate(path, os.path.getsize(path) // 2)
        half_written(Path, "write_text", 1, lambda path, *rest: "results.json" in path.name, halve)


def child(request):
    """In the forked process: output as the request says, then the program. -> its exit status"""
    os.dup2(os.open(request["err"], CREATE), 2)
    if request["out"] == "closed":
        os.close(1)
        sys.stdout = None
    else:
        if request["out"] == "broken pipe":
            reading, writing = os.pipe()
            os.close(reading)
        else:
            writing = os.open(request["out"], CREATE)
        os.dup2(writing, 1)
        sys.stdout = open(1, "w", encoding=request["encoding"], closefd=False)
    sys.stderr = open(2, "w", encoding=request["encoding"], closefd=False)
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arm(request["when"], lambda: os.kill(os.getpid(), getattr(signal, request["how"])))
    return PROGRAMS[request["program"]](request["argv"])


def warm_up():
    """A run whose late imports and compiled kernels every child inherits."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        train.main([*TINY, "--surrogate", "slot", "--defense", "noise_arl", "--runs-dir", folder])


def serve():
    torch.set_num_threads(1)
    with small_world():
        if not torch.accelerator.is_available():  # whose autograd threads do not survive a fork
            warm_up()
        gc.freeze()
        for line in sys.stdin:
            pid = os.fork()
            if pid == 0:
                sys.exit(child(json.loads(line)))  # to the end of the interpreter, which flushes
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
