"""The bodies that the reward `http` and a server of rewards exchange; docs/serving-rewards.md describes them."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Texts(BaseModel):
    """The prompts of a request's images, and the metadata of each, which may be left out."""

    model_config = ConfigDict(strict=True)

    prompts: list[str]
    metadata: list[dict[str, Any]] | None = None


class ScoreRequest(Texts):
    """A request in JSON; in a form, the images are files and the rest is the field `request`."""

    model_config = ConfigDict(strict=True, val_json_bytes="base64")

    images: list[bytes]  # PNG files


class ScoreAnswer(BaseModel):
    """An answer, with null for a sample that has no score; other keys are ignored."""

    scores: list[Annotated[float, Field(strict=True, allow_inf_nan=False)] | None]


class Refusal(BaseModel):
    """An answer with another status than 200, as FastAPI gives it."""

    detail: str


def complaint(error: ValidationError, *, values: bool = False) -> str:
    """The first thing that is wrong, in one line such as `prompts.0 should be a valid string`.

    With `values`, what was found there is said as well: `batch_size=0 should be greater than or equal to 1`.
    """
    first = error.errors(include_url=False)[0]
    message = " ".join(first["msg"].removeprefix("Value error, ").split())
    if not first["loc"]:
        return message
    where = ".".join(str(part) for part in first["loc"])
    if values and first["type"] != "missing":
        where += f"={first['input']!r}"
    should = message.removeprefix("Input ")
    return f"{where} {should}" if should != message else f"{where}: {message}"
