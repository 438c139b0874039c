"""FLUX.2 dev with a reference image: `model.family: flux2_edit`."""

from phalanx.zoo.families import flux2


class Model(flux2.Model):
    """As flux2, with an image to edit."""

    image_column = "image"
