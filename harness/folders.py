"""Folders of pictures: which files they hold, decoding them, and the cache of what was decoded.

A folder has train/CLASS/* and test/CLASS/*, or Tiny ImageNet's original layout. Pictures are turned as
their EXIF says, resized (short side) and centre-cropped to a square; grey becomes RGB. They are decoded
once into --data-dir (into the folder itself if that cannot be written); the cache is rebuilt when a file's
name, size or time changes. Whatever is wrong with the pictures ends in a UserError: one sentence that names
the file and says what to do.
"""

import hashlib
import os
import warnings
from pathlib import Path

import torch

from harness.files import UserError, one_line, read_ours, write

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "WEBP", "TIFF")  # none that starts another program, as EPS does
ENDINGS = {".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".webp", ".tif", ".tiff"}
MAX_PIXELS = 100_000_000  # of a resized image, before it is cropped
EXPECTED, UNPACK = "expected train/CLASS/* and test/CLASS/*", "unpack the original archive again"


def load_folder(folder, image_size, cache_dir):
    """-> (x, y) of train, (x, y) of test, class names; x uint8 [N, 3, H, W]"""
    folder = Path(folder)
    if not os.path.isdir(folder):  # False for a name that is too long as well
        raise UserError(
            f"--dataset: there is no folder {folder}; use shapes, cifar10, cifar100, tinyimagenet, "
            "facescrub or a folder with train/CLASS/* and test/CLASS/*."
        )
    try:
        list_files = tiny_imagenet_files if (folder / "wnids.txt").is_file() else class_folder_files
        files, classes = list_files(folder)
    except OSError as error:
        raise UserError(
            f"--dataset {folder}: cannot be read ({one_line(error)}); mend its permissions or copy it."
        ) from None
    listing = "\n".join(
        f"{split} {path.relative_to(folder)} {label} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for split, rows in files.items()
        for path, label in rows
    )
    stamp = hashlib.sha256(f"{image_size}\n{listing}".encode(errors="surrogateescape")).hexdigest()
    cached = read_cache(folder, image_size, cache_dir, stamp, files)
    if cached is None:
        cached = {"stamp": stamp}
        with warnings.catch_warnings():  # of a damaged file only the error is shown
            warnings.simplefilter("ignore")
            size = image_size or len(decode(files["train"][0][0], None))
            for split, rows in files.items():
                cached[split + "_x"] = torch.stack([decode(path, size) for path, _ in rows])
        write_cache(folder, image_size, cache_dir, cached)
    train, test = (
        (cached[split + "_x"].permute(0, 3, 1, 2), torch.tensor([label for _, label in rows]))
        for split, rows in files.items()
    )
    return train, test, classes


def class_folder_files(folder):
    for split in ("train", "test"):
        if not (folder / split).is_dir():
            raise UserError(f"--dataset {folder}: there is no folder {folder / split}; {EXPECTED}.")
    classes = sorted(class_names(folder / "train"))
    if not classes:
        raise UserError(f"--dataset {folder}: {folder / 'train'} has no class folders; {EXPECTED}.")
    extra = class_names(folder / "test") - set(classes)
    if extra:
        raise UserError(
            f"--dataset {folder}: class {min(extra)} is in test but not in train; "
            "give both the same class folders."
        )
    files = {
        split: [
            (path, label) for label, name in enumerate(classes) for path in image_files(folder / split / name)
        ]
        for split in ("train", "test")
    }
    return files, classes


def class_names(folder):
    return {p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")}


def tiny_imagenet_files(folder):
    """train/WNID/images/*; val/images/* with val/val_annotations.txt, which are our test images."""
    if not (folder / "train").is_dir():
        raise UserError(f"--dataset {folder}: {folder / 'train'} is missing; {UNPACK}.")
    wnids = [p.name for p in sorted((folder / "train").iterdir()) if p.is_dir()]
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    train = [
        (path, label_of[wnid]) for wnid in wnids for path in image_files(folder / "train" / wnid / "images")
    ]
    annotations = folder / "val" / "val_annotations.txt"
    if not annotations.is_file():
        raise UserError(f"--dataset {folder}: {annotations} is missing; {UNPACK}.")
    test = []
    for number, line in enumerate(annotations.read_text(errors="replace").splitlines(), 1):
        name, wnid, *_ = [*line.split("\t"), "", ""]
        if name and (wnid not in label_of or Path(name).name != name):
            raise UserError(
                f"--dataset {folder}: line {number} of {annotations} does not name an image and a class "
                f"of train; {UNPACK}."
            )
        test += [(folder / "val" / "images" / name, label_of[wnid])] if name else []
    missing = [path for path, _ in test if not path.is_file()]
    if missing or not test:
        raise UserError(
            f"--dataset {folder}: {missing[0] if missing else annotations} is missing or empty; {UNPACK}."
        )
    return {"train": train, "test": test}, wnids


def image_files(folder):
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in ENDINGS) if folder.is_dir() else []
    if not files:
        raise UserError(
            f"{folder}: this class has no images; add some or remove the class from train and test."
        )
    for path in files:
        if not path.is_file():
            raise UserError(f"{path}: not a file nor a link to one; replace or delete it.")
    return files


def decode(path, size):
    """-> uint8 [size, size, 3]: RGB, short side resized to `size` (None: left as it is), centre-cropped."""
    from PIL import Image, ImageOps  # comes with torchvision

    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.mode == "F":  # could be in [0, 1], in [0, 255], NaN
                raise ValueError("floating-point pixels have no agreed range: save it with 8 bits")
            deep = image.mode.startswith("I") or ";16" in str(image.tile)
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):  # 16-bit grey: convert("RGB") would clip it at 255
                image = image.convert("I").point(lambda value: value / 256).convert("L")
            image = image.convert("RGB")
            if deep and not any(most for _, most in image.getextrema()):
                raise ValueError(
                    "its 16-bit pixels are all below 256 and would be black: save it with 8 bits"
                )
            w, h = image.size
            size = size or min(w, h)
            if (w, h) != (size, size):
                scale = size / min(w, h)
                if w * h * scale**2 > MAX_PIXELS:
                    raise ValueError(f"{w}x{h} is too long to be resized to a short side of {size}")
                image = image.resize(
                    (max(size, round(w * scale)), max(size, round(h * scale))), Image.Resampling.BILINEAR
                )
                left, top = (image.width - size) // 2, (image.height - size) // 2
                image = image.crop((left, top, left + size, top + size))
            return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(size, size, 3)
    except Exception as error:  # Pillow raises many kinds
        raise UserError(f"{path}: not a readable image ({one_line(error)}); replace or delete it.") from None


# ------------------------------------------------------------------------------------------ cache


def cache_paths(folder, image_size, cache_dir):
    key = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:12]
    name = f"cache-{key}-{image_size or 'native'}.pt"
    return Path(cache_dir) / name, folder / f".cem-{name}"


def read_cache(folder, image_size, cache_dir, stamp, files):
    """What was decoded of these very files, or None."""

    def read(path):
        cached = torch.load(path, weights_only=True)
        for split, rows in files.items():
            x = cached[split + "_x"]
            if x.dtype != torch.uint8 or x.shape != (len(rows), x.shape[1], x.shape[1], 3):
                raise ValueError("not one picture for each file")
        if cached["stamp"] != stamp:
            raise ValueError("of other files")
        return cached

    for path in cache_paths(folder, image_size, cache_dir):
        try:
            return read_ours(path, read)
        except UserError:  # absent, damaged, of another version: decode again
            continue


def write_cache(folder, image_size, cache_dir, cached):
    for path in cache_paths(folder, image_size, cache_dir):
        try:
            return write(path, lambda temporary: torch.save(cached, temporary))
        except UserError:  # read-only: the next place, or do without
            continue
