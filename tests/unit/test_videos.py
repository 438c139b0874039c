"""Videos on disk and in the loggers, which are read back, and the images that represent them."""

import json
import sys
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from phalanx.config.flow import FlowRLConfig, FlowRolloutConfig
from phalanx.config.run import TrainerConfig
from phalanx.functional.frames import evenly_spaced
from phalanx.media.videos import GIF_FRAMES, can_write, write_video
from phalanx.rollout.flow.samplers import train_sampler, val_sampler
from phalanx.run.rules import check
from phalanx.run.telemetry.run_logger import RunLogger
from phalanx.telemetry.records import Record, grid, read_index, save_records
from phalanx.tools.sample import GRID_VIDEOS, Writer
from phalanx.zoo.families.sd3 import Model as ImageModel
from phalanx.zoo.families.wan import Model as VideoModel
from tests.helpers.checks import refused

SHADES = [20, 90, 160, 230]  # of a video's frames, distinguishable after any encoder


def video(shades: list[int], height: int = 32, width: int = 48) -> NDArray[np.uint8]:
    """Frames [F, H, W, 3], each with a uniform shade."""
    return np.stack([np.full((height, width, 3), shade, dtype=np.uint8) for shade in shades])


def records(count: int = 2, shades: list[int] = SHADES) -> list[Record]:
    return [Record(f"prompt {i}", i / 10, video(shades), i, fps=8) for i in range(count)]


def shaded(i: int) -> Record:
    return Record(f"prompt {i}", i / 10, video([40 * i] * 4), i, fps=8)


def read(path: Path) -> tuple[NDArray[np.uint8], float]:
    """The frames [F, H, W, 3] of a file, and the number per second."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        rate = container.streams.video[0].average_rate
    assert rate is not None
    return np.stack(frames), float(rate)


def test_evenly_spaced() -> None:
    assert evenly_spaced(33, 9) == list(range(0, 33, 4))
    assert evenly_spaced(5, 3) == [0, 2, 4]
    assert evenly_spaced(81, 4) == [0, 27, 53, 80]
    assert evenly_spaced(5, 1) == [2]
    for count in (5, 8):
        assert evenly_spaced(5, count) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("height", "width"), [(32, 48), (31, 45)])
def test_a_video_is_read_as_it_was_written(tmp_path: Path, height: int, width: int) -> None:
    write_video(tmp_path / "a.mp4", video(SHADES, height, width), fps=16)
    frames, rate = read(tmp_path / "a.mp4")
    assert frames.shape == (4, 32, width + width % 2, 3) and rate == 16
    np.testing.assert_allclose(frames.mean((1, 2, 3)), SHADES, atol=6)


def test_a_path_with_a_colon_is_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_video(Path("run:1.mp4"), video(SHADES), fps=8)
    assert len(read(tmp_path / "run:1.mp4")[0]) == 4


def test_what_the_encoder_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A frame that is too wide is a one-line OSError, which costs a validation's images but not the run."""
    wide = video([0, 9], height=2, width=16400)
    with pytest.raises(OSError, match=r"a\.mp4: .*libx264") as error:
        write_video(tmp_path / "a.mp4", wide, fps=8)
    assert "\n" not in str(error.value)
    with start(tmp_path, "console") as log:
        log.records(2, "ocr", [Record("a", 0.5, wide, 0, fps=8)])
    assert "images of step 2 were not written: " in caplog.text
    assert list((tmp_path / "images" / "ocr").iterdir()) == []


def test_a_build_without_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_write()
    monkeypatch.setattr("phalanx.media.videos.CODEC", "libx26x")
    assert not can_write()


def test_validation_folder(tmp_path: Path) -> None:
    folder = save_records(tmp_path, 10, "ocr", records(3, [*SHADES, 250]))
    assert folder == tmp_path / "images" / "ocr" / "step_000010"
    names = sorted(file.name for file in folder.iterdir())
    each = [f"{i:05d}.{kind}" for i in range(3) for kind in ("mp4", "png")]
    assert names == sorted([*each, "grid.mp4", "grid.png", "index.jsonl"])
    rows = read_index(folder)
    assert [(row["file"], row["video"]) for row in rows] == [(f"{i:05d}.png", f"{i:05d}.mp4") for i in range(3)]
    with Image.open(folder / "00001.png") as strip:  # four of the five frames, side by side
        assert strip.size == (4 * 48, 32)
        assert [strip.getpixel((k * 48 + 5, 5))[0] for k in range(4)] == [20, 90, 230, 250]  # type: ignore[index]
    frames, rate = read(folder / "grid.mp4")
    still = grid([Record("prompt", 0.0, video([0])[0], i) for i in range(3)])
    assert len(frames) == 5 and rate == 8
    assert frames.shape[1:3] == tuple(side + side % 2 for side in reversed(still.size))
    assert len(read(folder / "00002.mp4")[0]) == 5


def test_images_have_no_videos_beside_them(tmp_path: Path) -> None:
    folder = save_records(tmp_path, 10, "ocr", [Record("a", 0.5, video([9])[0], 0)])
    assert sorted(file.name for file in folder.iterdir()) == ["00000.png", "grid.png", "index.jsonl"]
    assert "video" not in json.loads((folder / "index.jsonl").read_text())


def start(folder: Path, logger: str) -> RunLogger:
    return RunLogger(TrainerConfig(output_dir=str(folder), logger=[logger]), {}, {}, 0, 4, True)


def test_tensorboard_plays_the_grid(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with start(tmp_path, "tensorboard") as log:
        log.records(2, "ocr", records(shades=list(range(20, 240, 10))))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (still,), (moving,) = events.Images("images/ocr"), events.Images("videos/ocr")
    with Image.open(BytesIO(moving.encoded_image_string)) as gif:
        assert (moving.step, moving.width, moving.height) == (2, *gif.size)
        assert gif.format == "GIF" and gif.n_frames == GIF_FRAMES  # type: ignore[attr-defined]
        seconds = 22 / 8  # the duration of the whole video
        assert gif.info["duration"] == pytest.approx(1000 * seconds / GIF_FRAMES, abs=10)
    assert still.width > moving.width  # four frames side by side


def test_wandb_gets_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    with start(tmp_path, "wandb") as log:
        log.records(2, "ocr", [shaded(i) for i in range(3)])
    wandb.teardown()
    files = (tmp_path / "wandb").glob("offline-run-*/files/media/videos/videos/ocr_*.mp4")
    shades = sorted(read(file)[0].mean() for file in files)
    assert shades == pytest.approx([0, 40, 80], abs=6)


def test_samples_on_disk(tmp_path: Path) -> None:
    """tasks/sample.py: first videos, then images into the same folder."""
    writer = Writer(tmp_path, 2, fps=24, seed=5)
    for i in range(3):
        writer.add(i, f"prompt {i}", video(SHADES))
    writer.finish(None)
    names = [*(f"{i:05d}.mp4" for i in range(3)), "grid.mp4", "grid.png", "index.jsonl"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert [(row["file"], row["seed"]) for row in read_index(tmp_path)] == [(name, 5) for name in names[:3]]
    (frames, rate), (grids, _) = read(tmp_path / "00001.mp4"), read(tmp_path / "grid.mp4")
    assert (len(frames), rate, len(grids)) == (4, 24, 4)
    writer = Writer(tmp_path, 2, seed=5)
    writer.add(0, "prompt", video([50])[0])
    writer.finish(None)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["00000.png", "grid.png", "index.jsonl"]


def test_the_moving_grid_shows_the_first_videos(tmp_path: Path) -> None:
    """The image shows all videos, even if there are too many for an encoder or for memory."""
    writer = Writer(tmp_path, 1, fps=8, seed=5)
    shown = list(range(GRID_VIDEOS))
    for i in [*range(GRID_VIDEOS, 60), *shown]:  # another rank's videos may come first
        writer.add(i, "x", video([*SHADES, 250], 2, 20) if i in shown else video([10] * 5, 2, 20))
    assert sum(len(frames) for frames in writer._tiles.values()) == 16 * 5 + 44 * 4
    writer.finish(60)
    frames, _ = read(tmp_path / "grid.mp4")
    with Image.open(tmp_path / "grid.png") as still:
        assert still.size[0] > 16384 and len(frames) == 5
    assert frames.shape[2] == 16 * 168 + 8  # tiles of 160 and a margin
    assert abs(int((frames[3, 12, :, 0] < 243).sum()) - 16 * 160) < 50
    np.testing.assert_allclose(frames[:, 12, 8 + 15 * 168 + 80].mean(1), [*SHADES, 250], atol=8)


def test_settings_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, val = FlowRolloutConfig(num_frames=5), FlowRolloutConfig()
    val.val.num_frames = 9
    assert train_sampler(config, VideoModel).num_frames == 5 and val_sampler(config, VideoModel).num_frames == 5
    assert val_sampler(val, VideoModel).num_frames == 9 and train_sampler(val, VideoModel).num_frames == 1
    for wanted, key, number in ((config, "rollout.num_frames", 5), (val, "rollout.val.num_frames", 9)):
        with refused(f"{key}: {number}: StableDiffusion3Pipeline makes images, not videos; set it to 1"):
            val_sampler(wanted, ImageModel)
    with refused("rollout.noise_level: 2.5 is more than 1, the maximum with rollout.sde_type=cps"):
        train_sampler(FlowRolloutConfig(sde_type="cps", noise_level=2.5), ImageModel)
    for engine in ("vllm_omni", "dataset"):
        with refused(f"rollout.num_frames: 5 needs rollout.engine=policy; {engine} samples images, not videos"):
            check(FlowRLConfig(rollout=FlowRolloutConfig(num_frames=5, engine=engine)))
    monkeypatch.setitem(sys.modules, "av", None)
    assert train_sampler(FlowRolloutConfig(), VideoModel).num_frames == 1
    with refused("rollout.num_frames: 5: videos need PyAV with libx264; pip install 'phalanx[video]'"):
        train_sampler(config, VideoModel)
