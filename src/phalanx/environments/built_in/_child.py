"""Run a model's code in a confined process: `python -P -u _child.py SECONDS BYTES UNCONFINED`, with the code on stdin.

Its first line is the list of confinements that this machine lacks; unless UNCONFINED is 1 nothing runs without one of
them. All that follows is what the code prints. Nothing of phalanx is imported, so that it starts fast.
"""

import ast
import ctypes
import json
import linecache
import resource
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

_NAME = "<code>"
_PDEATHSIG = 1  # of prctl


def run(code: str) -> None:
    """Run code as a script, and print the value of its last line where that is an expression, as a console does."""
    linecache.cache[_NAME] = (len(code), None, code.splitlines(keepends=True), _NAME)
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        tree = ast.parse(code, _NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _NAME, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _NAME, "eval"), names)
            if value is not None:
                print(repr(value))
    except Exception as error:  # whatever the code raises
        frame = error.__traceback__  # of this file
        rest = None if frame is None or isinstance(error, SyntaxError) else frame.tb_next
        traceback.print_exception(type(error), error, rest)


def main(limit_s: int, memory: int, unconfined: bool) -> None:
    """Confine this process, then read the code and run it."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)  # it does not outlive the thread that waits for it
    code = sys.stdin.read()
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    missing = runpy.run_path(str(Path(__file__).parents[2] / "sandbox.py"))["confine"](memory)
    print(json.dumps(missing))
    if unconfined or not missing:
        run(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
