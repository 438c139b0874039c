"""The model card of an export, README.md: where its weights come from, with the front matter that the hub reads, a
picture of the run's rewards, and for the hub the run's report.

They are made of the run's config.yaml, provenance.json and metrics.jsonl, as far as they are there. Values from the
environment are references, as in these files, and of absolute paths only the last part is shown.
"""

import re
import shlex
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from phalanx.config.files import MOST_CONFIG
from phalanx.config.messages import counted, cut
from phalanx.config.secrets import hide
from phalanx.config.sources import parse_yaml
from phalanx.data.data_files import DataError
from phalanx.data.hub import SCHEME, named
from phalanx.run.checkpoint_folder import read_meta
from phalanx.run.exporting import Exporter
from phalanx.run.kind import kind_of
from phalanx.run.provenance import read_provenance
from phalanx.run.telemetry.run_folder import Run, read_config, read_run
from phalanx.telemetry.loggers import setting
from phalanx.tools.board.comparison import validation_bounds
from phalanx.tools.board.report import REPORT_FILE, page_of
from phalanx.tools.card_curves import draw, lines_of

CARD = "README.md"
CURVES = "curves.png"
_CACHED = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")  # a model's folder in the cache of the hub
# all but the last part of an absolute path
_PATH = re.compile(r"""(?<![\w/.:~}])~?/(?:[^/\s,'"\]]+/)*(?=[^/\s,'"\]])""")
_LICENCE = ("license", "license_name", "license_link")
LONGEST = 200  # characters of a value
_LOAD = {
    "peft": "model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}), {here!r})",
    "transformers": "model = AutoModelForCausalLM.from_pretrained({here!r})",
    "diffusers LoRA": "pipeline = DiffusionPipeline.from_pretrained({base!r})\npipeline.load_lora_weights({here!r})",
    "diffusers": "pipeline = DiffusionPipeline.from_pretrained({here!r})",
}


def write_card(folder: Path, exporter: Exporter, repository: str | None) -> None:
    """Write the card of an export to its folder, and its picture. Raises OSError.

    repository: its name on the hub, if any; the run's report is written as well then, without hosts and logs.
    """
    card = _Card(exporter, repository or folder.name.removesuffix(".part"))
    lines = [] if card.run is None else lines_of(card.run, card.step)
    if lines:
        draw(lines).save(folder / CURVES)
    if card.run is not None and repository is not None:
        (folder / REPORT_FILE).write_bytes(page_of([card.public_run(card.run)], with_ranks=False)[0])
    (folder / CARD).write_text(hide(card.text(folder)))


class _Card:
    """The parts of a card."""

    def __init__(self, exporter: Exporter, name: str) -> None:
        self.trained, self.model, self.name = exporter.trained, exporter.model, name
        self.lora = self.model.lora_rank > 0 and not exporter.merge
        self.folder = self.trained.folder.parent.parent
        self.step = int(read_meta(self.trained.folder)["progress"]["step"])
        self.config_text, self.config = read_config(self.folder)
        self.starts = read_provenance(self.folder)
        self.base = base_name(self.model.path)
        self.licence = licence_of(self.model.path, self.model.revision)
        pictures = kind_of(self.trained.run).outputs == "images"
        self.library = "diffusers" if pictures else "peft" if self.lora else "transformers"
        # keys of a policy of a joint run begin with its name
        self.prefix = f"{self.trained.policy}." if self.trained.policy else ""
        algorithm = setting(self.config, f"{self.prefix}algorithm.name")
        self.algorithm = _shown_text(algorithm) if isinstance(algorithm, str) else None

    @cached_property
    def run(self) -> Run | None:
        """The run with its metrics; None if there are none."""
        with suppress(ValueError):
            return read_run(self.folder)
        return None

    def public_run(self, run: Run) -> Run:
        """A run whose configuration has of absolute paths the last part."""
        text = None if self.config_text is None else _PATH.sub("", self.config_text)
        config: Any = None
        with suppress(yaml.YAMLError):
            config = parse_yaml(text or "")
        return replace(run, config_text=text, config=config if isinstance(config, dict) else {}, problems=())

    def text(self, folder: Path) -> str:
        """The whole card, with links to what lies in the export's folder."""
        from huggingface_hub import ModelCardData

        licence: dict[str, Any] = dict(self.licence)
        data = ModelCardData(
            library_name=self.library,
            base_model=self.base,
            base_model_relation=None if self.base is None else "adapter" if self.lora else "finetune",
            datasets=self._data_sets() or None,
            tags=["phalanx", *(["lora"] if self.lora else []), *([self.algorithm] if self.algorithm else [])],
            pipeline_tag=None if self.library == "diffusers" else "text-generation",
            ignore_metadata_errors=True,
            **licence,
        )
        kind = "A LoRA of" if self.lora else "A fine-tuned"
        method = f" by `{self.algorithm}`" if self.algorithm else ""
        parts = [
            f"---\n{data.to_yaml()}\n---",
            f"# {self.name.rpartition('/')[2]}",
            f"{kind} {self._base_words()}, trained{method} with Phalanx for {counted(self.step, 'step')}.",
            f"```python\n{self._loading_code()}\n```",
            self._training_table(),
            self._curves(folder),
            self._validation_table(),
            self._command_block(),
        ]
        return "\n\n".join(filter(None, parts)) + "\n"

    def _base_words(self) -> str:
        if self.base is None:
            return f"`{_shown_text(self.model.path)}`"
        return f"[{self.base}](https://huggingface.co/{self.base})"

    def _loading_code(self) -> str:
        form = "diffusers LoRA" if self.lora and self.library == "diffusers" else self.library
        return _LOAD[form].format(base=self.base or _shown_text(self.model.path), here=self.name)

    def _data_files(self, which: str) -> list[str]:
        files = setting(self.config, f"data.{which}_files")
        return list(map(str, files)) if isinstance(files, list) else []

    def _data_sets(self) -> list[str]:
        """The data sets of the hub on which the model was trained."""
        names: list[str] = []
        for file in self._data_files("train"):
            with suppress(DataError):  # an entry that no job would read
                names += [named(file, file)["name"]] if file.startswith(SCHEME) else []
        return list(dict.fromkeys(names))

    def _training_table(self) -> str:
        """A table of base, data, rewards, ranks and versions."""
        inputs = self.starts[-1]["inputs"] if self.starts else {}
        rows = [("base", self._base_words())]
        if self.licence:
            rows.append(("licence of the base", " ".join(f"`{value}`" for value in self.licence.values())))
        if self.model.revision is not None:
            rows.append(("revision of the base", f"`{self.model.revision}`"))
        for which, words in (("train", "training data"), ("val", "validation data")):
            for place, file in enumerate(self._data_files(which)):
                digest = inputs.get(f"data.{which}_files[{place}]", {}).get("sha256")
                rows.append((words, f"`{_shown_text(file)}`" + (f", SHA-256 `{digest}`" if digest else "")))
        functions = setting(self.config, "reward.functions")
        for function in functions if isinstance(functions, list) else ():
            if isinstance(function, dict):
                name = function.get("name") or _shown_text(str(function.get("path")))
                rows.append(("reward", f"`{name}`, weight {function.get('weight', 1)}"))
        if self.starts:
            versions = ", ".join(map(" ".join, self.starts[-1]["versions"].items()))
            ranks = counted(self.starts[-1]["ranks"].get("world", 1), "rank")
            rows += [("task", f"`{self.starts[-1]['task']}` on {ranks}")]
            rows += [("versions", cut(versions, 2 * LONGEST))]
        rows.append(("weights", "the moving average" if self.trained.weights == "ema" else "those of the last update"))
        lines = ["## Training", "", "| | |", "|---|---|"]
        for words, value in rows:
            lines.append(f"| {words} | {value.replace('|', chr(92) + '|')} |")
        return "\n".join(lines)

    def _curves(self, folder: Path) -> str:
        """The picture of the rewards and the link to the report, as far as they are there."""
        report = f"[The run's report]({REPORT_FILE}) has all curves and samples; download it to open it."
        title = f"Curves up to step {self.step}, with 95 % intervals of validations over prompts"
        parts = [f"![{title}]({CURVES})"] if (folder / CURVES).is_file() else []
        parts += [report] if (folder / REPORT_FILE).is_file() else []
        return "\n\n".join(["## Curves", *parts]) if parts else ""

    def _validation_table(self) -> str:
        """A table of the last validation before the checkpoint, and of the first one of the run."""
        run, lines = self.run, []
        if run is None:
            return ""
        for name in run.validations():
            last = self._last_point(run, f"val/{name}/reward/mean")
            if last is None:
                continue
            step, mean = last
            bounds = validation_bounds(run, name, step)
            interval = "" if bounds is None else f"{bounds.low:.4g} to {bounds.high:.4g}"
            first, before = run.points(f"val/{name}/reward/mean")[0]
            began = f"{before:.4g} (step {first})" if first < step else ""
            lines.append(f"| `{name}` | {step} | {mean:.4g} | {interval} | {began} |")
        if not lines:
            return ""
        head = "| set | step | mean reward | 95 % interval over prompts | before |\n|---|---|---|---|---|\n"
        return "## Validation\n\n" + head + "\n".join(lines)

    def _last_point(self, run: Run, key: str) -> tuple[int, float] | None:
        """The last point of a metric that is no later than the checkpoint."""
        return next((point for point in reversed(list(run.points(key))) if point[0] <= self.step), None)

    def _command_block(self) -> str:
        """The command of the last start, if it was recorded, and the whole configuration, folded."""
        parts = ["## Command"]
        words = self.starts[-1].get("command") if self.starts else None
        if words == []:  # a task alone would lack its model
            parts.append("A call of `phalanx.train` in Python, with the configuration below.")
        elif words is not None:
            line = shlex.join([self.starts[-1]["task"], *words])
            parts.append(f"```sh\nsh train.sh {_shown_text(line, MOST_CONFIG)}\n```")
        if self.config_text is not None:
            text = _PATH.sub("", self.config_text).strip()
            parts.append(f"<details><summary>Configuration</summary>\n\n```yaml\n{text}\n```\n\n</details>")
        return "\n\n".join(parts) if len(parts) > 1 else ""


def base_name(path: str) -> str | None:
    """The name of a base on the hub, None for a folder, unless it is a snapshot in the cache of the hub."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return path
    cached = _CACHED.search(str(folder.resolve()))
    return None if cached is None else f"{cached[1]}/{cached[2]}"


def licence_of(path: str, revision: str | None) -> dict[str, str]:
    """The licence in the front matter of a base's card, empty if there is none or it cannot be read."""
    from huggingface_hub import hf_hub_download, metadata_load
    from huggingface_hub.errors import HTTPError

    file = Path(path).expanduser() / CARD
    data: Any = None
    with suppress(OSError, ValueError, HTTPError, yaml.YAMLError):
        if not file.parent.is_dir():
            file = Path(hf_hub_download(path, CARD, revision=revision))
        data = metadata_load(file)
    licence = {}
    for key in _LICENCE if isinstance(data, dict) else ():
        if isinstance(data.get(key), str):
            licence[key] = cut(data[key], LONGEST)
    return licence


def _shown_text(value: str, length: int = LONGEST) -> str:
    """A value for a card, in one line: of absolute paths in it the last part."""
    return cut(_PATH.sub("", " ".join(value.split())), length)
