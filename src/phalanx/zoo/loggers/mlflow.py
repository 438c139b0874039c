"""MLflow: the server given by MLFLOW_TRACKING_URI, by default a SQLite file in the run's folder, `mlflow.db`."""

import os
import re
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from phalanx.config.load import flat
from phalanx.telemetry.loggers import Logger, RunStart
from phalanx.telemetry.records import SAMPLES, Record, kind_of, shown_grid

_REFUSED = re.compile(r"[^\w/. :-]")  # characters that MLflow does not allow in metric names


class Mlflow(Logger):
    """Logs metrics; the configuration as parameters; the files of a validation as artifacts, and its grid (for texts,
    that of the images in their prompts) as an image. The experiment is `trainer.project_name`.

    MLflow's client waits for the server, for minutes if it is down, so calls are made on a background thread.
    """

    extra = "mlflow"
    append_only = True

    def __init__(self, start: RunStart) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        folder = Path(start.trainer.output_dir).absolute()
        server = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(server or f"sqlite:///{folder / 'mlflow.db'}")
        self.id = start.id
        if start.id is not None:
            try:
                self._client.update_run(start.id, status="RUNNING")
            except MlflowException:  # another store than that of the checkpoint's run; an unreachable one fails below
                self.id = None
        if self.id is None:
            self.id = self._create_run(start, None if server else (folder / "mlflow").as_uri())
        self._client.log_dict(self.id, start.config, "config.yaml")
        self._worker = ThreadPoolExecutor(1, "mlflow")
        self._sent: deque[Future[Any]] = deque()

    def _create_run(self, start: RunStart, artifacts: str | None) -> str:
        """Create a run and return its id. `artifacts`: location for a new experiment's files; None: the server's."""
        from mlflow.entities import Param

        trainer = start.trainer
        known = self._client.get_experiment_by_name(trainer.project_name)
        experiment = known.experiment_id if known else self._client.create_experiment(trainer.project_name, artifacts)
        run_id: str = self._client.create_run(experiment, run_name=trainer.experiment_name).info.run_id
        self._client.log_batch(run_id, params=[Param(*pair) for pair in flat(start.config).items()])
        return run_id

    def log(self, step: int, row: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_REFUSED.sub("_", key), float(value), now, step) for key, value in row.items()]
        self._queue_call(self._client.log_batch, metrics)

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        kind = kind_of(records)
        self._queue_call(self._client.log_artifacts, str(folder), f"{kind}/{set_name}/{folder.name}")
        grid = shown_grid(records) if kind == SAMPLES else Image.open(folder / "grid.png")
        if grid is not None:
            key = re.sub(r"[^\w/. -]", "_", f"{kind}/{set_name}", flags=re.ASCII)
            self._queue_call(self._client.log_image, grid, key=key, step=step)

    def _queue_call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Queue a call for this run on the thread. Raises the exception of an earlier call, if any."""
        while self._sent and self._sent[0].done():
            if self._sent[0].exception() is not None:
                self._worker.shutdown(wait=False, cancel_futures=True)
            self._sent.popleft().result()
        self._sent.append(self._worker.submit(call, self.id, *args, **kwargs))

    def close(self, failed: bool) -> None:
        self._queue_call(self._client.set_terminated, "FAILED" if failed else "FINISHED")
        self._worker.shutdown()
        for sent in self._sent:
            sent.result()
