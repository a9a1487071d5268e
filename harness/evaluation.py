"""A trained encoder as its attackers see it, and what can be said about it without an attacker."""

import hashlib
import math

import torch

import cem
from harness.data import EVAL_BATCH, image_hashes, to_float
from harness.files import say
from harness.split_net import count_flops, count_params, latency_ms

FEATURE_BATCH = 250  # images through the encoder at a time: what lies between two layers stays in the cache
AUDIT_NUMBERS = 50_000_000  # at most so many features, samples times D, are held for the audit
FISHER_IMAGES = 1000
LABEL_WIDTH = 70  # pixels left of the pictures, for the name of the row


class Victim:
    """All that an attacker may use: the encoder (in eval mode) and the channel with its wire."""

    def __init__(self, encoder, sigma, wire=lambda z: z):
        self.encoder, self.sigma, self.wire = encoder, sigma, wire

    @torch.no_grad()
    def features(self, x):
        """Clean features of uint8 images, on the encoder's device."""
        self.encoder.eval()
        device, out = next(self.encoder.parameters()).device, None
        for start in range(0, len(x), FEATURE_BATCH):
            z = self.encoder(to_float(x[start : start + FEATURE_BATCH].to(device)))
            if out is None:  # filled in place: never two copies of all features
                out = z.new_empty(len(x), *z.shape[1:]).contiguous(memory_format=torch.channels_last)
            out[start : start + FEATURE_BATCH] = z
        return out

    def send(self, z, looks=1):
        """z' = wire(z + n), fresh noise on every call; of several `looks` the mean of what was not dropped."""
        total, arrived = 0, 0
        for _ in range(looks):
            sent = self.wire(cem.channel(z, self.sigma) if self.sigma else z)
            total, arrived = total + sent, arrived + (sent != 0)
        return total / arrived.clamp(min=1)


def state_hash(module):
    """Of its weights and buffers: an attack must leave an encoder as it was."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def accuracy(net, victim, images, draws=1):
    """How often the server is right: the mean over so many draws of the noise."""
    net.eval()
    parts = victim.features(images.x).split(EVAL_BATCH)
    said = [torch.cat([net.server(victim.send(z)).argmax(1) for z in parts]).cpu() for _ in range(draws)]
    return (torch.stack(said) == images.y).float().mean().item()


def leakage(victim, splits, seed):
    """The audit of cem.py on a run's images, and dFIL -> a dict for results.json."""
    nothing = dict.fromkeys(("bits", "stderr", "floor_factor", "dfil", "dfil_stderr"))
    if not victim.sigma:
        return nothing
    dim = victim.features(splits.test.x[:1]).numel()
    generator = torch.Generator().manual_seed(seed)

    def sample(images):
        keep = max(1000, AUDIT_NUMBERS // dim)
        few = len(images) <= keep
        return images if few else images[torch.randperm(len(images), generator=generator)[:keep]]

    fit = sample(splits.train)
    known = set(image_hashes(fit))
    test = splits.test[torch.tensor([h not in known for h in image_hashes(splits.test)], dtype=torch.bool)]
    if len(test) < 2:
        say("the leakage audit needs test images that are not among the training images: left out")
        return nothing
    test = sample(test)
    z_fit, z_test = victim.features(fit.x).cpu(), victim.features(test.x).cpu()
    bits, stderr = cem.leakage_bits(z_fit, fit.y, z_test, victim.sigma, generator)
    device = next(victim.encoder.parameters()).device
    dfil, dfil_stderr = cem.fisher_information(
        victim.encoder, test[:FISHER_IMAGES].float().to(device), victim.sigma, generator=generator
    )
    # exp(−2 I/d): by how much what is sent can lower the floor under the error, d the number of pixels
    factor = math.exp(-2 * bits * math.log(2) / test.x[0].numel())
    return {"bits": bits, "stderr": stderr, "floor_factor": factor, "dfil": dfil, "dfil_stderr": dfil_stderr}


def encoder_cost(encoder, image_size):
    return {
        "params": count_params(encoder),
        "flops": count_flops(encoder, image_size),
        "latency_ms": latency_ms(encoder, image_size),
    }


def show(results, folder):
    """Print what results.json holds."""
    lines = [("accuracy", f"{100 * results['accuracy']:8.2f} %")]
    if results["accuracy"] < 2 * results["chance"]:
        lines.append(
            ("", f"near chance, which is {100 * results['chance']:.1f} %: the network has learnt little")
        )
    for name, attack in results["attacks"].items():
        for split in ("train", "test"):
            m = attack[split]
            text = f"MSE {m['mse']:.4f}  NMSE {m['nmse']:.3f}  PSNR {m['psnr']:5.2f} dB  SSIM {m['ssim']:.3f}"
            best = "  <- strongest" if results["strongest"] == name and len(results["attacks"]) > 1 else ""
            lines.append((f"{name} on {split}", text + best))
        if attack.get("converged") is False:
            lines.append(
                ("", f"{name} was still improving when it reached its limit of {attack['epochs']} epochs")
            )
    leak = results["leakage"]
    if leak["bits"] is None:
        lines.append(
            ("leakage", "unbounded (no noise)" if not results["config"]["sigma"] else "not measured")
        )
    else:
        below = "; below 0: the fitted density is no use, so this bounds nothing" if leak["bits"] < 0 else ""
        lines.append(("leakage, at most", f"{leak['bits']:8.1f} bits (± {leak['stderr']:.1f}){below}"))
        lines.append(("Fisher information", f"{leak['dfil']:8.3g} per pixel (± {leak['dfil_stderr']:.2g})"))
    for name, figures in results["cel"].items():
        shown = ", ".join(f"{key} {value:.3g}" for key, value in figures.items())
        lines.append((f"surrogate {name}", shown))
    cost, seconds = results["encoder"], results["seconds"]
    megaflop = f"{cost['flops'] / 1e6:8.2f} MFLOP and {cost['latency_ms']:.2f} ms an image"
    lines.append(("encoder", f"{megaflop}, {cost['params']:,} parameters"))
    lines.append(("time", f"{seconds['train']:.0f} s training, {seconds['attack']:.0f} s attack"))
    say("\n" + "\n".join(f"{label:22}{text}" for label, text in lines) + f"\n-> {folder}/")


def save_pictures(path, originals, rows, columns=10, zoom=3):
    """A PNG with the originals above what each attacker got of them; `rows` is {name: float images}."""
    from PIL import Image, ImageDraw  # comes with torchvision

    columns = min(columns, len(originals))
    strips = {"original": originals[:columns], **{name: x[:columns] for name, x in rows.items()}}
    tile = originals.shape[-1] * zoom
    sheet = Image.new("RGB", (LABEL_WIDTH + columns * tile, len(strips) * tile), "white")
    for i, (name, x) in enumerate(strips.items()):
        pixels = (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(2, 0, 3, 1).reshape(x.shape[-2], -1, 3)
        strip = Image.fromarray(pixels.contiguous().numpy()).resize(
            (columns * tile, tile), Image.Resampling.NEAREST
        )
        sheet.paste(strip, (LABEL_WIDTH, i * tile))
        ImageDraw.Draw(sheet).text((5, i * tile + tile // 2 - 5), name, fill="black")
    sheet.save(path, format="PNG")
