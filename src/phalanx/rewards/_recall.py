"""The share of a text's words or characters that was read, wherever they were: LongText-Bench (arXiv 2507.22058).

Only letters, those of French among them, digits and Chinese characters count. Words are separated by white space and
compared without case, for English; characters are compared as they are, for Chinese.
"""

import re
from collections import Counter

KINDS = ("words", "characters")
_ACCENTED = "àâäéèêëîïôöùûüç"
_IGNORED = re.compile(rf"[^a-zA-Z0-9\u4e00-\u9fa5{_ACCENTED}{_ACCENTED.upper()}\s]")


def matched(target: str, read: str, kind: str) -> tuple[int, int]:
    """How many of the target's parts were read, each as often as the target has it, and how many it has."""
    expected = _parts(target, kind)
    return (expected & _parts(read, kind)).total(), expected.total()


def _parts(text: str, kind: str) -> Counter[str]:
    words = _IGNORED.sub("", text).split()
    return Counter("".join(words)) if kind == "characters" else Counter(word.lower() for word in words)
