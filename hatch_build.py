"""What the wheel holds beside the package: the files that `phalanx` finds by name (phalanx.config.shipped)."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHIPPED = ("train.sh", "launch", "tasks", "configs", "assets")


class ShippedFiles(BuildHookInterface):
    """Copies them to phalanx/shipped; an editable install has them in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"] |= {name: f"phalanx/shipped/{name}" for name in SHIPPED}
