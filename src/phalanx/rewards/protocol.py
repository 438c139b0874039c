"""Bodies of the requests and answers between the reward `http` and a reward server; see docs/serving-rewards.md."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Texts(BaseModel):
    """The prompts of a request's images, and optionally the metadata of each."""

    model_config = ConfigDict(strict=True)

    prompts: list[str]
    metadata: list[dict[str, Any]] | None = None


class ScoreRequest(Texts):
    """A request in JSON. In a multipart form, the images are files and the field `request` contains the other keys."""

    model_config = ConfigDict(strict=True, val_json_bytes="base64")

    images: list[bytes]  # PNG files


class ScoreAnswer(BaseModel):
    """An answer with the scores, null for a sample without one, and perhaps a text on each. Other keys are ignored."""

    scores: list[Annotated[float, Field(strict=True, allow_inf_nan=False)] | None]
    feedback: list[str | None] | None = None


class Refusal(BaseModel):
    """An answer with a status other than 200, in FastAPI's format."""

    detail: str


def complaint(error: ValidationError, *, values: bool = False) -> str:
    """The first of the errors, as one line such as `prompts.0 should be a valid string`.

    values: include the invalid value, as in `batch_size=0 should be greater than or equal to 1`.
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
