"""The frames of a video that stand for it."""


def evenly_spaced(total: int, count: int) -> list[int]:
    """Numbers of `count` of `total` frames, as evenly spaced as they can be, the first and the last
    among them; a single one is the middle. All frames where there are no more than `count`.
    """
    if count >= total:
        return list(range(total))
    if count == 1:
        return [total // 2]
    return [round(i * (total - 1) / (count - 1)) for i in range(count)]
