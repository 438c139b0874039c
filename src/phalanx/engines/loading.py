"""Loading what was downloaded: files that are cut short, broken or of another model are told in one line."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

Turns = str | tuple[str, ...]  # a question, or a talk of questions and answers in turn that ends with a question
# whatever classes raise that are built with settings which they do not expect
_MISFITS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Turns what the block cannot load into a ValueError of one line: `what`, a colon and the reason.

    `what` names the setting that gave the file: transformers says of a broken file what it stumbles over, not where.
    """
    try:
        yield
    except Exception as error:
        # tokenizers defines no class of errors: it raises Exception itself
        if not isinstance(error, _MISFITS) and type(error) is not Exception:
            raise
        plain = type(error) in (Exception, OSError, ValueError) or isinstance(error, StrictDataclassError)
        named = [] if plain else [type(error).__name__]
        first, *more = [line.strip() for line in str(error).strip().splitlines()] or [""]
        if first.endswith(":") and more:  # of a setting's type the second line says what is wrong
            first = f"{first} {more[0]}"
        raise ValueError(": ".join([what, *named, *([first] if first else [])])) from error


def check_weights(info: dict[str, Any], what: str) -> None:
    """ValueError, beginning with `what`, where weights were not in the files or of another shape.

    `info` is what from_pretrained gives for output_loading_info, with ignore_mismatched_sizes, whose shapes it holds:
    transformers only logs them.
    """
    missing, other = sorted(info["missing_keys"]), sorted(info["mismatched_keys"])
    if missing:
        raise ValueError(f"{what}: it has no {missing[0]}")
    if other:
        name, shape, expected = other[0]
        raise ValueError(f"{what}: its {name} is {list(shape)} rather than {list(expected)}")


def special_tokens(tokenizer: Any) -> list[str]:
    """Tokens that a tokenizer does not read as text, such as <|im_end|>."""
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]


def as_talk(turns: Turns, shown: Sequence[dict[str, Any]], special: Sequence[str]) -> list[dict[str, Any]]:
    """The messages of a question about images, whose parts are `shown`, in front of all; see `as_text`."""
    talk = []
    for i, turn in enumerate((turns,) if isinstance(turns, str) else turns):
        content = [*(shown if i == 0 else ()), {"type": "text", "text": as_text(turn, special)}]
        talk.append({"role": "assistant" if i % 2 else "user", "content": content})
    return talk


def as_text(question: str, special: Sequence[str]) -> str:
    """A question in which no special token is left: a completion that holds one would end it, and answer itself."""
    for token in special:
        question = question.replace(token, f"{token[:1]} {token[1:]}")
    return question
