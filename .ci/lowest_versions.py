"""Print the lowest version of each dependency that pyproject.toml allows, as constraints for pip."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
extras = project["optional-dependencies"]
for requirement in [*project["dependencies"], *extras["hub"], *extras["web"], *extras["zstd"]]:
    if not requirement.startswith("edgeasync["):
        print(requirement.replace(">=", "=="))
