"""Model inversion: attackers that reconstruct x from what was sent.

Threat model. The attacker owns the encoder (weights and buffers) and knows the channel: z' = wire(z + n) with fresh noise
n ~ N(0, σ²I) on every look and whatever a defence does on the wire. It has images of its own: the victim's training
images (`train`, the worst case) or images the victim never saw (`aux`). It never touches the victim's weights.

    decoder   a residual network D trained to minimise ‖D(z') − x‖²; the strongest of its epochs on a split of the
              attacker's own images (`stop`) is kept
    gan       the same network as a generator, trained on ‖D(z') − x‖² − w·critic(D(z')) with a WGAN-GP critic that has
              seen the attacker's own images only
    whitebox  no training: minimise ‖F_e(x) − z'‖² / D + t·TV(x) + ρ·‖x − x̂‖² / d over the image itself, x̂ what the
              decoder made of z' if it ran before (otherwise ρ = 0), from several starts (grey, noise, x̂); the start with the
              least objective is taken. For Gaussian noise and x ~ N(x̂, e·I), e the decoder's error, the most probable x has
              ρ = (d/D)·σ²/e; a little more keeps x near x̂ where z' does not see it. Done for the first
              --whitebox-images of each reported split; the attackers are compared on these

Reported images are in no attacker's training or stopping data: `test` are the data set's own test images, `train` are
images the victim was trained on and the attacker was not (`members`).
"""

import copy
import hashlib
import math
import sys
from dataclasses import dataclass

import torch
from torch import nn

from cem import channel
from data import EVAL_BATCH, Images, batches, to_float
from decoder import Decoder, fit_decoder
from metrics import metrics
from report import UserError, cli

ATTACKER_SEED = 7919  # keeps the attackers' random numbers apart from the victim's and from any proxy's
LOOK_SEED = 15_485_863  # and these from the noise on the images that are reported
MEMBERS_SHARE, MEMBERS_MAX = 0.1, 1000  # training images kept back from the attacker, to be reported as `train`
STOP_SHARE, STOP_MAX = 0.1, 1000
FEATURE_BATCH = 250  # images through the encoder at a time: what it holds between two layers stays in the cache
GAN_WEIGHT, GAN_PENALTY, CRITIC_CHANNELS, CRITIC_LR = 1e-3, 10.0, 24, 2e-4
WHITEBOX_LR, WHITEBOX_TV, WHITEBOX_TV_NOISE = 0.05, 1e-5, 0.1  # t = WHITEBOX_TV + WHITEBOX_TV_NOISE·σ²
WHITEBOX_NEAR = 0.1  # ρ = WHITEBOX_NEAR + (d/D)·σ²/e


# ------------------------------------------------------------------------------------------------ the victim

class Victim:
    """All that an attacker may use: the encoder (in eval mode) and the channel with its wire."""

    def __init__(self, encoder, sigma, wire=lambda z: z):
        self.encoder, self.sigma, self.wire = encoder.eval(), sigma, wire

    @torch.no_grad()
    def features(self, x):
        """Clean features of uint8 images, on the encoder's device."""
        device, out = next(self.encoder.parameters()).device, None
        for start in range(0, len(x), FEATURE_BATCH):
            z = self.encoder(to_float(x[start:start + FEATURE_BATCH].to(device)))
            if out is None:  # filled in place: never two copies of all features
                out = torch.empty(len(x), *z.shape[1:], dtype=z.dtype, device=device, memory_format=torch.channels_last)
            out[start:start + FEATURE_BATCH] = z
        return out

    def send(self, z):
        # z' = wire(z + n), fresh noise on every call
        return self.wire(channel(z, self.sigma) if self.sigma else z)

    def fingerprint(self):
        """Hash of the encoder's weights and buffers: an attack must leave it as it was."""
        digest = hashlib.sha256()
        for name, tensor in self.encoder.state_dict().items():
            digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ the images

@dataclass
class AttackImages:
    fit: Images  # the attacker trains on these
    stop: Images  # and stops on these
    report: dict  # name -> Images: reconstructed and reported, seen by no attacker before

    def check(self):
        """Refuse any image that is reported and was also trained or stopped on."""
        known = row_hashes(self.fit) | row_hashes(self.stop)
        for name, images in self.report.items():
            shared = len(known & row_hashes(images))
            if shared:
                raise UserError(f"{shared} of the reported {name} images are also in the attacker's own data; split them apart.")


def each_hash(images):
    return (hash(x.tobytes()) for x in images.x.permute(0, 2, 3, 1).contiguous().numpy())


def row_hashes(images):
    return set(each_hash(images))


def attacker_images(splits, which="train", seed=0):
    """Fit, stop and reported images for an attacker who holds the victim's training images, or `aux` images."""
    generator = torch.Generator().manual_seed(ATTACKER_SEED + seed)
    order = torch.randperm(len(splits.train), generator=generator)
    n_members = max(1, min(MEMBERS_MAX, round(len(order) * MEMBERS_SHARE)))
    members, rest = splits.train[order[:n_members]], splits.train[order[n_members:]]
    pool = rest if which == "train" else splits.aux[torch.randperm(len(splits.aux), generator=generator)]
    # A data set may hold the same picture twice: the attacker loses its copies of what is reported.
    report = {"train": members, "test": splits.test}
    taken = row_hashes(members) | row_hashes(splits.test)
    pool = pool[torch.tensor([key not in taken for key in each_hash(pool)], dtype=torch.bool)]
    if len(pool) < 2:
        raise UserError(f"--attacker-data {which}: {len(pool)} images are too few to train an attacker on; give it more.")
    n_stop = max(1, min(STOP_MAX, round(len(pool) * STOP_SHARE)))
    return AttackImages(pool[n_stop:], pool[:n_stop], report)


# ------------------------------------------------------------------------------------------------ attacks

def decoder_attack(victim, images, options, progress, known, make_term=None):
    """-> (reconstruct, facts): reconstruct(z') decodes what was sent. `known` is what the earlier attackers returned."""
    image_size = images.fit.x.shape[-1]
    device = next(victim.encoder.parameters()).device
    shape = victim.features(images.stop.x[:1]).shape[1:]
    decoder = Decoder(shape, image_size, options.attack_blocks, options.attack_channels)
    decoder = decoder.to(device, memory_format=torch.channels_last)
    batch = min(options.attack_batch, len(images.fit))

    def pairs(part=images.fit, size=batch, augment=True):
        for x, _ in batches(part, size, augment=augment, device=device):
            with torch.no_grad():
                sent = victim.send(victim.encoder(x))
            yield sent, x

    decoder.observe(victim.send(victim.features(images.fit.x[:EVAL_BATCH])))
    steps = len(images.fit) // batch
    best_epoch, error = fit_decoder(decoder, pairs, lambda: pairs(images.stop, EVAL_BATCH, False), options.attack_epochs, steps,
                                    options.attack_lr, progress, make_term(image_size, device) if make_term else None)

    @torch.no_grad()
    def reconstruct(sent):
        return torch.cat([decoder(part) for part in sent.split(EVAL_BATCH)])

    return reconstruct, {"params": sum(p.numel() for p in decoder.parameters()), "best_epoch": best_epoch, "stop_mse": error,
                         "fit_images": len(images.fit)}


class Critic(nn.Module):
    """WGAN-GP: `term(fake, real)` trains the critic one step and returns what the generator pays."""

    def __init__(self, image_size, device, channels=CRITIC_CHANNELS):
        super().__init__()
        c, layers = 3, []
        for multiple in (1, 2, 4):
            layers += [nn.Conv2d(c, multiple * channels, 4, 2, 1), nn.LeakyReLU(0.2)]
            c = multiple * channels
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(c * (image_size // 8) ** 2, 1)).to(device)
        self.optimizer = torch.optim.Adam(self.layers.parameters(), CRITIC_LR, betas=(0.5, 0.9))

    def term(self, fake, real):
        # critic: min E[f(fake)] − E[f(real)] + 10 E[(‖∇f(mix)‖ − 1)²],  mix = u·real + (1−u)·fake
        u = torch.rand(len(real), 1, 1, 1, device=real.device)
        mix = (u * real + (1 - u) * fake.detach()).requires_grad_()
        slope, = torch.autograd.grad(self.layers(mix).sum(), mix, create_graph=True)
        loss = self.layers(fake.detach()).mean() - self.layers(real).mean() + GAN_PENALTY * (slope.flatten(1).norm(dim=1) - 1).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        # generator: −w·E[f(fake)]
        self.layers.requires_grad_(False)
        score = -GAN_WEIGHT * self.layers(fake).mean()
        self.layers.requires_grad_(True)
        return score


def gan_attack(victim, images, options, progress, known):
    return decoder_attack(victim, images, options, progress, known, lambda size, device: Critic(size, device).term)


def total_variation(x):
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean((1, 2, 3)) + (x[..., 1:] - x[..., :-1]).abs().mean((1, 2, 3))


def whitebox_attack(victim, images, options, progress, known):
    size = images.fit.x.shape[-1]
    frozen = copy.deepcopy(victim.encoder).requires_grad_(False)
    tv_weight = WHITEBOX_TV + WHITEBOX_TV_NOISE * victim.sigma ** 2
    calls = len(images.report)

    def reconstruct(sent):
        done = reconstruct.calls = reconstruct.calls + 1
        n = len(sent)
        starts = [torch.full((n, 3, size, size), 0.5, device=sent.device), torch.rand(n, 3, size, size, device=sent.device)]
        guess, near = starts[0], 0.0
        if "decoder" in known:
            reconstruct_decoder, facts = known["decoder"]
            guess = reconstruct_decoder(sent)
            near = WHITEBOX_NEAR + guess[0].numel() / sent[0].numel() * victim.sigma ** 2 / facts["stop_mse"]
            starts.append(guess)
        u = torch.logit(torch.cat(starts).clamp(0.01, 0.99)).requires_grad_()  # x = sigmoid(u) stays in (0, 1)
        target, guess = sent.repeat(len(starts), 1, 1, 1), guess.repeat(len(starts), 1, 1, 1)
        optimizer = torch.optim.Adam([u], WHITEBOX_LR)
        for step in range(options.whitebox_steps):
            optimizer.param_groups[0]["lr"] = WHITEBOX_LR * 0.5 * (1 + math.cos(math.pi * step / options.whitebox_steps))
            x = torch.sigmoid(u)
            # ‖F_e(x) − z'‖² / D + t·TV(x) + ρ·‖x − x̂‖² / d, each image for itself; an exact 0 was dropped and says nothing
            objective = (((frozen(x) - target) * (target != 0)).square().mean((1, 2, 3)) + tv_weight * total_variation(x)
                         + near * (x - guess).square().mean((1, 2, 3)))
            u.grad, = torch.autograd.grad(objective.sum(), u)
            optimizer.step()
            progress(((done - 1) * options.whitebox_steps + step + 1) / (calls * options.whitebox_steps))
        best = objective.detach().view(len(starts), n).argmin(0)
        return torch.sigmoid(u.detach()).view(len(starts), n, 3, size, size)[best, torch.arange(n, device=sent.device)]

    reconstruct.calls = 0
    return reconstruct, {"steps": options.whitebox_steps, "starts": 3 if "decoder" in known else 2, "tv_weight": tv_weight}


ATTACKS = {"decoder": decoder_attack, "gan": gan_attack, "whitebox": whitebox_attack}


def run(names, victim, images, options, seed=0, progress=lambda name, done: None):
    """-> (results, pictures): metrics per attack and split, and each attack's reconstructions of the test images.

    All attackers look at the same z'. `mse_common` is the error on the images that every attacker reconstructed.
    """
    images.check()
    before = victim.fingerprint()
    torch.manual_seed(LOOK_SEED + seed)
    seen = {split: victim.send(victim.features(part.x)) for split, part in images.report.items()}
    results, pictures, known = {}, {}, {}
    few = options.whitebox_images if "whitebox" in names else None
    for name in sorted(names, key=list(ATTACKS).index):
        torch.manual_seed(ATTACKER_SEED + seed)
        reconstruct, facts = known[name] = ATTACKS[name](victim, images, options, lambda done: progress(name, done), known)
        results[name] = dict(facts)
        for split, part in images.report.items():
            pictures[name] = reconstruct(seen[split][:few] if name == "whitebox" else seen[split]).cpu()
            original = part.float()[:len(pictures[name])]
            results[name][split] = metrics(original, pictures[name])
            results[name][split]["images"] = len(original)
            results[name][split]["mse_common"] = metrics(original[:few], pictures[name][:few])["mse"]
    if victim.fingerprint() != before:
        raise RuntimeError("an attack changed the victim's weights or buffers")
    return results, pictures


def strongest(results):
    """-> {split: name of the attack with the least MSE on the images that all of them reconstructed}"""
    return {split: min(results, key=lambda name: results[name][split]["mse_common"]) for split in ("train", "test")} if results else {}


def main(argv=None):
    """python attack.py runs/NAME [--attack ...]: attack a trained run again -> attack.json, attack.png beside its results."""
    from audit import attack_checkpoint  # audit.py imports this file
    return cli(attack_checkpoint, argv, "attack.py")


if __name__ == "__main__":
    sys.exit(main())
