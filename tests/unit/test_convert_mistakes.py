"""`phalanx convert`: mistakes, and files that name code."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.__main__ import main
from phalanx.config import ConfigError
from phalanx.config.lm import LMRLConfig
from phalanx.run.rules import load_config
from phalanx.tools.convert import convert
from tests.helpers.checks import refused

FUNCTIONS = """
import ml_collections

def compressibility():
    config.sample.num_steps = 10

def general_ocr_sd3():
    config.sample.num_steps = 20
"""


def convert_text(folder: Path, words: str) -> tuple[Any, str]:
    """The configuration of a command of verl, loaded, and its text."""
    (folder / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {words}")
    text = convert(str(folder / "run.sh"))
    (folder / "config.yaml").write_text(text)
    return load_config(LMRLConfig, str(folder / "config.yaml"), []), text


def test_code_that_a_file_names_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("open('executed', 'w')\ndef compute_score(): pass\nclass Config: pass\n")
    keys = (
        "algorithm.adv_estimator=evil.py actor_rollout_ref.rollout.name=evil.py:E custom_reward_function.path=evil.py "
    )
    keys += "trainer.logger=evil actor_rollout_ref.rollout.multi_turn.interaction_config_path=evil.py:E"
    keys += " actor_rollout_ref.model.path='${oc.env:HOME}'"
    config, text = convert_text(tmp_path, f"{keys} data.train_batch_size=32")
    assert (config.algorithm.name, config.rollout.engine, config.model.path) == ("grpo", "policy", "MODEL")
    assert "# algorithm.adv_estimator=evil.py  # here it is algorithm.name; code of the file is not loaded\n" in text
    assert not Path("executed").exists()


def test_a_setting_that_contradicts_a_default_is_a_comment(tmp_path: Path) -> None:
    """Both engines would sleep, which is the default of each."""
    words = "reward.reward_model.model.path=judge actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.path=x"
    config, text = convert_text(tmp_path, words)
    assert (config.reward.model.path, config.rollout.engine) == (None, "vllm")
    assert (
        "# reward.reward_model.model.path: judge  # reward.model.sleep: true does not work with rollout.sleep" in text
    )


def test_an_algorithm_without_an_equal_is_a_comment(tmp_path: Path) -> None:
    config, text = convert_text(tmp_path, "algorithm.adv_estimator=remax actor_rollout_ref.model.path=x")
    assert config.algorithm.name == "grpo"
    assert "# algorithm.adv_estimator: remax  # algorithm.name: " in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.txt", "echo hello", "{}: of no known trainer; name one of verl_omni, verl_sft, verl, flow_"),
        ("run.sh", "python3 -m verl.trainer a.b=1 c.d=2", "{}: none of its 2 settings is known here"),
        ("run.sh", "swift rlhf --rlhf_type kto --model x", "{}: its method is kto; expected grpo, rloo, "),
        ("run.sh", "verl.trainer data.x='1", "{}: cannot be read: No closing quotation"),
        ("run.sh", "python -m verl_omni.trainer.main_omni a.b=1", "{}: verl_omni.trainer.main_omni has no equal here"),
        ("run.yaml", "runner: {task_type: embodied}", "{}: runner.task_type is embodied; expected reasoning"),
        (
            "run.py",
            "from trl import SFTConfig, TrlParser\nparse(SFTConfig)",
            "{}: none of its 0 settings is known here; if they come from the command line, convert a .sh file with the ",
        ),
        ("run.yaml", "a: [1", "{}: not valid YAML: "),
        ("run.yaml", "- 1", "{}: the top level must be sections (key: value)"),
        ("run.py", "a = (", "{}: not valid Python: "),
        ("grpo.py", FUNCTIONS, "{}: name its function, as in FILE.py:general_ocr_sd3; it has compressibility, "),
        (
            "grpo.py:general_ocr",
            FUNCTIONS,
            "{}: no function general_ocr that sets config; did you mean general_ocr_sd3?",
        ),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, message: str
) -> None:
    path = tmp_path / name.partition(":")[0]
    path.write_text(content)
    assert main(["convert", str(tmp_path / name)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith(f"error: {message.format(path)}")


def test_a_file_that_is_not_there_and_a_trainer_that_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "run.sh").touch()
    with refused(f"{tmp_path}/rum.sh: no such file; did you mean {tmp_path}/run.sh?", ConfigError):
        convert(str(tmp_path / "rum.sh"))
    with pytest.raises(ConfigError, match=r"^from=nemo: expected one of verl_omni, verl_sft, verl, "):
        convert(str(tmp_path / "run.sh"), "nemo")


def test_the_command_prints_what_it_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text("python train.py --model base --num_generations 4 --gradient_accumulation_steps 8")
    assert main(["convert", str(tmp_path / "run.sh"), "from=ms_swift"]) == 0
    assert "\nmodel:\n  path: base  # model\n" in capsys.readouterr().out
