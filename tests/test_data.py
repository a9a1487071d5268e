"""What harness/data.py, folders.py and shapes.py do: literal loops for batches, independent arithmetic for
pictures, a cache that is never wrong and never runs code, and one sentence for every mistake."""

import hashlib
import importlib
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import RunsCode, picture_folder, random_pixels, save_picture, seeded, sentence
from PIL import Image

from harness import data, folders
from harness.data import Images, batches, crop_and_flip, draw_shapes, load, load_splits, to_float

ROOT = Path(data.__file__).parents[1]


def rows(x):
    """The bytes of each image, row by row."""
    return [image.tobytes() for image in x.permute(0, 2, 3, 1).contiguous().numpy()]


def load_pair(folder, tmp_path, image_size=None):
    """-> Images of train, Images of test, class names; cached in tmp_path/cache"""
    train, test, classes = folders.load_folder(folder, image_size, tmp_path / "cache")
    return Images(*train), Images(*test), classes


# -------------------------------------------------------------------------------- shapes


@pytest.fixture(scope="module")
def shapes():
    return load("shapes", seed=0, aux_share=0.2)


def test_shapes_same_seed_same_bytes_other_seed_other_bytes():
    a, b, c = draw_shapes(50, seed=3), draw_shapes(50, seed=3), draw_shapes(50, seed=4)
    assert rows(a.x) == rows(b.x) and torch.equal(a.y, b.y)
    assert not set(rows(a.x)) & set(rows(c.x))


def test_shapes_are_distinct_varied_and_balanced(shapes):
    parts = (shapes.train, shapes.val, shapes.aux, shapes.test)
    images = [row for part in parts for row in rows(part.x)]
    assert (
        len(images) == data.SHAPES_TRAIN + data.SHAPES_TEST == len(set(images))
    )  # none twice, test included
    for part in parts:
        assert part.x.dtype == torch.uint8 and part.y.dtype == torch.int64 and part.x.shape[1:] == (3, 32, 32)
        assert part.float().double().var() >= 0.03
    labels = torch.cat([part.y for part in parts[:3]])
    assert labels.bincount().tolist() == [data.SHAPES_TRAIN // 10] * 10
    assert shapes.test.y.bincount().tolist() == [data.SHAPES_TEST // 10] * 10 and len(shapes.classes) == 10


def test_every_shape_is_told_from_its_ground():
    """A shape covers part of the picture, and differs from its ground in colour."""
    pixels = draw_shapes(40, seed=0).float()
    ring = torch.ones(32, 32, dtype=torch.bool)
    ring[2:-2, 2:-2] = False  # the outermost two pixels belong to the ground nearly everywhere
    ground = pixels[:, :, ring].mean(2)  # [n, 3]
    far = (pixels - ground[:, :, None, None]).abs().amin(1) > 0.15  # pixels that differ in every channel
    share = far.float().mean((1, 2))
    assert (share > 0.03).all() and (share < 0.6).all()


def test_a_class_is_one_shape_and_two_classes_are_two():
    """The nearest class mean of the upright silhouettes, drawn alone: every class is its own."""
    from harness.shapes import NAMES, shape_distance

    t = torch.linspace(-1.2, 1.2, 41)
    v, u = torch.meshgrid(t, t, indexing="ij")
    drawn = torch.stack([(shape_distance(k, u, v) < 0).float() for k in range(len(NAMES))]).flatten(1)
    overlap = drawn @ drawn.T / (drawn.sum(1)[:, None] + drawn.sum(1) - drawn @ drawn.T)  # ∩ / ∪
    assert (drawn.mean(1) > 0.1).all() and overlap.fill_diagonal_(0).max() < 0.9


# -------------------------------------------------------------------------------- splits


def test_splits_are_a_partition(shapes):
    drawn = draw_shapes(data.SHAPES_TRAIN, seed=0)
    whole, union = dict(zip(rows(drawn.x), drawn.y.tolist())), {}
    for part, size in ((shapes.train, 4200), (shapes.val, 600), (shapes.aux, 1200)):
        found = dict(zip(rows(part.x), part.y.tolist()))
        assert len(found) == size and not union.keys() & found.keys()
        union |= found
    assert union == whole  # every training image once, with its own label


def test_the_same_seed_loads_the_same_splits(few_shapes):
    a, b, c = (load("shapes", seed=seed, aux_share=0.2) for seed in (3, 3, 4))
    for name in ("train", "val", "aux", "test"):
        one, two, other = (getattr(splits, name) for splits in (a, b, c))
        assert torch.equal(one.x, two.x) and torch.equal(one.y, two.y)
        assert not set(rows(one.x)) & set(rows(other.x))
    assert data.fingerprint(a) == data.fingerprint(b) != data.fingerprint(c)


@pytest.mark.parametrize("split", ["train", "val", "test", "aux"])
def test_the_fingerprint_sees_every_pixel_and_label(few_shapes, split):
    splits = load("shapes", aux_share=0.2)
    before = data.fingerprint(splits)
    part = getattr(splits, split)
    part.x[-1, 2, -1, -1] ^= 1
    pixel = data.fingerprint(splits)
    part.x[-1, 2, -1, -1] ^= 1
    part.y[0] += 1
    assert len({before, pixel, data.fingerprint(splits)}) == 3
    sentence(lambda: data.check_images({"data": before}, splits, "a.pt"), "a.pt", "other images")
    part.y[0] -= 1
    data.check_images({"data": before}, splits, "a.pt")


def numbered(count, start):
    """One-colour images whose pixel is their number."""
    number = torch.arange(start, start + count, dtype=torch.uint8)
    return number.view(-1, 1, 1, 1).expand(-1, 3, 4, 4).contiguous(), number.long() % 5


@pytest.fixture
def hundred(monkeypatch):
    """load("anywhere") finds 100 training images, 0 to 99, and 20 test images, 200 to 219."""
    found = (numbered(100, 0), numbered(20, 200), list("abcde"))
    monkeypatch.setattr(data, "load_folder", lambda *_: found)


def numbers(images):
    return images.x[:, 0, 0, 0].tolist()


def test_val_depends_on_the_seed_and_test_does_not(hundred):
    a, b = load("anywhere", seed=0), load("anywhere", seed=1)
    assert set(numbers(a.val)) != set(numbers(b.val)) and len(a.val) == len(b.val) == 10
    for splits in (a, b):
        assert sorted(numbers(splits.test)) == list(range(200, 220))
        assert sorted(numbers(splits.train) + numbers(splits.val)) == list(range(100)) and not len(splits.aux)
        for part in (splits.train, splits.val, splits.test):
            assert [v % 5 for v in numbers(part)] == part.y.tolist()


def test_train_size_keeps_that_many_before_val_and_aux(hundred):
    cut = lambda: load("anywhere", seed=0, val_share=0.1, aux_share=0.25, train_size=40)
    splits = cut()
    assert (len(splits.val), len(splits.aux), len(splits.train)) == (4, 10, 26)
    assert len(set(numbers(splits.val) + numbers(splits.aux) + numbers(splits.train))) == 40
    assert numbers(cut().train) == numbers(splits.train)
    assert len(load("anywhere", train_size=1000).train) == 90  # more than there are: all


def test_too_few_images(hundred):
    sentence(lambda: load("anywhere", train_size=5), "anywhere", "too few", "--train-size")
    sentence(lambda: load("anywhere", val_share=0.5, aux_share=0.5), "anywhere", "too few")
    sentence(lambda: load("anywhere", train_size=4), "--train-size 4", "5 classes")


def test_a_runs_settings_decide_its_splits(hundred):
    args = dict(dataset="anywhere", data_dir="d", image_size=None, seed=0, train_size=None, batch_size=8)
    wanted = SimpleNamespace(**args, attacker_data="aux")
    sentence(lambda: load_splits(wanted), "anywhere", "4 pixels a side", "--image-size 32")
    data.MIN_IMAGE_SIZE, before = 4, data.MIN_IMAGE_SIZE
    try:
        assert len(load_splits(wanted).aux) == 25 and len(load_splits(wanted).train) == 65
        wanted.attacker_data = "train"
        assert len(load_splits(wanted).aux) == 0
        wanted.batch_size = 91
        sentence(lambda: load_splits(wanted), "--batch-size 91", "only 90", "lower it")
    finally:
        data.MIN_IMAGE_SIZE = before


def test_a_folders_test_images_are_dealt_class_by_class():
    y = torch.tensor([0, 0, 0, 2, 2, 1, 0])
    turn = lambda i: (sum(y[j] == y[i] for j in range(i)).item() if i else 0, y[i].item())
    assert data.dealt(y).tolist() == sorted(range(len(y)), key=turn) == [0, 5, 3, 1, 4, 2, 6]


# -------------------------------------------------------------------------------- batches


def literal_crop_and_flip(x, generator, padding):
    """Pad one image at a time by repeating its edges, cut the shifted window out, mirror it or not."""
    b, _, h, w = x.shape
    shift_y, shift_x = torch.randint(-padding, padding + 1, (2, b, 1), generator=generator)
    mirrored = torch.rand(b, 1, generator=generator) < 0.5
    out = []
    for i in range(b):
        padded = np.pad(x[i].numpy(), ((0, 0), (padding, padding), (padding, padding)), mode="edge")
        top, left = padding + int(shift_y[i]), padding + int(shift_x[i])
        window = padded[:, top : top + h, left : left + w]
        out.append(window[:, :, ::-1] if mirrored[i] else window)
    return torch.from_numpy(np.stack(out))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("padding", [0, 2, 4])
def test_crop_and_flip_is_the_literal_loop(dtype, channels_last, padding):
    x = torch.randint(0, 256, (40, 3, 9, 12), generator=seeded(0)).to(dtype)
    given = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    got = crop_and_flip(given, seeded(5), padding)
    assert got.dtype == dtype and torch.equal(got, literal_crop_and_flip(x, seeded(5), padding))
    assert got.is_contiguous(memory_format=torch.channels_last) and torch.equal(given, x)


def test_crop_and_flip_reaches_every_shift_and_both_sides():
    """One bright pixel in the middle: where it lands is the shift."""
    x = torch.zeros(2000, 3, 11, 11, dtype=torch.uint8)
    x[:, :, 5, 5] = 255
    places = {tuple(p) for p in (crop_and_flip(x, seeded(0))[:, 0] == 255).nonzero()[:, 1:].tolist()}
    assert places == {(5 + dy, 5 + dx) for dy in range(-4, 5) for dx in range(-4, 5)}
    left = torch.zeros(2000, 3, 8, 8, dtype=torch.uint8)
    left[..., 0] = 255
    assert 900 < (crop_and_flip(left, seeded(0), padding=0)[:, 0, 0, -1] == 255).sum() < 1100


def test_batches_visit_every_image_once_in_an_order_of_the_seed():
    images = Images(torch.zeros(130, 3, 8, 8, dtype=torch.uint8), torch.arange(130))

    def order(seed):
        torch.manual_seed(seed)
        return torch.cat([y for _, y in batches(images, 13)]).tolist()

    assert sorted(order(1)) == list(range(130)) != order(1) == order(1) != order(2)


def test_batches_are_floats_in_0_1():
    x = torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8).expand(-1, 3, -1, -1)
    assert to_float(x).dtype == torch.float32 and torch.equal(to_float(x), x.double().div(255).float())


def test_batches_leave_out_the_last_short_one_only():
    images = Images(torch.zeros(10, 3, 8, 8, dtype=torch.uint8), torch.arange(10))
    sizes = lambda batch: [len(y) for _, y in batches(images, batch)]
    assert sizes(4) == [4, 4] and sizes(5) == [5, 5] and sizes(16) == []


def test_a_batch_is_its_images_in_the_given_order_cropped_and_flipped():
    images, order, g = draw_shapes(20, seed=0), torch.arange(19, -1, -1), seeded(0)
    torch.manual_seed(0)
    for i, (x, y) in enumerate(batches(images, 5, order=order)):
        index = order[5 * i : 5 * i + 5]
        assert torch.equal(x, to_float(crop_and_flip(images.x[index], g))) and torch.equal(y, images.y[index])
    assert i == 3


# -------------------------------------------------------------------------------- folders of pictures


def test_folder_keeps_pixels_and_labels(tmp_path):
    made = picture_folder(tmp_path / "f", classes=("bee", "ant", "cat"))
    train, test, classes = load_pair(tmp_path / "f", tmp_path)
    assert classes == ["ant", "bee", "cat"]
    for split, images in (("train", train), ("test", test)):
        want = {
            p.tobytes(): classes.index(name.split("/")[1])
            for name, p in made.items()
            if name.startswith(split)
        }
        assert dict(zip(rows(images.x), images.y.tolist())) == want
        assert images.x.dtype == torch.uint8 and images.y.dtype == torch.int64
    splits = load(str(tmp_path / "f"), data_dir=tmp_path / "cache")
    assert len(splits.train) + len(splits.val) == 30 and len(splits.test) == 6


MODES = [("png", "L"), ("pgm", "L"), ("png", "LA"), ("png", "P"), ("png", "1")]


@pytest.mark.parametrize("ending, mode", MODES)
def test_grey_becomes_rgb(tmp_path, ending, mode):
    shades = [0, 255] if mode == "1" else np.arange(256)
    grey = np.random.default_rng(0).choice(shades, (16, 16)).astype(np.uint8)
    Image.fromarray(grey).convert(mode).save(tmp_path / f"grey.{ending}")
    got = folders.decode(tmp_path / f"grey.{ending}", 16)
    assert torch.equal(got, torch.from_numpy(grey)[:, :, None].expand(-1, -1, 3))


def halved(pixels):
    """Triangle filter by two, from its definition: weights 1, 3, 3, 1, cut off and rescaled at the edges."""

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
    small = halved(pixels)
    top, left = (small.shape[0] - 16) // 2, (small.shape[1] - 16) // 2
    want = small[top : top + 16, left : left + 16]
    got = folders.decode(save_picture(tmp_path / "a.png", pixels), 16).numpy().astype(float)
    assert got.shape == (16, 16, 3) and np.abs(got - want).max() <= 1  # rounded twice, once per direction


def test_crop_without_resize_takes_the_middle(tmp_path):
    pixels = random_pixels(2, 20, 33)
    got = folders.decode(save_picture(tmp_path / "a.png", pixels), 20).numpy()
    assert np.array_equal(got, pixels[:, 6:26])


def test_image_size_defaults_to_the_first_images_short_side(tmp_path):
    picture_folder(tmp_path / "f", size=32)
    save_picture(tmp_path / "f/train/ant/9.png", random_pixels(0, 40, 64))
    assert load_pair(tmp_path / "f", tmp_path)[0].x.shape == (20, 3, 32, 32)
    assert load_pair(tmp_path / "f", tmp_path, image_size=48)[0].x.shape == (20, 3, 48, 48)


def test_other_files_are_not_images(tmp_path):
    picture_folder(tmp_path / "f")
    (tmp_path / "f/train/ant/readme.txt").write_text("not an image")
    (tmp_path / "f/train/.hidden").mkdir()
    train, _, classes = load_pair(tmp_path / "f", tmp_path)
    assert len(train) == 20 and classes == ["ant", "bee"]


# orientation -> what a viewer shows of the stored pixels (EXIF 2.3, tag 274)
TURNS = {
    1: lambda p: p,
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.swapaxes(0, 1),
    6: lambda p: np.rot90(p, -1),
    7: lambda p: np.rot90(p, 2).swapaxes(0, 1),
    8: lambda p: np.rot90(p),
}


@pytest.mark.parametrize("ending", ["png", "tif", "jpg"])
def test_exif_rotation_is_honoured(tmp_path, ending):
    blocks = np.kron(random_pixels(3, 2, 2), np.ones((16, 16, 1), np.uint8))  # survives JPEG
    for orientation, turn in TURNS.items():
        exif = Image.Exif()
        exif[274] = orientation
        save_picture(
            tmp_path / f"a.{ending}", blocks, exif=exif, **({"quality": 100} if ending == "jpg" else {})
        )
        got = folders.decode(tmp_path / f"a.{ending}", 32).numpy()
        wrong = np.abs(got.astype(int) - turn(blocks)).mean((0, 1))
        assert wrong.max() < (8 if ending == "jpg" else 0.1), orientation


def test_exif_rotation_of_a_long_picture_decides_what_is_cropped(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    pixels = random_pixels(0, 20, 33)
    got = folders.decode(save_picture(tmp_path / "a.png", pixels, exif=exif), 20).numpy()
    assert np.array_equal(got, np.rot90(pixels, -1)[6:26])


@pytest.mark.parametrize("ending", ["png", "pgm"])
def test_sixteen_bit_grey_keeps_its_shades(tmp_path, ending):
    """A 16-bit value v is the 8-bit shade v / 257, and not white wherever it is above 255."""
    deep, path = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16), tmp_path / f"deep.{ending}"
    if ending == "png":
        Image.fromarray(deep).save(path)
    else:
        path.write_bytes(b"P5\n16 16\n65535\n" + deep.astype(">u2").tobytes())
    want = torch.arange(256, dtype=torch.int32).view(16, 16, 1).expand(-1, -1, 3)
    assert (folders.decode(path, 16).int() - want).abs().max() <= 1


def save_rgb16(path, pixels):
    """A PNG of 16 bits a channel, which Pillow reads and does not write."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 16, 2, 0, 0, 0)
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )


def test_sixteen_bits_that_hold_0_to_255_are_refused_and_not_black(tmp_path):
    grey = np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint16)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey).save(tmp_path / "grey.tif")
    save_rgb16(tmp_path / "rgb.png", random_pixels(0))
    for name in ("grey.png", "grey.tif", "rgb.png"):
        sentence(lambda name=name: folders.decode(tmp_path / name, 32), name, "16-bit", "8 bits")
    save_rgb16(tmp_path / "rgb.png", random_pixels(0).astype(int) * 257)  # the same with all its bits
    assert np.array_equal(folders.decode(tmp_path / "rgb.png", 32).numpy(), random_pixels(0))


def test_unusual_pictures_are_read(tmp_path):
    """One pixel, long and thin, CMYK, animated, a name that is no text: none of them is a mistake."""
    for name, pixels in (("one.png", random_pixels(0, 1, 1)), ("thin.png", random_pixels(0, 1, 3000))):
        assert folders.decode(save_picture(tmp_path / name, pixels), 32).shape == (32, 32, 3)
    Image.fromarray(random_pixels(0)).convert("CMYK").save(tmp_path / "cmyk.jpg")
    two = [Image.fromarray(random_pixels(i)) for i in range(2)]
    two[0].save(tmp_path / "two.webp", save_all=True, append_images=two[1:], lossless=True)
    assert folders.decode(tmp_path / "cmyk.jpg", 32).float().std() > 1
    assert np.array_equal(folders.decode(tmp_path / "two.webp", 32).numpy(), random_pixels(0))
    picture_folder(tmp_path / "f")
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    (tmp_path / "f").rename(folder)
    (folder / "train" / "bee").rename(folder / "train" / "b\n☃")
    (folder / "test" / "bee").rename(folder / "test" / "b\n☃")
    assert len(load(str(folder), data_dir=tmp_path / "cache").train) == 18
    assert list((tmp_path / "cache").glob("cache-*.pt"))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n"


def test_no_format_that_starts_another_program(tmp_path, monkeypatch):
    """An EPS named .png must not reach Ghostscript, nor another format outside the list be opened."""
    from PIL import EpsImagePlugin

    called = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **k: called.append(a))
    (tmp_path / "a.png").write_bytes(EPS)
    sentence(lambda: folders.decode(tmp_path / "a.png", 32), tmp_path / "a.png", "not a readable image")
    with Image.open(tmp_path / "a.png") as opened:  # Pillow alone would have taken it for an EPS
        assert opened.format == "EPS" and not called
    Image.fromarray(random_pixels(0)).save(tmp_path / "b.png", format="GIF")
    sentence(lambda: folders.decode(tmp_path / "b.png", 32), tmp_path / "b.png", "not a readable image")
    assert not {"EPS", "PDF", "WMF", "FITS"} & set(folders.FORMATS)


def make_tiny_imagenet(root):
    made = {"train": {}, "test": {}}
    for label, wnid in enumerate(("n01", "n02", "n03")):
        for i in range(5):
            pixels = random_pixels(100 * label + i, 64, 64)
            save_picture(root / "train" / wnid / "images" / f"{wnid}_{i}.png", pixels)
            made["train"][pixels.tobytes()] = label
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("boxes\n")
    lines = []
    for i, label in enumerate((2, 0, 1, 1)):
        pixels = random_pixels(900 + i, 64, 64)
        save_picture(root / "val" / "images" / f"val_{i}.png", pixels)
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
    picture_folder(tmp_path / "facescrub")
    assert load("facescrub", data_dir=tmp_path).classes == ["ant", "bee"]


# -------------------------------------------------------------------------------- cache


def cache_of(tmp_path):
    (path,) = (tmp_path / "cache").iterdir()
    return path


def no_decoding(monkeypatch):
    def decode(path, size):
        raise AssertionError(f"{path} was decoded again")

    monkeypatch.setattr(folders, "decode", decode)


def test_second_load_uses_the_cache_which_is_not_in_the_users_folder(tmp_path, monkeypatch):
    made = picture_folder(tmp_path / "f")
    first = load_pair(tmp_path / "f", tmp_path)
    found = {str(p.relative_to(tmp_path / "f")) for p in (tmp_path / "f").rglob("*") if p.is_file()}
    assert found == set(made) and cache_of(tmp_path).suffix == ".pt"
    no_decoding(monkeypatch)
    second = load_pair(tmp_path / "f", tmp_path)
    for a, b in zip(first[:2], second[:2]):
        assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y)
    assert first[2] == second[2]
    with pytest.raises(AssertionError, match="decoded again"):  # another size is another cache
        load_pair(tmp_path / "f", tmp_path, image_size=16)


@pytest.mark.parametrize("change", ["pixels", "time", "added", "removed", "renamed", "test"])
def test_cache_is_rebuilt_when_the_folder_changes(tmp_path, monkeypatch, change):
    folder, new = tmp_path / "f", random_pixels(77)
    picture_folder(folder)
    load_pair(folder, tmp_path)
    path = folder / "train/bee/3.png"
    {
        "pixels": lambda: save_picture(path, new),
        "time": lambda: os.utime(path, ns=(1, 1)),
        "added": lambda: save_picture(folder / "train/bee/new.png", new),
        "removed": lambda: path.unlink(),
        "renamed": lambda: path.rename(folder / "train/ant/moved.png"),
        "test": lambda: save_picture(folder / "test/ant/0.png", new),
    }[change]()
    with monkeypatch.context() as m:
        no_decoding(m)
        with pytest.raises(AssertionError, match="decoded again"):
            load_pair(folder, tmp_path)
    train, test, _ = load_pair(folder, tmp_path)
    images, holds_new, bees = {
        "pixels": (20, True, 10),
        "time": (20, False, 10),
        "added": (21, True, 11),
        "removed": (19, False, 9),
        "renamed": (20, False, 9),
        "test": (20, False, 10),
    }[change]
    assert (len(train), new.tobytes() in rows(train.x), int((train.y == 1).sum())) == (
        images,
        holds_new,
        bees,
    )
    assert (new.tobytes() in rows(test.x)) == (change == "test")
    no_decoding(monkeypatch)
    load_pair(folder, tmp_path)  # and cached again


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None], ids=["empty", "text", "truncated"])
def test_damaged_cache_is_decoded_again(tmp_path, damage):
    picture_folder(tmp_path / "f")
    want, _, _ = load_pair(tmp_path / "f", tmp_path)
    cache = cache_of(tmp_path)
    cache.write_bytes(cache.read_bytes()[:-100] if damage is None else damage)
    assert torch.equal(load_pair(tmp_path / "f", tmp_path)[0].x, want.x)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_cache_that_would_run_code_is_not_used(tmp_path, how):
    picture_folder(tmp_path / "f")
    first = load_pair(tmp_path / "f", tmp_path)[0]
    cache = cache_of(tmp_path)
    crafted = {**torch.load(cache, weights_only=True), "more": RunsCode(tmp_path / "ran")}
    torch.save(crafted, cache) if how == "torch" else cache.write_bytes(pickle.dumps(crafted))
    again = load_pair(tmp_path / "f", tmp_path)[0]
    assert torch.equal(first.x, again.x) and torch.equal(first.y, again.y) and not (tmp_path / "ran").exists()
    torch.load(cache, weights_only=True)  # rebuilt
    pickle.loads(pickle.dumps(crafted))
    assert (tmp_path / "ran").exists()  # it would have


CRAFTED = {
    "labels": {"train_y": torch.full((20,), 9)},
    "a label": {"train_y": torch.arange(20) // 10 + (torch.arange(20) == 3)},
    "number of images": {"test_x": torch.zeros(3, 32, 32, 3, dtype=torch.uint8)},
    "nothing": {"train_x": None},
    "floats": {"train_x": torch.full((20, 32, 32, 3), float("nan"))},
    "another shape": {"train_x": torch.zeros(20, 32, 16, 3, dtype=torch.uint8)},
    "another stamp": {"stamp": "0"},
}


@pytest.mark.parametrize("entry", CRAFTED.values(), ids=CRAFTED)
def test_a_cache_with_wrong_labels_or_images_is_not_used(tmp_path, entry):
    picture_folder(tmp_path / "f")
    first = load_pair(tmp_path / "f", tmp_path)
    cache = cache_of(tmp_path)
    torch.save({**torch.load(cache, weights_only=True), **entry}, cache)
    again = load_pair(tmp_path / "f", tmp_path)
    for a, b in zip(first[:2], again[:2]):
        assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y)


def refuse_writing(monkeypatch, *folders, error):
    """torch.save fails below `folders`. An unwritable place is a RuntimeError there, not an OSError."""
    real = torch.save

    def save(what, where, *args, **kwargs):
        if set(folders) & set(Path(where).parents):
            raise error
        real(what, where, *args, **kwargs)

    monkeypatch.setattr(torch, "save", save)


ERRORS = [PermissionError("read-only"), RuntimeError("open file failed with strerror: Permission denied")]


@pytest.mark.parametrize("error", ERRORS, ids=["OSError", "RuntimeError"])
def test_where_data_dir_cannot_be_written_the_folder_holds_the_cache_or_there_is_none(
    tmp_path, monkeypatch, error
):
    folder = tmp_path / "f"
    picture_folder(folder)
    with monkeypatch.context() as m:
        refuse_writing(m, tmp_path, error=error)  # nowhere to write
        assert len(load_pair(folder, tmp_path)[0]) == 20 and not list(tmp_path.rglob("*cache-*.pt"))
    refuse_writing(monkeypatch, tmp_path / "cache", error=error)
    train = load_pair(folder, tmp_path)[0]
    assert len(list(folder.glob(".cem-cache-*.pt"))) == 1
    no_decoding(monkeypatch)
    assert torch.equal(load_pair(folder, tmp_path)[0].x, train.x)


def test_two_folders_share_a_data_dir(tmp_path):
    picture_folder(tmp_path / "f"), picture_folder(tmp_path / "g", classes=("cat", "dog", "eel"))
    found = [load_pair(tmp_path / name, tmp_path) for name in ("f", "g", "f")]
    assert [(len(train), len(classes)) for train, _, classes in found] == [(20, 2), (30, 3), (20, 2)]
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_cache_names_do_not_depend_on_how_the_folder_is_written(tmp_path, monkeypatch):
    (tmp_path / "f").mkdir()
    monkeypatch.chdir(tmp_path)
    names = {folders.cache_paths(Path(p), 32, "d")[0] for p in ("f", "./f", str(tmp_path / "f"))}
    digest = hashlib.sha256(str((tmp_path / "f").resolve()).encode()).hexdigest()[:12]
    assert names == {Path("d") / f"cache-{digest}-32.pt"}


# -------------------------------------------------------------------------------- mistakes


def test_missing_folder(tmp_path):
    sentence(lambda: load(str(tmp_path / "nowhere")), tmp_path / "nowhere", "shapes")
    sentence(lambda: load("tinyimagenet", data_dir=tmp_path), tmp_path / "tiny-imagenet-200")
    sentence(lambda: load("x" * 5000), "--dataset", "use shapes")
    (tmp_path / "file").write_text("")
    sentence(lambda: load(str(tmp_path / "file")), tmp_path / "file")


WRONG_FOLDERS = {
    "no train": (lambda f: shutil.rmtree(f / "train"), "train"),
    "no test": (lambda f: shutil.rmtree(f / "test"), "test"),
    "empty class in train": (lambda f: [p.unlink() for p in (f / "train/bee").iterdir()], "train/bee"),
    "empty class in test": (lambda f: [p.unlink() for p in (f / "test/bee").iterdir()], "test/bee"),
    "class only in train": (lambda f: shutil.rmtree(f / "test/bee"), "test/bee"),
    "class only in test": (lambda f: shutil.rmtree(f / "train/bee"), "class bee is in test"),
    "one class": (lambda f: (shutil.rmtree(f / "train/bee"), shutil.rmtree(f / "test/bee")), "1 class"),
    "no class folders": (lambda f: (shutil.rmtree(f / "train"), (f / "train").mkdir()), "no class folders"),
}


@pytest.mark.parametrize("change, words", WRONG_FOLDERS.values(), ids=WRONG_FOLDERS)
def test_a_folder_that_is_no_data_set(tmp_path, change, words):
    picture_folder(tmp_path / "f")
    change(tmp_path / "f")
    sentence(lambda: load(str(tmp_path / "f"), data_dir=tmp_path / "cache"), tmp_path / "f", words)


def half(path):
    save_picture(path, random_pixels(0))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def grey_float(path):
    Image.fromarray(np.full((32, 32), np.nan, np.float32)).save(path, format="TIFF")


BROKEN = {
    "empty": (lambda p: p.write_bytes(b""), "not a readable image"),
    "text": (lambda p: p.write_text("a picture of an ant"), "not a readable image"),
    "half": (half, "not a readable image"),
    "header that is no number": (lambda p: p.write_bytes(b"P6\nxx 32\n255\n"), "not a readable image"),
    "header that is cut": (lambda p: p.write_bytes(b"P6\nxx 32"), "not a readable image"),
    "too little data": (lambda p: p.write_bytes(b"P6\n32 32\n255\n" + bytes(100)), "not a readable image"),
    "damaged tiff": (
        lambda p: p.write_bytes(b"II*\0\x08\0\0\0" + bytes(range(40, 240))),
        "not a readable image",
    ),
    "enormous": (lambda p: p.write_bytes(b"P6\n99999999 99999999\n255\n1"), "not a readable image"),
    "endless": (lambda p: save_picture(p, random_pixels(0, 1, 200_000)), "200000x1 is too long"),
    "NaN pixels": (grey_float, "floating-point pixels"),
    "broken link": (lambda p: p.symlink_to("nowhere"), "not a file"),
    "link to itself": (lambda p: p.symlink_to(p.name), "not a file"),
    "folder": (lambda p: p.mkdir(), "not a file"),
    "pipe": (os.mkfifo, "not a file"),
}


@pytest.mark.parametrize("name", ["train/ant/0.png", "test/ant/1.png"], ids=["the first", "another"])
@pytest.mark.parametrize("make, words", BROKEN.values(), ids=BROKEN)
def test_a_broken_picture_is_named(tmp_path, name, make, words):
    """The first is also the one whose size is asked for, unless --image-size says it."""
    picture_folder(tmp_path / "f", train=2)
    (tmp_path / "f" / name).unlink()
    make(tmp_path / "f" / name)
    for size in (32,) if "too long" in words else (None, 32):
        broken = lambda size=size: load_pair(tmp_path / "f", tmp_path, size)
        sentence(broken, tmp_path / "f" / name, words, "delete it")


@pytest.mark.parametrize(
    "error", [zlib.error("x"), struct.error("y"), KeyError(5), OverflowError("z")], ids=repr
)
def test_whatever_pillow_raises_is_one_sentence(tmp_path, monkeypatch, error):
    def load(self):
        raise error

    path = save_picture(tmp_path / "a.png", random_pixels(0))
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", load)
    sentence(lambda: folders.decode(path, 32), path, "not a readable image")


def test_beyond_pillows_limit_on_the_number_of_pixels(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    path = save_picture(tmp_path / "a.png", random_pixels(0))
    sentence(lambda: folders.decode(path, 32), path)


@pytest.mark.parametrize(
    "missing", ["val/val_annotations.txt", "val/images/val_2.png", "train/n02/images", "train"]
)
def test_incomplete_tiny_imagenet(tmp_path, missing):
    root = tmp_path / "tiny-imagenet-200"
    make_tiny_imagenet(root)
    (root / missing).rename(tmp_path / "elsewhere")
    sentence(lambda: load("tinyimagenet", data_dir=tmp_path), root / missing)


ANNOTATIONS = {
    "label out of range": (b"val_0.png\tn09\t0\n", "line 1 of"),
    "label missing": (b"val_0.png n01\n", "val_annotations.txt"),
    "no text": (b"\xff\xfe\0val_0.png", "val_annotations.txt"),
    "an image elsewhere": (b"../../train/n01/images/n01_0.png\tn01\n", "line 1 of"),
    "no image": (b"\n", "missing or empty"),
}


@pytest.mark.parametrize("text, words", ANNOTATIONS.values(), ids=ANNOTATIONS)
def test_annotations_that_name_no_image_and_class(tmp_path, text, words):
    make_tiny_imagenet(tmp_path / "tiny-imagenet-200")
    (tmp_path / "tiny-imagenet-200/val/val_annotations.txt").write_bytes(text)
    sentence(lambda: load("tinyimagenet", data_dir=tmp_path), words, "unpack the original archive again")


@pytest.mark.parametrize("size", [31, 64])
def test_shapes_and_cifar_have_one_size(size):
    for name in ("shapes", "cifar10", "cifar100"):
        sentence(lambda name=name: load(name, image_size=size), f"--image-size {size}", name, "32x32")


# -------------------------------------------------------------------------------- CIFAR and torchvision


class FakeCIFAR:
    base_folder = "cifar-10-batches-py"

    def __init__(self, root, train, download):
        n = 40 if train else 8
        self.data = np.random.default_rng(train).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        self.targets, self.classes = [i % 10 for i in range(n)], [f"class {c}" for c in range(10)]


def fake_cifar(monkeypatch, name, cls):
    data.import_torchvision()
    monkeypatch.setattr(importlib.import_module("torchvision.datasets"), name, cls)


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100"])
def test_cifar_keeps_pixels_and_labels(monkeypatch, tmp_path, name):
    fake_cifar(monkeypatch, name, FakeCIFAR)
    splits = load(name.lower(), data_dir=tmp_path)
    want = {p.tobytes(): i % 10 for i, p in enumerate(FakeCIFAR(None, True, True).data)}
    parts = (splits.train, splits.val)
    assert {row: y for part in parts for row, y in zip(rows(part.x), part.y.tolist())} == want
    assert rows(splits.test.x) == [p.tobytes() for p in FakeCIFAR(None, False, True).data]
    assert splits.train.y.dtype == torch.int64 and splits.classes[3] == "class 3"


OFFLINE = [OSError("<urlopen error [Errno -2]\n Name or service not known>"), RuntimeError("File not found.")]


@pytest.mark.parametrize("error", OFFLINE, ids=["no network", "broken archive"])
def test_cifar_without_network(monkeypatch, tmp_path, error):
    class Offline(FakeCIFAR):
        def __init__(self, *args, **kwargs):
            raise error

    fake_cifar(monkeypatch, "CIFAR10", Offline)
    words = ("cifar10", tmp_path / "d", "cifar-10-batches-py", "--data-dir")
    sentence(lambda: load("cifar10", data_dir=tmp_path / "d"), *words)


def test_torchvision_imports_in_a_fresh_process():
    code = "from harness import data; data.import_torchvision(); import torchvision.datasets; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("ok"), done.stderr


def imports(monkeypatch, errors):
    """import_module raises the errors in turn, then works. -> (names asked for, operators declared)"""
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
    assert data.import_torchvision() == "the module" and asked == ["torchvision", "torchvision"]
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    assert declared == [("torchvision::nms", schema), ("torchvision::qnms", schema)]


OTHERS = [
    RuntimeError("operator torchvision::roi_align does not exist"),
    ImportError("No module named torchvision"),
]


@pytest.mark.parametrize("error", OTHERS, ids=["another operator", "not installed"])
def test_any_other_import_error_is_passed_on(monkeypatch, error):
    asked, declared = imports(monkeypatch, [error])
    with pytest.raises(type(error), match=str(error)):
        data.import_torchvision()
    assert asked == ["torchvision"] and declared == []


def test_a_torchvision_that_imports_is_left_alone(monkeypatch):
    asked, declared = imports(monkeypatch, [])
    assert data.import_torchvision() == "the module" and asked == ["torchvision"] and declared == []
