"""The cache of prompt embeddings: each prompt is encoded once, and comes back from disk bit by bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phalanx.config.parallel import ParallelConfig
from phalanx.distributed.mesh import Node
from phalanx.models.flow import embeds
from phalanx.models.flow.embeds import EmbedsCache
from phalanx.models.flow.family import Embeds
from phalanx.run.world import start_world
from tests.helpers.policies import MAX_LENGTH, PROMPTS, make_policy, one_rank
from tests.helpers.ranks import run_ranks


class Encoder:
    """Random embeddings; `calls` records the texts."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype, self.calls = dtype, list[list[str]]()

    def __call__(self, texts: list[str]) -> list[Embeds]:
        self.calls.append(texts)
        return [
            {"prompt_embeds": torch.randn(len(text), 8, dtype=self.dtype), "pooled": torch.randn(4, dtype=self.dtype)}
            for text in texts
        ]


def same(a: Embeds, b: Embeds) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_a_prompt_is_encoded_once() -> None:
    encoder = Encoder()
    cache = EmbedsCache(encoder, "model", None)
    first = cache(["a", "bb", "a", "ccc"])
    assert encoder.calls == [["a", "bb", "ccc"]]
    assert [len(e["prompt_embeds"]) for e in first] == [1, 2, 1, 3]
    assert first[0] is first[2]
    again = cache(["ccc", "dddd", "a"])
    assert encoder.calls == [["a", "bb", "ccc"], ["dddd"]]
    assert again[0] is first[3] and again[2] is first[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_disk_gives_back_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    written = EmbedsCache(Encoder(dtype), "model", str(tmp_path))(["a cat", "日本語 \N{CAT}", ""])
    encoder = Encoder(dtype)
    read = EmbedsCache(encoder, "model", str(tmp_path))(["", "a cat", "日本語 \N{CAT}", "new"])
    assert encoder.calls == [["new"]]
    assert same(read[0], written[2]) and same(read[1], written[0]) and same(read[2], written[1])
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) == 4 and {p.suffix for p in files} == {".safetensors"}  # no half-written ones are left
    (tmp_path / "plain").touch()
    assert {p.stat().st_mode for p in files} == {(tmp_path / "plain").stat().st_mode}  # a team may share the folder


def test_another_model_has_other_embeddings(tmp_path: Path) -> None:
    EmbedsCache(Encoder(), "model float32 64", str(tmp_path))(["a"])
    encoder = Encoder()
    EmbedsCache(encoder, "model float32 128", str(tmp_path))(["a"])
    assert encoder.calls == [["a"]]


def test_another_family_has_other_embeddings(sd3_folder: Path, tmp_path: Path) -> None:
    """A custom family may encode the prompts of the same folder differently."""
    own = tmp_path / "family.py"
    own.write_text("from phalanx.zoo.families import sd3\n\n\nclass Model(sd3.Model):\n    pass\n")
    with one_rank() as world:
        for family, files in ((None, 1), (str(own), 2), (str(own), 2)):
            policy = make_policy(world, sd3_folder, embeds_cache_dir=tmp_path / "cache", family=family)
            policy.embed(PROMPTS[:1], negatives=False)
            assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == files


def test_memory_forgets_the_prompts_that_were_used_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = 4 * (8 + 4)  # bytes of a prompt of one letter
    monkeypatch.setattr(embeds, "MEMORY_LIMIT", 2 * prompt)
    encoder = Encoder()
    cache = EmbedsCache(encoder, "model", None)
    cache(["a"])
    cache(["b"])
    cache(["a"])
    cache(["c"])  # b goes
    cache(["a"])
    assert encoder.calls == [["a"], ["b"], ["c"]]
    cache(["b"])  # c goes
    cache(["a"])
    cache(["c"])
    assert encoder.calls == [["a"], ["b"], ["c"], ["b"], ["c"]]


def test_more_prompts_at_once_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeds, "MEMORY_LIMIT", 1)
    encoder = Encoder()
    out = EmbedsCache(encoder, "model", None)(["a", "bb", "ccc"])
    assert [len(e["prompt_embeds"]) for e in out] == [1, 2, 3]


@pytest.mark.parametrize("family", ["sd3_t5", "qwen"])
def test_a_policy_encodes_each_prompt_alone_and_once(
    family: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    with one_rank() as world:
        policy = make_policy(world, folder, embeds_cache_dir=tmp_path)
        first = policy.embed(PROMPTS)
        assert len(first) == 2 * len(PROMPTS)  # the prompts, then their negatives
        assert len(list(tmp_path.rglob("*.safetensors"))) == 5  # two share the default negative
        assert same(first[3], first[5]) and not same(first[3], first[4])
        assert {p.device.type for e in policy.model.text_encoders for p in e.parameters()} == {"cpu"}
        alone = policy.model.encode(["a cat"], torch.device("cpu"), MAX_LENGTH)
        assert same(first[0], alone[0])

        later = make_policy(world, folder, embeds_cache_dir=tmp_path)
        monkeypatch.setattr(later, "_encode_missing", None)  # calling it would fail
        monkeypatch.setattr(later.model, "text_encoders", [])
        for a, b in zip(later.embed(PROMPTS), first, strict=True):
            assert same(a, b)
    for file in tmp_path.rglob("*.safetensors"):
        assert "prompt_embeds" in load_file(file)


def test_embeddings_of_qwen_image_have_no_padding(qwen_folder: Path) -> None:
    with one_rank() as world:
        model = make_policy(world, qwen_folder).model
    short, long = model.encode(["x", "two small dogs"], torch.device("cpu"), 32)
    assert len(short["prompt_embeds"]) < len(long["prompt_embeds"])
    [alone] = model.encode(["x"], torch.device("cpu"), 32)
    torch.testing.assert_close(short["prompt_embeds"], alone["prompt_embeds"])
    [cut] = model.encode(["two small dogs"], torch.device("cpu"), 4)
    assert torch.equal(
        cut["prompt_embeds"], model.encode(["two small dogs"], torch.device("cpu"), 32)[0]["prompt_embeds"][:4]
    )
    batch = model.collate([short, long], 20, padded=True)
    lengths = [len(short["prompt_embeds"]), len(long["prompt_embeds"])]
    assert batch["prompt_embeds"].shape == (2, 20, 64) and batch["prompt_embeds_mask"].sum(1).tolist() == lengths
    assert batch["prompt_embeds"][~batch["prompt_embeds_mask"]].abs().max() == 0


# Texts of a node's ranks in two rounds: both ranks share one text, and a second epoch deals them differently.
ROUNDS = [[["a", "bb", ""], ["bb", "ccc", ""]], [["ccc", "dddd", ""], ["a", "bb", "eeeee", ""]]]


def in_turns(folder: Path | None, shards: int | None = None) -> tuple[list[list[str]], list[Embeds]]:
    """The texts that a rank encoded, and the embeddings of its texts afterwards."""
    encoder, world = Encoder(), start_world(ParallelConfig(fsdp_size=shards))
    torch.manual_seed(world.rank)
    cache, node = EmbedsCache(encoder, "model", None if folder is None else str(folder)), Node(world, 60.0)
    for wanted in ROUNDS:
        cache.share(wanted, node, lambda encode: encode())
    calls = list(encoder.calls)
    found = [embeds for wanted in ROUNDS for embeds in cache(wanted[node.place])]
    assert encoder.calls == calls
    return calls, found


@pytest.mark.parametrize(("nodes", "shards"), [(1, 2), (2, 2), (2, 1)])
def test_a_node_encodes_a_prompt_once(nodes: int, shards: int) -> None:
    """Whichever rank encoded a text, all ranks of the node have the same values, bit for bit."""
    ranks = run_ranks(in_turns, 2 * nodes, None, shards, local_world=2)
    for (first, mine), (second, others) in zip(ranks[::2], ranks[1::2], strict=True):
        assert first == [["a", ""], ["dddd"]]
        assert second == [["bb", "ccc"], ["eeeee"]]
        found = dict(zip([*ROUNDS[0][0], *ROUNDS[1][0]], mine, strict=True))
        for text, other in zip([*ROUNDS[0][1], *ROUNDS[1][1]], others, strict=True):
            assert len(other["prompt_embeds"]) == len(text)
            assert text not in found or same(other, found[text])


def test_what_is_on_disk_is_encoded_by_none(tmp_path: Path) -> None:
    run_ranks(in_turns, 2, tmp_path)
    assert [calls for calls, _ in run_ranks(in_turns, 2, tmp_path)] == [[], []]


def test_a_tensor_that_texts_share_travels_once() -> None:
    """As the tensor of an image does, which several texts share."""
    image, alone = torch.randn(6, 8), torch.randn(6, 8)
    texts = [torch.randn(n + 1, 8) for n in range(3)]
    sent = {3: image, 4: image, 7: alone}
    packed = embeds._pack_embeds({i: {"prompt_embeds": t, "image": sent[i]} for i, t in zip(sent, texts, strict=True)})
    assert packed.count(b"image") == 2
    received = embeds._unpack_embeds(packed)
    assert sorted(received) == sorted(sent) and received[3]["image"] is received[4]["image"]
    for i, t in zip(sent, texts, strict=True):
        assert same(received[i], {"prompt_embeds": t, "image": sent[i]})
