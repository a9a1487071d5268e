"""Train a split network with a conditional-entropy loss, attack it, report.

    python train.py --surrogate gated                       # built-in images, 1 to 2 minutes on two CPU cores
    python train.py --surrogate gated --dataset cifar10
    python train.py --init runs/NAME --surrogate cluster    # harden a network that is trained already
    python train.py --help

Writes runs/NAME/: results.json, log.csv (a row an epoch), checkpoint.pt, and pictures. `--resume` goes on
after an interruption, bit for bit on the same number of threads: the random numbers of an epoch depend on the
seed and the epoch alone. One step of training stands in `train_epoch`, top to bottom.
"""

import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import cem
from attack import attacker_images, inspect_run, write_results
from harness import files, monitor, parallel
from harness.data import batches, check_images, fingerprint, load_splits
from harness.decoder import Decoder
from harness.evaluation import Victim, accuracy, state_hash
from harness.files import UserError
from harness.options import REFRESHED, parse_flags, training_settings
from harness.parts import load_network, make_network, make_surrogates
from harness.split_net import SplitNet, apply

MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4  # of the network's SGD; the paper's
# of the Adam that fits the surrogates' own parameters: γ·g_CEL is too small for a plain step
SURROGATE_LR = 2e-3
RAMP = 2  # epochs over which γ rises behind the warm-up
REFRESH_SAMPLES = 50_000  # images in a refresh, to bound memory
FIT_STEPS = 300  # of the attention on frozen features, before a trained network is hardened
PROCESS_SEED = 500_009  # keeps the processes' random numbers apart
VALUES = ("epoch", "log", "seconds", "average", "base", "spread")  # in a checkpoint, beside state_dicts


def learning_rate(args, done):
    """η at share `done` of the run."""
    if args.schedule == "steps":
        return args.lr * 0.2 ** sum(done >= milestone for milestone in (1 / 4, 1 / 2, 2 / 3, 5 / 6))
    rise = 0.15
    if done < rise:
        return args.lr * (0.04 + 0.96 * done / rise)
    return args.lr * 0.5 * (1 + math.cos(math.pi * (done - rise) / (1 - rise)))


def loss_scale(args, epoch):
    # γ: 0 in the warm-up, then up to --scale in RAMP epochs; with --init all of it from the first step
    rise = 1.0 if args.init else min(1.0, (epoch - args.warmup + 1) / RAMP)
    return args.scale * rise if epoch >= args.warmup else 0.0


class Run:
    """Everything a checkpoint holds, and the training of it."""

    def __init__(self, args, splits):
        self.args, self.splits, self.image_size = args, splits, splits.train.x.shape[-1]
        self.steps = len(splits.train) // (args.batch_size * parallel.processes())
        try:
            net, self.defense, self.shape = make_network(args, len(splits.classes), self.image_size)
            self.cels = make_surrogates(args, len(splits.classes), self.shape, self.image_size)
        except ValueError as error:
            raise UserError(str(error)) from None
        self.data, self.epoch, self.log, self.seconds = fingerprint(splits), 0, [], 0.0
        self.base, self.spread = None, []
        self.use(net)

    def use(self, net):
        """Train `net` from here on, with fresh optimisers."""
        self.net, self.victim = net, Victim(net.encoder, self.args.sigma, self.defense.wire)
        self.average = []
        sgd = {"momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, "nesterov": True}
        self.optimizer = torch.optim.SGD(net.parameters(), self.args.lr, **sgd)
        own = [p for p in self.cels.parameters() if p.requires_grad]
        self.cel_optimizer = torch.optim.Adam(own, SURROGATE_LR, fused=True) if own else None

    def cel_losses(self, z, y, x, cels):
        """[(L_CEL, surrogate)]; [A §3.3 step 1] allows to pool z first."""
        z = F.adaptive_avg_pool2d(z, self.args.pool) if self.args.pool else z
        # crops and noise go on as if there were no surrogate
        with torch.random.fork_rng(devices=[z.device] if z.is_cuda else []):
            return [(cel(z, y, x), cel) for cel in cels]

    def train_epoch(self, tick):
        """One pass over the training images -> the epoch's row of the log.

        Hooks of the defence, which do nothing without one: wire changes what is sent, loss and encoder_terms
        add to L_D, after_step trains its proxy. tick shows how far we are.
        """
        args, net, cels, defense = self.args, self.net, self.cels, self.defense
        order = self.epoch_order()
        net.train(args.lr > 0)  # a rate of 0 changes nothing, BatchNorm's averages included
        gamma, fitted = loss_scale(args, self.epoch), self.epoch > 0 or args.init
        # gmm and cluster are silent until `train` has refreshed them, at the end of an epoch. gated and slot
        # are called in the warm-up too, where γ is 0: that fits their own parameters
        acting = {n: cel for n, cel in cels.items() if n not in REFRESHED or (fitted and gamma > 0)}
        lambdas = dict(zip(cels, args.lambd))
        sums, figures = torch.zeros(5, device=args.device), {}
        for step, (x, y) in enumerate(batches(self.splits.train, args.batch_size, args.device, order)):
            done = (self.epoch * self.steps + step) / (args.epochs * self.steps)
            lr = self.optimizer.param_groups[0]["lr"] = learning_rate(args, done)
            self.optimizer.zero_grad(set_to_none=True)

            # z = F_e(x)                                              the encoder, on the device
            z = apply(net.encoder, x, args.precision)
            z_cut = z.detach().requires_grad_()
            # z' = wire(z + n),  n ~ N(0, σ²I)                        what is sent
            sent = defense.wire(cem.channel(z_cut, args.sigma) if args.sigma else z_cut)
            # L_D = cross-entropy(server(z'), y) + the defence's own terms
            logits = apply(net.server, sent, args.precision)
            loss_d = F.cross_entropy(logits, y, label_smoothing=args.label_smoothing)
            loss_d = loss_d + defense.loss(x, z_cut, sent)
            # (i) λ·r(η)·γ·∂L_CEL/∂z, and γ·g_CEL for the surrogate's own parameters
            losses = self.cel_losses(z_cut, y, x, acting.values())
            weights = [lambdas[name] * cem.lr_ratio(lr, args.eta_ref) * gamma for name in acting]
            if self.cel_optimizer:
                self.cel_optimizer.zero_grad(set_to_none=True)
            g_z, finite = cem.cel_gradient(z_cut, losses, weights, args.scale, args.clip)
            # (ii)-(iv) θ ← θ − η (g_D + λ·r(η)·γ·g_CEL)
            terms = defense.encoder_terms(net.encoder, x)
            if args.stash == "cut":
                g_d = cem.stash_at_cut(z, z_cut, loss_d, g_z, terms)
            else:
                decay = {"average": self.average, "decay": args.momentum_decay}
                g_d = cem.stash_params(z, z_cut, loss_d, g_z, net.encoder, terms, **decay)
            parallel.average_gradients([*net.parameters(), *cels.parameters()])
            self.optimizer.step()
            if self.cel_optimizer:
                self.cel_optimizer.step()
            defense.after_step(x, sent)

            # what the log tells, without waiting for the device
            cel = sum((loss.detach() for loss, _ in losses), torch.zeros_like(loss_d))
            ratio = g_z.norm() / g_d.norm().clamp_min(torch.finfo(g_d.dtype).tiny)
            right = (logits.argmax(1) == y).float().mean()
            sums += torch.stack([loss_d.detach(), cel, right, ratio, 1 - finite])
            for name, surrogate in acting.items():
                for key, value in surrogate.stats.items():
                    figures[f"{name}.{key}"] = figures.get(f"{name}.{key}", 0) + value.float() / self.steps
            tick(done + 1 / (args.epochs * self.steps))
        parallel.average([sums, *self.average])
        for part in (net, defense, cels):
            parallel.average_statistics(part)
        names = ("loss_d", "loss_cel", "train_accuracy", "gradient_ratio", "nonfinite_steps")
        row = {"epoch": self.epoch + 1, "lr": lr, "scale": gamma}
        row |= dict(zip(names, sums.div(self.steps).tolist()))
        return row | {key: float(value) for key, value in (figures | defense.stats).items()}

    def epoch_order(self):
        """Seed this epoch's random numbers, and deal the training images to the processes."""
        seed, n = self.args.seed * 1_000_003 + self.epoch, parallel.processes()
        torch.manual_seed(seed)
        order = torch.randperm(len(self.splits.train))
        if n > 1:  # one order for all, crops and noise of each one's own
            torch.manual_seed(seed + PROCESS_SEED * parallel.rank())
            order = order[: len(order) // n * n][parallel.rank() :: n]
        return order

    def refresh(self):
        """[A §3.4] the statistics of gmm and cluster, from clean features of the training images."""
        refreshed, part = [self.cels[name] for name in REFRESHED if name in self.cels], self.splits.train
        if refreshed:
            n = len(part)
            part = part[torch.randperm(n)[:REFRESH_SAMPLES].sort().values] if n > REFRESH_SAMPLES else part
            z = self.victim.features(part.x)
            z = F.adaptive_avg_pool2d(z, self.args.pool) if self.args.pool else z
            for cel in refreshed:
                cel.refresh(z, part.y.to(self.args.device), num_samples=n)
            parallel.copy_from_first(self.cels.buffers())

    def start_from(self, folder):
        """--init: the weights of a trained run, and surrogates that fit them before the first step."""
        path = folder / "checkpoint.pt"
        state = files.read_checkpoint(path)
        net, _ = files.read_ours(path, lambda _: load_network(state, self.args, self.image_size))
        self.use(net)
        self.base = {"name": folder.name, "hash": state_hash(net)}
        torch.manual_seed(self.args.seed)
        self.refresh()
        learning = [cel for cel in self.cels.values() if any(p.requires_grad for p in cel.parameters())]
        net.eval()
        passes = math.ceil(FIT_STEPS / (len(self.splits.train) // self.args.batch_size))
        for _ in range(passes if learning else 0):
            for x, y in batches(self.splits.train, self.args.batch_size, self.args.device):
                with torch.no_grad():
                    z = net.encoder(x)
                z.requires_grad_()
                self.cel_optimizer.zero_grad(set_to_none=True)
                losses = self.cel_losses(z, y, x, learning)
                cem.cel_gradient(z, losses, [0.0] * len(learning), self.args.scale)
                parallel.average_gradients(self.cels.parameters())
                self.cel_optimizer.step()

    def train(self, save, tick):
        args = self.args
        while self.epoch < args.epochs:
            start = time.perf_counter()
            row = self.train_epoch(tick)
            if not math.isfinite(row["loss_d"]):
                raise UserError(f"training diverged in epoch {row['epoch']}; lower --lr or --lambd.")
            if self.defense.after_epoch(self.epoch, args.epochs, self.net):  # PATROL replaced parameters
                self.use(self.net)
            # fitted at the end of this epoch, used in the next: from the last epoch of the warm-up on
            due = self.epoch - max(args.warmup, 1) + 1
            if due >= 0 and due % args.refresh_every == 0:
                self.refresh()
            row["val_accuracy"] = accuracy(self.net, self.victim, self.splits.val)
            if self.cels and self.epoch in (0, args.epochs - 1):  # what spread.png shows
                self.spread.append(monitor.spread_per_class(self.victim, self.splits.val, args.pool))
            row["seconds"] = time.perf_counter() - start
            self.log.append(row)
            self.seconds += row["seconds"]
            self.epoch += 1
            files.say(monitor.epoch_line(row, args.epochs, self.cels))
            save()

    # ---------------------------------------------------------------------------------------- its checkpoint

    def parts(self):
        found = {"weights": self.net, "optimizer": self.optimizer, "cels": self.cels, "defense": self.defense}
        return {**found, "cel_optimizer": self.cel_optimizer} if self.cel_optimizer else found

    def state(self):
        fixed = {"format": files.FORMAT, "config": vars(self.args), "data": self.data, "net": self.net.config}
        values = {name: getattr(self, name) for name in VALUES}
        return {**fixed, **values, **{name: part.state_dict() for name, part in self.parts().items()}}

    def load(self, state):
        self.use(SplitNet(**state["net"]).to(self.args.device, memory_format=torch.channels_last))
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        for name in VALUES:
            setattr(self, name, state[name])
        self.average = [g.to(self.args.device) for g in self.average]
        numbers = all(isinstance(v, (int, float)) for row in self.log for v in row.values())
        if not numbers or [row["epoch"] for row in self.log] != list(range(1, self.epoch + 1)):
            raise ValueError("its log is not that of its epochs")
        self.spread = [part.float() for part in self.spread]


def train(argv):
    args = parse_flags(argv)
    args.device = parallel.start(args.device)
    args.processes, args.threads = parallel.processes(), torch.get_num_threads()
    folder = Path(args.runs_dir) / (args.name + (f"-{args.processes}processes" if args.processes > 1 else ""))
    if args.init and folder.resolve() == Path(args.init).resolve():
        raise UserError(f"--init {args.init}: it would be replaced by what starts from it; choose a --name.")
    run = Run(args, parallel.first_then_others(lambda: load_splits(args)))
    if args.attack:  # before hours of training, not behind them
        Decoder(run.shape, run.image_size, 1, 8)
        attacker_images(run.splits, args.attacker_data, args.seed)
    if args.init:  # before --overwrite removes a run
        base = Path(args.init) / "checkpoint.pt"
        check_images(files.read_checkpoint(base), run.splits, base)
    first = parallel.is_first()
    taken = parallel.first_alone(lambda: files.take_folder(folder, args, training_settings(args)))
    lock, state = taken if first else (None, None)
    state = parallel.from_first(state)
    if state is not None:
        check_images(state, run.splits, folder / "checkpoint.pt")
        files.read_ours(folder / "checkpoint.pt", lambda _: run.load(state))
    elif args.init:
        run.start_from(Path(args.init))
    monitor.describe(args, run.splits, run.shape, run.cels)

    def save():
        if first:
            state = run.state()
            files.write(folder / "checkpoint.pt", lambda path: torch.save(state, path))
            files.write_rows(folder / "log.csv", run.log)

    progress = files.Progress()
    run.train(save, lambda done: progress("train", done))
    if first:
        # killed between checkpoint and log, the log would stay a row behind
        files.write_rows(folder / "log.csv", run.log)
        report(run, folder, argv)


def report(run, folder, argv):
    """Attack the trained network, write what came of it, print it."""
    results, pictures = inspect_run(run.net, run.defense, run.splits, run.args)
    results["cel"], results["base"] = monitor.cel_figures(run.log[-1], run.cels), run.base
    results["defense"] = monitor.defense_figures(run.log[-1], run.args.defense)
    results["nonfinite_steps"] = round(sum(row["nonfinite_steps"] for row in run.log) * run.steps)
    results["seconds"]["train"], results["environment"] = run.seconds, files.environment("train.py", argv)
    monitor.draw_training(folder / "training.png", run.log)
    monitor.draw_spread(folder / "spread.png", run.spread, run.cels)
    write_results(folder, "results", results, pictures, run.splits)


def main(argv=None):
    return files.command_line(train, argv, "train.py")


if __name__ == "__main__":
    sys.exit(main())
