"""Helpers that several test files share. Plain functions are imported: `from conftest import seeded`."""

import re
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image

import train
from harness import data, evaluation, monitor
from harness.files import FORMAT, UserError
from harness.options import parse_flags

torch.set_num_threads(1)  # the networks here are tiny: more threads only cost

# a run of a few seconds
TINY = "--width 4 --bottleneck 2 --train-size 130 --batch-size 32 --epochs 2".split()
TINY += "--attack-epochs 1 --attack-size 1x8".split()
SHAPES = (140, 30)  # images that `few_shapes` leaves


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def few_shapes(monkeypatch):
    """--dataset shapes with a hundredth of its images."""
    monkeypatch.setattr(data, "SHAPES_TRAIN", SHAPES[0])
    monkeypatch.setattr(data, "SHAPES_TEST", SHAPES[1])


def sentence(call, *parts):
    """The call ends in a UserError: one line with one full stop at its end that names all the parts."""
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and re.search(r"[^.]\.$", text), text
    for part in parts:
        assert str(part) in text, f"{part} is not in: {text}"


def flags(text, *more):
    """parse_flags of a command line, with the numbers and paths in `more` behind it."""
    return parse_flags([*text.split(), *map(str, more)])


def random_pixels(seed, height=32, width=32):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save_picture(path, pixels, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **how)
    return path


def picture_folder(root, classes=("ant", "bee"), train=10, test=2, size=32):
    """train/CLASS/i.png and test/CLASS/i.png, all different. -> {relative path: pixels}"""
    made = {}
    for split, count in (("train", train), ("test", test)):
        for name in classes:
            for i in range(count):
                path = f"{split}/{name}/{i}.png"
                made[path] = random_pixels(len(made), size, size)
                save_picture(root / path, made[path])
    return made


def save_checkpoint(folder, command="", **changes):
    """folder/checkpoint.pt of a finished run with these flags, without weights; `changes` replace fields."""
    config = {**vars(flags(command)), "processes": 1, "threads": 1}
    state = {
        "format": FORMAT,
        "config": config,
        "data": "",
        "net": {},
        "weights": {},
        "epoch": config["epochs"],
    }
    state |= {"seconds": 1.0, "log": [], "average": [], "spread": [], "base": None}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({**state, **changes}, folder / "checkpoint.pt")
    return state


class RunsCode:
    """Pickled, it leaves an empty file behind wherever it is unpickled with its code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


# -------------------------------------------------------------------------------- runs of the program

# flags of a run with each surrogate, and with each of its forms
SURROGATES = {
    "none": "",
    "gmm": "--surrogate gmm",
    "cluster": "--surrogate cluster",
    "released": "--surrogate cluster --form released",
    "gated": "--surrogate gated",
    "adversarial": "--surrogate gated --mode adversarial",
    "documented": "--surrogate gated --mode documented",
    "slot": "--surrogate slot",
    "slot documented": "--surrogate slot --mode documented",
    "slot image": "--surrogate slot --mode image",
    "direct": "--surrogate direct",
    "direct+cluster": "--surrogate direct+cluster",
}


@contextmanager
def small_world(pictures=False):
    """A hundredth of the shapes; no time goes into latencies, a long fit before hardening, and curves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "SHAPES_TRAIN", SHAPES[0])
        patch.setattr(data, "SHAPES_TEST", SHAPES[1])
        patch.setattr(evaluation, "latency_ms", lambda encoder, image_size: 1.0)
        patch.setattr(train, "FIT_STEPS", 6)
        if not pictures:
            patch.setattr(monitor, "figure_of", lambda path, width, height: None)
        yield


def go(*argv, main=train.main, pictures=False):
    """Exit status of main in the small world; a warning would be a line on stderr."""
    with small_world(pictures), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", UserWarning)
        status = main(list(map(str, argv)))
    assert [w.message for w in seen if issubclass(w.category, (UserWarning, RuntimeWarning))] == []
    return status


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """trained(flags) -> folder of a TINY run with these flags, made once. Copy it before you write there."""
    runs, made = tmp_path_factory.mktemp("trained"), {}

    def folder(text=""):
        if text not in made:
            name = f"run{len(made)}"
            assert go(*TINY, *text.split(), "--runs-dir", runs, "--name", name) == 0
            made[text] = runs / name
        return made[text]

    return folder
