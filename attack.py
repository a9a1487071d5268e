"""Model inversion: attackers that reconstruct x from what was sent.

    python attack.py runs/NAME --attack decoder,gan,whitebox     # a trained run again -> attack.json

Threat model. The attacker owns the encoder (weights and buffers) and knows the channel: z' = wire(z + n) with
fresh noise n ~ N(0, σ²I) on every look and whatever a defence does on the wire. It may average several looks
at the same picture (--looks). It has images of its own: the victim's training images (`train`, the worst
case) or images the victim never saw (`aux`). It never touches the victim's weights.

    decoder   a residual network D trained to minimise ‖D(z') − x‖²/d; the best of its epochs on a split of
              the attacker's own images (`stop`) is kept
    gan       the same network as a generator, trained on ‖D(z') − x‖²/d − w·critic(D(z')) with a WGAN-GP
              critic that has seen the attacker's own images only
    whitebox  no training: minimise ‖F_e(x) − z'‖²/D + t·TV(x) + ρ·‖x − x̂‖²/d over the image itself, x̂ what
              the decoder made of z' if it ran before (otherwise ρ = 0), from several starts (grey, noise,
              x̂); the start with the least objective is taken. For Gaussian noise and x ~ N(x̂, e·I), e the
              decoder's error, the most probable x has ρ = (d/D)·σ²/e; a little more keeps x near x̂ where z'
              does not see it. It is slow, so it reconstructs the first WHITEBOX_IMAGES of each split

Reported images are in no attacker's training or stopping data: `test` are the data set's own test images,
`train` are images the victim was trained on and the attacker was not. Which attacker is the strongest is
decided on the `stop` images, not on those that are reported.
"""

import argparse
import copy
import functools
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from harness.data import EVAL_BATCH, Images, check_images, image_hashes, load_splits, to_float
from harness.decoder import Decoder, fit_decoder
from harness.evaluation import Victim, accuracy, encoder_cost, leakage, save_pictures, show, state_hash
from harness.files import Progress, UserError, command_line, environment, read_ours, write
from harness.metrics import metrics
from harness.options import OF_THE_ATTACK, given_flags, make_parser, read_run, usable_device
from harness.parts import load_network
from harness.split_net import count_params, operations

ATTACKER_SEED = 7919  # keeps the attackers' random numbers apart from the victim's and from any proxy's
LOOK_SEED = 15_485_863  # and these from the noise on the images that are reported
MEMBERS_SHARE, MEMBERS_MAX = 0.1, 1000  # training images kept from the attacker, reported as `train`
STOP_SHARE, STOP_MAX = 0.1, 1000
FIT_MAX, EPOCH_MAX = 50_000, 20_000  # images an attacker trains on, and those of them in one epoch
BATCH, LR = 64, 3e-3  # of the decoder, and of its Adam
GAN_WEIGHT, GAN_PENALTY, CRITIC_CHANNELS, CRITIC_LR = 1e-3, 10.0, 24, 2e-4
DRAWS = 4  # of the noise in an accuracy that is reported: one draw alone is off by 0.2 points
WHITEBOX_IMAGES, WHITEBOX_STEPS, WHITEBOX_LR = 64, 300, 0.05
WHITEBOX_TV, WHITEBOX_TV_NOISE = 1e-5, 0.1  # t = WHITEBOX_TV + WHITEBOX_TV_NOISE·σ²
WHITEBOX_NEAR = 0.1  # ρ = WHITEBOX_NEAR + (d/D)·σ²/e


# ------------------------------------------------------------------------------------- the images


@dataclass
class AttackImages:
    fit: Images  # the attacker trains on these
    stop: Images  # and stops on these
    report: dict  # name -> Images: reconstructed and reported, seen by no attacker before

    def check(self):
        """Refuse any image that is reported and was also trained or stopped on."""
        known = {*image_hashes(self.fit), *image_hashes(self.stop)}
        for name, images in self.report.items():
            shared = len(known & {*image_hashes(images)})
            if shared:
                raise UserError(f"{shared} of the reported {name} images are the attacker's own.")


def attacker_images(splits, which="train", seed=0):
    """Fit, stop and reported images of an attacker with the victim's training images, or with `aux` ones."""
    generator = torch.Generator().manual_seed(ATTACKER_SEED + seed)
    order = torch.randperm(len(splits.train), generator=generator)
    n_members = max(1, min(MEMBERS_MAX, round(len(order) * MEMBERS_SHARE)))
    members, rest = splits.train[order[:n_members]], splits.train[order[n_members:]]
    pool = rest if which == "train" else splits.aux[torch.randperm(len(splits.aux), generator=generator)]
    # A data set may hold the same picture twice: the attacker loses its copies of what is reported.
    taken = {*image_hashes(members), *image_hashes(splits.test)}
    pool = pool[torch.tensor([key not in taken for key in image_hashes(pool)], dtype=torch.bool)]
    if len(pool) < 2:
        raise UserError(
            f"--attacker-data {which}: {len(pool)} images cannot train an attacker; give it more."
        )
    n_stop = max(1, min(STOP_MAX, round(len(pool) * STOP_SHARE)))
    fit = pool[n_stop : n_stop + FIT_MAX]
    return AttackImages(fit, pool[:n_stop], {"train": members, "test": splits.test})


# ------------------------------------------------------------------------------------- attacks


def decoder_attack(victim, images, args, progress, known, critic=None):
    """-> (reconstruct, facts): reconstruct(z') decodes what was sent. `known`: of earlier attackers."""
    image_size = images.fit.x.shape[-1]
    # a picture passes the encoder twice in all: as it is and mirrored
    straight = victim.features(images.fit.x)
    mirrored = victim.features(images.fit.x.flip(-1))
    decoder = Decoder(straight.shape[1:], image_size, *args.attack_size)
    decoder = decoder.to(straight.device, memory_format=torch.channels_last)
    batch = min(BATCH, len(images.fit))

    def pairs():
        order = torch.randperm(len(images.fit))[:EPOCH_MAX]
        for index in order[: len(order) - len(order) % batch].split(batch):
            mirror = torch.rand(batch) < 0.5
            x, z = to_float(images.fit.x[index]).to(straight.device), straight[index]
            x[mirror], z[mirror] = x[mirror].flip(-1), mirrored[index[mirror]]
            yield victim.send(z, args.looks), x

    # the same z' every epoch: fresh noise alone would move their error by up to 1 %
    sent = victim.send(victim.features(images.stop.x), args.looks)
    stop = list(zip(sent.split(EVAL_BATCH), images.stop.float().to(sent.device).split(EVAL_BATCH)))

    decoder.observe(victim.send(straight[:EVAL_BATCH], args.looks))
    term = critic(image_size, straight.device).term if critic else None
    steps = min(len(images.fit), EPOCH_MAX) // batch
    how = args.attack_epochs, steps, LR, progress, term, args.precision
    facts = fit_decoder(decoder, pairs, lambda: stop, *how)

    @torch.no_grad()
    def reconstruct(sent):
        return torch.cat([decoder(part) for part in sent.split(EVAL_BATCH)])

    facts |= {"params": count_params(decoder), "fit_images": len(images.fit)}
    # a step computes the pictures, and the gradients of weights and features, each at the cost of the first
    facts["operations"] = 3 * operations(decoder, straight[:1]) * steps * batch * facts["epochs"]
    return reconstruct, facts


class Critic(nn.Module):
    """WGAN-GP: `term(fake, real)` trains the critic one step and returns what the generator pays."""

    def __init__(self, image_size, device, channels=CRITIC_CHANNELS):
        super().__init__()
        c, layers = 3, []
        for multiple in (1, 2, 4):
            layers += [nn.Conv2d(c, multiple * channels, 4, 2, 1), nn.LeakyReLU(0.2)]
            c = multiple * channels
        layers += [nn.Flatten(), nn.Linear(c * (image_size // 8) ** 2, 1)]
        self.layers = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.Adam(self.layers.parameters(), CRITIC_LR, betas=(0.5, 0.9))

    def term(self, fake, real):
        # critic: min E[f(fake)] − E[f(real)] + 10 E[(‖∇f(mix)‖ − 1)²],  mix = u·real + (1−u)·fake
        u = torch.rand(len(real), 1, 1, 1, device=real.device)
        mix = (u * real + (1 - u) * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(self.layers(mix).sum(), mix, create_graph=True)
        loss = (
            self.layers(fake.detach()).mean()
            - self.layers(real).mean()
            + GAN_PENALTY * (slope.flatten(1).norm(dim=1) - 1).square().mean()
        )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        # generator: −w·E[f(fake)]
        self.layers.requires_grad_(False)
        score = -GAN_WEIGHT * self.layers(fake).mean()
        self.layers.requires_grad_(True)
        return score


gan_attack = functools.partial(decoder_attack, critic=Critic)


def total_variation(x):
    return x.diff(dim=2).abs().mean((1, 2, 3)) + x.diff(dim=3).abs().mean((1, 2, 3))


def whitebox_attack(victim, images, args, progress, known):
    size, sigma = images.fit.x.shape[-1], victim.sigma / math.sqrt(args.looks)
    frozen = copy.deepcopy(victim.encoder).requires_grad_(False)
    tv_weight = WHITEBOX_TV + WHITEBOX_TV_NOISE * sigma**2

    def reconstruct(sent):
        sent = sent[:WHITEBOX_IMAGES]
        n, grey = len(sent), torch.full((len(sent), 3, size, size), 0.5, device=sent.device)
        starts, guess, near = [grey, torch.rand_like(grey)], grey, 0.0
        if "decoder" in known:
            reconstruct_decoder, facts = known["decoder"]
            guess = reconstruct_decoder(sent)
            near = WHITEBOX_NEAR + guess[0].numel() / sent[0].numel() * sigma**2 / facts["stop_mse"]
            starts.append(guess)
        # x = sigmoid(u) stays in (0, 1)
        u = torch.logit(torch.cat(starts).clamp(0.01, 0.99)).requires_grad_()
        target, guess = sent.repeat(len(starts), 1, 1, 1), guess.repeat(len(starts), 1, 1, 1)
        optimizer = torch.optim.Adam([u], WHITEBOX_LR)
        for step in range(WHITEBOX_STEPS):
            fallen = 0.5 * (1 + math.cos(math.pi * step / WHITEBOX_STEPS))
            optimizer.param_groups[0]["lr"] = WHITEBOX_LR * fallen
            x = torch.sigmoid(u)
            # ‖F_e(x) − z'‖² / D + t·TV(x) + ρ·‖x − x̂‖² / d; an exact 0 was dropped and says nothing
            seen = ((frozen(x) - target) * (target != 0)).square().mean((1, 2, 3))
            objective = seen + tv_weight * total_variation(x) + near * (x - guess).square().mean((1, 2, 3))
            (u.grad,) = torch.autograd.grad(objective.sum(), u)
            optimizer.step()
            progress((step + 1) / WHITEBOX_STEPS)
        best = objective.detach().view(len(starts), n).argmin(0)
        images_of = torch.sigmoid(u.detach()).view(len(starts), n, 3, size, size)
        return images_of[best, torch.arange(n, device=sent.device)]

    starts = 3 if "decoder" in known else 2
    return reconstruct, {"steps": WHITEBOX_STEPS, "starts": starts, "tv_weight": tv_weight}


ATTACKS = {"decoder": decoder_attack, "gan": gan_attack, "whitebox": whitebox_attack}


def attack(victim, images, args, progress=lambda name, done: None):
    """-> (results, strongest, pictures): metrics per attacker and split, who did best on the stop images, and
    each one's reconstructions of the test images. All attackers look at the same z'."""
    images.check()
    before, seed = state_hash(victim.encoder), args.seed
    torch.manual_seed(LOOK_SEED + seed)
    looked_at = {**images.report, "stop": images.stop}
    seen = {split: victim.send(victim.features(part.x), args.looks) for split, part in looked_at.items()}
    results, pictures, known, common = {}, {}, {}, WHITEBOX_IMAGES if "whitebox" in args.attack else None
    for name in [name for name in ATTACKS if name in args.attack]:
        torch.manual_seed(ATTACKER_SEED + seed)
        tick = functools.partial(progress, name)
        reconstruct, facts = known[name] = ATTACKS[name](victim, images, args, tick, known)
        results[name] = dict(facts)
        for split, part in looked_at.items():
            made = reconstruct(seen[split]).cpu()
            whole = {**metrics(part[: len(made)].float(), made), "images": len(made)}
            # of the images that every attacker reconstructed
            shared = metrics(part[:common].float(), made[:common]) if common else whole
            if split == "stop":
                results[name]["stop_common_mse"] = shared["mse"]
            else:
                extra = {f"{key}_common": shared[key] for key in ("mse", "ssim")} if common else {}
                results[name][split], pictures[name] = whole | extra, made  # the pictures of `test` stay
    if state_hash(victim.encoder) != before:
        raise RuntimeError("an attack changed the victim's weights or buffers")
    strongest = min(results, key=lambda name: results[name]["stop_common_mse"], default=None)
    return results, strongest, pictures


# ------------------------------------------------------------------------------------- a trained run


def inspect_run(net, defense, splits, args):
    """Accuracy, attacks, leakage and cost of a trained network. -> (results, pictures of the test images)"""
    start, progress = time.perf_counter(), Progress()
    victim = Victim(net.encoder, args.sigma, defense.wire)
    torch.manual_seed(args.seed)
    results = {
        "config": vars(args),
        "accuracy": accuracy(net, victim, splits.test, DRAWS),
        "val_accuracy": accuracy(net, victim, splits.val, DRAWS),
        "chance": splits.test.y.bincount().max().item() / len(splits.test),
        "attacks": {},
        "strongest": None,
    }
    pictures = {}
    if args.attack:
        images = attacker_images(splits, args.attacker_data, args.seed)
        results["attacks"], results["strongest"], pictures = attack(victim, images, args, progress)
    progress("audit", 0.0)
    results["leakage"] = leakage(victim, splits, args.seed)
    progress("audit", 1.0)
    results["encoder"] = encoder_cost(net.encoder, splits.train.x.shape[-1])
    results["seconds"] = {"attack": time.perf_counter() - start}
    return results, pictures


def write_results(folder, stem, results, pictures, splits):
    sheet = "reconstructions" if stem == "results" else stem
    write(folder / f"{sheet}.png", lambda path: save_pictures(path, splits.test[:10].float(), pictures))
    write(folder / f"{stem}.json", json.dumps(results, indent=1))
    show(results, folder)


def attack_again(argv):
    """A trained run attacked again, with --attack, --attack-epochs, --attack-size or --looks of its own."""
    if set(argv) & {"-h", "--help"}:
        make_parser().parse_args(["--help"])
    if not argv or argv[0].startswith("-"):
        raise UserError(
            "name the run's folder first, as in: python attack.py runs/NAME --attack decoder,gan,whitebox"
        )
    folder, flags = Path(argv[0]), argv[1:]
    path = folder / "checkpoint.pt"
    state = read_run(path)
    changed, asked = given_flags(flags), make_parser().parse_args(flags)
    fixed = changed - {*OF_THE_ATTACK, "device", "data_dir"}
    if fixed:
        flag = f"--{min(fixed).replace('_', '-')}"
        raise UserError(f"{flag}: belongs to training; give --attack, --attack-epochs, --attack-size or --looks.")
    new = {name: getattr(asked, name) for name in {*changed, "device"}}
    new |= {} if state["config"]["attack"] else {"attack": asked.attack}
    args = argparse.Namespace(**(state["config"] | new))
    args.device = usable_device(args.device)
    if state["epoch"] < args.epochs:
        raise UserError(f"{folder}: its training is not finished; finish it first with train.py --resume.")
    splits = load_splits(args)
    check_images(state, splits, path)
    net, defense = read_ours(path, lambda _: load_network(state, args, splits.train.x.shape[-1]))
    results, pictures = inspect_run(net, defense, splits, args)
    results.update(cel={}, environment=environment("attack.py", argv))
    results["seconds"]["train"] = state["seconds"]
    write_results(folder, "attack", results, pictures, splits)


def main(argv=None):
    return command_line(attack_again, argv, "attack.py")


if __name__ == "__main__":
    sys.exit(main())
