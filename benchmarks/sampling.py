"""Drawing tokens in the trained modules, in transformers' generate as TRL's rollouts do, and in vLLM, alternating.

    python benchmarks/sampling.py [--runs 2] [--rows 12] [--before TREE] [--vllm PYTHON]

8 responses to each of 12 prompts of 20 to 60 tokens, by a random Qwen2 of 6 layers, 192 channels and 8,192 tokens on
one thread: with a long tail of lengths (median 60, longest 1,024) or all of 100 tokens. A response ends where the
random number of a token, or a maximum number of tokens, says so. `rows` are decoded together by the session; generate
and vLLM get all responses at once, and generate, which is slow, runs once. TREE: a checkout from before
phalanx.rollout.lm.session. PYTHON: that of an environment with vLLM. Figures are CPU seconds of a process per 1,000
tokens, and the growth of the peak of its memory while it draws. The last line is JSON.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import LogitsProcessor, Qwen2Config, Qwen2ForCausalLM

PROMPTS, RESPONSES, VOCABULARY, LONGEST = 12, 8, 8192, 1024
END = VOCABULARY - 1
SIZES = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6,
         "num_key_value_heads": 2, "max_position_embeddings": 4096, "vocab_size": VOCABULARY}  # fmt: skip


def model() -> Any:
    """The random model."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval().float()


def job(kind: str) -> tuple[list[list[int]], list[int]]:
    """The prompts, and the lengths of the responses, prompt by prompt."""
    stream, prompts = torch.Generator().manual_seed(1), []
    for _ in range(PROMPTS):
        length = int(torch.randint(20, 60, (1,), generator=stream))
        prompts.append(torch.randint(3, END, (length,), generator=stream).tolist())
    count = PROMPTS * RESPONSES
    if kind == "flat":
        return prompts, [100] * count
    lengths = (60 * torch.exp(1.1 * torch.randn(count, generator=stream))).clamp(4, LONGEST).long()
    lengths[37] = LONGEST
    return prompts, lengths.tolist()


def numbers(lengths: list[int]) -> torch.Tensor:
    """Uniform numbers [B, LONGEST]; that of a response's last token is so large that the end token is drawn."""
    uniform = 0.99 * torch.rand(len(lengths), LONGEST, generator=torch.Generator().manual_seed(2))
    for i, length in enumerate(lengths):
        uniform[i, length - 1] = 1 - 2**-24
    return uniform


def session(kind: str, rows: int, device: str = "cpu", *, eager: bool = False) -> list[list[int]]:
    """The responses of a session in the trained modules; eager: without CUDA graphs."""
    from phalanx.models.lm.model import CausalLM
    from phalanx.rollout.lm.decode import Decoding
    from phalanx.rollout.lm.policy_session import PolicySession
    from phalanx.rollout.lm.session import Request, converse

    prompts, lengths = job(kind)
    how, requests, uniform, module = (
        Decoding(LONGEST, 1.0, [END], 0),
        [],
        numbers(lengths),
        CausalLM(model().to(device), 1024),
    )
    for i in range(len(lengths)):
        request = Request(prompt=prompts[i // RESPONSES], name=(i,), decoding=how, room=LONGEST)
        vars(request)["numbers"] = uniform[i].contiguous()  # instead of those of its name
        requests.append(request)
    with clocked():
        converse(PolicySession(module, module.lm.config, torch.device(device), rows, eager=eager), requests)
    return [request.tokens for request in requests]


def before(kind: str, rows: int) -> list[list[int]]:
    """The same by the loop of a checkout from before there were sessions."""
    from phalanx.models.lm.model import CausalLM
    from phalanx.rollout.lm import decode

    prompts, lengths = job(kind)
    how, found, uniform, module = decode.Decoding(LONGEST, 1.0, [END], 0), [], numbers(lengths), CausalLM(model(), 1024)
    drawn: Any = vars(decode)["decode"]
    with clocked():
        for first in range(0, len(lengths), rows):
            places = [i // RESPONSES for i in range(first, min(first + rows, len(lengths)))]
            some = prompts[places[0] : places[-1] + 1]
            at = [place - places[0] for place in places]
            found += drawn(module, module.lm.config, some, at, uniform[first : first + rows], how)
    return found


class Ends(LogitsProcessor):
    """Makes the end token certain where a response is to end, and impossible before."""

    def __init__(self, lengths: list[int], width: int) -> None:
        self.lengths, self.width = torch.tensor(lengths), width

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        now = (self.lengths == input_ids.shape[1] - self.width + 1)[:, None]
        return torch.where(torch.arange(VOCABULARY) == END, torch.where(now, 1e4, -1e4), scores)


def generate(kind: str, rows: int) -> list[list[int]]:
    """The same in transformers' generate."""
    prompts, lengths = job(kind)
    width, every, lm = max(map(len, prompts)), [], model()
    for i in range(len(lengths)):
        prompt = prompts[i // RESPONSES]
        every.append([0] * (width - len(prompt)) + prompt)
    ids, chosen = torch.tensor(every), Ends(lengths, width)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": LONGEST, "eos_token_id": END, "pad_token_id": 0}
    with clocked(), torch.no_grad():
        out = lm.generate(ids, attention_mask=(ids != 0).long(), logits_processor=[chosen], **options)
    return [out[i, width : width + length].tolist() for i, length in enumerate(lengths)]


def vllm(kind: str, rows: int) -> list[list[int]]:
    """The same in vLLM."""
    from vllm import LLM, SamplingParams

    prompts, lengths = job(kind)
    with tempfile.TemporaryDirectory() as folder:
        model().save_pretrained(folder)
        options = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 2048}
        engine = LLM(folder, **options)
        given = [{"prompt_token_ids": prompts[i // RESPONSES]} for i in range(len(lengths))]
        settings = [SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths]
        with clocked():
            outputs = engine.generate(given, settings, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


SIDES = {"session": session, "before": before, "generate": generate, "vllm": vllm}
found: dict[str, float] = {}


class clocked:
    """Measures the CPU seconds of a block, and by how much it raises the peak of memory."""

    def __enter__(self) -> None:
        self.peak, self.start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()

    def __exit__(self, *_: object) -> None:
        found["cpu_s"] = time.process_time() - self.start
        found["peak_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.peak) / 1e3


def turn(python: str, side: str, kind: str, rows: int, tree: str | None) -> dict[str, float]:
    """Run one side in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if side == "before":
        environment["PYTHONPATH"] = f"{tree}/src"
    if side == "vllm":
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}
        environment |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [python, __file__, "--only", side, "--kind", kind, "--rows", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {side} failed\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2, help="runs of each side (2)")
    parser.add_argument("--rows", type=int, nargs="+", default=[12], help="responses decoded together (12)")
    parser.add_argument("--before", help="a checkout from before phalanx.rollout.lm.session")
    parser.add_argument("--vllm", help="the Python of an environment with vLLM")
    parser.add_argument("--only", choices=SIDES, help="run one side once, in this process")
    parser.add_argument("--kind", choices=("tail", "flat"), default="tail", help="with --only: the lengths")
    args = parser.parse_args()
    if args.only:
        torch.set_num_threads(1)
        tokens = sum(map(len, SIDES[args.only](args.kind, args.rows[0])))
        print(json.dumps({"per_1000": 1000 * found["cpu_s"] / tokens, "tokens": tokens} | found))
        return
    jobs = [("session", rows) for rows in args.rows] + [("generate", PROMPTS * RESPONSES)]
    jobs += [("before", rows) for rows in args.rows if args.before] + [("vllm", PROMPTS * RESPONSES)] * bool(args.vllm)
    medians = {}
    for kind in ("tail", "flat"):
        every: dict[str, list[dict[str, float]]] = {}
        for run in range(args.runs):
            for side, rows in jobs if run == 0 else [job for job in jobs if job[0] != "generate"]:
                python = args.vllm if side == "vllm" else sys.executable
                every.setdefault(f"{side} {rows}", []).append(turn(python, side, kind, rows, args.before))
                print(kind, side, rows, every[f"{side} {rows}"][-1], flush=True)
        for name, results in every.items():
            for key in ("per_1000", "peak_mb"):
                medians[f"{kind}, {name}, {key}"] = round(statistics.median(one[key] for one in results), 3)
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
