"""Images in memory: uint8 tensors, deterministic splits, batches that are cropped and flipped whole.

    data = load("shapes", seed=0)            # or cifar10, cifar100, tinyimagenet, facescrub, a folder
    data.train.x                             # uint8 [N, 3, H, W], stored channels_last
    data.train.y                             # int64 [N]
    for x, y in batches(data.train, 128): ...   # x float32 in [0, 1]

Splits. `test` is the data set's own and nothing is ever selected on it. `val` is carved from the training
images by the seed; so is `aux` (images for an attacker who has none of the victim's), empty unless asked
for.
"""

import hashlib
import importlib
import socket
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from harness import parallel, shapes
from harness.files import UserError, one_line
from harness.folders import load_folder

NAMED_FOLDERS = {"tinyimagenet": "tiny-imagenet-200", "facescrub": "facescrub"}
VAL_SHARE = 0.1  # of the training images, for choosing settings
AUX_SHARE = 0.25  # of them, for an attacker with images of its own, where asked for
MIN_IMAGE_SIZE = 32
NAMED = ("cifar10", "cifar100", *NAMED_FOLDERS)
SHAPES_TRAIN, SHAPES_TEST = 6000, 1000
CROP_PADDING = 4
DOWNLOAD_PATIENCE = 20  # seconds without an answer
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


def image_hashes(images):
    """A hash of the pixels of each image, to find the same picture in two splits."""
    return [hash(x.tobytes()) for x in images.x.permute(0, 2, 3, 1).contiguous().numpy()]


def to_float(x):
    """uint8 pixels -> float32 in [0, 1], channels_last."""
    return x.to(torch.float32, memory_format=torch.channels_last).div_(255)


# ------------------------------------------------------------------------------------------ batches


def batches(images, batch_size, device="cpu", order=None):
    """One epoch as (x float32 [B, 3, H, W], y [B]), cropped and flipped, in random order or in `order`,
    without the last short batch."""
    order = torch.randperm(len(images)) if order is None else order
    for start in range(0, len(order) - len(order) % batch_size, batch_size):
        index = order[start : start + batch_size]
        yield to_float(crop_and_flip(images.x[index]).to(device)), images.y[index].to(device)


def crop_and_flip(x, generator=None, padding=CROP_PADDING):
    """Each image shifted by up to `padding` pixels (edges repeated) and mirrored with probability 1/2."""
    b, _, h, w = x.shape
    shift_y, shift_x = torch.randint(-padding, padding + 1, (2, b, 1), generator=generator)
    rows = (torch.arange(h) + shift_y).clamp_(0, h - 1)  # [B, H]
    cols = (torch.arange(w) + shift_x).clamp_(0, w - 1)  # [B, W]
    mirrored = torch.rand(b, 1, generator=generator) < 0.5
    cols = torch.where(mirrored, cols.flip(1), cols)
    pixels = (torch.arange(b)[:, None, None] * h + rows[:, :, None]) * w + cols[:, None, :]  # [B, H, W]
    flat = x.permute(0, 2, 3, 1).reshape(b * h * w, -1)  # [B·H·W, 3], a view of channels_last storage
    return flat[pixels.flatten()].view(b, h, w, -1).permute(0, 3, 1, 2)


# ------------------------------------------------------------------------------------------ loading


def load(
    name="shapes", data_dir="data", image_size=None, seed=0, val_share=0.1, aux_share=0.0, train_size=None
):
    """-> Splits. `train_size` keeps so many training images (by the seed) before val and aux come off."""
    if name in ("shapes", "cifar10", "cifar100") and image_size not in (None, 32):
        raise UserError(f"--image-size {image_size}: {name} is 32x32; leave the flag out.")
    if name == "shapes":
        train = draw_shapes(SHAPES_TRAIN, seed=2 * seed)
        test = draw_shapes(SHAPES_TEST, seed=2 * seed + 1)
        classes = list(shapes.NAMES)
    elif name in ("cifar10", "cifar100"):
        train, test, classes = load_cifar(name, data_dir)
    else:
        folder = Path(data_dir) / NAMED_FOLDERS[name] if name in NAMED_FOLDERS else Path(name)
        train, test, classes = load_folder(folder, image_size, data_dir)
        train, test = Images(*train), Images(*test)
        test = test[dealt(test.y)]
    if len(classes) < 2:
        raise UserError(
            f"--dataset {name}: found {len(classes)} class; a classifier needs at least 2 class folders."
        )
    if train_size and train_size < len(classes):
        raise UserError(
            f"--train-size {train_size}: there are {len(classes)} classes; use at least an image of each."
        )

    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    order = order[:train_size] if train_size else order
    n_val, n_aux = round(len(order) * val_share), round(len(order) * aux_share)
    val, aux, rest = order[:n_val], order[n_val : n_val + n_aux], order[n_val + n_aux :]
    if len(rest) == 0 or len(val) == 0:
        raise UserError(
            f"--dataset {name}: {len(order)} training images are too few to carve a validation set from; "
            "add images or raise --train-size."
        )
    return Splits(
        train[rest.sort().values], train[val.sort().values], test, train[aux.sort().values], classes
    )


def load_splits(args):
    """The images of a run's settings."""
    aux_share = AUX_SHARE if args.attacker_data == "aux" else 0.0
    splits = load(
        args.dataset, args.data_dir, args.image_size, args.seed, VAL_SHARE, aux_share, args.train_size
    )
    side = splits.train.x.shape[-1]
    if side < MIN_IMAGE_SIZE:
        raise UserError(
            f"--dataset {args.dataset}: its images have {side} pixels a side; "
            f"add --image-size {MIN_IMAGE_SIZE}."
        )
    if len(splits.train) < args.batch_size * parallel.processes():
        raise UserError(
            f"--batch-size {args.batch_size}: there are only {len(splits.train)} training images; lower it."
        )
    return splits


def check_images(state, splits, path):
    """A checkpoint belongs to its images."""
    if state["data"] != fingerprint(splits):
        raise UserError(f"{path}: was made with other images than these; restore them or train again.")


def dealt(y):
    """Order that takes an image of every class in turn: the first ones, which are shown, are then mixed."""
    order = y.argsort(stable=True)
    # [N] the how many-th of its class each of these is
    turn = torch.cat([torch.arange(n) for n in y.bincount().tolist()])
    return order[turn.argsort(stable=True)]


def draw_shapes(n, seed=0, size=shapes.SIZE):
    return Images(*shapes.draw(n, seed, size))


def import_torchvision():
    """torchvision, also beside a torch that its native operators were not built for.

    The published torchvision wheel is built for CUDA. Beside a CPU-only torch its extension cannot load,
    and the import stops where it registers a meta kernel for an operator that does not exist: first nms,
    then qnms. We use neither, so declaring their signatures is enough; on any other error nothing is
    declared and the error is passed on.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
    for signature in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        torch.library.define("torchvision::" + signature.split("(")[0], signature[signature.index("(") :])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        return importlib.import_module("torchvision")


def load_cifar(name, data_dir):
    import_torchvision()
    datasets = importlib.import_module("torchvision.datasets")
    cls = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    socket.setdefaulttimeout(DOWNLOAD_PATIENCE)
    try:
        parts = [cls(data_dir, train=is_train, download=True) for is_train in (True, False)]
    except Exception as error:  # no network, a broken archive, an unwritable folder: many kinds
        raise UserError(
            f"--dataset {name}: neither found in {data_dir} nor downloaded ({one_line(error)}); put "
            f"{cls.base_folder} there, pass its parent as --data-dir, or use --dataset shapes."
        ) from None
    train, test = (
        Images(torch.from_numpy(part.data).permute(0, 3, 1, 2), torch.tensor(part.targets)) for part in parts
    )
    return train, test, parts[0].classes
