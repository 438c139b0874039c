"""Trust in a checkpoint's own config.yaml: it is somebody's file, and runs no code and reads no environment variable
unless the user trusts the run or names the same keys on the command line.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.config.messages import ConfigError, cut

_LISTED = 3  # values in a message
# keys that tasks without training and rewards ignore
UNUSED: dict[str, Mapping[str, Any]] = {"data": {"train_files": [], "val_files": []}, "rollout": {"engine": "policy"}}


@dataclass(frozen=True)
class Use:
    """The use that a task makes of a run's configuration.

    trusted: the user has set trust_run. sections: those whose code the task would run. named: the keys of each section
    that the task itself sets or ignores, with the user's values.
    """

    trusted: bool = False
    sections: tuple[str, ...] = ()
    named: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def checked(self, content: dict[str, Any], file: Path) -> dict[str, Any]:
        """The content of `file`, without keys of code and of the environment that the task does not use. Raises
        ConfigError for those that it would use.
        """
        if self.trusted:
            return content
        kept, problems = dict(content), []
        for name, section in content.items():
            if not isinstance(section, dict):
                if any(_texts(str(name), section)):
                    problems += [(str(name), section)] * (name in self.sections)
                    kept[name] = {}
                continue
            kept[name] = dict(section)
            for key, value in section.items():
                part = next(_foreign_parts(f"{name}.{key}", value), None)
                if part is None:
                    continue
                if name in self.sections and not self._replaces_value(str(name), key, value):
                    problems.append(part)
                elif (name, key) == ("model", "path"):
                    kept[name][key] = ""  # it is required, and the task sets it
                else:
                    del kept[name][key]
        if problems:
            listed = ", ".join(f"{key}={cut(str(value), 80)}" for key, value in problems[:_LISTED])
            more = f" and {len(problems) - _LISTED} more" if problems[_LISTED:] else ""
            raise ConfigError(
                f"checkpoint: {file} would run code or read the environment: {listed}{more}; give trust_run=true if "
                "you trust that run, or set these keys yourself"
            )
        return kept

    def _replaces_value(self, section: str, key: Any, value: Any) -> bool:
        """Whether the task's own value replaces the run's; sections within a section are merged."""
        named = self.named.get(section, {})
        return key in named and not (isinstance(value, dict) and isinstance(named[key], dict))


def _foreign_parts(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a key's value, with their keys, that are code, an address, or from the environment."""
    yield from _texts(key, value)
    if key == "reward.functions" and isinstance(value, list):
        for i, entry in enumerate(value):
            for name in ("path", "name"):
                given = entry.get(name) if isinstance(entry, dict) else None
                if given is not None and (name == "path" or given == "http"):
                    yield f"{key}[{i}].{name}", given
    elif key == "environment.kwargs":
        for name, given in _texts(key, value, every=True):
            if name.endswith(".unconfined") and given:
                yield name, given
    elif key == "environment.tool_config_path" and value is not None:
        yield key, value
    elif key in ("environment.path", "environment.tools", "environment.format", "rollout.engine"):
        yield from ((name, text) for name, text in _texts(key, value, every=True) if ":" in str(text))
    elif key in ("data.train_files", "data.val_files"):
        yield from ((name, text) for name, text in _texts(key, value, every=True) if ".py:" in str(text))
    elif key == "model.family" and isinstance(value, str) and (":" in value or "." in value):
        yield key, value


def _texts(key: str, value: Any, *, every: bool = False) -> Iterator[tuple[str, Any]]:
    """The leaves of a value with their keys: those with an interpolation, or every one."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(f"{key}.{name}", item, every=every)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _texts(f"{key}[{i}]", item, every=every)
    elif every or (isinstance(value, str) and "${" in value):
        yield key, value
