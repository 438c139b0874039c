"""Boxes in images and their overlap. A box is (left, top, right, bottom)."""

Box = tuple[float, float, float, float]


def area(box: Box, edge: float = 0.0) -> float:
    """The area of a box, 0 if sides are in the wrong order. `edge`: 1 if right and bottom are pixels of the box."""
    return max(box[2] - box[0] + edge, 0.0) * max(box[3] - box[1] + edge, 0.0)


def iou(one: Box, other: Box, edge: float = 0.0) -> float:
    """Intersection over union in 0..1; 0 if no box has an area. `edge`: see `area`."""
    both = max(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), min(one[3], other[3])
    common = area(both, edge)
    union = area(one, edge) + area(other, edge) - common
    return common / union if union else 0.0
