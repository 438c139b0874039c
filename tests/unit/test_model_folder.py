"""Foreign model folders: any defect of their files is reported in one line, if possible before they are loaded."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.folder import base_folder, how_to_load, model_index
from phalanx.models.flow.policy import build_policy
from phalanx.models.lm.composite import check_text, text_part
from phalanx.zoo.families.sd3 import Model
from tests.helpers.checks import refused

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
ENCODER = "text_encoder/model.safetensors"
INDEX, CONFIG, SCHEDULER = "model_index.json", "transformer/config.json", "scheduler/scheduler_config.json"

Change = Callable[[Path], object]


@pytest.fixture
def folder(sd3_folder: Path, tmp_path: Path) -> Path:
    """A copy of a folder that a test may break."""
    return Path(shutil.copytree(sd3_folder, tmp_path / "m"))


def text(name: str, content: str) -> Change:
    """Write another content to a file."""
    return lambda folder: (folder / name).write_text(content)


def keys(name: str, **values: Any) -> Change:
    """Set keys of a JSON file."""
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))


def tensors(name: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    """Change the tensors of a safetensors file."""
    return lambda folder: save_file(change(load_file(folder / name)), folder / name, {"format": "pt"})


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / ENCODER), folder / "text_encoder/pytorch_model.bin")
    (folder / ENCODER).unlink()


def variant(folder: Path) -> None:
    for file in (folder / "text_encoder").glob("*.safetensors"):
        file.rename(file.with_suffix(".fp16.safetensors"))


def piped(folder: Path) -> None:
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)


EXPECTED_PAIR = "expected [library, class]"
FILES: list[tuple[Change, str]] = [
    (keys(INDEX, vae=["diffusers"]), f"{{folder}}/{INDEX}: 'vae' is ['diffusers']; {EXPECTED_PAIR}"),
    (keys(INDEX, vae=[]), f"{{folder}}/{INDEX}: 'vae' is []; {EXPECTED_PAIR}"),
    (keys(INDEX, **{"../x": ["diffusers", "A"]}), f"{{folder}}/{INDEX}: '../x' is ['diffusers', 'A']; {EXPECTED_PAIR}"),
    (keys(INDEX, vae=["antigravity", "A"]), "'{folder}' has its vae from antigravity; known: diffusers, transformers"),
    (keys(INDEX, vae=["diffusers", "Vea"]), "'{folder}' has a Vea, which the installed diffusers lacks"),
    (keys(INDEX, vae=[None, None]), f"{{folder}}/{INDEX} names no vae"),
    (keys(INDEX, _class_name=["a", "b"]), f"{{folder}}/{INDEX} names no _class_name"),
    (text(INDEX, "[" * 10**5), f"{{folder}}/{INDEX} is not valid JSON: it is nested too deeply"),
    (text(CONFIG, "[1]"), f"{{folder}}/{CONFIG} holds a list; expected an object, {{{{...}}}}"),
    (piped, f"{{folder}}/{CONFIG} cannot be read: neither a file nor a folder"),
    (keys(CONFIG, num_attention_heads=10**9), f"{{folder}}/{CONFIG}: num_attention_heads is 1000000000; expected a number of at most 1e+08"),
    (keys(CONFIG, num_layers=-1), f"{{folder}}/{CONFIG}: num_layers is -1; expected 0 to 10000"),
    (keys(SCHEDULER, shift=float("nan")), f"{{folder}}/{SCHEDULER}: shift is nan; expected a number of at most 1e+08"),
    (keys(SCHEDULER, shift=0), f"{{folder}}/{SCHEDULER}: shift is 0; expected a number more than 0"),
    (keys(SCHEDULER, shift="3"), f"{{folder}}/{SCHEDULER}: shift is '3'; expected a number more than 0"),
    (keys(SCHEDULER, stochastic_sampling=True), f"{{folder}}/{SCHEDULER}: stochastic_sampling is true; only false is supported"),
    (keys(SCHEDULER, invert_sigmas=True), f"{{folder}}/{SCHEDULER}: invert_sigmas is true; only false is supported"),
    (keys(SCHEDULER, prediction_type="epsilon"), f"{{folder}}/{SCHEDULER}: prediction_type is 'epsilon'; expected flow_prediction"),
    (keys(SCHEDULER, num_train_timesteps=0), f"{{folder}}/{SCHEDULER}: num_train_timesteps is 0; expected 1000"),
    (text("vae/x.safetensors.index.json", "{}"), "{folder}/vae/x.safetensors.index.json has no weight_map, an object that names the file of "
     "each tensor"),
    (pickled, "{folder}/text_encoder has no weights (*.safetensors); pytorch_model.bin is a pickle, which is not read: save it with "
     "safe_serialization"),
    (variant, "{folder}/text_encoder has weights only of the variant fp16; write the folder anew without it, by from_pretrained(..., "
     "variant='fp16').save_pretrained(...) of the model's class"),
    (tensors(TRANSFORMER, lambda all: {name: t.to(torch.int8) for name, t in all.items()}),
     f"{{folder}}/{TRANSFORMER}: context_embedder.bias is of dtype I8; expected floating point"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), FILES, ids=[m.rpartition("/")[2][:60] for _, m in FILES])
def test_told_by_the_files_alone(folder: Path, change: Change, message: str) -> None:
    change(folder)
    with refused("model.path: " + message.format(folder=folder)):
        model_index(str(folder))


def test_a_single_file_is_no_folder(folder: Path) -> None:
    with refused(
        f"model.path: '{folder}/{TRANSFORMER}' is a single file; expected a diffusers model folder, such as "
        "from_single_file(file).save_pretrained(folder) of the pipeline's class writes"
    ):
        model_index(f"{folder}/{TRANSFORMER}")


def test_an_older_folder_without_t5(folder: Path) -> None:
    """Its model_index.json does not name the components that it omits."""
    content = json.loads((folder / INDEX).read_text())
    assert content.pop("text_encoder_3") == content.pop("tokenizer_3") == [None, None]
    (folder / INDEX).write_text(json.dumps(content))
    model = Model(FlowModelConfig(path=str(folder), dtype="float32"), torch.float32, torch.float32)
    assert model.pipeline.text_encoder_3 is None
    assert how_to_load(folder) == (
        f"StableDiffusion3Pipeline.from_pretrained('{folder}', text_encoder_3=None, tokenizer_3=None)"
    )


def without(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda all: {key: value for key, value in all.items() if key != name}


FINAL_NORM = "text_model.final_layer_norm.weight"
LOADED: list[tuple[Change, str]] = [
    (tensors(ENCODER, without(FINAL_NORM)), "'{folder}': the weights of text_encoder are not whole: it has no text_model.final_layer_norm.weight"),
    (tensors(ENCODER, lambda all: all | {FINAL_NORM: torch.ones(3)}), "'{folder}': the weights of text_encoder are not whole: its "
     "text_model.final_layer_norm.weight is [3] rather than [32]"),
    (keys(CONFIG, num_attention_heads="4"), "'{folder}' does not load: TypeError: not all arguments converted during string formatting"),
    (tensors(TRANSFORMER, lambda all: all | {"transformer_blocks.7.x": torch.ones(1)}), f"{{folder}}/{TRANSFORMER} contains "
     "transformer_blocks.7.x, for which its config.json has no layer"),
    (text("tokenizer/tokenizer.json", "{}"), "'{folder}' does not load: KeyError: 'added_tokens'"),
    (keys("vae/config.json", scaling_factor=0), "'{folder}': the VAE's scaling_factor is 0; expected more than 0"),
    (keys("vae/config.json", shift_factor=None), "'{folder}': the VAE's shift_factor is null; expected a number"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), LOADED, ids=[m[10:70] for _, m in LOADED])
def test_told_as_it_is_loaded(folder: Path, change: Change, message: str) -> None:
    change(folder)
    config = FlowModelConfig(path=str(folder), dtype="float32")
    none: Any = None
    with refused("model.path: " + message.format(folder=folder)):
        build_policy(config, none, none, none, seed=0, detach_uncond=False)


def test_tokenizers_by_the_names_of_published_folders(folder: Path) -> None:
    """Those of Stable Diffusion 3.5, FLUX.1 and Wan name a T5TokenizerFast, which transformers 5 does not list until it
    is asked for: MBart's, which nothing here asks for, stands for it.
    """
    keys(INDEX, tokenizer=["transformers", "MBartTokenizerFast"])(folder)
    assert model_index(str(folder))["tokenizer"][1] == "MBartTokenizerFast"
    keys(INDEX, tokenizer=["transformers", "T6TokenizerFast"])(folder)
    with refused(f"model.path: '{folder}' has a T6TokenizerFast, which the installed transformers lacks"):
        model_index(str(folder))


def test_a_tokenizer_must_tell_texts_apart_and_fit_its_encoder(folder: Path) -> None:
    file = folder / "tokenizer/tokenizer.json"
    whole = file.read_text()
    content = json.loads(whole)
    ends = {word: i for i, word in enumerate(("<|startoftext|>", "<|endoftext|>"))}
    content["model"]["vocab"] = ends
    for token in content["added_tokens"]:
        token["id"] = ends[token["content"]]
    file.write_text(json.dumps(content))
    config = FlowModelConfig(path=str(folder), dtype="float32")
    with pytest.raises(ValueError, match="tokenizer has the same tokens for all texts; its files are damaged"):
        Model(config, torch.float32, torch.float32)
    file.write_text(whole)
    keys("text_encoder/config.json", vocab_size=100)(folder)
    embedding = "text_model.embeddings.token_embedding.weight"
    tensors(ENCODER, lambda all: all | {embedding: all[embedding][:100].clone()})(folder)
    with pytest.raises(ValueError, match="tokenizer has 514 tokens, and its text encoder embeds 100"):
        Model(config, torch.float32, torch.float32)


def test_a_hub_id_is_pinned(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the hub's cache: it has two revisions, and each is found by its name."""
    import huggingface_hub
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repo = tmp_path / "cache" / "models--some--model"
    for name, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        shutil.copytree(folder, repo / "snapshots" / commit)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / name).write_text(commit)
    keys(INDEX, _class_name="Other")(repo / "snapshots" / ("a" * 40))
    assert model_index("some/model")["_class_name"] == "Other"
    assert model_index("some/model", "v1")["_class_name"] == "StableDiffusion3Pipeline"
    pinned = FlowModelConfig(path="some/model", revision="v1")
    found = repo / "snapshots" / ("b" * 40)
    assert base_folder(pinned) == found
    (found / "text_encoder" / "model.safetensors").unlink()  # a variant's is not fetched
    monkeypatch.setattr(
        huggingface_hub, "list_repo_files", lambda path, revision: [ENCODER.replace(".safe", ".fp16.safe")]
    )
    with refused(
        "model.path: some/model/text_encoder has weights only of the variant fp16; write the folder anew without it, by "
        "from_pretrained(..., variant='fp16').save_pretrained(...) of the model's class"
    ):
        base_folder(pinned)
    with refused("model.path: 'some/model': no such folder, and no hub has it at revision 'v2' within reach"):
        model_index("some/model", "v2")


def test_a_text_part_that_is_no_causal_model_is_named() -> None:
    """Such as the encoder and decoder of DiffusionGemma, which denoise a canvas of random tokens."""
    settings = transformers.DiffusionGemmaConfig(architectures=["DiffusionGemmaForBlockDiffusion"])
    with pytest.raises(ValueError) as error:
        check_text(settings, text_part(settings))
    assert str(error.value) == (
        "the text part of a DiffusionGemmaForBlockDiffusion, a diffusion_gemma_text, has no causal language model in transformers"
    )
    gemma = transformers.Gemma3Config(architectures=["Gemma3ForConditionalGeneration"])
    check_text(gemma, text_part(gemma))
