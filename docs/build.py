"""Writes docs/*.html, the concept files as pages to read beside the documents: left the prose and the equations,
right the lines that compute them. Everything comes from the files themselves and from DOCUMENTS.md.

    python docs/build.py          figures (if torch is installed), pages, and the copied parts of README.zh.md
    python docs/build.py FOLDER   pages and README.zh.md into FOLDER, for a test to compare

It needs the standard library alone. docs/figures.py draws the *.svg and computes examples.json, with torch.
contents.txt is the table of contents of [A]: number | title | in English | its equations | note; {FILE: TEXT}
in a note becomes a link to the first line of FILE that holds TEXT.
"""

import ast
import html
import io
import json
import keyword
import re
import subprocess
import sys
import tokenize
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
read = lambda path: path.read_text(encoding="utf-8")

MAP = re.search(r"<!-- map -->\n(.*?)<!-- /map -->", read(ROOT / "DOCUMENTS.md"), re.S).group(1)
ROWS = re.findall(r"^\| (.+?) \| (\S+?):(\d+) \| (.+?) \|$", MAP, re.M)  # label, file, line, in the documents
FILES = ["cem.py", "gmm_cel.py", "cluster_cel.py", "gated_att_cel.py", "slot_cross_cel.py", "direct_cel.py", "train.py"]
FIXED = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->|^```.*?^```$", re.S | re.M)  # README.zh.md has these from README.md
SIGNS = re.compile(r"[=≥≤←∝]|\S {2,}\S")  # a comment that has one is an equation
STRINGS = [getattr(tokenize, "FSTRING_" + end, None) for end in ("START", "END")]  # Python 3.12 takes f"" apart


def paint(source):
    """The lines of a Python source as HTML, coloured."""
    lines, spans, depth, previous = source.splitlines(), [], 0, ""
    for kind, text, start, end, _ in tokenize.generate_tokens(io.StringIO(source).readline):
        if kind == STRINGS[0]:
            depth, begin = depth + 1, begin if depth else start
        depth -= kind == STRINGS[1]
        if kind == tokenize.STRING and not depth or kind == STRINGS[1] and not depth:
            spans.append((begin if kind == STRINGS[1] else start, end, "s"))
        elif kind == tokenize.COMMENT or kind == tokenize.NUMBER and not depth:
            spans.append((start, end, "c" if kind == tokenize.COMMENT else "n"))
        elif kind == tokenize.NAME and not depth and (keyword.iskeyword(text) or previous in ("def", "class")):
            spans.append((start, end, "k" if keyword.iskeyword(text) else "d"))
        previous = text
    cuts = {}  # line -> [(from, to, class)]
    for (row, a), (last, b), name in spans:
        for i in range(row, last + 1):
            line = lines[i - 1]
            cuts.setdefault(i, []).append((a if i == row else 0, b if i == last else len(line), name))
    painted = []
    for i, line in enumerate(lines, 1):
        out, done = "", 0
        for a, b, name in cuts.get(i, []):
            out += html.escape(line[done:a], quote=False) + f'<span class="{name}">{html.escape(line[a:b], quote=False)}</span>'
            done = b
        painted.append(out + html.escape(line[done:], quote=False))
    return painted


def inline(text):
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    text = re.sub(r"(?<![\w*])\*(\w[\w -]*)\*(?![\w*])", r"<em>\1</em>", text)
    return re.sub(r"\[A §([\d.]+\d|\d)", r'[<a href="index.html#A\1">A §\1</a>', text)


def equation(number, text, wide):
    """One line. The gaps in it stay where there is room for them; the label goes to the right."""
    *pieces, last = [(p, p.rstrip()) for p in re.findall(r"\S+(?: \S+)*\s*", text)]
    indent, label = len(text) - len(text.lstrip()), re.match(r"\(\w+\)$|\[[A-E]", last[1]) and not wide
    width = lambda n: f' style="min-width:{n * 0.46:.1f}em"'
    out = f"<span{width(indent)}></span>" if indent and not label else ""
    for full, piece in pieces:
        out += f'<span class="gap"{"" if label else width(len(full) - 2)}>{inline(piece)}</span> '
    label = f'<span class="label">{inline(last[1])}</span>' if label else ""
    return f'<div class="eq" id="L{number}">{label}{out}{"" if label else f"<span>{inline(last[1])}</span>"}</div>'


def prose(lines, painted=None):
    """A docstring or comments, [(number, text)], as HTML. `painted`: this is a docstring, code in it is coloured."""
    out, kind, was = [], "", 0
    for number, text in lines:
        indent, words = len(text) - len(text.lstrip()), text.strip()
        if not words:
            kind = ""
            continue
        if painted is None:  # comments: each line by itself
            kind = "eq" if SIGNS.search(words) or indent > 1 else "more" if kind in ("p", "more") else "p"
        elif not kind:  # the first line of a block decides
            kind = "p" if not indent else "code" if words.startswith("cel = ") else "eq"
        elif kind in ("p", "more"):
            kind = "p" if re.match(r'\d\. |"\w+"|\(\w+\) ', words) or indent < was else "more"
        was, span = indent, f'<span id="L{number}">{inline(re.sub("  +", " ", words))}</span>'
        if kind == "eq":
            out.append(equation(number, text[4:] if painted else text, bool(painted)))
        elif kind == "more":
            out[-1] = out[-1].removesuffix("</p>") + f" {span}</p>"
        elif kind == "code":
            line = f'<span id="L{number}">{paint(text[4:] + chr(10))[0]}</span>\n'
            out += [line] if out and out[-1].startswith("<span") else ["<pre>", line]
        else:
            out.append(f'<p class="item">{span}</p>' if indent else f"<p>{span}</p>")
        if kind != "code" and len(out) > 1 and out[-2].startswith("<span"):
            out.insert(-1, "</pre>")
    return "".join(out + ["</pre>"] if out and out[-1].startswith("<span") else out)
