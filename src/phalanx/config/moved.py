"""Keys that have moved into a section that a job need not have. Their old names are still read, wherever they stand."""

import logging
from dataclasses import fields
from typing import Any

from phalanx.config.messages import ConfigError, bare, shown
from phalanx.config.validate import hints_of, is_section

log = logging.getLogger(__name__)
# old key: the section beside it, and its name there; below `writer`, too
MOVED = {
    "rollout.over_sampling_batch_size": ("partial_rollout", "over_sampling_batch_size"),
    "rollout.partial_rollout_tokens": ("partial_rollout", "tokens"),
}


def move_keys(schema: Any, values: dict[str, Any]) -> None:
    """Give moved keys among the user's values their new names.

    Without their section a default is left out, because saved configurations of earlier versions have all keys. Raises
    ConfigError for another value.
    """
    for old, (section, name) in MOVED.items():
        for prefix in ("", "writer."):
            *above, leaf = f"{prefix}{old}".split(".")
            hints, beside = hints_of(schema), values
            for part in above:
                kind, inner = hints.get(part), beside.get(part)
                hints = hints_of(kind) if is_section(kind) else {}
                beside = inner if isinstance(inner, dict) else {}
            if section not in hints or leaf not in beside:
                continue
            value, new = beside.pop(leaf), ".".join((*above, section, name))
            default = next(f.default for f in fields(bare(hints[section])) if f.name == name)
            if beside.get(section) in (None, False):
                beside[section] = None
                if value != default:
                    given = f"{prefix}{old}: {shown(value)}"
                    raise ConfigError(f"{given} is now {new}, of a section that is left out; set that, or leave it out")
            elif beside[section] is True or isinstance(beside[section], dict):  # the section reports another value
                beside[section] = {name: value} | ({} if beside[section] is True else beside[section])
                if value != default:
                    log.warning("%s is now %s", f"{prefix}{old}", new)
