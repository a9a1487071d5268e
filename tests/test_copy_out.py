"""Every surrogate, copied alone into an empty folder, in a stranger's loop: the README's, word for word."""

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPET = re.search(r"<!-- snippet -->\n```python\n(.*?)```\n<!-- /snippet -->", README, re.S).group(1)
PARALLEL = (ROOT / "harness/parallel.py").read_text(encoding="utf-8")
SHOWN = "cluster_cel", "ClusterCEL"  # the file and the class of the snippet
TERM = " + 0.2 * cel(z, y, x)"
# file: (class, weight); the weights are train.py's λ·γ
SURROGATES = {
    "gmm_cel": ("GMMCEL", 0.0008),
    "cluster_cel": ("ClusterCEL", 0.2),
    "gated_att_cel": ("GatedAttCEL", 0.2),
    "slot_cross_cel": ("SlotCrossCEL", 0.5),
    "direct_cel": ("DirectCEL", 0.3),
}

# One interpreter for all, most of whose time is the import of torch: each folder in turn is the only one of
# ours on its path. A stranger has pictures (a bright stripe for each class, the rest at random), an encoder
# that sends maps in (0, 1), and a server.
STRANGER = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)

def world():
    torch.manual_seed(0)
    y = torch.arange(300) % 10
    blocks = torch.rand(300, 3, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    x = 0.3 * torch.rand(300, 3, 16, 16) + 0.4 * blocks
    x[torch.arange(300), :, y + 3, :] += 0.3
    middle = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 2, stride=2), nn.BatchNorm2d(8)]
    encoder = nn.Sequential(*middle, nn.Sigmoid())
    server = nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
    loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
    network = nn.Sequential(encoder, server)
    names = {"encoder": encoder, "server": server, "network": network, "loader": loader, "epochs": 8}
    return names | {"pictures": x, "labels": y}

def end_of(made):
    made["encoder"].eval()
    with torch.no_grad():
        z = made["encoder"](made["pictures"])
        right = (made["server"](z + 0.1 * torch.randn_like(z)).argmax(1) == made["labels"]).float().mean()
    return z, right.item()

def measure(cel, z, y, x):
    # what the trained surrogate says of these features
    if hasattr(cel, "refresh"):
        torch.manual_seed(0)
        cel.refresh(z, y)
    cel.eval()
    with torch.no_grad():
        return cel(z, y, x).item()

plain = None
for folder in sys.argv[1:]:
    os.chdir(folder)
    sys.path[0] = folder
    for name in [name for name in sys.modules if name.endswith("_cel")]:
        del sys.modules[name]
    for other in ("cem", "train", "harness"):
        try:
            __import__(other)
        except ModuleNotFoundError:
            continue
        raise SystemExit("the repository can be imported from here")
    made = world()
    exec(compile(open("loop.py", encoding="utf-8").read(), "loop.py", "exec"), made)
    z, accuracy = end_of(made)
    if plain is None:  # the first folder's loop is without the surrogate's term
        plain = z, accuracy
        continue
    losses = [measure(made["cel"], features, made["labels"], made["pictures"]) for features in (plain[0], z)]
    result = {"without": losses[0], "with": losses[1], "accuracy": accuracy, "plain accuracy": plain[1]}
    print(json.dumps({**result, "stats": list(made["cel"].stats)}))
"""


def make_folder(folder, file, loop):
    folder.mkdir()
    shutil.copy(ROOT / f"{file}.py", folder)
    (folder / "loop.py").write_text(loop, encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """{file: what came of it}"""
    root = tmp_path_factory.mktemp("strangers")
    folders = [make_folder(root / "without", SHOWN[0], SNIPPET.replace(TERM, ""))]
    for file, (name, weight) in SURROGATES.items():
        loop = SNIPPET.replace(SHOWN[0], file).replace(SHOWN[1], name).replace("0.2 * cel", f"{weight} * cel")
        folders.append(make_folder(root / file, file, loop))
    (root / "driver").mkdir()
    (root / "driver" / "stranger.py").write_text(STRANGER, encoding="utf-8")
    command = [sys.executable, "-E", "-s", str(root / "driver" / "stranger.py"), *folders]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=root / "driver")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"without"')]
    return dict(zip(SURROGATES, lines, strict=True))


def test_the_snippet_shows_one_surrogate_and_all_are_tried():
    assert SNIPPET.count(TERM) == 1 and SNIPPET.count(SHOWN[0]) == 1 and SNIPPET.count(SHOWN[1]) == 2
    assert sorted(SURROGATES) == sorted(path.stem for path in ROOT.glob("*_cel.py"))


@pytest.mark.parametrize("file", SURROGATES)
def test_alone_in_a_strangers_loop(strangers, file):
    found = strangers[file]
    assert found["accuracy"] > max(0.5, found["plain accuracy"] - 0.15), "the task is not learned beside it"
    assert found["with"] < 0.95 * found["without"], "what it measures has not fallen"
    assert {"loss", "spread", "above_tau", "skipped"} <= set(found["stats"])


PROCESSES = """
import hashlib, os, sys
import torch
import torch.distributed
from gated_att_cel import GatedAttCEL
from gmm_cel import GMMCEL

torch.set_num_threads(1)
{helper}

def state_after_three_steps(rank):
    torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
    torch.manual_seed(0)
    gated, gmm = GatedAttCEL(2, 6, 0.1, memory=2), GMMCEL(2, 6, 0.1)
    gmm.refresh(torch.rand(60, 6), torch.arange(60) % 2)
    torch.manual_seed(1 + rank)  # other samples in each process
    for _ in range(3):
        z, y = torch.rand(16, 6, requires_grad=True), torch.arange(16) % 2
        gated.zero_grad()
        (gated(z, y) + gmm(z, y)).backward()
        synchronise(gated)
        synchronise(gmm)
        with torch.no_grad():
            for p in gated.parameters():
                p -= 0.1 * p.grad
    assert abs(gmm.weights.sum() - 1) < 1e-5
    state = [*gated.parameters(), *gmm.buffers()]
    torch.distributed.destroy_process_group()
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in state)).hexdigest()

children = []
for rank in (0, 1):
    if (pid := os.fork()) == 0:
        open(sys.argv[1] + str(rank), "w").write(state_after_three_steps(rank))
        os._exit(0)
    children.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
"""


def test_the_helper_for_several_processes_keeps_a_surrogate_equal(tmp_path):
    """`synchronise` of harness/parallel.py's docstring, in two processes that see other samples: the same
    parameters and statistics."""
    helper = textwrap.dedent(re.search(r"    def synchronise.*?(?=\n\"\"\")", PARALLEL, re.S)[0])
    make_folder(tmp_path / "two", "gmm_cel", PROCESSES.format(helper=helper))
    shutil.copy(ROOT / "gated_att_cel.py", tmp_path / "two")
    command = [sys.executable, "-E", "-s", "loop.py", str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "two")
    assert done.returncode == 0, done.stderr
    states = [(tmp_path / f"state{rank}").read_text() for rank in (0, 1)]
    assert states[0] == states[1] != ""
