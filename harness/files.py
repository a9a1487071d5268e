"""Between the program and the user: one-sentence errors, files that are never half-written, progress."""

import csv
import io
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch

from harness import parallel

FORMAT = 4  # of checkpoints; raise it when their contents change
FIELDS = {"config": dict, "data": str, "net": dict, "weights": dict, "epoch": int, "seconds": float}
FIELDS |= {"log": list, "average": list, "spread": list}
OURS = "results.json reconstructions.png training.png spread.png log.csv attack.json attack.png".split()
OURS += ["checkpoint.pt"]  # the last to go: without it the rest would look like a finished run


class UserError(Exception):
    """A mistake the user can mend: shown as one sentence, without a traceback."""


def one_line(error):
    return " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__


# ------------------------------------------------------------------------------------------ the terminal


class Terminal:
    """A stream that loses what cannot be shown (closed pipe, full disk, other alphabet): the run goes on."""

    def __init__(self, stream):
        self.stream = stream if stream is not None else open(os.devnull, "w")

    def write(self, text):
        try:
            self.stream.write(text)
        except UnicodeEncodeError:
            self.stream.write(text.encode("ascii", "replace").decode())
        except (OSError, ValueError):
            self.give_up()
        return len(text)

    def flush(self):
        try:
            self.stream.flush()
        except (OSError, ValueError):
            self.give_up()

    def give_up(self):
        nowhere = open(os.devnull, "w")
        try:  # what is buffered must go somewhere when Python ends
            os.dup2(nowhere.fileno(), self.stream.fileno())
        except (OSError, ValueError):  # a stream without a file
            pass
        self.stream = nowhere

    def __getattr__(self, name):
        return getattr(self.stream, name)


def say(line):
    """For the user, from the first process alone."""
    if parallel.is_first():
        print(line, flush=True)


def say_error(error):
    """One printable line on stderr, whatever a file's name holds."""
    print("".join(c if c.isprintable() else "?" for c in str(error)), file=sys.stderr, flush=True)


class Progress:
    """One live line on a terminal, a line now and then elsewhere."""

    def __init__(self):
        self.start, self.live, self.label, self.shown = time.perf_counter(), sys.stdout.isatty(), None, -1.0

    def __call__(self, label, done):
        if not parallel.is_first():
            return
        if label != self.label:
            self.start, self.label, self.shown = time.perf_counter(), label, -1.0
        if done - self.shown < (0.005 if self.live else 0.25) and done < 1:
            return
        self.shown = done
        used = time.perf_counter() - self.start
        left = used * (1 / done - 1) if done else 0
        line = f"{label:8} {100 * done:3.0f} %  {used:4.0f} s, {left:4.0f} s left"
        end = "" if self.live and done < 1 else "\n"
        print("\r" + line.ljust(78) if self.live else line, end=end, flush=True)


def command_line(main, argv, program):
    """Exit status of main(argv): 0, 2 for the user's mistake, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    streams, status = (sys.stdout, sys.stderr), 0
    sys.stdout, sys.stderr = Terminal(sys.stdout), Terminal(sys.stderr)
    try:
        main(argv)
    except UserError as error:
        if parallel.is_first():  # torchrun would end it, silent as yet, if another process failed before it
            status = 2
            say_error(error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        status = 2
        say_error("not enough memory: lower --batch-size, --width, --image-size or --attack-size.")
    except KeyboardInterrupt:
        status = 130
        again = [a for a in argv if a not in ("--resume", "--overwrite")]
        again += ["--resume"] if program == "train.py" else []
        if parallel.is_first():
            say_error(f"interrupted; go on with: {started_as(program, again)}")
    finally:
        parallel.stop()
        sys.stdout.flush()
        sys.stdout, sys.stderr = streams
    return status


def started_as(program, argv):
    processes = parallel.processes()
    start = "python" if processes == 1 else f"torchrun --nproc_per_node={processes}"
    return f"{start} {program} {shlex.join(argv)}"


def is_out_of_memory(error):
    """torch reports it as a RuntimeError on the CPU."""
    words = "allocate memory|not enough memory|out of memory|calculation overflowed|multiplication overflow"
    return isinstance(error, MemoryError) or re.search(words, str(error)) is not None


def environment(program, argv):
    """Where and how a run was made."""
    try:
        git = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.system(),
        "threads": torch.get_num_threads(),
        "command": started_as(program, argv),
        "commit": commit or None,
    }


# ------------------------------------------------------------------------------------------ files


def write_atomic(path, write):
    """write(temporary path), then rename: `path` is the old file or the whole new one, never half of it."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.cem-tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path, text_or_writer):
    """Atomically; a full disk or a folder that cannot be written is the user's to mend."""
    as_text = lambda temporary: temporary.write_text(text_or_writer, encoding="utf-8")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text_or_writer if callable(text_or_writer) else as_text)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        reason = (
            f"{path}: cannot be written ({one_line(error)}); free some space or choose another --runs-dir."
        )
        raise UserError(reason) from None


def claim_folder(folder):
    """Make the run's folder, see that it can be written, hold it against a second live run. -> the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise UserError(
            f"{folder}: cannot be written ({one_line(error)}); choose another --runs-dir or --name."
        ) from None
    try:
        import fcntl  # not on Windows, where two runs in one folder are the user's to avoid

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends
    except BlockingIOError:
        raise UserError(
            f"{folder}: another run is writing there now; wait for it or choose another --name."
        ) from None
    except (ImportError, OSError):  # a file system without locks
        pass
    for leftover in folder.glob(".*.cem-tmp"):  # a killed run's; a live one would hold the lock
        leftover.unlink(missing_ok=True)
    return lock


def write_rows(path, rows):
    """A CSV file; a row may have columns that others lack."""
    text = io.StringIO()
    writer = csv.DictWriter(
        text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    write(path, text.getvalue())


def read_ours(path, read):
    """read(path), a file this program wrote. Whatever is wrong with it becomes one sentence that names it."""
    try:
        with warnings.catch_warnings():  # of a foreign pickle: the sentence below is enough
            warnings.simplefilter("ignore")
            return read(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: there is no such file; train first, or check the name.") from None
    except UserError:
        raise
    except Exception as error:  # truncated, foreign, of another version, or a pickle that would run code
        raise UserError(
            f"{path}: damaged or not made by this version ({one_line(error)}); delete it and make it anew."
        ) from None


def read_checkpoint(path):
    """The state of a run; nothing in the file is executed."""

    def read(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format"] != FORMAT:
            raise ValueError(f"its format is {state['format']}, this is {FORMAT}")
        for name, kind in FIELDS.items():
            if not isinstance(state[name], kind):
                raise ValueError(f"its {name} is no {kind.__name__}")
        return state

    return read_ours(path, read)


def take_folder(folder, args, settings):
    """Claim runs/NAME -> (its lock, the checkpoint to go on from or None). No run is overwritten unasked."""
    lock, path = claim_folder(folder), folder / "checkpoint.pt"
    if args.resume and path.exists():
        state = read_checkpoint(path)
        threads = state["config"].get("threads")
        if threads != args.threads:
            text = f"--resume: begun on {threads} threads, now {args.threads}"
            say(f"{text}; bit-equality holds for the same number only")
        changed = [k for k, v in settings.items() if state["config"].get(k) != v and k != "threads"]
        if changed:
            flag = f"--{changed[0].replace('_', '-')}"
            raise UserError(
                f"--resume: {path} was made with another {flag}; repeat its settings or choose a --name."
            )
        return lock, state
    if args.resume:
        say(f"{path}: nothing to resume yet, starting from the beginning")
    elif path.exists() and not args.overwrite:
        raise UserError(
            f"{folder}: holds a run; add --resume to go on with it or --overwrite, or choose a --name."
        )
    for name in OURS:  # a folder never mixes two runs
        (folder / name).unlink(missing_ok=True)
    return lock, None
