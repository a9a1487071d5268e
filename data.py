"""Images in memory: uint8 tensors, deterministic splits, batches that are cropped and flipped whole.

    data = load("shapes", seed=0)            # or "cifar10", "cifar100", "tinyimagenet", "facescrub", or a folder
    data.train.x                             # uint8 [N, 3, H, W], stored channels_last
    data.train.y                             # int64 [N]
    for x, y in batches(data.train, 128, augment=True): ...   # x float32 in [0, 1]

Splits. `test` is the data set's own and nothing is ever selected on it. `val` is carved from the training images by
the seed; so is `aux` (images for an attacker who has none of the victim's), empty unless asked for.

A folder has train/CLASS/* and test/CLASS/*; `tinyimagenet` is read in its original layout. Images are resized (short
side) and centre-cropped to a square, grey becomes RGB. A folder is decoded once into FOLDER/.cem-cache-SIZE.pt (or into
--data-dir if the folder cannot be written); the cache is rebuilt when a file's name, size or time changes.
Whatever is wrong with the images ends in a UserError: one sentence that names the file and says what to do.
"""

import hashlib
import importlib
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

import shapes
from report import UserError, one_line, write_atomic

NAMED_FOLDERS = {"tinyimagenet": "tiny-imagenet-200", "facescrub": "facescrub"}
IMAGE_ENDINGS = {".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".webp", ".tif", ".tiff"}
SHAPES_TRAIN, SHAPES_TEST = 6000, 1000
CROP_PADDING = 4
MAX_PIXELS = 100_000_000  # of a resized image, before it is cropped
EVAL_BATCH = 500  # images at a time where no gradient is kept


@dataclass
class Images:
    x: torch.Tensor  # uint8 [N, 3, H, W]
    y: torch.Tensor  # int64 [N]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return Images(self.x[index].contiguous(memory_format=torch.channels_last), self.y[index])

    def float(self):
        return to_float(self.x)


@dataclass
class Splits:
    train: Images
    val: Images
    test: Images
    aux: Images
    classes: list


def fingerprint(splits):
    """Hash of every pixel and label of every split: a checkpoint belongs to these images."""
    digest = hashlib.sha256()
    for part in (splits.train, splits.val, splits.test, splits.aux):
        digest.update(part.x.permute(0, 2, 3, 1).contiguous().numpy().data)
        digest.update(part.y.numpy().data)
    return digest.hexdigest()


def to_float(x):
    """uint8 pixels -> float32 in [0, 1], channels_last."""
    return x.to(torch.float32, memory_format=torch.channels_last).div_(255)


# ---------------------------------------------------------------------------------------------- batches

def batches(images, batch_size, augment=False, generator=None, device="cpu", order=None, shift=CROP_PADDING):
    """One epoch as (x float32 [B, 3, H, W], y [B]), in random order or in `order`; the last short batch is left out when augmenting."""
    order = torch.randperm(len(images), generator=generator) if order is None else order
    end = len(order) - len(order) % batch_size if augment and len(order) >= batch_size else len(order)
    for start in range(0, end, batch_size):
        index = order[start:start + batch_size]
        x = images.x[index]
        if augment:
            x = crop_and_flip(x, generator, shift)
        yield to_float(x.to(device)), images.y[index].to(device)


def crop_and_flip(x, generator=None, padding=CROP_PADDING):
    """Each image of a batch shifted by up to `padding` pixels (edges repeated) and mirrored with probability 1/2."""
    b, _, h, w = x.shape
    shift_y, shift_x = torch.randint(-padding, padding + 1, (2, b, 1), generator=generator)
    rows = (torch.arange(h) + shift_y).clamp_(0, h - 1)  # [B, H]
    cols = (torch.arange(w) + shift_x).clamp_(0, w - 1)  # [B, W]
    mirrored = torch.rand(b, 1, generator=generator) < 0.5
    cols = torch.where(mirrored, cols.flip(1), cols)
    pixels = (torch.arange(b)[:, None, None] * h + rows[:, :, None]) * w + cols[:, None, :]  # [B, H, W]
    flat = x.permute(0, 2, 3, 1).reshape(b * h * w, -1)  # [B·H·W, 3], a view of channels_last storage
    return flat[pixels.flatten()].view(b, h, w, -1).permute(0, 3, 1, 2)


# ---------------------------------------------------------------------------------------------- loading

def load(name="shapes", data_dir="data", image_size=None, seed=0, val_share=0.1, aux_share=0.0, train_size=None):
    """-> Splits. `train_size` keeps that many training images (chosen by the seed) before val and aux are carved off."""
    if name == "shapes":
        if image_size not in (None, shapes.SIZE):
            raise UserError(f"--image-size {image_size}: shapes is drawn at {shapes.SIZE}x{shapes.SIZE}; leave the flag out.")
        train = draw_shapes(SHAPES_TRAIN, seed=2 * seed)
        test = draw_shapes(SHAPES_TEST, seed=2 * seed + 1)
        classes = list(shapes.NAMES)
    elif name in ("cifar10", "cifar100"):
        train, test, classes = load_cifar(name, data_dir, image_size)
    else:
        folder = Path(data_dir) / NAMED_FOLDERS[name] if name in NAMED_FOLDERS else Path(name)
        train, test, classes = load_folder(folder, image_size, data_dir)
        test = test[dealt(test.y)]
    if len(classes) < 2:
        raise UserError(f"--dataset {name}: found {len(classes)} class; a classifier needs at least 2 class folders.")
    if train_size and train_size < len(classes):
        raise UserError(f"--train-size {train_size}: there are {len(classes)} classes; use at least an image of each.")

    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    order = order[:train_size] if train_size else order
    n_val, n_aux = round(len(order) * val_share), round(len(order) * aux_share)
    val, aux, rest = order[:n_val], order[n_val:n_val + n_aux], order[n_val + n_aux:]
    if len(rest) == 0 or len(val) == 0:
        raise UserError(f"--dataset {name}: {len(order)} training images are too few to carve a validation set from; "
                        "add images, raise --train-size, or change --val-share or --aux-share.")
    return Splits(train[rest.sort().values], train[val.sort().values], test, train[aux.sort().values], classes)


def dealt(y):
    """Order that takes an image of every class in turn: the first of a folder's test images, which are shown, are then not all of one class."""
    order = y.argsort(stable=True)
    turn = torch.cat([torch.arange(n) for n in y.bincount().tolist()])  # [N] the how many-th of its class each of these is
    return order[turn.argsort(stable=True)]


def draw_shapes(n, seed=0, size=shapes.SIZE):
    return Images(*shapes.draw(n, seed, size))


def import_torchvision():
    """torchvision, also beside a torch that its native operators were not built for.

    The published torchvision wheel is built for CUDA. Beside a CPU-only torch its extension cannot load, and the import
    stops where it registers a meta kernel for an operator that does not exist: first nms, then qnms. We use neither, so
    declaring their signatures is enough; on any other error nothing is declared and the error is passed on.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
    for signature in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                      "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):
        torch.library.define("torchvision::" + signature.split("(")[0], signature[signature.index("("):])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        return importlib.import_module("torchvision")


def load_cifar(name, data_dir, image_size):
    if image_size not in (None, 32):
        raise UserError(f"--image-size {image_size}: {name} is 32x32; leave the flag out.")
    import_torchvision()
    datasets = importlib.import_module("torchvision.datasets")
    cls = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    try:
        parts = [cls(data_dir, train=is_train, download=True) for is_train in (True, False)]
    except Exception as error:  # no network, a broken archive, an unwritable folder: torchvision raises many kinds
        raise UserError(f"--dataset {name}: neither found in {data_dir} nor downloaded ({one_line(error)}); put "
                        f"{cls.base_folder} there, pass its parent as --data-dir, or use --dataset shapes.") from None
    train, test = (Images(torch.from_numpy(part.data).permute(0, 3, 1, 2), torch.tensor(part.targets)) for part in parts)
    return train, test, parts[0].classes


def load_folder(folder, image_size, cache_dir):
    """train/CLASS/* and test/CLASS/*, or Tiny ImageNet's own layout -> (train, test, class names)."""
    folder = Path(folder)
    if not is_folder(folder):
        raise UserError(f"--dataset: there is no folder {folder}; use shapes, cifar10, cifar100, tinyimagenet, "
                        "facescrub or a folder with train/CLASS/* and test/CLASS/*.")
    try:
        files, classes = (tiny_imagenet_files if (folder / "wnids.txt").is_file() else class_folder_files)(folder)
    except OSError as error:
        raise UserError(f"--dataset {folder}: cannot be read ({one_line(error)}); mend its permissions or copy it.") from None
    listing = "\n".join(f"{split} {path.relative_to(folder)} {label} {path.stat().st_size} {path.stat().st_mtime_ns}"
                        for split, rows in files.items() for path, label in rows)
    stamp = hashlib.sha256(f"{image_size}\n{listing}".encode(errors="surrogateescape")).hexdigest()
    cached = read_cache(folder, image_size, cache_dir, stamp, files)
    if cached is None:
        size = image_size or native_size(files["train"][0][0])
        cached = {"stamp": stamp}
        for split, rows in files.items():
            with warnings.catch_warnings():  # of a damaged file only the error is shown
                warnings.simplefilter("ignore")
                cached[split + "_x"] = torch.stack([decode(path, size) for path, _ in rows])
            cached[split + "_y"] = torch.tensor([label for _, label in rows])
        write_cache(folder, image_size, cache_dir, cached)
    train, test = (Images(cached[s + "_x"].permute(0, 3, 1, 2), cached[s + "_y"]) for s in ("train", "test"))
    return train, test, classes


def is_folder(path):
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def class_folder_files(folder):
    for split in ("train", "test"):
        if not (folder / split).is_dir():
            raise UserError(f"--dataset {folder}: there is no folder {folder / split}; expected train/CLASS/* and test/CLASS/*.")
    classes = sorted(p.name for p in (folder / "train").iterdir() if p.is_dir() and not p.name.startswith("."))
    if not classes:
        raise UserError(f"--dataset {folder}: {folder / 'train'} has no class folders; expected train/CLASS/* and test/CLASS/*.")
    extra = {p.name for p in (folder / "test").iterdir() if p.is_dir() and not p.name.startswith(".")} - set(classes)
    if extra:
        raise UserError(f"--dataset {folder}: class {min(extra)} is in test but not in train; give both the same class folders.")
    files = {split: [(path, label) for label, name in enumerate(classes) for path in image_files(folder / split / name)]
             for split in ("train", "test")}
    return files, classes


def tiny_imagenet_files(folder):
    """train/WNID/images/*, val/images/* with val/val_annotations.txt (its validation images are our test images)."""
    if not (folder / "train").is_dir():
        raise UserError(f"--dataset {folder}: {folder / 'train'} is missing; unpack the original archive again.")
    wnids = [p.name for p in sorted((folder / "train").iterdir()) if p.is_dir()]
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    train = [(path, label_of[wnid]) for wnid in wnids for path in image_files(folder / "train" / wnid / "images")]
    annotations = folder / "val" / "val_annotations.txt"
    if not annotations.is_file():
        raise UserError(f"--dataset {folder}: {annotations} is missing; unpack the original archive again.")
    test = []
    for number, line in enumerate(annotations.read_text(errors="replace").splitlines(), 1):
        name, wnid, *_ = [*line.split("\t"), "", ""]
        if name and (wnid not in label_of or Path(name).name != name):
            raise UserError(f"--dataset {folder}: line {number} of {annotations} does not name an image and a class of train; unpack the original archive again.")
        test += [(folder / "val" / "images" / name, label_of[wnid])] if name else []
    missing = [path for path, _ in test if not path.is_file()]
    if missing or not test:
        raise UserError(f"--dataset {folder}: {missing[0] if missing else annotations} is missing or empty; unpack the original archive again.")
    return {"train": train, "test": test}, wnids


def image_files(folder):
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_ENDINGS) if folder.is_dir() else []
    if not files:
        raise UserError(f"{folder}: this class has no images; add some or remove the class from train and test.")
    for path in files:
        if not path.is_file():
            raise UserError(f"{path}: not a file nor a link to one; replace or delete it.")
    return files


def native_size(path):
    with open_image(path) as image:
        return min(image.size)


def open_image(path):
    from PIL import Image  # comes with torchvision
    try:
        return Image.open(path)
    except (OSError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: not a readable image ({one_line(error)}); replace or delete it.") from None


def decode(path, size):
    """-> uint8 [size, size, 3]: RGB, short side resized to `size`, centre-cropped."""
    from PIL import Image
    try:
        with open_image(path) as image:
            if image.mode == "F":  # could be in [0, 1], in [0, 255], NaN
                raise ValueError("floating-point pixels have no agreed range: save it with 8 bits")
            if image.mode.startswith("I"):  # 16-bit grey: convert("RGB") would clip it at 255
                image = image.convert("I").point(lambda value: value / 256).convert("L")
            image = image.convert("RGB")
            w, h = image.size
            if (w, h) != (size, size):
                scale = size / min(w, h)
                if w * h * scale ** 2 > MAX_PIXELS:
                    raise ValueError(f"{w}x{h} is too long to be resized to a short side of {size}")
                image = image.resize((max(size, round(w * scale)), max(size, round(h * scale))), Image.Resampling.BILINEAR)
                left, top = (image.width - size) // 2, (image.height - size) // 2
                image = image.crop((left, top, left + size, top + size))
            return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(size, size, 3)
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{path}: not a readable image ({one_line(error)}); replace or delete it.") from None


# ---------------------------------------------------------------------------------------------- cache

def cache_paths(folder, image_size, cache_dir):
    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return folder / f".cem-cache-{image_size or 'native'}.pt", Path(cache_dir) / f"cache-{key}-{image_size or 'native'}.pt"


def read_cache(folder, image_size, cache_dir, stamp, files):
    for path in cache_paths(folder, image_size, cache_dir):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                cached = torch.load(path, weights_only=True)
        except Exception:  # absent, half-written by another program, of an older version: decode again
            continue
        if isinstance(cached, dict) and cached.get("stamp") == stamp and all(fits(cached, split, rows) for split, rows in files.items()):
            return cached
    return None


def fits(cached, split, rows):
    """One uint8 image and the right label for each file."""
    x, y = cached.get(split + "_x"), cached.get(split + "_y")
    return (torch.is_tensor(x) and x.dtype == torch.uint8 and x.dim() == 4 and x.shape == (len(rows), x.shape[1], x.shape[1], 3)
            and torch.is_tensor(y) and torch.equal(y, torch.tensor([label for _, label in rows])))


def write_cache(folder, image_size, cache_dir, cached):
    for path in cache_paths(folder, image_size, cache_dir):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, lambda temporary: torch.save(cached, temporary))
            return
        except (OSError, RuntimeError):  # a read-only folder (torch.save raises RuntimeError): try the next place, or do without
            continue
