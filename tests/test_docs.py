"""The pages in docs/ and README.zh.md are what `python docs/build.py` makes of the files as they are now."""

import html
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MAP = re.compile(r"^\| (.+?) \| (\w+)\.py:(\d+) \| (.+?) \|$", re.M)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
FIXED = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->|^```.*?^```$", re.S | re.M)
AGAIN = "is stale: run python docs/build.py and commit what it writes"


def read(path):
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The pages, built anew by an interpreter that has the standard library alone."""
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-S", "-E", str(DOCS / "build.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


class Page(HTMLParser):
    """Anchors (with the text that follows them up to the next one) and links; every tag must be closed."""

    def __init__(self, path):
        super().__init__()
        self.text, self.links, self.open, self.anchor = {}, [], [], None
        self.feed(read(path))
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if "id" in attrs:
            assert attrs["id"] not in self.text, f"{attrs['id']} is there twice"
            self.anchor = attrs["id"]
            self.text[self.anchor] = ""
        self.links += [attrs[name] for name in ("href", "src") if name in attrs]
        assert tag not in ("script", "iframe")
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.anchor:
            self.text[self.anchor] += data


@pytest.fixture(scope="module")
def pages():
    return {path.stem: Page(path) for path in DOCS.glob("*.html")}


def bare(text):
    return re.sub(r"[\s`*]", "", html.unescape(text))


def test_the_committed_pages_are_those_of_the_files(built):
    made = {path.name for path in built.glob("*.html")}
    assert made == {path.name for path in DOCS.glob("*.html")}
    for name in sorted(made):
        assert read(built / name) == read(DOCS / name), f"docs/{name} {AGAIN}"


def test_there_is_a_page_for_every_surrogate(pages):
    assert {path.stem for path in ROOT.glob("*_cel.py")} | {"cem", "index"} <= set(pages)
    for path in ROOT.glob("*_cel.py"):
        assert "<svg" in read(DOCS / f"{path.stem}.html"), path.stem


def test_every_label_of_the_map_has_an_anchor_and_a_link(pages):
    rows = MAP.findall(read(ROOT / "DOCUMENTS.md"))
    assert len(rows) > 20
    for label, file, line, _ in rows:
        assert bare(label) in bare(pages[file].text[f"L{line}"]), f"{label}: {file}.html#L{line}"
        assert f"{file}.html#L{line}" in pages["index"].links, f"{label} has no link in docs/index.html"


def test_no_line_of_a_file_is_lost(pages):
    for name in set(pages) - {"index"}:
        for number, line in enumerate(read(ROOT / f"{name}.py").splitlines(), 1):
            words = bare(line.replace('"""', "").strip())
            words = words.lstrip("#").strip("-") if words.startswith("#") else words
            if words and not line.strip().startswith("# fmt"):
                assert words in bare(pages[name].text[f"L{number}"]), f"{name}.py:{number}"


def test_every_link_leads_somewhere_in_this_repository(pages):
    for name, page in pages.items():
        for link in page.links:
            assert not re.match(r"\w+:|//", link), f"{name}.html: {link} is not in the repository"
            file, _, anchor = link.partition("#")
            target = (DOCS / file).resolve() if file else DOCS / f"{name}.html"
            assert target.is_file(), f"{name}.html: {link}"
            if anchor:
                assert anchor in pages[target.stem].text, f"{name}.html: {link}"


def close(old, new):
    """Equal but for the last digits of the numbers, which may differ between machines."""
    pairs = zip(NUMBER.findall(old), NUMBER.findall(new))
    near = all(math.isclose(float(a), float(b), rel_tol=0.01, abs_tol=0.02) for a, b in pairs)
    return NUMBER.sub("#", old) == NUMBER.sub("#", new) and near


def test_figures_and_worked_examples_are_those_of_the_surrogates(tmp_path):
    command = [sys.executable, str(DOCS / "figures.py"), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {p.name for p in DOCS.glob("*.svg")} | {
        "examples.json"
    }
    for path in tmp_path.glob("*.svg"):
        assert close(read(DOCS / path.name), read(path)), f"docs/{path.name} {AGAIN}"
    old, new = (json.loads(read(folder / "examples.json")) for folder in (DOCS, tmp_path))
    assert old == new, f"docs/examples.json {AGAIN}"
    computed = {(row["where"], row["what"]): row["computed"] for row in new}
    assert computed["6.2", "L at τ = 0.002"] == "1.2008"
    assert computed["6.3", "L at τ = 0.002"] == "2.4162"


# ------------------------------------------------------------------------------------------ README.zh.md


def prose_of(name):
    return FIXED.sub("", read(ROOT / name))


def test_the_chinese_readme_has_the_code_and_the_tables_of_the_english_one(built):
    assert read(built / "README.zh.md") == read(ROOT / "README.zh.md"), f"README.zh.md {AGAIN}"
    english, chinese = (
        [m[0] for m in FIXED.finditer(read(ROOT / name))] for name in ("README.md", "README.zh.md")
    )
    assert english == chinese and len(english) >= 5
    first = [re.findall(r"^\| (`.+?`) \|", prose_of(name), re.M) for name in ("README.md", "README.zh.md")]
    assert first[0] == first[1] and len(first[0]) >= 8


def test_the_chinese_readme_has_the_numbers_flags_and_links_of_the_english_one():
    english, chinese = prose_of("README.md"), prose_of("README.zh.md")
    for pattern in (r"\d+(?:\.\d+)*(?:x\d+)?", r"--[a-z-]+", r"H\([^)]*\)|I\([^)]*\)", r"^## |^- "):
        counts = [Counter(re.findall(pattern, text, re.M)) for text in (english, chinese)]
        assert counts[0] == counts[1], f"{pattern}: {counts[0] - counts[1]} {counts[1] - counts[0]}"
    links = [set(re.findall(r"\]\((\S+?)\)", text)) for text in (english, chinese)]
    assert links[0] - {"README.zh.md"} <= links[1]
    assert all((ROOT / link).exists() for link in links[1] if not link.endswith(".png"))
