"""What the surrogate files have in common: each copies out alone, fits its page, ends with the same block."""

import ast
import pathlib
import unicodedata

import pytest

HERE = pathlib.Path(__file__).parent.parent
LINES = {
    "gmm": 200,
    "cluster": 200,
    "gated_att": 200,
    "slot_cross": 300,
    "direct": 150,
}  # beside the docstring
every_surrogate = pytest.mark.parametrize("name", LINES)


def read(name):
    return (HERE / f"{name}_cel.py").read_text(encoding="utf-8")


def block(text):
    """The lines from the mark to the end of the file."""
    mark = "\n# ----- what every surrogate needs"
    assert text.count(mark) == 1, "the shared block is missing"
    return text[text.index(mark) + 1 :]


def test_no_surrogate_file_is_missing_here():
    assert {path.name for path in HERE.glob("*_cel.py")} == {f"{name}_cel.py" for name in LINES}


@every_surrogate
def test_the_block_is_the_same_to_the_letter(name):
    shared = block(read(name))
    assert shared == block(read("gated_att")) and len(shared.splitlines()) <= 35


@every_surrogate
def test_every_function_of_the_block_is_used_before_it(name):
    text = read(name)
    shared = block(text)
    for function in ast.parse(shared).body:
        assert f"{function.name}(" in text.removesuffix(shared)


@every_surrogate
def test_imports_torch_math_and_warnings_alone(name):
    imports = [n for n in ast.walk(ast.parse(read(name))) if isinstance(n, (ast.Import, ast.ImportFrom))]
    modules = [n.module if isinstance(n, ast.ImportFrom) else a.name for n in imports for a in n.names]
    assert {m.split(".")[0] for m in modules} <= {"torch", "math", "warnings"} and "torch" in modules


@every_surrogate
def test_fits_its_page(name):
    lines = read(name).splitlines()
    first = ast.parse(read(name)).body[0]
    docstring = first.end_lineno - first.lineno + 1
    assert ast.get_docstring(ast.parse(read(name))) and docstring <= 40
    assert len(lines) - docstring <= LINES[name]
    columns = lambda line: sum(not unicodedata.combining(sign) for sign in line)  # the bar of z̄ takes none
    assert max(map(columns, lines)) <= 110
