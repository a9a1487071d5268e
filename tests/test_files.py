"""What harness/files.py promises: files that are whole or absent, one live run a folder, one sentence for
whatever is wrong with a file, and output problems that never cost a run."""

import csv
import errno
import json
import os
import pickle
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import RunsCode, save_checkpoint, sentence

from harness import files
from harness.files import (
    UserError,
    claim_folder,
    read_checkpoint,
    read_ours,
    take_folder,
    write,
    write_atomic,
)

ROOT = Path(files.__file__).parents[1]


# -------------------------------------------------------------------------------- writing


def test_a_write_replaces_the_whole_file_or_leaves_the_old_one(tmp_path):
    path = tmp_path / "a.txt"
    write_atomic(path, lambda to: to.write_text("old"))
    assert path.read_text() == "old"

    def half(to):
        to.write_text("ne")
        assert path.read_text() == "old" and to.parent == path.parent  # a rename within the file system
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, half)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]
    write_atomic(path, lambda to: to.write_text("new"))
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.txt"]


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    RuntimeError("PytorchStreamWriter failed writing file"),
]


@pytest.mark.parametrize("error", FULL, ids=["as Python reports it", "as torch reports it"])
def test_a_full_disk_is_one_sentence_and_the_old_file_stays(tmp_path, error):
    def fails(to):
        to.write_bytes(b"half")
        raise error

    path = tmp_path / "runs" / "a" / "checkpoint.pt"
    write(path, "old")
    sentence(lambda: write(path, fails), path, "cannot be written", "free some space")
    assert path.read_text() == "old" and len(os.listdir(path.parent)) == 1
    (tmp_path / "file").write_text("")
    sentence(lambda: write(tmp_path / "file" / "a" / "b", "text"), "cannot be written", "--runs-dir")


def test_rows_with_different_columns_make_one_table(tmp_path):
    rows = [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "gmm.loss": 7.0, "loss": 0.25}]
    files.write_rows(tmp_path / "log.csv", rows)
    read = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert read == [
        {"epoch": "1", "loss": "0.5", "gmm.loss": ""},
        {"epoch": "2", "loss": "0.25", "gmm.loss": "7.0"},
    ]


# -------------------------------------------------------------------------------- a folder has one live run

HOLD = """
import sys, time
from pathlib import Path
from harness.files import claim_folder
lock = claim_folder(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_live_run_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    other = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "run"], env=env, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        being_written = tmp_path / "run" / f".checkpoint.pt.{other.pid}.cem-tmp"
        being_written.write_bytes(b"half")
        sentence(lambda: claim_folder(tmp_path / "run"), tmp_path / "run", "another run", "--name")
        assert being_written.exists()  # what the live run is writing is not swept away
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait(30)
    assert claim_folder(tmp_path / "run") and not being_written.exists()  # now it is a dead run's


def test_the_lock_holds_within_a_process_too_and_ends_with_its_object(tmp_path):
    lock = claim_folder(tmp_path / "run")
    sentence(lambda: claim_folder(tmp_path / "run"), "another run is writing there")
    assert claim_folder(tmp_path / "other")
    lock.close()
    assert claim_folder(tmp_path / "run")


def test_cleaning_removes_only_our_own_temporary_files(tmp_path):
    theirs = [".notes.tmp", "a.cem-tmp", ".cem-tmp.txt", ".hidden", "results.json.tmp", "sub/.x.1.cem-tmp"]
    (tmp_path / "run" / "sub").mkdir(parents=True)
    for name in [*theirs, ".checkpoint.pt.123.cem-tmp", ".log.csv.9.cem-tmp"]:
        (tmp_path / "run" / name).write_text("")
    claim_folder(tmp_path / "run")
    left = {str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert left == {*theirs, ".lock"}


def test_a_file_system_without_locks_is_no_reason_to_refuse(tmp_path, monkeypatch):
    import fcntl

    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert claim_folder(tmp_path / "run")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at all")
    for folder in (tmp_path / "file" / "run", tmp_path / "link", Path("a\0b"), tmp_path / ("x" * 300)):
        sentence(lambda folder=folder: claim_folder(folder), "cannot be written", "--runs-dir", "--name")


def settings(**changes):
    return {"sigma": 0.1, "lr": 0.05, "threads": 1, **changes}


def flags(resume=False, overwrite=False, threads=1):
    return SimpleNamespace(resume=resume, overwrite=overwrite, threads=threads)


@pytest.fixture
def finished(tmp_path):
    """The folder of a finished run, with a file of the user's own beside its files."""
    folder = tmp_path / "run"
    save_checkpoint(folder, config=settings())
    for name in (*files.OURS[:-1], "notes.txt"):
        (folder / name).write_text("old")
    return folder


def test_a_run_is_never_overwritten_unasked(finished):
    before = {p.name: p.read_bytes() for p in finished.iterdir()}
    sentence(
        lambda: take_folder(finished, flags(), settings()), finished, "--resume", "--overwrite", "--name"
    )
    assert {p.name: p.read_bytes() for p in finished.iterdir() if p.name != ".lock"} == before


def test_when_it_is_overwritten_all_its_files_go_first_and_no_others(finished):
    lock, state = take_folder(finished, flags(overwrite=True), settings())
    assert state is None and lock and set(os.listdir(finished)) == {".lock", "notes.txt"}


def test_resume_gives_the_state_back_and_refuses_other_settings(finished, capsys):
    lock, state = take_folder(finished, flags(resume=True), settings())
    assert state["epoch"] == 10 and capsys.readouterr().out == ""
    lock.close()
    lock, _ = take_folder(finished, flags(resume=True, threads=2), settings(threads=2))
    assert "begun on 1 threads, now 2" in capsys.readouterr().out
    lock.close()
    other = lambda: take_folder(finished, flags(resume=True), settings(lr=0.1))
    sentence(other, finished / "checkpoint.pt", "another --lr", "--name")


def test_resume_of_nothing_begins(tmp_path, capsys):
    _, state = take_folder(tmp_path / "new", flags(resume=True), settings())
    assert state is None and "nothing to resume yet" in capsys.readouterr().out


# -------------------------------------------------------------------------------- reading what is not ours


def raising(error):
    def read(path):
        raise error

    return read


@pytest.mark.parametrize(
    "error",
    [
        KeyError("epoch"),
        TypeError("a\nb"),
        EOFError(),
        pickle.UnpicklingError("x" * 500),
        OSError(5, "I/O error"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_goes_wrong_in_a_file_is_one_sentence_that_names_it(error):
    sentence(
        lambda: read_ours("runs/a/checkpoint.pt", raising(error)),
        "runs/a/checkpoint.pt: damaged",
        "delete it",
    )


def test_a_missing_file_is_not_called_damaged_and_our_own_sentences_pass(tmp_path):
    sentence(lambda: read_ours(tmp_path / "a", Path.read_text), tmp_path / "a", "there is no such file")
    (tmp_path / "f").write_text("")
    sentence(lambda: read_ours(tmp_path / "f" / "a", Path.read_text), "there is no such file")
    with pytest.raises(UserError, match="^mine$"):
        read_ours("a", raising(UserError("mine")))
    with pytest.raises(KeyboardInterrupt):
        read_ours("a", raising(KeyboardInterrupt()))
    assert read_ours(tmp_path / "f", Path.read_text) == ""


SPOILED = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("weights"),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a list": lambda path: torch.save([1, 2], path),
    "a tensor": lambda path: torch.save(torch.ones(3), path),
    "a number": lambda path: torch.save(5, path),
    "weights alone": lambda path: torch.save({"layer": torch.ones(3)}, path),
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"format": files.FORMAT})),
    "another version": lambda path: save_checkpoint(path.parent, format=0),
    "its format a list": lambda path: save_checkpoint(path.parent, format=[4]),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_file_that_is_no_checkpoint(tmp_path, spoil):
    path = tmp_path / "checkpoint.pt"
    state = save_checkpoint(tmp_path)
    assert read_checkpoint(path) == state
    spoil(path)
    sentence(lambda: read_checkpoint(path), path, "damaged or not made by this version", "delete it")


@pytest.mark.parametrize(
    "wrong", [None, "5", 5.5, [1], {"a": 1}, torch.ones(2)], ids=lambda wrong: type(wrong).__name__
)
@pytest.mark.parametrize("field", files.FIELDS)
def test_a_checkpoint_with_a_field_of_another_type(tmp_path, field, wrong):
    save_checkpoint(tmp_path, **{field: wrong})
    if not isinstance(wrong, files.FIELDS[field]):
        sentence(
            lambda: read_checkpoint(tmp_path / "checkpoint.pt"),
            "checkpoint.pt: damaged",
            f"its {field} is no",
        )
    else:
        assert read_checkpoint(tmp_path / "checkpoint.pt")[field] == wrong


@pytest.mark.parametrize("field", files.FIELDS)
def test_a_checkpoint_without_a_field(tmp_path, field):
    state = save_checkpoint(tmp_path)
    del state[field]
    torch.save(state, tmp_path / "checkpoint.pt")
    sentence(lambda: read_checkpoint(tmp_path / "checkpoint.pt"), "checkpoint.pt: damaged", field)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, how):
    path, ran = tmp_path / "checkpoint.pt", tmp_path / "ran"
    crafted = {**save_checkpoint(tmp_path), "log": RunsCode(ran)}
    torch.save(crafted, path) if how == "torch" else path.write_bytes(pickle.dumps(crafted))
    sentence(lambda: read_checkpoint(path), path, "damaged", "delete it")
    assert not ran.exists()
    torch.load(path, weights_only=False) if how == "torch" else pickle.loads(path.read_bytes())
    assert ran.exists()  # it would have


# -------------------------------------------------------------------------------- the terminal

# Imports the program once, then forks a child for each case: real descriptors, the interpreter's own end.
DRIVER = """
import json, os, sys
from pathlib import Path
from harness import files

def work(argv):
    print("λ·r(η)·γ " + "y" * 100_000)  # not flushed, and more than any buffer
    for i in range(200):
        files.say("x" * 100)
    Path(argv[0]).write_text("done")
    if argv[1:]:
        raise files.UserError("a naïve mistake.")

def child(case, argv):
    out, err = (os.open(f"{folder}/{case}.{name}", os.O_WRONLY | os.O_CREAT) for name in ("out", "err"))
    os.dup2(out, 1), os.dup2(err, 2)
    if case == "a pipe that nobody reads":
        ours, theirs = os.pipe()
        os.close(ours), os.dup2(theirs, 1)
    if case.startswith("full"):
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    if case == "full, stderr too":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    if case == "closed":
        os.close(1)
        sys.stdout = None
    if case == "both closed":
        os.close(1), os.close(2)
        sys.stdout = sys.stderr = None
    if case in ("ascii", "latin-1"):
        sys.stdout.reconfigure(encoding=case), sys.stderr.reconfigure(encoding=case)
    sys.exit(files.command_line(work, argv, "train.py"))

folder, statuses = sys.argv[1], {}
for case in sys.argv[2:]:
    sys.stdout.flush()
    if os.fork() == 0:
        child(case, [f"{folder}/{case}.file", *(["wrong"] if "stderr" in case or case == "ascii" else [])])
    statuses[case] = os.waitstatus_to_exitcode(os.wait()[1])
print(json.dumps(statuses))
"""
CASES = (
    "plain",
    "a pipe that nobody reads",
    "full",
    "full, stderr too",
    "closed",
    "both closed",
    "ascii",
    "latin-1",
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """{case: (exit status, stdout, stderr, whether the work was done)}"""
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "driver.py").write_text(DRIVER)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, folder / "driver.py", folder, *CASES], env=env, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    read = lambda case, what: (folder / f"{case}.{what}").read_bytes()
    return {
        case: (status, read(case, "out"), read(case, "err"), (folder / f"{case}.file").exists())
        for case, status in json.loads(done.stdout).items()
    }


@pytest.mark.parametrize("case", CASES)
def test_an_output_problem_never_costs_a_run(shown, case):
    status, out, err, done = shown[case]
    assert done and status == (2 if "stderr" in case or case == "ascii" else 0)
    assert err == (b"a na?ve mistake.\n" if case == "ascii" else b"")
    if case in ("plain", "ascii", "latin-1"):
        assert out.count(b"\n") == 201 and out.endswith(b"x" * 100 + b"\n")
        line = out.splitlines()[0].decode("utf-8" if case == "plain" else case)
        assert line.startswith("λ·r(η)·γ " if case == "plain" else "??r(?)?? ") and line.endswith(
            "y" * 100_000
        )


def test_piped_into_head(tmp_path):
    """The real thing, with the program as the user starts it."""
    code = "from harness import files; import pathlib; say = files.say; lines = range(5000); "
    code += "work = lambda argv: ([say('x' * 100) for _ in lines], pathlib.Path('done').write_text('')); "
    code += "files.command_line(work, [], 'train.py')"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} | head -1; exit ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "x" * 100 + "\n", "") and (
        tmp_path / "done"
    ).exists()


def ends(main, argv=(), program="train.py"):
    return files.command_line(main, list(argv), program)


def test_how_a_command_ends(capsys):
    streams = sys.stdout, sys.stderr
    assert ends(lambda argv: print("fine")) == 0
    assert ends(raising(UserError("--lr 5: too\nhigh\x1b[2J \udcff ä."))) == 2
    assert ends(raising(KeyboardInterrupt()), ["--name", "a b", "--resume", "--overwrite"]) == 130
    assert ends(raising(KeyboardInterrupt()), ["runs/a"], "attack.py") == 130
    assert ends(raising(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))) == 2
    assert ends(raising(MemoryError())) == 2
    out, err = capsys.readouterr()
    assert out == "fine\n"
    assert err.splitlines() == [
        "--lr 5: too?high?[2J ? ä.",
        "interrupted; go on with: python train.py --name 'a b' --resume",
        "interrupted; go on with: python attack.py runs/a",
        *["not enough memory: lower --batch-size, --width, --image-size or --attack-size."] * 2,
    ]
    with pytest.raises(RuntimeError, match="a bug"):  # which is not the user's to mend
        ends(raising(RuntimeError("a bug")))
    assert (sys.stdout, sys.stderr) == streams


def test_progress_is_a_few_lines_where_there_is_no_terminal(capsys):
    progress = files.Progress()
    for label in ("train", "decoder"):
        for step in range(1001):
            progress(label, step / 1000)
    lines = capsys.readouterr().out.splitlines()
    assert 4 <= sum(line.startswith("train") for line in lines) <= 6 and len(lines) <= 12
    assert lines[-1].startswith("decoder  100 %") and "0 s left" in lines[-1]


def test_progress_counts_the_time_that_is_left(capsys, monkeypatch):
    now = iter([0.0, 0.0, 30.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    files.Progress()("train", 0.25)
    assert capsys.readouterr().out.split()[:7] == ["train", "25", "%", "30", "s,", "90", "s"]


def test_the_environment_names_what_a_run_depends_on(monkeypatch):
    found = files.environment("train.py", ["--name", "a b"])
    assert found["torch"] == torch.__version__ and found["threads"] == torch.get_num_threads()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["command"] == "python train.py --name 'a b'"
    monkeypatch.setattr(files.subprocess, "run", lambda *a, **k: raising(FileNotFoundError("git"))(None))
    assert files.environment("train.py", []) == {**found, "command": "python train.py ", "commit": None}
