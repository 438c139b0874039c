"""Select frames that represent a video."""


def evenly_spaced(total: int, count: int) -> list[int]:
    """Indices of `count` of `total` frames, evenly spaced including the first and the last; a single one is the middle
    frame. Returns all frames if there are no more than `count`.
    """
    if count >= total:
        return list(range(total))
    if count == 1:
        return [total // 2]
    return [round(i * (total - 1) / (count - 1)) for i in range(count)]
