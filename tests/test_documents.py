"""DOCUMENTS.md: its map leads to the lines it names, and the documents are cited as [A] to [E] everywhere."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ROOT / "DOCUMENTS.md"
TEXT = DOCUMENTS.read_text(encoding="utf-8") if DOCUMENTS.exists() else ""
MAP = re.search(r"<!-- map -->\n(.*?)<!-- /map -->", TEXT, re.S)
ROWS = re.findall(r"^\| (.+?) \| (\S+?):(\d+) \| (.+?) \|$", MAP.group(1) if MAP else "", re.M)


def lines_of(name):
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


@pytest.mark.skipif(not DOCUMENTS.exists(), reason="DOCUMENTS.md is not here")
def test_the_map_has_rows_and_every_row_is_read():
    rows = [line for line in MAP.group(1).splitlines() if line.startswith("|")]
    assert len(ROWS) == len(rows) - 2 > 20  # without the head and the line under it
    mapped = {file for _, file, _, _ in ROWS}
    assert {path.name for path in ROOT.glob("*_cel.py")} | {"cem.py"} <= mapped


@pytest.mark.parametrize("label, file, line, what", ROWS, ids=[f"{r[1]}:{r[2]}" for r in ROWS])
def test_the_line_that_is_named_holds_the_label(label, file, line, what):
    lines = lines_of(file)
    found = [i + 1 for i, text in enumerate(lines) if label in text]
    assert int(line) <= len(lines) and label in lines[int(line) - 1], f"{label} is in line {found}"
    assert what.startswith(("[A", "[B", "[C", "[D", "[E"))


def text_files():
    """Files of the project, those that are not committed yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git repository")
    paths = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    binary = (".png", ".pt", ".jpg", ".gif")
    return {path: path.read_text(encoding="utf-8") for path in paths if path.suffix not in binary}


def test_nothing_is_cited_by_a_number_that_a_reader_cannot_open():
    numbered = re.compile("seed" + r"s?[ -]?00[0-4]\b", re.I)
    texts = text_files()
    assert len(texts) > 30
    assert [str(path) for path, text in texts.items() if numbered.search(text)] == []


@pytest.mark.skipif(not DOCUMENTS.exists(), reason="DOCUMENTS.md is not here")
def test_every_document_that_is_cited_is_listed():
    listed, cited = set(re.findall(r"^\| \[([A-Z])\] \|", TEXT, re.M)), set()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("harness/*.py"), *ROOT.glob("bench/*.py")]:
        cited |= set(re.findall(r"\[([A-Z]) (?:§|eq|app|objective)", path.read_text(encoding="utf-8")))
    assert cited <= listed == set("ABCDE")
