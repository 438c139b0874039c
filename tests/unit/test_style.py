"""The words and the shape of the code: names that say nothing, dense comprehensions, bare loops, docstrings of questions.

The checks are functions of source text, so that the tests at the end can show that each of them fails where it must.
"""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "phalanx"
FILES = sorted(SOURCE.rglob("*.py"))

# Names of variables that tell a reader nothing about their values.
VAGUE = {"found", "own", "said", "mine", "whose", "how"}
MAX_COMPREHENSIONS = 25  # per 1,000 lines of src
# per 100 functions: a name of one word, such as `read`, cannot be searched for, and interfaces have enough of them
MAX_ONE_WORD = 45
MAX_FUNCTION = 72  # lines without docstring and lines of only comments
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Where the method itself stands, a reader needs more comments than elsewhere: lines of comments per 100 lines of code.
MIN_COMMENTS = 10
COMMENTED = (
    "training/loop.py",
    "training/update.py",
    "training/minibatches.py",
    "rollout/flow/denoise.py",
    "rollout/lm/in_policy.py",
    "functional/sde.py",
)


def vague_names(source: str) -> list[str]:
    """Arguments and assigned variables with a name in VAGUE, as `line N: name`."""
    errors = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            errors.append(f"line {node.lineno}: {node.id}")
        if isinstance(node, ast.arg) and node.arg in VAGUE:
            errors.append(f"line {node.lineno}: {node.arg}")
    return errors


def questions(source: str) -> list[str]:
    """Docstrings that open with `What`, as `line N`: a docstring names the thing or says what is done."""
    errors = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (ast.get_docstring(node) or "").startswith("What"):
            errors.append(f"line {node.body[0].lineno}")
    return errors


def comprehensions(source: str) -> int:
    return sum(isinstance(node, COMPREHENSIONS) for node in ast.walk(ast.parse(source)))


def functions_and_one_word(source: str) -> tuple[int, int]:
    """How many functions there are without those that Python calls, and how many of them have names of one word."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = [node.name for node in nodes if not node.name.startswith("__")]
    return len(names), sum("_" not in name.strip("_") for name in names)


def comments_per_100(source: str) -> float:
    """Lines with a comment per 100 lines of code; blank lines, docstrings and lines of only comments are not code."""
    comments, code = set(), set()
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in skipped:
            code |= set(range(token.start[0], token.end[0] + 1))
    return 100 * len(comments) / len(code - docstrings)


def long_functions(source: str) -> list[str]:
    """Functions of more than MAX_FUNCTION lines, as `name: lines`; docstrings and lines of only comments are free."""
    lines, errors = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0]
        docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) else 0
        body = lines[node.lineno - 1 : node.end_lineno]
        count = len([line for line in body if not line.lstrip().startswith("#")]) - docstring
        if count > MAX_FUNCTION:
            errors.append(f"{node.name}: {count}")
    return errors


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_names_and_docstrings(path: Path) -> None:
    source = path.read_text()
    assert vague_names(source) == []
    assert questions(source) == []
    assert long_functions(source) == []


def test_comprehensions_are_few() -> None:
    count = sum(comprehensions(path.read_text()) for path in FILES)
    lines = sum(len(path.read_text().splitlines()) for path in FILES)
    assert 1000 * count / lines <= MAX_COMPREHENSIONS


def test_most_names_can_be_searched_for() -> None:
    counts = [functions_and_one_word(path.read_text()) for path in FILES]
    every, short = (sum(count) for count in zip(*counts, strict=True))
    assert 100 * short / every <= MAX_ONE_WORD


@pytest.mark.parametrize("name", COMMENTED)
def test_the_method_is_commented(name: str) -> None:
    assert comments_per_100((SOURCE / name).read_text()) >= MIN_COMMENTS


def test_a_vague_name_is_refused() -> None:
    assert vague_names("found = 1") == ["line 1: found"]
    assert vague_names("def f(own): pass") == ["line 1: own"]
    assert vague_names("for said, n in x: pass") == ["line 1: said"]
    assert vague_names("def how(): return result.found") == []  # a function, and an attribute of another library


def test_a_question_is_refused() -> None:
    assert questions('"""What it is."""') == ["line 1"]
    assert questions('def f():\n    """What f gives."""') == ["line 2"]
    assert questions('def f():\n    """The value."""') == []


def test_a_long_function_is_refused() -> None:
    head = 'def f():\n    """Two\n    lines."""\n    # why\n'
    assert long_functions(head + "    x = 1\n" * (MAX_FUNCTION - 1)) == []
    assert long_functions(head + "    x = 1\n" * MAX_FUNCTION) == [f"f: {MAX_FUNCTION + 1}"]


def test_comprehensions_comments_and_names_are_counted() -> None:
    assert functions_and_one_word("class A:\n    def __len__(self): ...\n    async def _read(self): ...") == (1, 1)
    assert functions_and_one_word("def read_file(): ...\ndef of(): ...\ndef _read_all_(): ...") == (3, 1)
    assert comprehensions("a = [x for x in y]\nb = {x: 1 for x in y}\nc = sum(x for x in {z for z in y})") == 4
    assert comments_per_100('"""Doc."""\na = 1  # why\n\n# how\nb = 2\n') == 100
    assert comments_per_100("a = '# text'\nb = 2\n") == 0
