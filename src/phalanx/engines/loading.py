"""Loading downloaded models: truncated or broken files and those of another model are reported in one line."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

log = logging.getLogger(__name__)

Turns = str | tuple[str, ...]  # a question, or alternating questions and answers that end with a question
Question = tuple[tuple[int, ...], Turns]  # indices of the images to show, in order, and the question
FOREIGN = "its files name code of their own (auto_map), and no code of a model folder runs"
# what classes raise when they are constructed with unexpected settings
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


def needs_code(error: BaseException) -> bool:
    """Whether a library has refused to run code that lies in a model folder."""
    return "trust_remote_code" in str(error)


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn a failure to load in the block into a ValueError of one line: `what`, a colon and the reason.

    `what` names the setting with the file's path, because transformers' errors about a broken file do not name it.
    """
    try:
        yield
    except Exception as error:
        # tokenizers has no exception class: it raises Exception itself
        if not isinstance(error, _MISFITS) and type(error) is not Exception:
            raise
        if needs_code(error):
            raise ValueError(f"{what}: {FOREIGN}") from error
        plain = type(error) in (Exception, OSError, ValueError) or isinstance(error, StrictDataclassError)
        named = [] if plain else [type(error).__name__]
        first, *more = [line.strip() for line in str(error).strip().splitlines()] or [""]
        if first.endswith(":") and more:  # for a setting of the wrong type, the second line has the reason
            first = f"{first} {more[0]}"
        raise ValueError(": ".join([what, *named, *([first] if first else [])])) from error


def load_with_info(kind: Any, path: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model of transformers' class `kind`, and what `check_weights` looks at: transformers would only log it."""
    checked = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = kind.from_pretrained(path, trust_remote_code=False, **checked, **options)
    return model, info


def check_weights(info: dict[str, Any], what: str) -> None:
    """Raise ValueError, beginning with `what`, if weights were missing from the files or had other shapes.

    Without this check, transformers would initialise them at random. info: see load_with_info.
    """
    missing, other = sorted(info["missing_keys"]), sorted(info["mismatched_keys"])
    if missing:
        raise ValueError(f"{what}: it has no {missing[0]}")
    if other:
        name, shape, expected = other[0]
        raise ValueError(f"{what}: its {name} is {list(shape)} rather than {list(expected)}")


def warn_of_unread(info: dict[str, Any], what: str) -> None:
    """Log tensors of the files that the model has no place for; `what` is the model, `info` as in check_weights."""
    names = sorted(info["unexpected_keys"])
    if names:
        log.warning("%s: %s", what, unread_tensors("the model", names))


def unread_tensors(model: str, names: Sequence[str]) -> str:
    """A sentence about tensors of a model's files that its class does not use."""
    return f"{model} has no place for {listed(names)} of its files, and ignores it"


def listed(names: Sequence[str]) -> str:
    """The first name and the number of the others."""
    return names[0] + (f" (+{len(names) - 1} more)" if len(names) > 1 else "")


def without_videos(processor: Any) -> Any:
    """A subclass of transformers' class `processor` without its part for videos, which requires torchvision."""

    def attributes(cls: Any) -> list[str]:
        return [name for name in processor.get_attributes() if name != "video_processor"]

    members = {"get_attributes": classmethod(attributes), "__module__": processor.__module__}
    return type(processor.__name__, (processor,), members)


def special_tokens(tokenizer: Any) -> list[str]:
    """The special tokens of a tokenizer, such as <|im_end|>."""
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]


def as_talk(turns: Turns, shown: Sequence[dict[str, Any]], special: Sequence[str]) -> list[dict[str, Any]]:
    """The messages of a question; the images, message parts `shown`, precede its text. See `as_text`."""
    talk = []
    for i, turn in enumerate((turns,) if isinstance(turns, str) else turns):
        content = [*(shown if i == 0 else ()), {"type": "text", "text": as_text(turn, special)}]
        talk.append({"role": "assistant" if i % 2 else "user", "content": content})
    return talk


def as_text(question: str, special: Sequence[str]) -> str:
    """Break up the special tokens in a question: a completion with one could end the question and answer it itself."""
    for token in special:
        question = question.replace(token, f"{token[:1]} {token[1:]}")
    return question
