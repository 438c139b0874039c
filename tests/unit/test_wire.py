"""What goes from the ranks that sample to others."""

import numpy as np

from phalanx.run.disaggregated.wire import deserialize_records, serialize_records
from phalanx.telemetry.records import Record
from tests.helpers.logs import prompt_image


def test_images_of_prompts_go_with_the_samples_of_a_validation() -> None:
    images = prompt_image(), prompt_image(width=9, shade=7)
    given = [Record("a", 0.5, "x", 0, images=images), Record("b", 0.25, "y", 1)]
    row, kept, stop = deserialize_records(serialize_records({"val/reward": 0.5}, {"set": given}))
    assert (row, stop) == ({"val/reward": 0.5}, 0)
    first, second = kept["set"]
    assert second == given[1]
    assert [(image.title, image.file) for image in first.images] == [(image.title, image.file) for image in images]
    assert all(np.array_equal(one.pixels, other.pixels) for one, other in zip(first.images, images, strict=True))
