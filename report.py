"""What goes to the user: one-sentence errors, files that are never half-written, the progress line, tables, pictures."""

import os
import platform
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch

import parallel

CHECKPOINT_FORMAT = 3
CHECKPOINT_KEYS = {"config", "net", "weights", "data", "surrogate", "defense", "defense_stats", "optimizer", "epoch", "log", "seconds", "stats", "counted"}
LABEL_WIDTH = 70  # pixels left of the pictures, for the name of the row


class UserError(Exception):
    """A mistake the user can mend: shown as one sentence, without a traceback."""


def one_line(error):
    return " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__


def say_error(error):
    """One printable line on stderr, whatever a file's name holds."""
    print("".join(c if c.isprintable() else "?" for c in str(error)), file=sys.stderr)


def cli(command, argv, program):
    """Exit status of `command(argv)`: 0, 2 for the user's mistake, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        command(argv)
    except UserError as error:
        if parallel.rank() == 0:
            say_error(error)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        say_error("not enough memory: lower --batch-size, --width, --image-size, --refresh-samples or the size of the surrogate or attacker.")
        return 2
    except KeyboardInterrupt:
        if parallel.rank() == 0:
            print(end="\n" if sys.stdout.isatty() else "")  # behind the progress line
            again = [*(a for a in argv if a != "--resume"), "--resume"] if program == "train.py" else argv
            say_error(f"interrupted; {'go on' if program == 'train.py' else 'start again'} with: {started_as(program, again)}")
        return 130
    finally:
        parallel.stop()
    return 0


def started_as(program, argv):
    processes = parallel.processes()
    return f"{'python' if processes == 1 else f'torchrun --nproc_per_node={processes}'} {program} {shlex.join(argv)}"


def is_out_of_memory(error):
    """torch reports it as a RuntimeError on the CPU."""
    words = ("allocate memory", "not enough memory", "out of memory", "size calculation overflowed", "multiplication overflow")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def prepare_folder(folder):
    """Make it, see that it can be written before hours of training, and clear away what a killed run left half-written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".probe.{os.getpid()}.tmp").touch()
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise UserError(f"{folder}: cannot be written ({one_line(error)}); choose another --runs-dir or --out.") from None


def write_atomic(path, write):
    """`write(temporary_path)`, then rename: `path` is the old file or the whole new one, never half of it."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path, text_or_writer):
    """Atomically; a full disk or a folder that cannot be written is the user's to mend."""
    writer = text_or_writer if callable(text_or_writer) else lambda temporary: temporary.write_text(text_or_writer)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, writer)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise UserError(f"{path}: cannot be written ({one_line(error)}); free some space or choose another --runs-dir.") from None


def read_checkpoint(path):
    """-> the state of a Run; refuses what is no checkpoint of ours. Nothing in the file is executed."""
    try:
        with warnings.catch_warnings():  # a foreign pickle: the sentence below is enough
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such checkpoint; train first, or check --out and --runs-dir.") from None
    except Exception:  # truncated, not a checkpoint, or a pickle that would run code: torch raises many kinds
        raise UserError(f"{path}: damaged or not a checkpoint of this program; delete it and train again.") from None
    if not isinstance(state, dict) or state.get("format") != CHECKPOINT_FORMAT or CHECKPOINT_KEYS - state.keys():
        raise UserError(f"{path}: not a checkpoint of this version; delete it and train again.")
    return state


class Progress:
    """One live line on a terminal, a line now and then elsewhere."""

    def __init__(self):
        self.start, self.live, self.label, self.shown = time.perf_counter(), sys.stdout.isatty(), None, -1.0

    def __call__(self, label, done, note=""):
        if label != self.label:
            self.start, self.label, self.shown = time.perf_counter(), label, -1.0
        if done - self.shown < (0.005 if self.live else 0.25) and done < 1:
            return
        self.shown = done
        used = time.perf_counter() - self.start
        left = used * (1 / done - 1) if done else 0
        line = f"{label} {100 * done:3.0f} %  {used:4.0f} s, {left:4.0f} s left {note}"
        print("\r" + line.ljust(78) if self.live else line, end="" if self.live and done < 1 else "\n", flush=True)


def environment(program, argv):
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    return {"torch": torch.__version__, "python": platform.python_version(), "platform": platform.system(),
            "threads": torch.get_num_threads(), "command": started_as(program, argv), "commit": commit or None}


def print_report(results, folder):
    print(f"\n{'accuracy':22}{100 * results['accuracy']:8.2f} %")
    for name, result in results["attacks"].items():
        for split in ("train", "test"):
            m = result[split]
            best = "  <- strongest" if results["strongest"][split] == name and len(results["attacks"]) > 1 else ""
            print(f"{name + ' on ' + split:22}MSE {m['mse']:.4f}  NMSE {m['nmse']:.3f}  PSNR {m['psnr']:5.2f} dB  SSIM {m['ssim']:.3f}"
                  + (f"  MSE {m['mse_common']:.4f} on the images all saw{best}" if len(results["attacks"]) > 1 else ""))
    leak, cel = results["leakage"], results["cel"]
    print(f"{'leakage, at most':22}" + (f"{leak['bits']:8.1f} bits (± {leak['stderr']:.1f})" if leak["bits"] is not None else "unbounded (no noise)"))
    if cel["active_share"] is not None:
        print(f"{'surrogate':22}active on {100 * cel['active_share']:.0f} % of its steps, gradient ratio {cel['grad_ratio']:.3f}")
    encoder = results["encoder"]
    print(f"{'encoder':22}{encoder['flops'] / 1e6:8.2f} MFLOP and {encoder['latency_ms']:.2f} ms an image, {encoder['params']:,} parameters")
    print(f"{'time':22}{results['seconds']['train']:.0f} s training, {results['seconds']['attack']:.0f} s attack\n-> {folder}/")


def save_pictures(path, originals, rows, count=10, zoom=3):
    """A PNG with the originals above what each attacker got of them; `rows` is {name: float images}."""
    from PIL import Image, ImageDraw  # comes with torchvision
    count = min(count, len(originals))
    strips = {"original": originals[:count], **{name: x[:count] for name, x in rows.items()}}
    tile = originals.shape[-1] * zoom
    label = LABEL_WIDTH
    sheet = Image.new("RGB", (label + count * tile, len(strips) * tile), "white")
    for i, (name, x) in enumerate(strips.items()):
        pixels = (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(2, 0, 3, 1).reshape(x.shape[-2], -1, 3)
        strip = Image.fromarray(pixels.contiguous().numpy()).resize((count * tile, tile), Image.Resampling.NEAREST)
        sheet.paste(strip, (label, i * tile))
        ImageDraw.Draw(sheet).text((5, i * tile + tile // 2 - 5), name, fill="black")
    sheet.save(path, format="PNG")
