"""Whether the wheel holds the executor plugin, or depends on it.

Until the plugin is on a package index of its own, the wheel bundles it. `IMPLICIT_LLM_PLUGIN=separate` makes the wheel
that depends on it, so that only one distribution owns its files.
"""

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "snakemake_executor_plugin_submitit"
SOURCE = f"workflow/plugins/submitit/src/{NAME}"
REQUIREMENT = "snakemake-executor-plugin-submitit>=0.2,<0.3"


class PluginHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("IMPLICIT_LLM_PLUGIN")
        if wanted not in (None, "separate"):
            raise ValueError(f"IMPLICIT_LLM_PLUGIN: {wanted!r} is not allowed; write separate, or unset it")
        if wanted == "separate":
            build_data["dependencies"].append(REQUIREMENT)
        elif version != "editable":  # then the source folder itself is on the path
            build_data["force_include"][SOURCE] = NAME
