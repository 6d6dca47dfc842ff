"""What `dg scaffold defs pgwal_pipeline.PostgresCdcComponent NAME` writes: a source that loads as it is, with every setting to change."""

import re
import textwrap
from typing import Any

import dagster as dg
import yaml

from pgwal_pipeline.components.attributes import MEANINGS, shown_default
from pgwal_pipeline.settings import Settings

_GIVEN = ("source_dsn", "lake", "slot", "publication")

_YAML = """type: {type}

attributes:
  # The name is part of the names of this source's jobs and sensors, and the prefix of its assets' keys.
  name: {name}
  source_dsn: "{{{{ env.{variable} }}}}"
  lake: "{{{{ context.project_root }}}}/lake/{name}"
  slot: {name}
  publication: {name}

  # Any other setting. Left out, it is the variable PGWAL_<SETTING> of the environment, else what is shown.
{settings}

  # How the assets of its tables are called and shown.
  # translation:
  #   group_name: "{{{{ layer }}}}_{name}"
  #   tags: {{ source: {name} }}
  #   owners: ["team:data"]

requirements:
  env:
    - {variable}
"""

_PYTHON = """import dagster as dg
from pgwal_pipeline import PostgresCdcComponent


@dg.component_instance
def load(context: dg.ComponentLoadContext) -> PostgresCdcComponent:
    return PostgresCdcComponent(
        name="{name}",
        source_dsn=dg.EnvVar("{variable}"),
        lake=str(context.project_root / "lake" / "{name}"),
        slot="{name}",
        publication="{name}",
    )
"""


class CdcScaffolder(dg.Scaffolder):
    """Writes the files of a new source."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        """Write `defs.yaml` with every setting, or `component.py`."""
        folder = request.target_path.parent if request.append else request.target_path
        name = re.sub(r"[^a-z0-9_]+", "_", folder.name.lower()).strip("_")[:50] or "source"
        values = {"type": request.type_name, "name": name, "variable": f"{name.upper()}_DSN"}
        if request.scaffold_format == "python":
            (folder / "component.py").write_text(_PYTHON.format(**values), encoding="utf-8")
            return
        text = _YAML.format(**values, settings="\n".join(_lines()))
        if request.append:
            with request.target_path.open("a", encoding="utf-8") as file:
                file.write(f"---\n{text}")
        else:
            (folder / "defs.yaml").write_text(text, encoding="utf-8")


def _lines() -> list[str]:
    """Return the settings with their meanings, as comments."""
    lines = []
    for name in Settings.model_fields:
        if name not in _GIVEN:
            default = shown_default(name)
            lines += textwrap.wrap(f"{MEANINGS.get(name, name)}.", 96, initial_indent="  #   # ", subsequent_indent="  #   # ")
            lines.append(f"  # {name}:" if default is None else f"  # {yaml.safe_dump({name: default}).strip()}")
    return lines
