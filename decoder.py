"""The network that turns z' into a picture, and the loop that trains it: for the attackers and for a defence's proxy."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from report import UserError

COARSE = 8  # most cells a side of the decoder's coarse picture


class Residual(nn.Module):
    """relu(x + bn(conv(relu(bn(conv(x))))))"""

    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(*conv_bn(channels, channels), nn.ReLU(inplace=True), *conv_bn(channels, channels))

    def forward(self, x):
        return torch.relu(x + self.body(x))


def conv_bn(c_in, c_out):
    return nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out)


class Decoder(nn.Module):
    """[c, h, w] -> [3, H, H] in (0, 1): residual blocks at the features' size, then PixelShuffle doublings.

    What comes in is standardised channel by channel with the mean and deviation of what was sent (`observe`). Otherwise
    a defence could hide z by making it small, which takes nothing from an attacker who looks closely.
    Beside the convolutions a linear map of all of z' paints a coarse picture of at most COARSE x COARSE cells: what a
    defence spreads thinly over the whole of z' is invisible to small windows and plain to a linear attacker.
    8 blocks of 64 channels are the paper's size (about 0.7 M parameters, and 0.1 M for the coarse picture).
    """

    def __init__(self, shape, image_size, blocks=8, channels=64):
        super().__init__()
        c, h, _ = shape
        doublings = math.log2(image_size / h)
        if doublings != int(doublings):
            raise UserError(f"--image-size {image_size}: the decoder doubles {h}x{h} features and cannot reach {image_size}; "
                            f"use {h * 2 ** round(doublings)}.")
        self.register_buffer("mean", torch.zeros(c, 1, 1))
        self.register_buffer("std", torch.ones(c, 1, 1))
        layers = [*conv_bn(c, channels), nn.ReLU(inplace=True), *(Residual(channels) for _ in range(blocks))]
        for _ in range(int(doublings) - 1):
            half = max(8, channels // 2)
            layers += [nn.Conv2d(channels, 4 * half, 3, padding=1), nn.PixelShuffle(2), nn.ReLU(inplace=True), Residual(half)]
            channels = half
        layers += [nn.Conv2d(channels, 12, 3, padding=1), nn.PixelShuffle(2)] if doublings else [nn.Conv2d(channels, 3, 3, padding=1)]
        self.layers = nn.Sequential(*layers)
        self.coarse = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 3 * min(h, COARSE) ** 2),
                                    nn.Unflatten(1, (3, min(h, COARSE), min(h, COARSE))),
                                    nn.Upsample(size=(image_size, image_size), mode="bilinear"))
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


def fit_decoder(decoder, pairs, stop_pairs, epochs, steps, lr, progress=lambda done: None, term=None):
    """Adam on ‖D(z') − x‖² over `pairs()`, an iterator of (z', x) batches; keeps the epoch that is best on `stop_pairs()`.

    `term(D(z'), x)` is added to the loss if given.

    -> (best epoch, its error).
    """
    optimizer = torch.optim.Adam(decoder.parameters(), lr)
    total = epochs * steps
    # up to lr in the first tenth of the steps, then down along a cosine
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / (0.1 * total), 1.0)
                                                 * 0.5 * (1 + math.cos(math.pi * step / total)))
    best, best_epoch, best_state = math.inf, 0, None
    for epoch in range(epochs):
        decoder.train()
        for i, (sent, x) in enumerate(pairs()):
            reconstruction = decoder(sent)
            loss = F.mse_loss(reconstruction, x)
            loss = loss + term(reconstruction, x) if term else loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress((epoch * steps + i + 1) / total)
        decoder.eval()
        with torch.no_grad():
            errors = [(F.mse_loss(decoder(sent), x) * len(x), len(x)) for sent, x in stop_pairs()]
        error = (sum(e for e, _ in errors) / sum(n for _, n in errors)).item()
        if not math.isfinite(error):
            raise UserError(f"--attack-lr {lr}: the attacker diverged in its epoch {epoch + 1}; lower it.")
        if error < best:
            best, best_epoch, best_state = error, epoch + 1, copy.deepcopy(decoder.state_dict())
    decoder.load_state_dict(best_state)
    return best_epoch, best
