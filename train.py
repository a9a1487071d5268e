"""Train a split network with a conditional-entropy loss, attack it, report.

    python train.py --surrogate gated                       # built-in images, a few minutes on two CPU cores
    python train.py --surrogate gated --dataset cifar10
    python train.py --help

Writes runs/NAME/: results.json, log.csv (a row an epoch), checkpoint.pt, reconstructions.png. `--resume` goes on after
an interruption. One step of training is:

    z  = F_e(x)                                 the encoder, on the device
    z' = wire(z + n), n ~ N(0, σ²I)             what is sent
    L_D = cross-entropy(server(z'), y) + the defence's own terms
    θ  ← θ − η (g_D + λ·r(η)·γ·g_CEL)           cem.stash; γ = 0 in the warm-up, then ramps up to --scale

Random numbers of an epoch depend on the seed and the epoch alone, so a run resumed at an epoch's start goes on as if
it had never stopped.
"""

import csv
import io
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import attack
import cem
import data
import defenses
import parallel
from audit import accuracy, finish
from cluster_cel import ClusterCEL
from gated_att_cel import GatedAttCEL
from gmm_cel import GMMCEL
from options import NOT_SETTINGS, SHORT_RUN, parse
from report import CHECKPOINT_FORMAT, Progress, UserError, cli, prepare_folder, read_checkpoint, write
from slot_cross_cel import SlotCrossCEL
from split_net import MIN_IMAGE_SIZE, UNITS, SplitNet, count_flops, feature_shape

PROCESS_SEED = 500_009  # keeps the processes' random numbers apart


# ------------------------------------------------------------------------------------------------ the parts

def build(args, classes, image_size):
    """-> (net, defense, surrogate or None, feature shape) on the device, from the seed."""
    torch.manual_seed(args.seed)
    try:
        cut = args.cut + defenses.extra_cut(args.defense)
        if args.cut < len(UNITS[args.arch]) <= cut:
            raise ValueError(f"--cut {args.cut}: --defense {args.defense} cuts {cut - args.cut} unit deeper and leaves the server none; lower it.")
        net = SplitNet(args.arch, classes, args.width, cut, args.bottleneck)
        shape = feature_shape(net.encoder, image_size)
        plain = SplitNet(args.arch, classes, args.width, args.cut, args.bottleneck).encoder
        strengths = {name: getattr(args, name) for name in ("dropout", "distcorr", "patrol", "noise_arl")}
        defense = defenses.build(args.defense, strengths, args.seed, shape, image_size, count_flops(plain, image_size))
        cel = build_surrogate(args, classes, shape)
    except ValueError as error:
        raise UserError(str(error)) from None
    net.to(args.device, memory_format=torch.channels_last)
    return net, defense.to(args.device), cel.to(args.device) if cel is not None else None, shape


def build_surrogate(args, classes, shape):
    if args.pool > shape[1]:
        raise ValueError(f"--pool {args.pool}: the features are {shape[1]}x{shape[2]}; pool to fewer cells a side.")
    side = args.pool or shape[1]
    dim, sigma = shape[0] * side * side, args.sigma * side / shape[1]  # the mean of n cells has noise σ/√n
    given = lambda **flags: {k: getattr(args, v) for k, v in flags.items() if getattr(args, v) is not None}
    # τ = var_threshold·σ² and the floor g0 are per dimension; a trace is D of them
    terms = 1 if args.variance == "per_dim" or args.surrogate == "slot" else dim
    tau, eps = terms * args.var_threshold * sigma ** 2, terms * args.floor
    if args.surrogate == "gmm":
        return GMMCEL(classes, dim, sigma, **given(components="clusters", covariance="covariance", update_scale="update_scale"))
    if args.surrogate == "cluster":
        return ClusterCEL(classes, dim, tau, eps=eps, **given(clusters="clusters", form="form", variance="variance", outliers="outliers"))
    if args.surrogate == "gated":
        return GatedAttCEL(dim, tau, eps=eps, sigma=sigma,
                           **given(hidden="hidden", variance="variance", attention="attention", measure_on="measure_on"))
    if args.surrogate == "slot":
        return SlotCrossCEL(dim, tau, eps=eps, sigma=sigma, num_classes=classes, **{gate: False for gate in args.off},
                            **given(slots="slots", attention="attention", measure_on="measure_on"))
    return None


def learning_rate(args, done):
    """η at share `done` of the run."""
    if args.schedule == "steps":
        return args.lr * 0.2 ** sum(done >= milestone for milestone in (1 / 4, 1 / 2, 2 / 3, 5 / 6))
    rise = 0.15
    return args.lr * (0.04 + 0.96 * done / rise) if done < rise else args.lr * 0.5 * (1 + math.cos(math.pi * (done - rise) / (1 - rise)))


def loss_scale(args, epoch):
    # γ: 0 in the warm-up, then up to --scale in --ramp epochs
    return args.scale * min(1.0, (epoch - args.warmup + 1) / max(1, args.ramp)) if epoch >= args.warmup else 0.0


def pooled(z, side):
    return F.adaptive_avg_pool2d(z, side) if side else z


def make_optimizer(args, net, cel):
    groups = [{"params": list(net.parameters()), "weight_decay": args.weight_decay}]
    if cel is not None and any(p.requires_grad for p in cel.parameters()):
        groups.append({"params": list(cel.parameters()), "weight_decay": 0.0})
    return torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum)


# ------------------------------------------------------------------------------------------------ training

class Run:
    """Everything a checkpoint holds."""

    def __init__(self, args, splits):
        self.args, self.splits = args, splits
        self.image_size = splits.train.x.shape[-1]
        self.net, self.defense, self.cel, self.shape = build(args, len(splits.classes), self.image_size)
        self.optimizer = make_optimizer(args, self.net, self.cel)
        self.fingerprint = data.fingerprint(splits)
        self.epoch, self.log = 0, []
        self.counted = []  # a counted step's (active, gradient ratio, finite, share of the batch that was skipped)
        self.seconds = 0.0
        self.victim = attack.Victim(self.net.encoder, args.sigma, self.defense.wire)
        self.steps = len(splits.train) // (args.batch_size * parallel.processes())
        # a surrogate's built-in delay, scaled down for short runs
        self.delay = 0
        if hasattr(self.cel, "delay_calls"):
            self.delay = self.cel.delay_calls = min(self.cel.delay_calls, int(SHORT_RUN * self.steps * max(0, args.epochs - args.warmup)))
        self.refreshes = hasattr(self.cel, "refresh")

    def state(self):
        return {"format": CHECKPOINT_FORMAT, "config": vars(self.args), "net": self.net.config, "weights": self.net.state_dict(),
                "data": self.fingerprint,
                "surrogate": self.cel.state_dict() if self.cel is not None else {}, "defense": self.defense.state_dict(),
                "optimizer": self.optimizer.state_dict(), "epoch": self.epoch, "log": self.log, "seconds": self.seconds,
                "stats": dict(self.cel.stats) if self.cel is not None else {}, "defense_stats": dict(self.defense.stats),
                "counted": torch.stack(self.counted).cpu() if self.counted else torch.empty(0, 4)}

    def load(self, state, path="checkpoint.pt"):
        if state["data"] != self.fingerprint:
            raise UserError(f"--dataset {self.args.dataset}: its images are not those of the checkpoint; restore them or train again.")
        try:
            self.restore(state)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError):  # weights of another network, figures that are none
            raise UserError(f"{path}: does not fit this network and these settings; delete it and train again.") from None

    def restore(self, state):
        self.net = SplitNet(**state["net"]).to(self.args.device, memory_format=torch.channels_last)
        self.net.load_state_dict(state["weights"])
        self.victim = attack.Victim(self.net.encoder, self.args.sigma, self.defense.wire)
        if self.cel is not None:
            self.cel.load_state_dict(state["surrogate"])
            self.cel.stats = state["stats"]
        self.defense.load_state_dict(state["defense"])
        self.defense.stats.update(state["defense_stats"])
        self.optimizer = make_optimizer(self.args, self.net, self.cel)
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.log, self.seconds = state["epoch"], state["log"], state["seconds"]
        self.counted = list(state["counted"].to(self.args.device))

    def epoch_order(self):
        """Seed this epoch's random numbers, and deal the training images to the processes."""
        seed = self.args.seed * 1_000_003 + self.epoch
        torch.manual_seed(seed)
        order = torch.randperm(len(self.splits.train))
        if parallel.processes() > 1:  # one order for all, crops and noise of each one's own
            torch.manual_seed(seed + PROCESS_SEED * parallel.rank())
            order = order[:len(order) // parallel.processes() * parallel.processes()][parallel.rank()::parallel.processes()]
        return order

    def train_epoch(self, tick):
        args, net, cel, defense = self.args, self.net, self.cel, self.defense
        order = self.epoch_order()
        net.train()
        gamma, totals = loss_scale(args, self.epoch), torch.zeros(3, device=args.device)
        use_cel = cel is not None and gamma > 0
        first_counted = max(args.warmup, 1 if self.refreshes else 0) * self.steps + self.delay
        for step, (x, y) in enumerate(data.batches(self.splits.train, args.batch_size, augment=True, device=args.device, order=order,
                                                      shift=args.shift)):
            done = self.epoch * self.steps + step
            lr = learning_rate(args, done / (args.epochs * self.steps))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.zero_grad(set_to_none=True)
            # z = F_e(x);  z' = wire(z + n)
            z = net.encoder(x)
            z_cut = z.detach().requires_grad_()
            sent = defense.wire(cem.channel(z_cut, args.sigma) if args.sigma else z_cut)
            # L_D = cross-entropy + the defence's own terms
            logits = net.server(sent)
            loss_d = F.cross_entropy(logits, y) + defense.loss(x, z_cut, sent)
            loss_cel = cel(pooled(z_cut, args.pool), y) if use_cel else None
            out = cem.stash(args.stash, z, z_cut, loss_d, loss_cel, net.encoder, cel, args.lambd * cem.lr_ratio(lr, args.eta_ref),
                            gamma, args.clip, defense.encoder_terms(net.encoder, x))
            parallel.average_gradients([*net.parameters(), *(cel.parameters() if use_cel else [])])
            self.optimizer.step()
            defense.after_step(x, sent.detach())
            totals += torch.stack([loss_d.detach(), loss_cel.detach() if use_cel else loss_d.detach() * 0,
                                   (logits.argmax(1) == y).float().mean()])
            if use_cel and done >= first_counted:
                skipped = (cel.stats["skipped"] + cel.stats["nonfinite"]) / len(y)
                self.counted.append(torch.stack([cel.stats["active"].to(z.dtype), out["ratio"].detach(), out["finite"], skipped.to(z.dtype)]))
            tick(done + 1, args.epochs * self.steps)
            if args.verbose and use_cel and done % 200 == 0 and parallel.rank() == 0:
                print("\n" + "  ".join(f"{k} {v.float().mean():.4g}" for k, v in cel.stats.items()))
        parallel.average([totals, *net.buffers(), *defense.buffers(), *(cel.buffers() if cel is not None else [])])
        return totals.div(self.steps).tolist(), gamma, lr

    def refresh(self):
        """Stage 2: the surrogate's statistics from clean features of the training images, eval mode, no gradient."""
        chosen = torch.randperm(len(self.splits.train))[:self.args.refresh_samples].sort().values
        part = self.splits.train[chosen] if len(chosen) < len(self.splits.train) else self.splits.train
        self.net.eval()
        self.cel.refresh(pooled(self.victim.features(part.x), self.args.pool), part.y.to(self.args.device))
        if hasattr(self.cel, "num_samples"):
            self.cel.num_samples.fill_(len(self.splits.train))  # N of the running update counts the whole set
        parallel.copy_from_first(self.cel.buffers())

    def train(self, save, tick):
        args = self.args
        while self.epoch < args.epochs:
            start = time.perf_counter()
            (loss_d, loss_cel, train_acc), gamma, lr = self.train_epoch(tick)
            if not math.isfinite(loss_d):
                raise UserError(f"training diverged in epoch {self.epoch + 1} (the loss is {loss_d}); lower --lr or --lambd.")
            if self.defense.after_epoch(self.epoch, args.epochs, self.net):
                self.victim = attack.Victim(self.net.encoder, args.sigma, self.defense.wire)
                self.optimizer = make_optimizer(args, self.net, self.cel)
            # fitted at the end of this epoch, used in the next: from the last epoch of the warm-up on
            due = self.epoch - max(args.warmup, 1) + 1
            if self.refreshes and due >= 0 and due % args.refresh_every == 0:
                self.refresh()
            row = {"epoch": self.epoch + 1, "lr": lr, "scale": gamma, "loss_d": loss_d, "loss_cel": loss_cel, "train_accuracy": train_acc,
                   "val_accuracy": accuracy(self.net, self.victim, self.splits.val), "seconds": time.perf_counter() - start}
            self.log.append(row)
            self.seconds += row["seconds"]
            self.epoch += 1
            save(self)

    def cel_report(self):
        """How the surrogate fared over the steps behind warm-up and delay, and its own figures of the last call."""
        if not self.counted:
            return {"active_share": None, "grad_ratio": None}
        active, ratio, finite, skipped = torch.stack(self.counted).float().cpu().unbind(1)
        return {"active_share": active.mean().item(), "grad_ratio": ratio.median().item(), "skipped_share": skipped.mean().item(),
                "counted_steps": len(ratio), "nonfinite_steps": int((finite == 0).sum()), "delay_calls": self.delay,
                "last_call": {k: v.tolist() for k, v in self.cel.stats.items()}}


# ------------------------------------------------------------------------------------------------ output

def save_run(folder, run):
    state = run.state()
    write(folder / "checkpoint.pt", lambda temporary: torch.save(state, temporary))
    write_log(folder, run)


def write_log(folder, run):
    text = io.StringIO()
    writer = csv.DictWriter(text, run.log[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(run.log)
    write(folder / "log.csv", text.getvalue())


def load_splits(args):
    splits = data.load(args.dataset, args.data_dir, args.image_size, args.seed, args.val_share, args.aux_share, args.train_size)
    if splits.train.x.shape[-1] < MIN_IMAGE_SIZE:
        raise UserError(f"--dataset {args.dataset}: its images have {splits.train.x.shape[-1]} pixels a side; enlarge them with --image-size {MIN_IMAGE_SIZE}.")
    if len(splits.train) < args.batch_size * parallel.processes():
        raise UserError(f"--batch-size {args.batch_size}: there are only {len(splits.train)} training images; lower it.")
    largest = min(splits.train.y.bincount().max().item(), args.refresh_samples)
    if args.clusters and args.clusters > largest:
        raise UserError(f"--clusters {args.clusters}: the largest class has {largest} images to fit them on; lower it.")
    return splits


def train(argv):
    args = parse(argv)
    args.device = parallel.start(args.device)
    args.processes = parallel.processes()
    say = print if parallel.rank() == 0 else lambda line: None
    folder = Path(args.runs_dir) / args.out
    run = Run(args, parallel.first_then_others(lambda: load_splits(args)))
    if args.resume and not (folder / "checkpoint.pt").exists():
        say(f"{folder / 'checkpoint.pt'}: nothing to resume yet, starting from the beginning")
    elif args.resume:
        state = read_checkpoint(folder / "checkpoint.pt")
        if state["config"].get("processes", 1) != args.processes:
            raise UserError(f"--resume: {folder / 'checkpoint.pt'} was made by {state['config'].get('processes', 1)} processes; start as many.")
        changed = [k for k, v in vars(args).items() if state["config"].get(k) != v and k not in (*NOT_SETTINGS, "processes")]
        if changed:
            raise UserError(f"--resume: {folder / 'checkpoint.pt'} was made with another --{changed[0].replace('_', '-')}; repeat its settings or choose another --out.")
        run.load(state, folder / "checkpoint.pt")
    if args.attack:  # before hours of training, not behind them
        attack.Decoder(run.shape, run.image_size, 1, 8)
        attack.attacker_images(run.splits, args.attacker_data, args.seed)
    s = run.splits
    say(f"{args.dataset}: {len(s.train)} train, {len(s.val)} val, {len(s.test)} test images of {len(s.classes)} classes")
    say(f"{args.arch} cut after {run.net.config['cut']} units, z = {'x'.join(map(str, run.shape))}, sigma {args.sigma:g}, "
          f"surrogate {args.surrogate}, defence {args.defense}, device {args.device}")
    if run.cel is not None:
        say(f"lambda {args.lambd:g}, scale {args.scale:g}, warm-up {args.warmup} of {args.epochs} epochs" + (f", delay {run.delay} calls" if run.delay else ""))
    progress = Progress()
    if parallel.rank() > 0:
        return run.train(lambda run: None, lambda done, total: None)
    prepare_folder(folder)
    if run.log:  # killed between checkpoint and log, it would stay a row behind
        write_log(folder, run)
    run.train(lambda run: save_run(folder, run), lambda done, total: progress("train   ", done / total))
    finish(run, args, folder, argv, "train.py")


def main(argv=None):
    return cli(train, argv, "train.py")


if __name__ == "__main__":
    sys.exit(main())
