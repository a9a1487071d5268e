"""Writes docs/*.html, the concept files as pages to read beside the documents: left the prose and the
equations, right the lines that compute them. It needs the standard library alone.

    python docs/build.py          figures (if torch is installed), pages, and the copied parts of README.zh.md
    python docs/build.py FOLDER   pages and README.zh.md into FOLDER, for a test to compare

docs/figures.py draws *.svg and computes examples.json with the surrogates. contents.txt is the table of
contents of [A]: number | title | in English | its equations | note; {FILE: TEXT} in a note becomes a link to
the first line of FILE that holds TEXT. *.tmpl is what stands around all this.
"""

import html
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from string import Template

from typeset import inline, paint, prose

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FILES = "cem gmm_cel cluster_cel gated_att_cel slot_cross_cel direct_cel train".split()
MAP_ROW = re.compile(r"^\| (.+?) \| (\w+)\.py:(\d+) \| (.+?) \|$", re.M)  # label, file, line, where printed
FIXED = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->|^```.*?^```$", re.S | re.M)  # the same in both READMEs


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def page(name):
    """One file: its docstring beside its figure, then rows of prose and code."""
    source = read(f"{name}.py")
    rows, in_doc, margin, before = [("top", [], [], [])], False, 0, ""  # class, comments, docstring, code
    for i, (line, painted) in enumerate(zip(source.splitlines(), paint(source)), 1):
        bare = line.strip()
        first = bare.startswith('"""') and not in_doc
        begins = re.match("@|def |class ", bare) and not before.startswith("@")
        if bare.startswith("# fmt"):
            continue  # for the formatter alone
        if first or in_doc:
            margin = line.index(bare) if first else margin
            rows[-1][2].append((i, line[margin:].removeprefix('"""').removesuffix('"""')))
            in_doc = not bare.endswith('"""') or first and bare == '"""'
        elif bare.startswith("# ---"):
            rows += [("h2", [(i, bare.strip("# -"))], [], []), ("row", [], [], [])]
        elif not bare and not rows[-1][3]:
            rows.append(("row def", [], [], []))  # comments that stand alone
        else:
            if (begins or bare.startswith("#")) and rows[-1][3]:
                rows.append(("row def" if begins else "row", [], [], []))
            if bare.startswith("#"):
                rows[-1][1].append((i, bare[1:].removeprefix(" ")))
            else:
                rows[-1][3].append(f'<span id="L{i}" data-n="{i}">{painted}</span>')
        before = bare
    out = [f"<h1>{name}.py</h1>"]
    for kind, comments, doc, code in rows:
        text = prose(comments, False) + prose(doc, True)
        if kind == "h2":
            out.append(f'<h2 id="L{comments[0][0]}">{inline(comments[0][1])}</h2>')
        elif text or code:
            while code and code[-1].endswith('"></span>'):
                code.pop()  # blank lines before the next row
            right = figure(name) if kind == "top" else "<pre>" + "\n".join(code) + "</pre>"
            out.append(f'<div class="{kind}"><div class="prose">{text}</div>{right}</div>')
    return "\n".join(out)


def figure(name):
    if not (HERE / f"{name}.svg").exists():
        return ""
    svg = read(f"docs/{name}.svg")
    caption = html.unescape(re.search(r"<desc>(.*?)</desc>", svg)[1])
    return f"<figure>{svg}<figcaption>{inline(caption)}</figcaption></figure>"


def at(file, line, text=""):
    return f'<a href="{file}.html#L{line}">{text} <span class="where">{file}.py:{line}</span></a>'


def linked(match):
    """{FILE: TEXT} of contents.txt."""
    found = [i for i, line in enumerate(read(f"{match[1]}.py").splitlines(), 1) if match[2] in line]
    return at(match[1], found[0]) if found else sys.exit(f"contents.txt: no {match[2]!r} in {match[1]}.py")


def index():
    """[A]'s table of contents with the places of DOCUMENTS.md's map, the examples, the figures."""
    of_section, others = {}, []
    for _, file, line, what in MAP_ROW.findall(read("DOCUMENTS.md")):
        match = re.match(r"\[A(?: §(?P<section>[\d.]+))?\] (?P<text>(?P<equation>[^:]*).*)", what)
        if match:
            key = match["section"] or match["equation"]
            place = (file == "cem", int(line), f"<li>{at(file, line, html.escape(match['text']))}</li>")
            of_section.setdefault(key, []).append(place)  # the stash comes last in [A §3.3]
        else:
            others.append(f"<li>{at(file, line, html.escape(what))}</li>")
    contents = []
    for entry in read("docs/contents.txt").splitlines():
        number, title, english, equations, note = (field.strip() for field in entry.split(" |", 4))
        places = sorted(p for key in [number, *equations.split()] for p in of_section.pop(key, []))
        note = re.sub(r"\{(\w+)\.py: ([^}]+)\}", linked, note)
        contents.append(
            f'<li class="{"" if "." in number else "part"}" id="A{number}"><b class="number">{number}</b>'
            f'<span lang="zh">{title}</span> <span class="soft">{english}{note and ". "}{note}</span>'
            f"<ul>{''.join(place for _, _, place in places)}</ul></li>"
        )
    if of_section:
        sys.exit(f"docs/contents.txt has no place for {list(of_section)}.")
    table = [
        f"<tr><td>{e['where']}</td><td>{e['what']}</td><td>{e['printed']}</td><td>{e['computed']}</td>"
        f"<td>{e['printed'] and '≠='[e['agrees']]}</td></tr>"
        for e in json.loads(read("docs/examples.json"))
    ]
    heads = {name: f'<h3><a href="{name}.html">{name}.py</a></h3>' for name in FILES}
    figures = [f"<div>{heads[name]}{figure(name)}</div>" for name in FILES if figure(name)]
    parts = {"contents": contents, "others": others, "examples": table, "figures": figures}
    return Template(read("docs/index.tmpl")).substitute({k: "\n".join(v) for k, v in parts.items()})


def chinese():
    """README.zh.md, with the code and the marked parts of README.md."""
    fixed, text = [match[0] for match in FIXED.finditer(read("README.md"))], read("README.zh.md")
    if len(FIXED.findall(text)) != len(fixed):
        sys.exit(f"README.zh.md must have {len(fixed)} blocks of code or between marks, as README.md.")
    return FIXED.sub(lambda _: fixed.pop(0), text)


def build(folder):
    for name in ["index", *FILES]:
        links = [f'<a href="{other}.html">{other}</a>' for other in ["index", *FILES]]
        nav = " ".join(f"<b>{name}</b>" if f">{name}<" in link else link for link in links)
        body = index() if name == "index" else page(name)
        text = Template(read("docs/page.tmpl")).substitute(title=name, nav=nav, body=body)
        (folder / f"{name}.html").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE
    if folder == HERE and find_spec("torch"):
        subprocess.run([sys.executable, HERE / "figures.py"], check=True)
    build(folder)
    (ROOT if folder == HERE else folder).joinpath("README.zh.md").write_text(chinese(), encoding="utf-8")
