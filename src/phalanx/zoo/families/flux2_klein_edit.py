"""FLUX.2 Klein with a reference image: `model.family: flux2_klein_edit`."""

from phalanx.zoo.families import flux2_klein


class Model(flux2_klein.Model):
    """As flux2_klein, with an image to edit."""

    image_column = "image"
