"""What harness/options.py promises: few flags, each refusing nonsense in one sentence; settings that depend
on others filled in; names that two different runs never share; and what a run inherits from its base."""

import re
from pathlib import Path

import pytest
import torch
from conftest import flags, picture_folder, save_checkpoint, sentence

from harness import options
from harness.files import UserError
from harness.options import DEFAULTS, OF_IMAGE, given_flags, make_parser, parse_flags, read_run, training_settings
from harness.parts import SURROGATES

ACTIONS = {a.dest: a for a in make_parser()._actions if a.dest != "help"}


# -------------------------------------------------------------------------------- the flags


def test_there_are_fewer_flags_than_there_were_and_each_has_one_line_of_help():
    assert len(ACTIONS) < 62
    for action in ACTIONS.values():
        assert action.help and "\n" not in action.help, action.dest
        assert action.option_strings == ["--" + action.dest.replace("_", "-")]


def test_help_is_printed_and_mentions_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(["--help"])
    shown = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.M))
    assert ended.value.code == 0 and shown == {a.option_strings[0] for a in ACTIONS.values()}


def test_every_setting_has_a_plain_type_that_a_checkpoint_keeps(tmp_path):
    """Numbers, strings and lists of them: nothing that a pickle would have to run."""
    for command in (
        "",
        "--surrogate slot+direct --lambd 1+2 --scale 1 --mode documented --off snr_gate,slot_mass --attack none",
    ):
        state = save_checkpoint(tmp_path, command)
        assert read_run(tmp_path / "checkpoint.pt")["config"] == state["config"]


def test_every_surrogate_has_its_defaults_and_can_be_named():
    assert DEFAULTS.keys() == SURROGATES.keys()
    for name, (lambd, scale, warmup) in DEFAULTS.items():
        args = flags(f"--surrogate {name} --epochs 100")
        assert (args.surrogate, args.lambd, args.scale, args.warmup) == ([name], [lambd], scale, warmup)


NUMBERS = [
    a.option_strings[0] for a in ACTIONS.values() if getattr(a.type, "__name__", "").endswith("number")
]


@pytest.mark.parametrize(
    "text", ["nan", "inf", "-inf", "-1", "1e308", "", "ten", "1" + "0" * 400, "9" * 5000, "1,5"]
)
@pytest.mark.parametrize("flag", [*NUMBERS, "--sigma", "--lambd", "--strength", "--attack-epochs"])
def test_no_number_takes_nonsense(flag, text):
    sentence(lambda: parse_flags([f"{flag}={text}"]), flag)


WRONG = {
    "--epochs 0": ("--epochs: 0", "at least 1"),
    "--epochs 0.5": ("--epochs", "whole number"),
    "--width 0": ("--width: 0", "at least 1"),
    "--image-size 31": ("--image-size: 31", "at least 32 and at most 4096"),
    "--train-size 0": ("--train-size: 0", "at least 1"),
    "--seed 2147483648": ("--seed", "at most 2147483647"),
    "--label-smoothing 1": ("--label-smoothing", "at most 0.9"),
    "--momentum-decay 1 --stash params": ("--momentum-decay", "at most 0.9999"),
    "--momentum-decay 0.9": ("--momentum-decay", "--stash params"),
    "--sigma 1e-30": ("--sigma", "0, or at least 1e-6"),
    "--sigma 0 --surrogate gmm": ("--sigma 0", "give a positive --sigma"),
    "--surrogate magic": ("--surrogate", "gmm, cluster, gated, slot, direct"),
    "--surrogate gmm+gmm": ("--surrogate", "different surrogates"),
    "--surrogate gmm+": ("--surrogate", "joined by +"),
    "--surrogate none+gmm": ("--surrogate", "joined by +"),
    "--surrogate gmm+cluster --lambd 1": ("--lambd", "one number for each of the 2"),
    "--lambd 1": ("--lambd", "the 0 surrogates"),
    "--surrogate gated --epochs 3 --warmup 3": ("--epochs 3", "would never act"),
    "--surrogate gmm --epochs 1": ("--epochs 1", "would never act"),
    "--surrogate gated --slots 4": ("--slots", "only slot takes it"),
    "--surrogate cluster --form released --floor 1": ("--floor", "not with this --mode or --form"),
    "--surrogate slot --mode image --var-threshold 1": ("--var-threshold", "not with this --mode or --form"),
    "--clusters 4": ("--clusters", "only gmm and cluster take it"),
    "--surrogate gated --mode image": ("--mode image", "fit, adversarial, documented"),
    "--surrogate slot --mode fit": ("--mode fit", "mixture, documented, image"),
    "--surrogate slot --mode magic": ("--mode", "choose from"),
    "--surrogate gated --floor 0": ("--floor: 0", "greater than 0"),
    "--surrogate gated --var-threshold 0": ("--var-threshold: 0", "greater than 0"),
    "--surrogate gmm --update-scale 0": ("--update-scale: 0", "greater than 0"),
    "--arch vgg12": ("--arch", "vgg11"),
    "--defense prayer": ("--defense prayer", "use one of none, dropout"),
    "--defense dropout+dropout": ("--defense", "joined by +"),
    "--defense dropout --strength 0.1+0.2": ("--strength", "one number for each of the 1"),
    "--strength 1": ("--strength", "--defense"),
    "--attack luck": ("--attack", "decoder, gan, whitebox"),
    "--attack decoder,decoder": ("--attack", "different attackers"),
    "--attack-size 2": ("--attack-size", "as in 2x48"),
    "--attack-size 0x48": ("--attack-size", "as in 2x48"),
    "--attack-size 2x00": ("--attack-size", "as in 2x48"),
    "--attack-size 2x48x1": ("--attack-size", "as in 2x48"),
    "--attack-epochs 0": ("--attack-epochs", "at least 1"),
    "--looks 0": ("--looks: 0", "at least 1"),
    "--device cuda:99": ("--device cuda:99", "use cpu or auto"),
    "--device meta": ("--device meta", "use cpu or auto"),
    "--device hpu": ("--device hpu", "use cpu or auto"),
    "--device toaster": ("--device toaster", "use cpu or auto"),
    "--workers 4": ("--workers", "see --help"),
    "--epoch 3": ("--epoch", "see --help"),
    "--epochs": ("--epochs", "see --help"),
    "fast": ("fast", "see --help"),
}


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_flag_is_one_sentence_that_says_what_to_do(command):
    sentence(lambda: flags(command), *WRONG[command])


# -------------------------------------------------------------------------------- what depends on what


def test_epochs_and_rate_depend_on_whether_a_base_is_hardened(tmp_path):
    save_checkpoint(tmp_path)
    assert [(a.epochs, a.lr) for a in (flags(""), flags("--init", tmp_path))] == [(10, 0.02), (3, 0.01)]
    assert flags("--lr 0").lr == 0 and flags("--init", tmp_path, "--epochs", 7).epochs == 7


def test_the_warm_up_is_the_longest_of_the_surrogates_and_at_most_a_fifth_of_the_epochs(tmp_path):
    warmup = lambda command: flags(command).warmup
    assert warmup("--surrogate gated+slot --scale 1 --epochs 50") == 5
    assert warmup("--surrogate gated --epochs 10") == 2
    assert warmup("--surrogate gated --epochs 3") == 0
    assert warmup("--surrogate gmm --epochs 3") == 1  # its statistics come at the end of the first epoch
    assert warmup("--surrogate gated --epochs 10 --warmup 7") == 7
    save_checkpoint(tmp_path)
    assert warmup(f"--surrogate gated+gmm --scale 1 --init {tmp_path} --epochs 1") == 0  # hardened from the first step


def test_surrogates_joined_by_plus_have_a_lambda_each_and_one_scale():
    args = flags("--surrogate gmm+cluster")
    assert args.lambd == [DEFAULTS["gmm"][0], DEFAULTS["cluster"][0]] and args.scale == 1
    args = flags("--surrogate cluster+gated --lambd 3+0 --scale 0.7")
    assert args.lambd == [3, 0] and args.scale == 0.7
    # γ of the one would multiply the λ of the other, and which depends on the order
    for both in ("cluster+gated", "gated+cluster"):
        sentence(lambda both=both: flags(f"--surrogate {both}"), f"--surrogate {both}", "--scale")


def test_slot_on_the_image_has_defaults_of_its_own():
    args = flags("--surrogate slot --mode image --epochs 100")
    assert (args.lambd, args.scale, args.warmup) == ([OF_IMAGE[0]], *OF_IMAGE[1:])
    assert flags("--surrogate direct+slot --mode image --lambd 0.4+0.4").scale == 1  # as the cells have it


def test_given_flags_are_those_that_stand_in_the_command():
    assert given_flags(["--lr=0.05", "--attack", "none", "--resume"]) == {"lr", "attack", "resume"}
    assert given_flags([]) == set()


# -------------------------------------------------------------------------------- names

# one other value of every setting that a trained network depends on
OTHER = {
    "dataset": "cifar10",
    "image_size": "32",
    "train_size": "100",
    "arch": "resnet20",
    "width": "17",
    "cut": "3",
    "bottleneck": "7",
    "epochs": "11",
    "batch_size": "127",
    "lr": "0.0500000001",
    "schedule": "steps",
    "label_smoothing": "0.1",
    "precision": "bfloat16",
    "seed": "1",
    "surrogate": "gated",
    "sigma": "0.10000001",
    "scale": "0.5",
    "warmup": "1",
    "eta_ref": "0.001",
    "clip": "1",
    "momentum_decay": "0.5 --stash params",
    "stash": "params",
    "pool": "2",
    "refresh_every": "2",
    "defense": "dropout",
    "attacker_data": "aux",
}
OF_A_SURROGATE = {
    "lambd": "gated --lambd 2.00000001",
    "var_threshold": "gated --var-threshold 0.3",
    "floor": "gated --floor 2",
    "clusters": "cluster --clusters 2",
    "form": "cluster --form lin",
    "variance": "cluster --variance trace",
    "outliers": "cluster --outliers truncate",
    "covariance": "gmm --covariance full",
    "update_scale": "gmm --update-scale 10",
    "mode": "gated --mode documented",
    "hidden": "gated --hidden 5",
    "slots": "slot --slots 3",
    "memory": "slot --memory 3",
    "off": "slot --mode documented --off snr_gate",
    "measure": "direct --measure logdet",
}


def test_every_setting_of_the_training_is_in_the_default_name(tmp_path):
    save_checkpoint(tmp_path / "a"), save_checkpoint(tmp_path / "b")
    commands = ["", *(f"--{k.replace('_', '-')} {v}" for k, v in OTHER.items())]
    commands += [f"--surrogate {name}" for name in DEFAULTS if name != "gated"]  # which OTHER has
    commands += [f"--surrogate {v}" for v in OF_A_SURROGATE.values()]
    commands += ["--surrogate slot --mode documented", "--defense dropout --strength 0.2"]
    commands += [f"--init {tmp_path / 'a'}", f"--init {tmp_path / 'b'}"]
    names = [flags(command).name for command in commands]
    assert len(set(names)) == len(names)
    covered = {*OTHER, *OF_A_SURROGATE, "strength", "init", *options.OF_THE_ATTACK, *options.OF_THE_PLACE}
    assert covered == set(ACTIONS)


def test_the_attack_and_the_place_are_not_so_that_a_finished_run_can_be_attacked_again():
    for command in (
        "--attack none",
        "--attack-epochs auto",
        "--attack-size 3x9",
        "--looks 4",
        "--runs-dir elsewhere",
    ):
        assert flags(command).name == flags("").name
    assert not {*options.OF_THE_ATTACK, *options.OF_THE_PLACE} & training_settings(flags("")).keys()


def test_two_data_folders_of_the_same_name_do_not_share_a_default_name(tmp_path, monkeypatch):
    picture_folder(tmp_path / "sA/xrays"), picture_folder(tmp_path / "sB/xrays")
    names = {flags("--dataset", tmp_path / s / "xrays").name for s in ("sA", "sB")}
    assert len(names) == 2 and all(name.startswith("xrays-") for name in names)
    monkeypatch.chdir(tmp_path / "sA")
    here = flags("--dataset xrays").name
    monkeypatch.chdir(tmp_path / "sB")
    assert flags("--dataset xrays").name != here  # the same words in another place
    cifar = [flags("--dataset cifar10 --data-dir", tmp_path / s).name for s in ("sA", "sB")]
    assert cifar[0] != cifar[1] and flags("--data-dir elsewhere").name == flags("").name  # shapes are drawn


@pytest.mark.parametrize("dataset", ["../..", "/", "a/../..", ".", "..", "x\ny", "ä ö", "\udcff", "-", ""])
def test_a_default_name_is_a_plain_name_in_its_folder(dataset):
    name = parse_flags([f"--dataset={dataset}"]).name
    assert Path(name).name == name and re.fullmatch(
        r"[A-Za-z0-9][A-Za-z0-9._+=,-]*|-[A-Za-z0-9._+=,-]+", name
    )


NAMES = [
    "..",
    ".",
    "",
    "/abs",
    "a/b",
    "a/../b",
    "../run",
    "..\\run",
    "a\\b",
    "~",
    "~root",
    ".hidden",
    "a\0b",
    "a b",
]
NAMES += ["$HOME", "a\nb", "run\n", "C:run", "a*", "ä", " run", "run/", "//"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stays_in_its_folder(name):
    with pytest.raises(UserError, match="(?s)--name.*--runs-dir") as caught:
        parse_flags([f"--name={name}"])
    assert "\n" not in str(caught.value).replace(name, "")
    assert flags("--name sigma0.1+x=3,4_B-").name == "sigma0.1+x=3,4_B-"


# -------------------------------------------------------------------------------- --init


def test_network_and_images_come_from_the_base(tmp_path):
    base = "--width 5 --cut 3 --bottleneck 4 --seed 9 --train-size 200 --attacker-data aux"
    save_checkpoint(tmp_path, f"{base} --batch-size 64 --sigma 0.3 --surrogate gmm")
    args = flags("--surrogate gated --init", tmp_path)
    assert (args.width, args.cut, args.bottleneck, args.seed) == (5, 3, 4, 9)
    assert (args.train_size, args.attacker_data) == (200, "aux")
    assert (args.sigma, args.surrogate, args.batch_size) == (0.1, ["gated"], 128)  # these are its own
    assert flags("--width 5 --sigma 0.3 --init", tmp_path).sigma == 0.3  # said again, it is no contradiction


REFUSED = {
    "another network": (
        "",
        "--width 8",
        {},
        ("--width 8", "the base of --init has 16", "leave the flag out"),
    ),
    "other images": ("", "--dataset cifar10", {}, ("--dataset cifar10", "shapes")),
    "another seed": ("", "--seed 1", {}, ("--seed 1", "the base of --init has 0")),
    "unfinished": ("--epochs 5", "", {"epoch": 4}, ("not finished", "--resume")),
    "PATROL": ("", "--defense patrol", {}, ("patrol", "from scratch")),
    "a base with PATROL": ("--defense patrol", "", {}, ("patrol", "from scratch")),
}


@pytest.mark.parametrize("base, command, changes, words", REFUSED.values(), ids=REFUSED)
def test_what_no_base_can_be(tmp_path, base, command, changes, words):
    save_checkpoint(tmp_path, base, **changes)
    sentence(lambda: flags(command, "--init", tmp_path), *words)


def test_a_base_that_is_not_there(tmp_path):
    sentence(lambda: flags("--init", tmp_path), tmp_path / "checkpoint.pt", "no such file")


CRAFTED = [
    *(("epochs", value) for value in ("ten", None, [3], 2.5)),
    *(("sigma", value) for value in ("0.1", None, [0.1])),
    *(("lambd", value) for value in (2.0, None, ["a"], "2")),
    *(("attack_size", value) for value in ([2.5, 4], ["2", "48"], "2x48")),
    *(("attack", value) for value in ("decoder", [1])),
    *(("dataset", value) for value in (5, None, ["a"])),
    *(("resume", value) for value in ("yes", None)),
    ("seed", torch.ones(1)),
    ("defense", 7),
    ("width", "16"),
]


@pytest.mark.parametrize("name, value", CRAFTED)
def test_a_checkpoint_with_a_setting_of_another_type_is_one_sentence(tmp_path, name, value):
    state = save_checkpoint(tmp_path)
    state["config"][name] = value
    torch.save(state, tmp_path / "checkpoint.pt")
    sentence(
        lambda: read_run(tmp_path / "checkpoint.pt"), "checkpoint.pt: damaged", f"its {name} is", "delete it"
    )
    sentence(lambda: flags("--init", tmp_path), "checkpoint.pt: damaged")


@pytest.mark.parametrize("name", ["epochs", "defense", "sigma", "looks"])
def test_a_checkpoint_without_a_setting_is_one_sentence(tmp_path, name):
    state = save_checkpoint(tmp_path)
    del state["config"][name]
    torch.save(state, tmp_path / "checkpoint.pt")
    sentence(lambda: flags("--init", tmp_path), "checkpoint.pt: damaged", name)
