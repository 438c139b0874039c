"""What an observation of the tool `python` contains: what the script computed, and nothing of the machine."""

import ctypes
from typing import Any

import pytest

from phalanx.config.environment import EnvironmentConfig
from phalanx.environments import Environments
from phalanx.zoo.environments.python import Python

PYTHON = Python(timeout_s=60)
# Scripts of ordinary computing, and the ends of what they print.
ORDINARY = {
    "import re\nre.findall(r'\\d+', 'a1b22')": "['1', '22']\n",
    "import datetime as d\nprint(d.date(2024, 2, 29) + d.timedelta(366))": "2025-03-01\n",
    "from zoneinfo import ZoneInfo\nfrom datetime import datetime\n"
    "datetime(2024, 7, 1, tzinfo=ZoneInfo('Europe/Berlin')).isoformat()": "'2024-07-01T00:00:00+02:00'\n",
    "import time\nt = time.time()\ntime.sleep(.01)\nprint(time.time() > t, time.localtime(0)[:4])": "True (1970, 1, 1, 0)\n",
    "import math, cmath\nprint(math.comb(10, 3), cmath.sqrt(-1))": "120 1j\n",
    "from decimal import *\ngetcontext().prec = 30\nDecimal(1) / 3": "Decimal('0.333333333333333333333333333333')\n",
    "from fractions import Fraction\nFraction(1, 3) + Fraction(1, 6)": "Fraction(1, 2)\n",
    "import csv, io, json\nprint(list(csv.reader(io.StringIO('a,b'))), json.dumps({'a': 1}))": "[['a', 'b']] {\"a\": 1}\n",
    "import sqlite3\nsqlite3.connect(':memory:').execute('select 1 + 2').fetchall()": "[(3,)]\n",
    "import hashlib\nhashlib.sha256(b'a').hexdigest()[:8]": "'ca978112'\n",
    "import tempfile, shutil, multiprocessing, concurrent.futures, asyncio, socket, ssl, subprocess, platform, ctypes\n7": "7\n",
    "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: print('alarm'))\n"
    "signal.setitimer(signal.ITIMER_REAL, .01)\ntime.sleep(.1)": "alarm\n",
    "import os, sys\nprint(os.getcwd(), sys.argv, sys.stdin.isatty(), os.cpu_count() > 0)": "/ ['<code>'] False True\n",
    "import mmap\nm = mmap.mmap(-1, 4096)\nm[:3] = b'abc'\nm[:4]": "b'abc\\x00'\n",
    "import inspect, json, os\nprint(len(inspect.getsource(json.dumps)) > 9, len(os.listdir(os.path.dirname(json.__file__))) > 3)": "True True\n",
    "import os\nd = os.dup(1)\nos.write(d, b'dup\\n')\nos.set_inheritable(d, False)\nos.get_inheritable(d)": "dup\nFalse\n",
    "import sys\nprint('e', file=sys.stderr)\nprint('o')": "e\no\n",
    "import warnings\nwarnings.warn('careful')": "<code>:2: UserWarning: careful\n  warnings.warn('careful')\n",
    "import logging\nlogging.warning('w')": "WARNING:root:w\n",
    "import sys\nprint('a')\nsys.exit('bye')": "a\nbye\n\nerror: it ended with status 1",
    "raise KeyboardInterrupt": 'File "<code>", line 1, in <module>\n    raise KeyboardInterrupt\nKeyboardInterrupt\n',
    "def f(n): return f(n + 1)\nf(0)": "RecursionError: maximum recursion depth exceeded\n",
    "import threading\nthreading.Thread(target=print).start()": "RuntimeError: can't start new thread\n",
    "import subprocess\nsubprocess.run(['ls'])": "PermissionError: [Errno 1] Operation not permitted\n",
    "import tempfile\ntempfile.TemporaryFile()": "No usable temporary directory found in ['/tmp', '/var/tmp', '/usr/tmp', '/']\n",
    "import os\nos.write(2, b'of a library')": "12\n",
    "import numpy as np\nprint(np.linalg.det(np.eye(3)), np.arange(4).reshape(2, 2) @ np.ones(2))": "1.0 [1. 5.]\n",
    "import sympy as s\nx = s.symbols('x')\ns.solve(x**2 - 5*x + 6, x)": "[2, 3]\n",
    "import pandas as pd\nprint(pd.DataFrame({'a': [1, 2]}).a.sum(), pd.Timestamp('2024-07-01', tz='UTC'))": "3 2024-07-01 00:00:00+00:00\n",
}  # fmt: skip


@pytest.mark.parametrize("code", ORDINARY)
def test_ordinary_scripts_work(code: str) -> None:
    text = PYTHON.python(code)
    assert text.endswith(ORDINARY[code])
    assert text == ORDINARY[code] or "Traceback" in text, "nothing else is printed, such as by a library"


DRAWS = (
    "import random, secrets, uuid\nimport numpy as np\n"
    "print(random.random(), random.Random().random(), secrets.token_hex(4), uuid.uuid4(), np.random.rand())\n"
    "random.seed()\nprint(random.random(), np.random.default_rng().random())\n"
    "random.seed(3)\nnp.random.seed(3)\nprint(random.random(), np.random.rand())"
)


def observations(sample_seed: int, calls: int, cfg: EnvironmentConfig) -> list[str]:
    """What a sample reads when its script draws random numbers in each of its calls."""
    conversation = Environments(cfg).open({"prompt": "?"}, 0, sample_seed)
    conversation.reset().result(60)
    call: dict[str, Any] = {"function": {"name": "python", "arguments": {"code": DRAWS}}}
    texts = []
    for _ in range(calls):
        turn = conversation.hear({"role": "assistant", "content": "", "tool_calls": [call]}).result(60)
        texts.append(turn.messages[0]["content"])
    return texts


@pytest.mark.parametrize("cfg", [{"tools": ["python"]}, {"path": "python"}], ids=["tools", "path"])
def test_random_numbers_follow_from_the_sample_and_the_call(cfg: dict[str, Any]) -> None:
    first, second = observations(5, 2, EnvironmentConfig(**cfg, num_workers=1))
    assert observations(5, 2, EnvironmentConfig(**cfg, num_workers=2)) == [first, second], (
        "a resumed run draws the same"
    )
    (other,) = observations(6, 1, EnvironmentConfig(**cfg, num_workers=1))
    for one, two, three in zip(*(text.split() for text in (first[:-1], second, other)), strict=True):
        drawn_from_the_scripts_own_seed = one in first.split()[-2:]
        assert (len({one, two, three}) == 1) == drawn_from_the_scripts_own_seed


def test_addresses_are_the_same_in_each_call() -> None:
    libc = ctypes.CDLL(None)
    before = libc.personality(-1)
    allowed = libc.personality(before | 0x0040000) != -1
    libc.personality(before)
    if not allowed:
        pytest.skip("this machine, such as a container, does not allow it")
    code = "print(object(), lambda: 0, {object(), int, str})"
    assert PYTHON.python(code) == PYTHON.python(code)
    assert libc.personality(-1) == before


def test_output_is_cut_at_the_same_byte() -> None:
    texts = {PYTHON.python("while True: print('x' * 999)") for _ in range(2)}
    (text,) = texts
    assert len(text) == 2**17 - 3 + len("\nerror: it printed too much, and was stopped")
