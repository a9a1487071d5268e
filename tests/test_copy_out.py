"""Every surrogate file, copied alone into an empty directory, in a stranger's training loop: the one the README shows, word for word."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECTION = re.search(
    r"## Copy a surrogate.*?(?=\n## )", (ROOT / "README.md").read_text(encoding="utf-8"), re.S
).group()
LOOP = re.search(r"```python\n(.*?)```", SECTION, re.S).group(1)
ROWS = re.findall(
    r"^\| (\w+_cel)\.py \| `((\w+)\(.*\))`.* \| ([\d.]+(?: / D)?) \|$", SECTION, re.M
)  # file, constructor, class, λ
TERM = " + lambd * cel(z, y)"
FILES = sorted(path.stem for path in ROOT.glob("*_cel.py"))

# What the stranger has: x = class centre + nuisance in 12 dimensions; an encoder that sends feature maps in (0,1); a linear server.
STRANGER = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
classes, D, sigma, epochs = 3, 16, 0.1, 20
lambd = {lambd}
y = torch.arange(600) % classes
x = 3 * torch.eye(classes, 12)[y] + torch.randn(600, 12)
loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, D), nn.Sigmoid(), nn.Unflatten(1, (4, 2, 2)))
server = nn.Sequential(nn.Flatten(), nn.Linear(D, classes))
optimizer = torch.optim.Adam([*encoder.parameters(), *server.parameters()], lr=0.01)
first_loss = F.cross_entropy(server(encoder(x)), y).item()
images, labels = x, y
"""
RESULT = """
with torch.no_grad():
    z = encoder(images).flatten(1)
    logits = server((z + sigma * torch.randn_like(z)).view(-1, 4, 2, 2))
    import json
    print(json.dumps({
        "spread": sum(z[labels == c].var(0, correction=0).mean().item() for c in range(classes)) / classes,
        "accuracy": (logits.argmax(1) == labels).float().mean().item(),
        "first_loss": first_loss,
        "last_loss": F.cross_entropy(logits, labels).item(),
        "called": bool(cel.stats),
    }))
"""
ALONE = """
try:
    import cem
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the repository can be imported from here")
"""


def test_readme_names_every_file_once():
    assert sorted(file for file, *_ in ROWS) == FILES and LOOP.count(TERM) == 1


def start_stranger(directory, file, constructor, name, lambd, loop):
    """The script in a new interpreter that sees the surrogate's file, torch and nothing of ours."""
    loop = loop.replace("from gated_att_cel import GatedAttCEL", f"from {file} import {name}")
    loop = re.sub(r"cel = GatedAttCEL\(.*?\)(?=  #)", lambda _: f"cel = {constructor}", loop)
    assert f"from {file} import {name}" in loop and f"cel = {constructor}" in loop
    directory.mkdir()
    shutil.copy(ROOT / f"{file}.py", directory)
    (directory / "stranger.py").write_text(
        ALONE + STRANGER.format(lambd=lambd) + loop + RESULT, encoding="utf-8"
    )
    return subprocess.Popen(
        [sys.executable, "-E", "-s", "stranger.py"],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """{file: its process}, and the same loop with the surrogate's term taken out, all at once: most of their time is importing torch."""
    folder = tmp_path_factory.mktemp("strangers")
    started = {row[0]: start_stranger(folder / row[0], *row, LOOP) for row in ROWS}
    return started | {"without": start_stranger(folder / "without", *ROWS[0], LOOP.replace(TERM, ""))}


@pytest.fixture(scope="module")
def without(strangers):
    return last_line(strangers["without"])


def last_line(process):
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("file", [row[0] for row in ROWS])
def test_alone_in_a_strangers_loop(strangers, without, file):
    result = last_line(strangers[file])
    assert result["called"] and not without["called"]
    assert result["last_loss"] < 0.5 * result["first_loss"], "the task is not learned beside it"
    assert result["accuracy"] > without["accuracy"] - 0.06
    assert result["spread"] < 0.8 * without["spread"], "the class-conditional spread has not fallen"
