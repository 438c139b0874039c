"""Weights & Biases; WANDB_MODE=offline needs no account."""

from pathlib import Path

from phalanx.telemetry.loggers import Logger, RunStart, cannot_start
from phalanx.telemetry.records import IMAGES, SAMPLES, Record, kind_of, together


class Wandb(Logger):
    """Logs metrics, and validations as images, mp4 files, or a table of texts. A resumed run continues under its id."""

    extra = "wandb"

    def __init__(self, start: RunStart) -> None:
        import wandb

        self._wandb = wandb
        try:
            self._run = wandb.init(
                project=start.trainer.project_name,
                name=start.trainer.experiment_name,
                dir=start.trainer.output_dir,
                config=start.config,
                id=start.id,
                resume="allow",
                reinit="create_new",  # beside other runs of this process
            )
        except wandb.Error as error:
            raise cannot_start("wandb", error) from None
        self.id = self._run.id

    def log(self, step: int, row: dict[str, float]) -> None:
        # With explicit steps, wandb drops those that it has seen before, which a resumed run repeats, and `wandb sync`
        # can join the parts of an offline run.
        self._run.log(row, step=step)

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        if kind_of(records) == SAMPLES:
            columns = ["step", "prompt", "text", "ground_truth", "reward"]
            columns += [f"reward/{term}" for term in records[0].scores]
            talks = records[0].conversation is not None
            columns += ["messages"] * talks
            shows = any(record.images for record in records)
            columns += ["images"] * shows
            table = self._wandb.Table(columns=columns)
            for record in records:
                row = [step, record.prompt, record.output, record.ground_truth, record.reward]
                row += [*record.scores.values(), *[record.transcript] * talks]
                if shows:
                    row.append(self._wandb.Image(together(record.images)) if record.images else None)
                table.add_data(*row)
            self._run.log({f"{SAMPLES}/{set_name}": table}, step=step)
            return
        kind, shown = "videos" if records[0].is_video else IMAGES, []
        for record in records:
            if record.is_video:
                file = str(folder / f"{record.stem}.mp4")
                shown.append(self._wandb.Video(file, caption=record.caption, format="mp4"))
            else:
                shown.append(self._wandb.Image(record.output, caption=record.caption))
        self._run.log({f"{kind}/{set_name}": shown}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)
