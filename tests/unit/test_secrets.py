"""Values from the environment: at any place in a configuration, and in messages."""

import logging
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from phalanx import exit
from phalanx.config.flow import FlowRLConfig
from phalanx.config.load import save
from phalanx.config.messages import ConfigError
from phalanx.config.secrets import hide, public
from phalanx.run.cli import _Terminal
from phalanx.run.rules import load_config

SECRET = "s3cret/of the test"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.config.secrets._names", {})
    monkeypatch.setenv("PHALANX_TEST_KEY", SECRET)


def with_kwargs(kwargs: str) -> tuple[Any, dict[str, Any]]:
    """The kwargs of a reward that the job gets, and the configuration that files and loggers get."""
    cfg = load_config(FlowRLConfig, None, [f"reward.functions=[{{name: ocr, kwargs: {kwargs}}}]", "model.path=base"])
    return cfg.reward.functions[0].kwargs, public(cfg)


@pytest.mark.parametrize(
    ("kwargs", "value"),
    [
        ("{key: '${oc.env:PHALANX_TEST_KEY}'}", {"key": SECRET}),
        ("{keys: ['x ${oc.env:PHALANX_TEST_KEY}', 1]}", {"keys": [f"x {SECRET}", 1]}),
        ("""'${oc.create:"{key: ${oc.env:PHALANX_TEST_KEY}}"}'""", {"key": SECRET}),
        ("""'${oc.create:"{a: {b: [1, ${oc.env:PHALANX_TEST_KEY}]}}"}'""", {"a": {"b": [1, SECRET]}}),
        ("{key: '${trainer.project_name}'}", {"key": "phalanx"}),
    ],
)
def test_no_value_is_in_files(kwargs: str, value: Any, tmp_path: Path) -> None:
    used, shown = with_kwargs(kwargs)
    assert used == value
    assert SECRET not in str(shown)
    cfg = load_config(FlowRLConfig, None, [f"reward.functions=[{{name: ocr, kwargs: {kwargs}}}]", "model.path=base"])
    save(cfg, tmp_path / "config.yaml")
    assert SECRET not in (tmp_path / "config.yaml").read_text()
    again = load_config(FlowRLConfig, str(tmp_path / "config.yaml"), [])
    assert again == cfg and again.reward.functions[0].kwargs == value


def test_the_parts_of_a_variable_that_holds_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TEST_KEY", "{key: s3cret-part, n: 12345678}")
    used, shown = with_kwargs("'${oc.decode:${oc.env:PHALANX_TEST_KEY}}'")
    assert used == {"key": "s3cret-part", "n": 12345678}
    assert "s3cret-part" not in str(shown) and "12345678" not in str(shown)
    assert hide("refused s3cret-part, 12345678") == "refused ${oc.env:PHALANX_TEST_KEY}, ${oc.env:PHALANX_TEST_KEY}"


def test_messages_show_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    with_kwargs("{key: '${oc.env:PHALANX_TEST_KEY}'}")
    reference = "${oc.env:PHALANX_TEST_KEY}"
    assert hide(f"401 for {SECRET}!") == f"401 for {reference}!"
    assert hide("https://host?key=s3cret/of%20the%20test") == f"https://host?key={reference}"
    assert hide("https://host?key=s3cret%2Fof%20the%20test") == f"https://host?key={reference}"
    record = logging.LogRecord("x", logging.WARNING, "", 0, "no answer to %s", (SECRET,), None)
    assert _Terminal().format(record) == f"WARNING: no answer to {reference}"


def test_a_mistake_in_a_value_is_told_without_it() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(FlowRLConfig, None, ["optim.lr=${oc.env:PHALANX_TEST_KEY}", "model.path=base"])
    assert SECRET not in hide(str(error.value))


def test_what_is_no_secret_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PHALANX_TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("PHALANX_TEST_SHORT", "a")
    monkeypatch.delenv("PHALANX_TEST_UNSET", raising=False)
    words = [
        "trainer.output_dir=${oc.env:PHALANX_TEST_FOLDER}/run",
        "trainer.project_name=${oc.env:PHALANX_TEST_SHORT}",
    ]
    load_config(
        FlowRLConfig,
        None,
        [*words, "trainer.experiment_name=${oc.env:PHALANX_TEST_UNSET,a-default}", "model.path=base"],
    )
    message = f"a disk is full: {tmp_path}/run of a-default"
    assert hide(message) == message  # existing folders, short values, defaults
    assert os.environ["PHALANX_TEST_KEY"] not in hide(message)


def test_threads_other_handlers_and_warnings_show_no_value(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hooks = (exit, "hide"), (threading, "excepthook"), (warnings, "formatwarning"), (logging, "_logRecordFactory")
    for module, name in hooks:
        monkeypatch.setattr(module, name, vars(module)[name])  # as they are afterwards, too
    exit.hide_with(hide)
    with_kwargs("{key: '${oc.env:PHALANX_TEST_KEY}'}")

    def refuse() -> None:
        raise ValueError(f"refused {SECRET}")

    library = logging.Logger("library")
    library.addHandler(logging.StreamHandler())
    try:
        refuse()
    except ValueError:
        library.exception("no answer to %s", SECRET)
    thread = threading.Thread(target=refuse, name="judge")
    thread.start()
    thread.join()
    shown = capfd.readouterr().err + warnings.formatwarning(f"old key {SECRET}", UserWarning, "file.py", 1)
    assert SECRET not in shown
    for words in ("no answer to", "in refuse", "an exception in the thread judge:", "ValueError: refused", "old key"):
        assert words in shown
    assert shown.count("${oc.env:PHALANX_TEST_KEY}") >= 4
