"""Oracles for data.py: literal loops for batches, independent image arithmetic for folders, one sentence for every mistake."""
import hashlib
import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import data
from data import Images, batches, crop_and_flip, draw_shapes, load, to_float
from report import UserError

ROOT = Path(data.__file__).parent


@pytest.fixture(scope="module")
def shapes():
    return load("shapes", seed=0, aux_share=0.2)


def rows(x):
    """The bytes of each image, row by row."""
    return [image.tobytes() for image in x.permute(0, 2, 3, 1).contiguous().numpy()]


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def random_pixels(seed, height=32, width=32):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def make_folder(root, classes=("ant", "bee"), train=10, test=2, size=32):
    """train/CLASS/i.png, test/CLASS/i.png; -> {relative path: pixels}."""
    made = {}
    for split, count in (("train", train), ("test", test)):
        for name in classes:
            for i in range(count):
                path = f"{split}/{name}/{i}.png"
                made[path] = random_pixels(len(made), size, size)
                save(root / path, made[path])
    return made


def load_pair(folder, tmp_path, image_size=None):
    return data.load_folder(folder, image_size, tmp_path / "cache")


# ------------------------------------------------------------------------------------------------ torchvision

def test_torchvision_imports_in_a_fresh_process():
    code = "import data; tv = data.import_torchvision(); from torchvision.datasets import CIFAR10; print('ok', tv.__version__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("ok"), done.stderr


def imports(monkeypatch, errors):
    """import_module raises the errors in turn, then returns a marker; -> (names asked for, operators declared)."""
    asked, declared = [], []

    def import_module(name):
        asked.append(name)
        if errors:
            raise errors.pop(0)
        return "the module"
    monkeypatch.setattr(data.importlib, "import_module", import_module)
    monkeypatch.setattr(data.torch.library, "define", lambda name, schema: declared.append((name, schema)))
    return asked, declared


def test_missing_nms_is_declared_and_the_import_tried_again(monkeypatch):
    asked, declared = imports(monkeypatch, [RuntimeError("operator torchvision::nms does not exist")])
    assert data.import_torchvision() == "the module"
    assert asked == ["torchvision", "torchvision"]
    assert [name for name, _ in declared] == ["torchvision::nms", "torchvision::qnms"]
    assert all(schema == "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for _, schema in declared)


@pytest.mark.parametrize("error", [RuntimeError("operator torchvision::roi_align does not exist"), RuntimeError("CUDA error"),
                                   ImportError("No module named torchvision")])
def test_any_other_import_error_is_passed_on(monkeypatch, error):
    asked, declared = imports(monkeypatch, [error])
    with pytest.raises(type(error), match=str(error)):
        data.import_torchvision()
    assert asked == ["torchvision"] and declared == []


def test_a_torchvision_that_imports_is_left_alone(monkeypatch):
    asked, declared = imports(monkeypatch, [])
    assert data.import_torchvision() == "the module" and asked == ["torchvision"] and declared == []


# ------------------------------------------------------------------------------------------------ shapes

def test_shapes_same_seed_same_bytes_other_seed_other_bytes():
    a, b, c = draw_shapes(50, seed=3), draw_shapes(50, seed=3), draw_shapes(50, seed=4)
    assert rows(a.x) == rows(b.x) and torch.equal(a.y, b.y)
    assert not set(rows(a.x)) & set(rows(c.x))


def test_shapes_are_distinct_varied_and_balanced(shapes):
    parts = (shapes.train, shapes.val, shapes.aux, shapes.test)
    images = [row for part in parts for row in rows(part.x)]
    assert len(images) == data.SHAPES_TRAIN + data.SHAPES_TEST == len(set(images))  # train and test share nothing either
    for part in parts:
        assert part.x.dtype == torch.uint8 and part.y.dtype == torch.int64 and part.x.shape[1:] == (3, 32, 32)
        assert part.float().double().var() >= 0.03
    labels = torch.cat([part.y for part in parts[:3]])
    assert labels.bincount().tolist() == [data.SHAPES_TRAIN // 10] * 10
    assert shapes.test.y.bincount().tolist() == [data.SHAPES_TEST // 10] * 10
    assert len(shapes.classes) == 10


def test_every_shape_is_told_from_its_ground():
    """A shape covers part of the picture, and shape and ground differ in colour: the mean colours inside and outside."""
    n, size = 40, 32
    images = draw_shapes(n, seed=0)
    pixels = images.float()
    ring = torch.ones(size, size, dtype=torch.bool)
    ring[2:-2, 2:-2] = False  # the outermost two pixels belong to the ground nearly everywhere
    ground = pixels[:, :, ring].mean(2)  # [n, 3]
    far = (pixels - ground[:, :, None, None]).abs().amin(1) > 0.15  # pixels that differ in every channel
    share = far.float().mean((1, 2))
    assert (share > 0.03).all() and (share < 0.6).all()


@pytest.mark.parametrize("flag", [31, 64])
def test_shapes_have_one_size(flag):
    with pytest.raises(UserError, match=f"--image-size {flag}.*32x32"):
        load("shapes", image_size=flag)


# ------------------------------------------------------------------------------------------------ splits

def test_splits_are_a_partition(shapes):
    drawn = draw_shapes(data.SHAPES_TRAIN, seed=0)
    whole = dict(zip(rows(drawn.x), drawn.y.tolist()))
    parts = {name: dict(zip(rows(part.x), part.y.tolist())) for name, part in
             (("train", shapes.train), ("val", shapes.val), ("aux", shapes.aux))}
    assert {name: len(part) for name, part in parts.items()} == {"train": 4200, "val": 600, "aux": 1200}
    union = {}
    for part in parts.values():
        assert not union.keys() & part.keys()
        union |= part
    assert union == whole  # every training image once, with its own label


def test_the_same_seed_loads_the_same_splits(monkeypatch):
    monkeypatch.setattr(data, "SHAPES_TRAIN", 200), monkeypatch.setattr(data, "SHAPES_TEST", 50)
    a, b, c = (load("shapes", seed=seed, aux_share=0.2) for seed in (3, 3, 4))
    for name in ("train", "val", "aux", "test"):
        assert torch.equal(getattr(a, name).x, getattr(b, name).x) and torch.equal(getattr(a, name).y, getattr(b, name).y)
        assert not set(rows(getattr(a, name).x)) & set(rows(getattr(c, name).x))


def small_source(monkeypatch, n=100):
    """load() over n tiny one-colour images whose pixel is their number."""
    def numbered(count, start):
        number = torch.arange(start, start + count, dtype=torch.uint8)
        return Images(number.view(-1, 1, 1, 1).expand(-1, 3, 4, 4).contiguous(), number.long() % 5)
    monkeypatch.setattr(data, "load_folder", lambda *_: (numbered(n, 0), numbered(20, 200), list("abcde")))


def numbers(images):
    return images.x[:, 0, 0, 0].tolist()


def test_val_depends_on_the_seed_and_test_does_not(monkeypatch):
    small_source(monkeypatch)
    a, b = load("anywhere", seed=0), load("anywhere", seed=1)
    assert set(numbers(a.val)) != set(numbers(b.val)) and len(a.val) == len(b.val) == 10
    for splits in (a, b):
        assert numbers(splits.test) == list(range(200, 220))
        assert sorted(numbers(splits.train) + numbers(splits.val)) == list(range(100)) and len(splits.aux) == 0
        for part in (splits.train, splits.val, splits.test):
            assert [v % 5 for v in numbers(part)] == part.y.tolist()


def test_train_size_keeps_that_many_before_val_and_aux(monkeypatch):
    small_source(monkeypatch)
    splits = load("anywhere", seed=0, val_share=0.1, aux_share=0.25, train_size=40)
    assert (len(splits.val), len(splits.aux), len(splits.train)) == (4, 10, 26)
    assert len(set(numbers(splits.val) + numbers(splits.aux) + numbers(splits.train))) == 40
    assert len(load("anywhere", train_size=1000).train) == 90  # more than there are: all
    assert numbers(load("anywhere", seed=0, val_share=0.1, aux_share=0.25, train_size=40).train) == numbers(splits.train)


def test_too_few_images_for_a_validation_set(monkeypatch):
    small_source(monkeypatch)
    with pytest.raises(UserError, match="anywhere.*too few"):
        load("anywhere", train_size=5)
    with pytest.raises(UserError, match="anywhere.*too few"):
        load("anywhere", val_share=0.5, aux_share=0.5)


# ------------------------------------------------------------------------------------------------ batches

def literal_crop_and_flip(x, generator, padding):
    """Pad one image at a time by repeating its edges, cut the shifted window out, mirror it or not."""
    b, _, h, w = x.shape
    shift_y, shift_x = torch.randint(-padding, padding + 1, (2, b, 1), generator=generator)
    mirrored = torch.rand(b, 1, generator=generator) < 0.5
    out = []
    for i in range(b):
        padded = np.pad(x[i].numpy(), ((0, 0), (padding, padding), (padding, padding)), mode="edge")
        top, left = padding + int(shift_y[i]), padding + int(shift_x[i])
        window = padded[:, top:top + h, left:left + w]
        out.append(window[:, :, ::-1] if mirrored[i] else window)
    return torch.from_numpy(np.stack(out))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("padding", [0, 2, 4])
def test_crop_and_flip_is_the_literal_loop(dtype, channels_last, padding):
    x = torch.randint(0, 256, (40, 3, 9, 12), generator=torch.Generator().manual_seed(0)).to(dtype)
    given = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    got = crop_and_flip(given, torch.Generator().manual_seed(5), padding)
    want = literal_crop_and_flip(x, torch.Generator().manual_seed(5), padding)
    assert got.dtype == dtype and torch.equal(got, want)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(given, x)  # the input is left as it was


def test_crop_and_flip_reaches_every_shift_and_both_sides():
    """One bright pixel in the middle: where it lands is the shift."""
    x = torch.zeros(2000, 3, 11, 11, dtype=torch.uint8)
    x[:, :, 5, 5] = 255
    out = crop_and_flip(x, torch.Generator().manual_seed(0))
    places = {tuple(p) for p in (out[:, 0] == 255).nonzero()[:, 1:].tolist()}
    assert places == {(5 + dy, 5 + dx) for dy in range(-4, 5) for dx in range(-4, 5)}
    left = torch.zeros(2000, 3, 8, 8, dtype=torch.uint8)
    left[..., 0] = 255
    mirrored = crop_and_flip(left, torch.Generator().manual_seed(0), padding=0)[:, 0, 0, -1] == 255
    assert 900 < mirrored.sum() < 1100


def test_batches_visit_every_image_once(shapes):
    part = shapes.val[torch.arange(130)]
    seen = [(row, int(y)) for x, y in batches(part, 32, generator=torch.Generator().manual_seed(0))
            for row, y in zip(rows((x * 255).round().to(torch.uint8)), y)]
    assert len(seen) == 130 and sorted(seen) == sorted(zip(rows(part.x), part.y.tolist()))
    assert [row for row, _ in seen] != rows(part.x)  # in another order


def test_batches_are_floats_in_0_1_and_follow_the_generator():
    x = torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8).expand(-1, 3, -1, -1)
    images = Images(x, torch.arange(4))
    (got, y), = batches(images, 4, generator=torch.Generator().manual_seed(1))
    assert got.dtype == torch.float32 and torch.equal(got, x[y].double().div(255).float())
    assert torch.equal(to_float(x), x.double().div(255).float())
    orders = [torch.cat([y for _, y in batches(images, 2, generator=torch.Generator().manual_seed(s))]).tolist() for s in (1, 1, 2, 3)]
    assert orders[0] == orders[1] and len({tuple(o) for o in orders}) > 1


def test_augmented_batches_leave_out_the_last_short_one_only():
    images = Images(torch.zeros(10, 3, 8, 8, dtype=torch.uint8), torch.arange(10))
    assert [len(y) for _, y in batches(images, 4, augment=True)] == [4, 4]
    assert [len(y) for _, y in batches(images, 4)] == [4, 4, 2]
    assert [len(y) for _, y in batches(images, 16, augment=True)] == [10]  # fewer than a batch: all of them
    assert [len(y) for _, y in batches(images, 5, augment=True)] == [5, 5]


# ------------------------------------------------------------------------------------------------ folders

def test_folder_keeps_pixels_and_labels(tmp_path):
    made = make_folder(tmp_path / "f", classes=("bee", "ant", "cat"))
    train, test, classes = load_pair(tmp_path / "f", tmp_path)
    assert classes == ["ant", "bee", "cat"]
    for split, images in (("train", train), ("test", test)):
        want = {pixels.tobytes(): classes.index(path.split("/")[1]) for path, pixels in made.items() if path.startswith(split)}
        assert dict(zip(rows(images.x), images.y.tolist())) == want
        assert images.x.dtype == torch.uint8 and images.y.dtype == torch.int64
    splits = load(str(tmp_path / "f"), data_dir=tmp_path / "cache")
    assert len(splits.train) + len(splits.val) == 30 and len(splits.test) == 6


@pytest.mark.parametrize("ending, mode", [("png", "L"), ("pgm", "L"), ("png", "LA"), ("png", "P"), ("png", "1")])
def test_grey_becomes_rgb(tmp_path, ending, mode):
    grey = np.random.default_rng(0).choice([0, 255] if mode == "1" else np.arange(256), (16, 16)).astype(np.uint8)
    Image.fromarray(grey).convert(mode).save(tmp_path / f"grey.{ending}")
    got = data.decode(tmp_path / f"grey.{ending}", 16)
    assert torch.equal(got, torch.from_numpy(grey)[:, :, None].expand(-1, -1, 3))


@pytest.mark.parametrize("ending", ["png", "pgm"])
def test_sixteen_bit_grey_keeps_its_shades(tmp_path, ending):
    """A 16-bit value v is the 8-bit shade v / 257, and not white wherever it is above 255."""
    deep = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    path = tmp_path / f"deep.{ending}"
    if ending == "png":
        Image.fromarray(deep).save(path)
    else:
        path.write_bytes(b"P5\n16 16\n65535\n" + deep.astype(">u2").tobytes())
    got = data.decode(path, 16).int()
    want = torch.arange(256, dtype=torch.int32).view(16, 16, 1).expand(-1, -1, 3)
    assert (got - want).abs().max() <= 1


def halved(pixels):
    """Bilinear (triangle) reduction by two, from its definition: weights 1, 3, 3, 1 over 8, cut off and rescaled at the edges."""
    def along_rows(a):
        n = len(a) // 2
        out = np.zeros((n, *a.shape[1:]))
        for i in range(n):
            taps = [(j, w) for j, w in zip(range(2 * i - 1, 2 * i + 3), (1, 3, 3, 1)) if 0 <= j < len(a)]
            out[i] = sum(w * a[j] for j, w in taps) / sum(w for _, w in taps)
        return out
    return along_rows(along_rows(pixels.astype(float)).swapaxes(0, 1)).swapaxes(0, 1)


@pytest.mark.parametrize("height, width", [(32, 48), (52, 32), (32, 32)])
def test_resize_and_centre_crop(tmp_path, height, width):
    """Short side 32 -> 16 by the definition of the triangle filter, then the middle 16 of the long side."""
    pixels = random_pixels(1, height, width)
    save(tmp_path / "a.png", pixels)
    small = halved(pixels)
    top, left = (small.shape[0] - 16) // 2, (small.shape[1] - 16) // 2
    want = small[top:top + 16, left:left + 16]
    got = data.decode(tmp_path / "a.png", 16).numpy().astype(float)
    assert got.shape == (16, 16, 3) and np.abs(got - want).max() <= 1  # rounded twice, once per direction


def test_crop_without_resize_takes_the_middle(tmp_path):
    pixels = random_pixels(2, 20, 33)
    save(tmp_path / "a.png", pixels)
    assert np.array_equal(data.decode(tmp_path / "a.png", 20).numpy(), pixels[:, 6:26])


def test_image_size_defaults_to_the_first_images_short_side(tmp_path):
    make_folder(tmp_path / "f", size=32)
    save(tmp_path / "f/train/ant/9.png", random_pixels(0, 40, 64))
    train, _, _ = load_pair(tmp_path / "f", tmp_path)
    assert train.x.shape == (20, 3, 32, 32)
    train, _, _ = load_pair(tmp_path / "f", tmp_path, image_size=48)  # another size, another cache
    assert train.x.shape == (20, 3, 48, 48)


def test_other_files_are_not_images(tmp_path):
    made = make_folder(tmp_path / "f")
    (tmp_path / "f/train/ant/readme.txt").write_text("not an image")
    (tmp_path / "f/train/.hidden").mkdir()
    train, _, classes = load_pair(tmp_path / "f", tmp_path)
    assert len(train) == sum(path.startswith("train") for path in made) and classes == ["ant", "bee"]


def make_tiny_imagenet(root):
    made = {"train": {}, "test": {}}
    for label, wnid in enumerate(("n01", "n02", "n03")):
        for i in range(5):
            pixels = random_pixels(100 * label + i, 64, 64)
            save(root / "train" / wnid / "images" / f"{wnid}_{i}.png", pixels)
            made["train"][pixels.tobytes()] = label
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("boxes\n")
    lines = []
    for i, label in enumerate((2, 0, 1, 1)):
        pixels = random_pixels(900 + i, 64, 64)
        save(root / "val" / "images" / f"val_{i}.png", pixels)
        made["test"][pixels.tobytes()] = label
        lines.append(f"val_{i}.png\tn0{label + 1}\t0\t0\t62\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    (root / "wnids.txt").write_text("n02\nn01\nn03\n")
    (root / "test" / "images").mkdir(parents=True)  # the original's test images have no labels
    return made


def test_tiny_imagenet_layout(tmp_path):
    made = make_tiny_imagenet(tmp_path / "tiny-imagenet-200")
    splits = load("tinyimagenet", data_dir=tmp_path, val_share=0.2)
    assert dict(zip(rows(splits.test.x), splits.test.y.tolist())) == made["test"]
    both = {row: y for part in (splits.train, splits.val) for row, y in zip(rows(part.x), part.y.tolist())}
    assert both == made["train"] and splits.classes == ["n01", "n02", "n03"]


def test_facescrub_is_a_folder_in_data_dir(tmp_path):
    make_folder(tmp_path / "facescrub")
    assert load("facescrub", data_dir=tmp_path).classes == ["ant", "bee"]


# ------------------------------------------------------------------------------------------------ cache

def no_decoding(monkeypatch):
    def decode(path, size):
        raise AssertionError(f"{path} was decoded again")
    monkeypatch.setattr(data, "decode", decode)


def test_second_load_uses_the_cache(tmp_path, monkeypatch):
    make_folder(tmp_path / "f")
    first = load_pair(tmp_path / "f", tmp_path)
    no_decoding(monkeypatch)
    second = load_pair(tmp_path / "f", tmp_path)
    for a, b in zip(first[:2], second[:2]):
        assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y)
    assert first[2] == second[2]
    assert not list((tmp_path / "f").glob("*.tmp"))
    with pytest.raises(AssertionError, match="decoded again"):  # another size is another cache
        load_pair(tmp_path / "f", tmp_path, image_size=16)


@pytest.mark.parametrize("change", ["pixels", "time", "added", "removed", "renamed", "test"])
def test_cache_is_rebuilt_when_the_folder_changes(tmp_path, monkeypatch, change):
    folder = tmp_path / "f"
    make_folder(folder)
    before, before_test, _ = load_pair(folder, tmp_path)
    path = folder / "train/bee/3.png"
    new = random_pixels(77)
    if change == "pixels":
        save(path, new)
    elif change == "time":
        os.utime(path, ns=(1, 1))
    elif change == "added":
        save(folder / "train/bee/new.png", new)
    elif change == "removed":
        path.unlink()
    elif change == "renamed":
        path.rename(folder / "train/ant/moved.png")
    elif change == "test":
        save(folder / "test/ant/0.png", new)
    with monkeypatch.context() as m:
        no_decoding(m)
        with pytest.raises(AssertionError, match="decoded again"):
            load_pair(folder, tmp_path)
    train, test, _ = load_pair(folder, tmp_path)
    shown = {"pixels": (20, True, 10), "time": (20, False, 10), "added": (21, True, 11), "removed": (19, False, 9),
             "renamed": (20, False, 9), "test": (20, False, 10)}[change]
    assert (len(train), new.tobytes() in rows(train.x), int((train.y == 1).sum())) == shown
    assert (new.tobytes() in rows(test.x)) == (change == "test")
    no_decoding(monkeypatch)
    load_pair(folder, tmp_path)  # and cached again


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None])
def test_damaged_cache_is_decoded_again(tmp_path, damage):
    folder = tmp_path / "f"
    make_folder(folder)
    want, _, _ = load_pair(folder, tmp_path)
    cache, = folder.glob(".cem-cache-*")
    cache.write_bytes(cache.read_bytes()[:-100] if damage is None else damage)
    got, _, _ = load_pair(folder, tmp_path)
    assert torch.equal(got.x, want.x)


def refuse_writing(monkeypatch, inside, error):
    """torch.save fails below `inside`. An unwritable place is a RuntimeError there, not an OSError."""
    real = torch.save

    def save(what, where, *args, **kwargs):
        if inside in Path(where).parents:
            raise error
        real(what, where, *args, **kwargs)
    monkeypatch.setattr(torch, "save", save)


@pytest.mark.parametrize("error", [PermissionError("read-only"), RuntimeError("open file failed with strerror: Permission denied")],
                         ids=["OSError", "RuntimeError"])
def test_read_only_folder_is_cached_in_data_dir_and_loads_without_any_cache(tmp_path, monkeypatch, error):
    folder = tmp_path / "f"
    made = make_folder(folder)
    with monkeypatch.context() as m:
        refuse_writing(m, tmp_path, error)  # nowhere to write
        train, _, _ = load_pair(folder, tmp_path)
        assert len(train) == 20 and not list((tmp_path).rglob("*cache-*.pt"))
    refuse_writing(monkeypatch, folder, error)
    train, _, _ = load_pair(folder, tmp_path)
    assert set(rows(train.x)) == {p.tobytes() for path, p in made.items() if path.startswith("train")}
    assert not list(folder.glob(".cem-cache-*")) and len(list((tmp_path / "cache").iterdir())) == 1
    no_decoding(monkeypatch)
    assert torch.equal(load_pair(folder, tmp_path)[0].x, train.x)


def test_two_folders_share_a_data_dir(tmp_path, monkeypatch):
    """Both read-only: each has a cache of its own in the data directory."""
    make_folder(tmp_path / "f"), make_folder(tmp_path / "g", classes=("cat", "dog", "eel"))
    refuse_writing(monkeypatch, tmp_path / "f", OSError("read-only"))
    refuse_writing(monkeypatch, tmp_path / "g", OSError("read-only"))
    counts = [(len(train), len(classes)) for train, _, classes in
              (load_pair(tmp_path / name, tmp_path) for name in ("f", "g", "f"))]
    assert counts == [(20, 2), (30, 3), (20, 2)]


# ------------------------------------------------------------------------------------------------ mistakes

def sentence(call, *parts):
    """The call ends in a UserError of one line that names all the parts."""
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")
    for part in parts:
        assert str(part) in text, f"{part} is not in: {text}"
    return text


def test_missing_folder(tmp_path):
    sentence(lambda: load(str(tmp_path / "nowhere")), tmp_path / "nowhere")
    sentence(lambda: load("tinyimagenet", data_dir=tmp_path), tmp_path / "tiny-imagenet-200")
    sentence(lambda: load("no-such-data-set"), "no-such-data-set", "shapes")
    (tmp_path / "file").write_text("")
    sentence(lambda: load(str(tmp_path / "file")), tmp_path / "file")


@pytest.mark.parametrize("split", ["train", "test"])
def test_missing_split(tmp_path, split):
    make_folder(tmp_path / "f")
    (tmp_path / "f" / split).rename(tmp_path / "elsewhere")
    sentence(lambda: load_pair(tmp_path / "f", tmp_path), tmp_path / "f" / split)


@pytest.mark.parametrize("split", ["train", "test"])
def test_empty_class(tmp_path, split):
    make_folder(tmp_path / "f")
    for path in (tmp_path / "f" / split / "bee").iterdir():
        path.unlink()
    sentence(lambda: load_pair(tmp_path / "f", tmp_path), tmp_path / "f" / split / "bee")


def test_class_only_in_train(tmp_path):
    make_folder(tmp_path / "f")
    save(tmp_path / "f/train/cat/0.png", random_pixels(0))
    sentence(lambda: load_pair(tmp_path / "f", tmp_path), tmp_path / "f/test/cat")


def test_class_only_in_test(tmp_path):
    make_folder(tmp_path / "f")
    save(tmp_path / "f/test/cat/0.png", random_pixels(0))
    sentence(lambda: load_pair(tmp_path / "f", tmp_path), tmp_path / "f", "cat")


def test_one_class(tmp_path):
    make_folder(tmp_path / "f", classes=("ant",))
    sentence(lambda: load(str(tmp_path / "f"), data_dir=tmp_path / "cache"), tmp_path / "f", "1 class")


@pytest.mark.parametrize("image_size", [None, 32])
def test_no_class_folders(tmp_path, image_size):
    """Images put straight into train/ and test/."""
    for split in ("train", "test"):
        save(tmp_path / "f" / split / "0.png", random_pixels(0))
    sentence(lambda: load(str(tmp_path / "f"), data_dir=tmp_path / "cache", image_size=image_size), tmp_path / "f")


@pytest.mark.parametrize("name", ["train/bee/3.png", "test/ant/1.png", "train/ant/0.png"])
@pytest.mark.parametrize("how", ["text", "empty", "truncated"])
def test_broken_image(tmp_path, name, how):
    make_folder(tmp_path / "f")
    path = tmp_path / "f" / name
    path.write_bytes({"text": b"this is no image", "empty": b"", "truncated": path.read_bytes()[:len(path.read_bytes()) // 2]}[how])
    sentence(lambda: load_pair(tmp_path / "f", tmp_path), path)


def test_broken_raw_image(tmp_path):
    make_folder(tmp_path / "f")
    path = tmp_path / "f/train/ant/a.ppm"
    path.write_bytes(b"P6\n32 32\n255\n" + bytes(100))
    sentence(lambda: load_pair(tmp_path / "f", tmp_path), path)


def test_enormous_image(tmp_path, monkeypatch):
    """Beyond Pillow's limit on the number of pixels."""
    make_folder(tmp_path / "f")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    sentence(lambda: load_pair(tmp_path / "f", tmp_path), tmp_path / "f/train/ant/0.png")


@pytest.mark.parametrize("missing", ["val/val_annotations.txt", "val/images/val_2.png", "train/n02/images"])
def test_incomplete_tiny_imagenet(tmp_path, missing):
    root = tmp_path / "tiny-imagenet-200"
    make_tiny_imagenet(root)
    (root / missing).rename(tmp_path / "elsewhere")
    sentence(lambda: load("tinyimagenet", data_dir=tmp_path), root / missing)


def test_tiny_imagenet_without_train(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    make_tiny_imagenet(root)
    (root / "train").rename(tmp_path / "elsewhere")
    sentence(lambda: load("tinyimagenet", data_dir=tmp_path), root)


# ------------------------------------------------------------------------------------------------ CIFAR

class FakeCIFAR:
    base_folder = "cifar-10-batches-py"

    def __init__(self, root, train, download):
        n = 40 if train else 8
        self.data = np.random.default_rng(train).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        self.targets = [i % 10 for i in range(n)]
        self.classes = [f"class {c}" for c in range(10)]


def fake_cifar(monkeypatch, name, cls):
    data.import_torchvision()
    monkeypatch.setattr(importlib.import_module("torchvision.datasets"), name, cls)


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100"])
def test_cifar_keeps_pixels_and_labels(monkeypatch, tmp_path, name):
    fake_cifar(monkeypatch, name, FakeCIFAR)
    splits = load(name.lower(), data_dir=tmp_path)
    want = {p.tobytes(): i % 10 for i, p in enumerate(FakeCIFAR(None, True, True).data)}
    assert {r: y for part in (splits.train, splits.val) for r, y in zip(rows(part.x), part.y.tolist())} == want
    assert rows(splits.test.x) == [p.tobytes() for p in FakeCIFAR(None, False, True).data]
    assert splits.train.y.dtype == torch.int64 and splits.classes[3] == "class 3"


@pytest.mark.parametrize("error", [OSError("<urlopen error [Errno -2]\n Name or service not known>"), RuntimeError("File not found or corrupted.")])
def test_cifar_without_network(monkeypatch, tmp_path, error):
    class Offline(FakeCIFAR):
        def __init__(self, *args, **kwargs):
            raise error
    fake_cifar(monkeypatch, "CIFAR10", Offline)
    sentence(lambda: load("cifar10", data_dir=tmp_path / "d"), "cifar10", tmp_path / "d", "cifar-10-batches-py", "--data-dir")


def test_cifar_has_one_size():
    sentence(lambda: load("cifar10", image_size=64), "--image-size 64", "32x32")


def test_cache_names_do_not_depend_on_how_the_folder_is_written(tmp_path, monkeypatch):
    make_folder(tmp_path / "f")
    monkeypatch.chdir(tmp_path)
    paths = [data.cache_paths(Path(p), 32, "d")[1] for p in ("f", "./f", str(tmp_path / "f"))]
    assert len(set(paths)) == 1
    assert hashlib.sha256(str((tmp_path / "f").resolve()).encode()).hexdigest()[:12] in paths[0].name


def test_a_folders_test_images_are_dealt_class_by_class():
    y = torch.tensor([0, 0, 0, 2, 2, 1, 0])
    turns = sorted(range(len(y)), key=lambda i: (sum(y[j] == y[i] for j in range(i)).item() if i else 0, y[i].item()))  # literal
    assert data.dealt(y).tolist() == turns == [0, 5, 3, 1, 4, 2, 6]


def test_without_shift_a_batch_holds_the_images_or_their_mirror_images():
    images = draw_shapes(20, seed=0)
    for x, y in batches(images, 5, augment=True, generator=torch.Generator().manual_seed(0), order=torch.arange(20), shift=0):
        for one, label in zip(x, y):
            same = [i for i in range(20) if torch.equal(one, to_float(images.x[i:i + 1])[0]) or torch.equal(one.flip(2), to_float(images.x[i:i + 1])[0])]
            assert same and images.y[same[0]] == label
