"""Video files: mp4 by PyAV, which the extra `video` installs, and GIF."""

from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from phalanx.config.files import replace_file
from phalanx.functional.frames import evenly_spaced

CODEC: Final = "libx264"  # played by browsers, notebooks and wandb
GIF_FRAMES = 16  # maximum per GIF, since GIFs compress badly


def can_write() -> bool:
    """Whether PyAV is installed with the codec, which is missing if PyAV was built against some other FFmpeg."""
    try:
        import av
    except ImportError:
        return False
    try:
        av.codec.Codec(CODEC, "w")
    except av.codec.codec.UnknownCodecError:
        return False
    return True


def write_video(path: Path, frames: Iterable[NDArray[np.uint8]], fps: int) -> None:
    """Write frames uint8 [H, W, 3] as an mp4 file; see `encode_video`. Raises OSError."""
    try:
        replace_file(path, encode_video(frames, fps))
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(f"{path}: {error}") from error


def encode_video(frames: Iterable[NDArray[np.uint8]], fps: int) -> bytes:
    """Encode frames uint8 [H, W, 3] as an mp4 of `fps` frames per second.

    The codec requires even sides, so the last row or column is repeated if their number is odd. Raises OSError if the
    encoder rejects the frames, for example if a side exceeds 16384 pixels.
    """
    import av

    file = BytesIO()
    try:
        with av.open(file, "w", format="mp4") as container:
            stream = None
            for frame in frames:
                odd = [(0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)]
                image = av.VideoFrame.from_ndarray(np.pad(frame, odd, mode="edge"), format="rgb24")
                if stream is None:
                    stream = container.add_stream(CODEC, rate=fps, options={"crf": "18"})
                    stream.width, stream.height = image.width, image.height
                    stream.pix_fmt = "yuv420p"
                container.mux(stream.encode(image))
            assert stream is not None, "a video has frames"
            container.mux(stream.encode(None))
    except av.error.FFmpegError as error:
        raise OSError(" ".join(str(error).split())) from error
    return file.getvalue()


def gif(frames: Sequence[NDArray[np.uint8]], fps: int) -> bytes:
    """Encode an endlessly looping GIF of up to GIF_FRAMES of the frames uint8 [H, W, 3]; it lasts as long as all frames
    do at `fps` frames per second.
    """
    shown = [Image.fromarray(frames[i]) for i in evenly_spaced(len(frames), GIF_FRAMES)]
    file, ms = BytesIO(), 1000 * len(frames) / fps / len(shown)
    shown[0].save(file, "GIF", save_all=True, append_images=shown[1:], duration=ms, loop=0)
    return file.getvalue()
