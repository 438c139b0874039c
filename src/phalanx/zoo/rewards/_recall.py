"""Recall of a text's words or characters, regardless of their order, as in LongText-Bench (arXiv 2507.22058).

Only letters (including the accented ones of French), digits and Chinese characters count. For English, words are split
at white space and compared without case; for Chinese, characters are compared as they are.
"""

import re
from collections import Counter
from typing import Any, Literal

Kind = Literal["words", "characters"]
_ACCENTED = "àâäéèêëîïôöùûüç"
_IGNORED = re.compile(rf"[^a-zA-Z0-9\u4e00-\u9fa5{_ACCENTED}{_ACCENTED.upper()}\s]")


def matched(target: str, read: str, kind: Kind) -> tuple[int, int]:
    """The number of the target's words or characters that were read, at most as often as they occur in the target, and
    the number of all of them.
    """
    expected = _count_parts(target, kind)
    return (expected & _count_parts(read, kind)).total(), expected.total()


def target_of(prompt: str, metadata: dict[str, Any], column: str, recall: Kind | None) -> str:
    """The text that an image of `prompt` should show; a list of texts is joined with spaces. Raises ValueError if the
    data has none, or none that `recall` could count.
    """
    target = metadata.get(column)
    if isinstance(target, list) and all(isinstance(part, str) for part in target):
        target = " ".join(target)
    if not isinstance(target, str) or not target.strip():
        actual = f"no {column}" if target is None else f"{column} {target!r}"
        quoted = "a text in double quotes in the prompt, or " if column == "ground_truth" else ""
        raise ValueError(f'{actual} for the prompt "{prompt}" (expected {quoted}a column {column} in the data)')
    if recall is not None and not _count_parts(target, recall):
        raise ValueError(f"{column} {target!r} has no letters or digits that recall could count")
    return target


def _count_parts(text: str, kind: Kind) -> Counter[str]:
    words = _IGNORED.sub("", text).split()
    return Counter("".join(words)) if kind == "characters" else Counter(word.lower() for word in words)
