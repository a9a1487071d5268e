"""The network that turns z' into a picture (attackers, a defence's proxy); how attackers are trained."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

from harness.files import UserError
from harness.split_net import ResidualBlock, apply, conv_bn_relu

COARSE = 8  # most cells a side of the decoder's coarse picture
CEILING = 60  # most epochs before the rate of an attacker of "auto" falls
MUON_LR, RISE = 0.01, 0.1  # of its convolutions; epochs in which the rates rise


class Decoder(nn.Module):
    """[c, h, w] -> [3, H, H] in (0, 1): residual blocks at the features' size, then PixelShuffle doublings.

    What comes in is standardised channel by channel with the mean and deviation of what was sent: attackers
    call `observe`, a defence's proxy does not. Otherwise a defence could hide z by making it small, which
    takes nothing from an attacker who looks closely. Beside the convolutions a linear map of all of z' paints
    a coarse picture of at most COARSE x COARSE cells: what a defence spreads thinly over the whole of z' is
    invisible to small windows and plain to a linear attacker. 8 blocks of 64 channels are the paper's size
    (about 0.7 M parameters, and 0.1 M for the coarse picture).
    """

    def __init__(self, shape, image_size, blocks=8, channels=64):
        super().__init__()
        c, h, _ = shape
        doublings = math.log2(image_size / h)
        if doublings != int(doublings):
            raise UserError(
                f"--image-size {image_size}: the decoder doubles {h}x{h} features and cannot reach "
                f"{image_size}; use {h * 2 ** round(doublings)}."
            )
        self.register_buffer("mean", torch.zeros(c, 1, 1))
        self.register_buffer("std", torch.ones(c, 1, 1))
        layers = [conv_bn_relu(c, channels), *(ResidualBlock(channels, channels) for _ in range(blocks))]
        for _ in range(int(doublings) - 1):
            half = max(8, channels // 2)
            layers += [
                nn.Conv2d(channels, 4 * half, 3, padding=1),
                nn.PixelShuffle(2),
                nn.ReLU(inplace=True),
                ResidualBlock(half, half),
            ]
            channels = half
        layers.append(nn.Conv2d(channels, 12 if doublings else 3, 3, padding=1))
        layers += [nn.PixelShuffle(2)] if doublings else []
        self.layers = nn.Sequential(*layers)
        self.coarse = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(shape), 3 * min(h, COARSE) ** 2),
            nn.Unflatten(1, (3, min(h, COARSE), min(h, COARSE))),
            nn.Upsample(size=(image_size, image_size), mode="bilinear"),
        )
        nn.init.zeros_(self.coarse[1].weight)
        nn.init.zeros_(self.coarse[1].bias)

    @torch.no_grad()
    def observe(self, sent):
        """Mean and deviation of each channel; an exact 0 was dropped on the wire and says nothing."""
        there = (sent != 0).to(sent.dtype)
        count = there.sum((0, 2, 3)).clamp_min(1)
        mean = sent.sum((0, 2, 3)) / count
        square = ((sent - mean.view(-1, 1, 1)) * there).square().sum((0, 2, 3)) / (count - 1).clamp_min(1)
        self.mean.copy_(mean.view(-1, 1, 1))
        self.std.copy_(square.sqrt().clamp_min(torch.finfo(sent.dtype).eps).view(-1, 1, 1))

    def forward(self, z):
        z = (z - self.mean) / self.std * (z != 0)  # what was dropped counts as the mean
        return torch.sigmoid(self.layers(z) + self.coarse(z))


class Muon(torch.optim.Optimizer):
    """Momentum SGD for convolutions, its step equally long in every direction (Jordan et al. 2024).

    M = U S Vᵀ is the average gradient of a weight [c_out, 9·c_in]; the step is U Vᵀ, or nearly: see
    `orthogonal`. A decoder reaches the same error in about half the epochs that Adam takes.
    """

    def __init__(self, weights, lr, momentum=0.95):
        super().__init__(weights, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        lr, momentum = (self.param_groups[0][key] for key in ("lr", "momentum"))
        for weight in self.param_groups[0]["params"]:
            average = self.state[weight].setdefault("average", torch.zeros_like(weight))
            average.lerp_(weight.grad, 1 - momentum)
            M = weight.grad.lerp(average, momentum).flatten(1)  # Nesterov's momentum
            weight.sub_(orthogonal(M).view_as(weight), alpha=lr * max(1, len(M) / M[0].numel()) ** 0.5)


def orthogonal(M):
    """M with its singular values brought near 1 by p(s) = 3.4445 s − 4.775 s³ + 2.0315 s⁵, five times."""
    M = M / M.norm().clamp_min(torch.finfo(M.dtype).tiny)
    one = torch.eye(len(M), dtype=M.dtype, device=M.device)
    Q, A = one, M @ M.T  # what M is multiplied by in the end, and M Mᵀ on the way there
    for _ in range(5):
        P = 3.4445 * one - 4.7750 * A + 2.0315 * A @ A
        Q, A = P @ Q, P @ A @ P
    return Q @ M


def fit_decoder(
    decoder, pairs, stop_pairs, epochs, steps, lr, progress=lambda done: None, term=None, precision="float32"
):
    """Minimise ‖D(z') − x‖² over `pairs()`, batches of (z', x); keeps the epoch best on `stop_pairs()`.

    Muon for the convolutions, Adam for the rest. The rate rises over a tenth of the first epoch, stays for
    two thirds of the epochs and falls along a cosine in the last third. epochs = "auto": it stays until the
    stop error is `flat`, for CEILING epochs at most, then falls for half as many. The attacker is a mean of
    its weights, two thirds of it over the last ninth of the steps: at a constant rate the weights tremble,
    and their own error looks flat long before that of their mean is. `term(D(z'), x)` is added to the loss.
    -> epochs, best_epoch, stop_mse, converged, history.
    """
    auto = epochs == "auto"
    kernels = [p for p in decoder.parameters() if p.dim() == 4]
    rest = [p for p in decoder.parameters() if p.dim() != 4]
    optimizers = [(torch.optim.Adam(rest, lr), lr), *([(Muon(kernels, MUON_LR), MUON_LR)] if kernels else [])]
    # θ̄ ← θ̄ + 9 / (t + 9) · (θ − θ̄), BatchNorm's averages included
    mean = AveragedModel(
        decoder, avg_fn=lambda old, new, t: old + 9 / (t + 9) * (new - old), use_buffers=True
    )
    fall_from, end = (CEILING, math.ceil(1.5 * CEILING)) if auto else (epochs / 1.5, epochs)
    history, best_state, converged = [], None, False if auto else None
    while len(history) < end:
        decoder.train()
        for i, (sent, x) in enumerate(pairs()):
            now = len(history) + i / steps  # in epochs
            fallen = max(0, now - fall_from) / (end - fall_from)
            share = 0.5 * (1 + math.cos(math.pi * fallen)) * min(1.0, (now + 1 / steps) / RISE)
            reconstruction = apply(decoder, sent, precision)
            loss = F.mse_loss(reconstruction, x)
            loss = loss + term(reconstruction, x) if term else loss
            decoder.zero_grad()
            loss.backward()
            for optimizer, peak in optimizers:
                optimizer.param_groups[0]["lr"] = share * peak
                optimizer.step()
            mean.update_parameters(decoder)
            progress((now + 1 / steps) / end)
        mean.eval()
        with torch.no_grad():
            errors = [(F.mse_loss(mean(sent), x) * len(x), len(x)) for sent, x in stop_pairs()]
        history.append((sum(e for e, _ in errors) / sum(n for _, n in errors)).item())
        if not math.isfinite(history[-1]):
            raise UserError(f"the attacker diverged in its epoch {len(history)}; give it more images.")
        if history[-1] == min(history):
            best_state = copy.deepcopy(mean.module.state_dict())
        if auto and len(history) <= CEILING and not converged and flat(history):
            converged, fall_from, end = True, len(history), math.ceil(1.5 * len(history))
    decoder.load_state_dict(best_state)
    decoder.eval()
    best = min(range(len(history)), key=history.__getitem__)
    facts = {"epochs": len(history), "best_epoch": best + 1, "stop_mse": history[best]}
    return {**facts, "converged": converged, "history": history}  # an epoch each


def flat(history):
    """Whether the best error fell by less than 1 % in the last quarter of the epochs, two or more."""
    quarter = len(history) // 4
    return quarter > 1 and min(history) > 0.99 * min(history[:-quarter])
