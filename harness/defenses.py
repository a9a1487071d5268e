"""The plug-in baselines: dropout, DistCorr, Noise-ARL, PATROL; alone or joined by `+`, with any surrogate.

Each defence has the same few hooks; in the base class, `none`, all of them do nothing:

    extra_cut("patrol")                        how many units deeper than --cut the encoder is cut
    defense = make_defense("dropout+noise_arl", [0.3, 1], seed=0, shape=(8, 8, 8), image_size=32)
    sent  = defense.wire(z_noisy)              in training, at inference and in front of every attacker
    term  = defense.loss(x, z, sent)           added to L_D; no gradient reaches a proxy's own weights
    roots = defense.encoder_terms(encoder, x)  terms of L_D that depend on the encoder directly, not through z
    defense.after_step(x, sent)                a proxy decoder learns from the victim's training batch
    defense.after_epoch(epoch, epochs, net)    PATROL prunes; True: rebuild the optimiser, parameters changed
    defense.state_dict(), defense.stats        what resuming needs; detached scalars of the last calls

    dropout    sent = m ⊙ z',  m_i = 0 with probability p (the strength), drawn afresh at every call. Not
               rescaled by 1/(1−p): the server is trained behind the same channel, and an attacker who knows
               p could undo it.
    distcorr   + α dCor(x, z), see `distance_correlation`
    noise_arl  + α max(0, SSIM(D(z'), x) − s). The proxy decoder D minimises ‖D(z') − x‖² + 1 − SSIM(D(z'), x)
               on the victim's training images while the encoder is trained against it.
    patrol     An encoder one unit deeper, pruned by whole channels down to the FLOPs of the plain one; the
               same proxy term; and, with the weight 0.1 α, the Lipschitz penalty over the units f_i, f_0 = x:
                   Σ_i ‖f_i(x+δ) − f_i(x)‖ / ‖f_{i−1}(x+δ) − f_{i−1}(x)‖

The proxy is never the attacker that is reported: attack.py builds a larger one from another seed and trains
it from scratch on the finished encoder.

Reference: [E §1.3, §2.2] and the papers it cites. Differs from the documents in: they name the methods and
give no formulas. Chosen here: the mask per element, the proxy and its loss, the pruning by BatchNorm gain
(see `prune`), a Gaussian δ. α and s are ours: with α = 0.3 and s = 0.5 the small proxy never made the
encoder pay.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from harness.decoder import Decoder
from harness.files import UserError
from harness.metrics import ssim
from harness.parallel import average_gradients
from harness.pruning import channels_within, encoder_flops, prune

PROXY_SEED = 104_729  # another initialisation than the evaluating attacker's (attack.py's)
PROXY_BLOCKS, PROXY_CHANNELS, PROXY_LR = 2, 16, 2e-3
SSIM_THRESHOLD = 0.2  # s: below this likeness the encoder pays nothing; the proxy learns too little for 0.5
LIPSCHITZ_SHARE = 0.1  # weight of the Lipschitz penalty relative to α
LIPSCHITZ_DELTA = 0.05  # standard deviation of δ, pixels in [0, 1]
LIPSCHITZ_BATCH = 32  # images of the batch that the penalty looks at
LIPSCHITZ_FLOOR = 1e-6  # smallest distance that is divided by
PRUNE_SHARE = 0.5  # the part of the epochs over which PATROL prunes; the rest lets the network recover


# ------------------------------------------------------------------------------------------ penalties


def distance_correlation(x, z):
    """Székely's distance correlation of n paired rows, in [0, 1]; x [n, ...], z [n, ...] -> scalar.

        a_ij = ‖x_i − x_j‖,  A_ij = a_ij − ā_i· − ā_·j + ā_··           b, B likewise for z
        dCov²(x, z) = (1/n²) Σ_ij A_ij B_ij      dCor² = dCov²(x, z) / (dCov(x, x) dCov(z, z))

    1 for z = x and any rotated, shifted or scaled x; 0 where x or z is constant. It tends to 0 for
    independent x and z as n grows, but it is biased upwards: for fixed n and growing dimension all
    distances become alike and it tends to 1 for independent rows too (n = 32, 500 dimensions each: above
    0.9). On a batch of images its change means something, its height does not. Coinciding rows and a value
    of 0 get the gradient 0, so that it is always finite.
    """
    # dCor² is the cosine of the angle between A and B
    cosine = centred_distances(x) @ centred_distances(z)
    positive = cosine > 0
    return torch.where(positive, torch.where(positive, cosine, 1).sqrt(), cosine * 0)


def centred_distances(x):
    """A as a vector of length 1, or 0 where all rows coincide. -> [n²]"""
    x = x.flatten(1)
    a = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")  # [n, n]; exact if rows coincide
    a = a - a.mean(0, keepdim=True) - a.mean(1, keepdim=True) + a.mean()
    return F.normalize(a.flatten(), dim=0, eps=torch.finfo(a.dtype).tiny)


def encoder_units(encoder):
    """The encoder's units f_i; bottleneck convolution, BatchNorm and sigmoid behind them are the last one."""
    units = [child for child in encoder if list(child.children())]
    return [*units, nn.Sequential(*(child for child in encoder if not list(child.children())))]


def lipschitz_penalty(units, x, delta):
    """Σ_i ‖f_i(x+δ) − f_i(x)‖ / ‖f_{i−1}(x+δ) − f_{i−1}(x)‖, mean over the images. No buffer moves."""
    h = torch.cat([x, x + delta])  # one batch, so that BatchNorm treats both halves alike
    total, before = x.new_zeros(()), half_distance(h)
    for unit in units:
        h = functional_call(unit, {name: buffer.clone() for name, buffer in unit.named_buffers()}, (h,))
        after = half_distance(h)
        total = total + (after / before.clamp_min(LIPSCHITZ_FLOOR)).mean()
        before = after
    return total


def half_distance(h):
    x, moved = h.flatten(1).chunk(2)
    return (moved - x).norm(dim=1)  # [B]


# ------------------------------------------------------------------------------------------ the defences


class Defense(nn.Module):
    """No defence: every hook does nothing."""

    name, default, below, extra_cut = "none", 0.0, math.inf, 0

    def __init__(self, strength, seed, shape, image_size, reference_flops):
        super().__init__()
        self.strength = self.default if strength is None else strength
        self.image_size, self.reference_flops, self.stats = image_size, reference_flops, {}
        if not 0 <= self.strength < self.below:
            limit = f" and below {self.below}" if self.below < math.inf else ""
            raise UserError(f"--strength {self.strength:g}: {self.name} needs at least 0{limit}.")

    def record(self, **values):
        self.stats.update({f"{self.name}.{key}": value.detach() for key, value in values.items()})

    def wire(self, z):
        return z

    def loss(self, x, z, sent):
        return z.new_zeros(())

    def encoder_terms(self, encoder, x):
        return []

    def after_step(self, x, sent):
        pass

    def after_epoch(self, epoch, epochs, net):
        return False


class Dropout(Defense):
    name, default, below = "dropout", 0.1, 1

    def wire(self, z):
        # sent = m ⊙ z',  m_i = 0 with probability p; in eval mode as well
        return z * (torch.rand_like(z) >= self.strength)


class DistCorr(Defense):
    name, default = "distcorr", 0.3

    def loss(self, x, z, sent):
        # α dCor(x, z)
        dcor = distance_correlation(x, z)
        self.record(dcor=dcor)
        return self.strength * dcor


class NoiseARL(Defense):
    name, default = "noise_arl", 1.0

    def __init__(self, strength, seed, shape, image_size, reference_flops):
        super().__init__(strength, seed, shape, image_size, reference_flops)
        with torch.random.fork_rng(devices=[]):  # the victim's random numbers go on as if there were no proxy
            torch.default_generator.manual_seed(PROXY_SEED + seed)
            self.decoder = Decoder(shape, image_size, PROXY_BLOCKS, PROXY_CHANNELS)
        self.adam = torch.optim.Adam(self.decoder.parameters(), PROXY_LR)

    def loss(self, x, z, sent):
        frozen = {name: p.detach() for name, p in self.decoder.named_parameters()}
        likeness = ssim(functional_call(self.decoder, frozen, (sent,)), x)
        self.record(ssim=likeness, active=(likeness > SSIM_THRESHOLD).float())
        # α max(0, SSIM(D(z'), x) − s)
        return self.strength * F.relu(likeness - SSIM_THRESHOLD)

    def after_step(self, x, sent):
        # ‖D(z') − x‖² + 1 − SSIM(D(z'), x)
        guess = self.decoder(sent.detach())
        error = F.mse_loss(guess, x)
        self.adam.zero_grad(set_to_none=True)
        (error + 1 - ssim(guess, x)).backward()
        average_gradients(self.decoder.parameters())
        self.adam.step()
        self.record(proxy_mse=error)

    def get_extra_state(self):
        return self.adam.state_dict()

    def set_extra_state(self, state):
        self.adam.load_state_dict(state)


class Patrol(NoiseARL):
    name, default, extra_cut = "patrol", 0.3, 1

    def encoder_terms(self, encoder, x):
        x = x[:LIPSCHITZ_BATCH]
        penalty = lipschitz_penalty(encoder_units(encoder), x, LIPSCHITZ_DELTA * torch.randn_like(x))
        self.record(lipschitz=penalty)
        return [self.strength * LIPSCHITZ_SHARE * penalty]

    def after_epoch(self, epoch, epochs, net):
        flops = encoder_flops(net.config, self.image_size)
        if flops <= self.reference_flops:
            return False
        # an equal share of what is left to remove, over the epochs that are left to prune in
        steps_left = max(1, round(epochs * PRUNE_SHARE) - epoch)
        budget = flops - (flops - self.reference_flops) / steps_left
        prune(net, channels_within(net.config, budget, self.image_size))
        return True


class Combined(Defense):
    """Several defences: what is sent passes through all of them in turn, their terms add up."""

    def __init__(self, parts):
        nn.Module.__init__(self)
        self.parts, self.stats = nn.ModuleList(parts), {}
        for part in parts:
            part.stats = self.stats

    def wire(self, z):
        for part in self.parts:
            z = part.wire(z)
        return z

    def loss(self, x, z, sent):
        return sum(part.loss(x, z, sent) for part in self.parts)

    def encoder_terms(self, encoder, x):
        return [term for part in self.parts for term in part.encoder_terms(encoder, x)]

    def after_step(self, x, sent):
        for part in self.parts:
            part.after_step(x, sent)

    def after_epoch(self, epoch, epochs, net):
        return any([part.after_epoch(epoch, epochs, net) for part in self.parts])


DEFENSES = {cls.name: cls for cls in (Defense, Dropout, DistCorr, Patrol, NoiseARL)}


def defense_classes(spec):
    names = spec.split("+")
    several = len(names) > 1
    if not set(names) <= set(DEFENSES) - ({"none"} if several else set()) or len(set(names)) < len(names):
        raise UserError(f"--defense {spec}: use one of {', '.join(DEFENSES)}, or several joined by +.")
    return [DEFENSES[name] for name in names]


def extra_cut(spec):
    return max(cls.extra_cut for cls in defense_classes(spec))


def make_defense(spec, strengths, seed, shape, image_size, reference_flops=None):
    """The defence `spec` for features of `shape` (c, h, w); `strengths` are its parts', None: their defaults.

    `reference_flops`: of the plain encoder, at --cut; PATROL prunes down to it.
    """
    classes = defense_classes(spec)
    strengths = strengths or [None] * len(classes)
    parts = [
        cls(strength, seed, shape, image_size, reference_flops) for cls, strength in zip(classes, strengths)
    ]
    return parts[0] if len(parts) == 1 else Combined(parts)
