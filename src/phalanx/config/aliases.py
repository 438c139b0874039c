"""Keys of other trainers (verl, VeRL-Omni, flow_grpo, TRL and others) and their names in Phalanx: foreign_keys.yaml."""

from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

# Sections of jobs with one policy that joint runs do not have.
NOT_JOINT = {
    "placement": "a joint run has no ranks of other roles: both policies are sampled and trained on all ranks",
    "environment": "the writer of a joint run answers once, without tools or turns",
    "critic": "no policy of a joint run has a critic; writer.algorithm.name is such as grpo",
    "filter_groups": "a joint run draws no samples again",
}


def _joint_alias(key: str, known: Collection[str]) -> str | None:
    """Like `alias`, for the keys of a joint run."""
    name = key.removeprefix("writer.").removeprefix("painter.")
    for section, reason in NOT_JOINT.items():
        if section in name.split("."):
            return reason
    if name in known:
        return f"both policies have one {name}"
    of_policies = [f"{part}.{name}" for part in ("writer", "painter") if f"{part}.{name}" in known]
    if of_policies and key == name:
        return f"here it is {' or '.join(of_policies)}"
    message = alias(name, {other.removeprefix("writer.").removeprefix("painter.") for other in known})
    return message if message is None else f"{message}, which a joint run has below writer and painter"


@cache
def foreign_keys() -> dict[str, Any]:
    """The sections of foreign_keys.yaml: names by key, or lists of keys without a counterpart."""
    tables: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("foreign_keys.yaml").read_text(encoding="utf-8"))
    return tables


def alias(key: str, known: Collection[str]) -> str | None:
    """The message about a key of another trainer, or about a key that a joint run lacks or has in another section.

    known: the keys of this job. Returns None for any other key.
    """
    if "painter.model.path" in known:
        return _joint_alias(key, known)
    if key == "policy" and "prompts" in known:
        return "of a joint run, tasks/sample.py takes the painter and tasks/generate.py the writer; leave it out"
    if key.startswith("critic.") and "critic.optim.lr" not in known:
        return None  # this job has no critic
    words = counterpart(key, known, _trainers_with(known))
    if words is None:
        return None
    return f"here it is {words}" if words else "here there is nothing to set for it"


def _trainers_with(known: Collection[str]) -> list[str]:
    """The trainers, by the names of their sections, that have jobs with these keys."""
    trainers = ["rlinf"] if "environment.path" in known else []
    if "data.rejected_key" in known:
        trainers.append("trl_supervised")
    if "rollout.n" in known:
        trainers.append("trl")
        trainers += ["openrlhf", "ms_swift", "verl_sft"] if "data.max_response_length" in known else []
    if "rollout.num_inference_steps" in known:
        trainers += ["flow_grpo", "flow_factory"]
    if "block_diffusion.noise_range_low" in known:
        trainers.append("dfactory")
    return trainers


def counterpart(key: str, known: Collection[str], trainers: Iterable[str]) -> str | None:
    """The name here of a key of verl, VeRL-Omni or one of `trainers`, or words that begin with it; empty if there is
    nothing to set for it, None if it is unknown.

    known: the keys of this job. trainers: as their sections in foreign_keys.yaml end; the first ones take precedence.
    """
    tables = foreign_keys()
    renamed = tables["renamed"]
    if "data.max_response_length" in known:
        renamed = renamed | tables["of_language_models"]
    if "environment.path" in known:
        renamed = renamed | tables["of_environments"]
    if key in renamed:
        return str(renamed[key])
    for trainer in trainers:
        name = tables[f"of_{trainer}"].get(key)
        first = "" if name is None else name.split(" ")[0].rstrip(",;")
        if name is not None and (first in known or "." not in first):
            return str(name)
    prefixes = tables["prefixes"]
    head = max((head for head in prefixes if key.startswith(head)), key=len, default=None)
    ours = None if head is None else prefixes[head] + key.removeprefix(head)
    if ours in known:
        return ours
    unset = [*tables["nothing_to_set"]]
    for trainer in trainers:
        unset += tables[f"nothing_to_set_of_{trainer}"]
    for entry in unset:
        if key == entry or (entry[-1] in "._" and key.startswith(entry)):
            return ""
    return None
