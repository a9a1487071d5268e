"""Python source as HTML, for docs/build.py: coloured code, and the prose of docstrings and comments.

Every line of a source has an element with id="L<its number>", in the code or in the prose.
"""

import html
import io
import keyword
import re
import tokenize
import unicodedata

COLOURS = {"STRING": "s", "NUMBER": "n", "COMMENT": "c"}  # classes of style.css
EQUATION = re.compile(r"[=≥≤←∝]|\S  +\S|^  ")  # a comment with one of these has a line of its own
LABEL = re.compile(r"(.*?)\s{3,}(\(\w+\)|\[[A-E] .*)")  # s = v ⊙ u    (3d)
MARKER = re.compile(r'(\d\.|"\w+"(?=  | \(|:|,))')  # begins an item of a list


def paint(source):
    """The lines of a Python source as HTML, coloured."""
    lines, marks, f_strings, before = source.splitlines(), [], [], ""
    for kind, text, start, end, _ in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[kind]
        if name == "FSTRING_START":  # from Python 3.12 on an f-string is many tokens
            f_strings.append(start)
        elif name == "FSTRING_END":
            start, name = f_strings.pop(), "STRING"
        word = "k" if keyword.iskeyword(text) else "d" if before in ("def", "class") else ""
        colour, before = COLOURS.get(name, word), text
        if colour and not f_strings and start[0] == end[0]:
            marks.append((*start, end[1], colour))
    for row, a, b, colour in reversed(marks):
        line = lines[row - 1]
        lines[row - 1] = f"{line[:a]}\1{colour}{line[a:b]}\2{line[b:]}"
    span = lambda line: re.sub("\1(.)", r'<span class="\1">', html.escape(line)).replace("\2", "</span>")
    return [span(line) for line in lines]


def inline(text):
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    text = re.sub(r"(?<![\w*])\*(\w[\w -]*)\*(?![\w*])", r"<em>\1</em>", text)
    return re.sub(r"\[A §(\d(\.\d)?)", r'[<a href="index.html#A\1">A §\1</a>', text)


def equation(number, text):
    """One line. Its columns stay where there is room for them; a label goes to the right."""
    label = LABEL.fullmatch(text)
    *columns, last = re.findall(r"^ +|\S+(?: \S+)* *", label[1] if label else text)
    width = lambda column: 0.46 * sum(not unicodedata.combining(c) for c in column)
    span = lambda c: f'<span style="min-width:min({width(c):.1f}em,60%)">{inline(c.strip())}</span> '
    formula = "".join(map(span, columns)) + inline(last)
    right = f'<div class="label">{inline(label[2])}</div>' if label else ""
    return f'<div class="eq" id="L{number}"><div>{formula}</div>{right}</div>'


def prose(lines, doc):
    """A docstring (doc) or comments, [(number, text)], as HTML. A blank line ends a block."""
    out, block, was = [""], "", 0
    for number, text in lines:
        indent, text = len(text) - len(text.lstrip()), text.rstrip()
        if doc and not block:  # its first line says what it is
            block = "code" if re.match("    (cel = |python )", text) else "equation" if indent else "text"
        elif not doc:
            block = "equation" if EQUATION.search(text) else "text"
        anchor, words = f'<span id="L{number}">', text.strip()
        if not text:
            block, was = "", 99  # 99: whatever comes begins a paragraph
        elif block == "code":
            line = f"{anchor}{paint(text[4:])[0]}</span></pre>"
            out.append(f"{out.pop()[:-6]}\n{line}" if out[-1].endswith("</pre>") else f"<pre>{line}")
        elif block == "equation":
            out.append(equation(number, text[4 * doc :]))
        elif out[-1].endswith("</p>") and indent >= was and not MARKER.match(words):
            out.append(f"{out.pop()[:-4]}\n{anchor}{inline(words)}</span></p>")
        else:
            mark = MARKER.match(words)
            words = f"<b>{mark[0]}</b>{inline(words[mark.end() :])}" if mark else inline(words)
            out.append(f"<p{' class=item' if mark else ''}>{anchor}{words}</span></p>")
        was = indent if text else was
    return "\n".join(out).strip()
