"""What a trained run is worth: accuracy, attacks, leakage bits, the encoder's cost -> results.json and pictures."""

import argparse
import json
import math
import time
from pathlib import Path

import torch

import attack
import cem
from data import EVAL_BATCH
from options import parse
from report import Progress, UserError, environment, print_report, read_checkpoint, save_pictures, write
from split_net import count_flops, count_params, latency_ms


@torch.no_grad()
def accuracy(net, victim, images):
    net.eval()
    logits = torch.cat([net.server(victim.send(z)) for z in victim.features(images.x).split(EVAL_BATCH)])
    return (logits.argmax(1).cpu() == images.y).float().mean().item()


def audit(run, args, progress):
    """Attack, audit and measure a trained run. -> (results, pictures of the test images)"""
    start = time.perf_counter()
    run.net.eval()
    results = {"config": {k: v for k, v in vars(args).items() if k != "resume"}}
    torch.manual_seed(args.seed)
    results["accuracy"] = accuracy(run.net, run.victim, run.splits.test)
    results["val_accuracy"] = accuracy(run.net, run.victim, run.splits.val)
    results["attacks"], pictures = {}, {}
    if args.attack:
        images = attack.attacker_images(run.splits, args.attacker_data, args.seed)
        results["attacks"], pictures = attack.run(args.attack, run.victim, images, args, args.seed, progress)
    results["strongest"] = attack.strongest(results["attacks"])
    if args.sigma:
        fit, test = (cem.audit_sample(part, math.prod(run.shape), args.seed) for part in (run.splits.train, run.splits.test))
        bits, stderr = cem.leakage_bits(run.victim.features(fit.x).cpu(), fit.y, run.victim.features(test.x).cpu(), args.sigma,
                                        torch.Generator().manual_seed(args.seed))
        # exp(−2 I/d): by how much what is sent can lower the floor under the error, d the number of pixels
        results["leakage"] = {"bits": bits, "stderr": stderr, "bits_per_feature": bits / math.prod(run.shape),
                              "floor_factor": math.exp(-2 * bits * math.log(2) / run.splits.test.x[0].numel())}
    else:
        results["leakage"] = {"bits": None, "stderr": None, "bits_per_feature": None, "floor_factor": None}  # infinite without noise
    results["encoder"] = {"params": count_params(run.net.encoder), "flops": count_flops(run.net.encoder, run.image_size),
                          "latency_ms": latency_ms(run.net.encoder, run.image_size), "features": list(run.shape)}
    results["cel"] = run.cel_report()
    results["defense"] = {k: float(v) for k, v in run.defense.stats.items()}  # of the last step
    results["seconds"] = {"train": run.seconds, "attack": time.perf_counter() - start}
    results["seconds"]["total"] = sum(results["seconds"].values())
    return results, pictures


def finish(run, args, folder, argv, program, stem="results", pictures_stem="reconstructions"):
    """Attack, audit, write, print."""
    progress = Progress()
    results, pictures = audit(run, args, lambda name, done: progress(f"{name:8}", done))
    results["environment"] = environment(program, argv)
    write(folder / f"{pictures_stem}.png", lambda temporary: save_pictures(temporary, run.splits.test.float(), pictures))
    write(folder / f"{stem}.json", json.dumps(results, indent=1))
    print_report(results, folder)


def attack_checkpoint(argv):
    """A trained run attacked again, with flags of the attack group, the rest as trained -> attack.json, attack.png beside its results."""
    from train import Run, load_splits  # train.py imports this file
    if set(argv) & {"-h", "--help"}:
        parse(["--help"])
    if not argv or argv[0].startswith("-"):
        raise UserError("name the run's folder first, as in: python attack.py runs/NAME --attack decoder,gan,whitebox")
    folder = Path(argv[0])
    state = read_checkpoint(folder / "checkpoint.pt")
    if state["epoch"] < state["config"]["epochs"]:
        raise UserError(f"{folder}: training stopped after epoch {state['epoch']} of {state['config']['epochs']}; finish it first with train.py --resume.")
    given = parse(argv[1:])
    trained = argparse.Namespace(**{**state["config"], "device": given.device, "data_dir": given.data_dir if "--data-dir" in argv else state["config"]["data_dir"]})
    for flag in [a.split("=")[0] for a in argv[1:] if a.startswith("--")]:
        name = flag[2:].replace("-", "_")
        if not name.startswith(("attack", "whitebox")) and name not in ("device", "data_dir"):
            raise UserError(f"{flag}: fixed when the run was trained; attack.py takes --attack..., --whitebox..., --device and --data-dir.")
        setattr(trained, name, getattr(given, name))
    trained.attack = trained.attack or given.attack
    if trained.attacker_data == "aux" and not trained.aux_share:
        raise UserError("--attacker-data aux: the run was trained on all images; train it again with --attacker-data aux to keep some for the attacker.")
    run = Run(trained, load_splits(trained))
    run.load(state, folder / "checkpoint.pt")
    finish(run, trained, folder, argv, "attack.py", "attack", "attack")
