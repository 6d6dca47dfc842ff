"""Find the sources that a code location has, and the one that a command works on.

The code location is that of the Dagster project around the working directory, as `dg` and `dagster` find it. Without one it is this
package's own, whose only source has the settings of the environment: then nothing is loaded until a job is to be run.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pgwal_pipeline.components.environment import SourceSettings
from pgwal_pipeline.messages.errors import PgwalError, SettingError
from pgwal_pipeline.settings import Settings

if TYPE_CHECKING:
    import dagster as dg

    from pgwal_pipeline.asset_specs import AssetNames
    from pgwal_pipeline.components.cdc import PostgresCdcComponent

_PACKAGE = Path(__file__).parent
_COMPONENTS = ("PostgresCdcComponent", "build_cdc_definitions")
# What a component may be given that the commands need not know of.
_OF_ASSETS = frozenset({"key_prefix", "owners", "translation", "translator"})


@dataclass(frozen=True)
class Source:
    """A source of the code location. `name` is empty for the one without a name.

    `given` gives its settings, `load` the definitions of its jobs, `names` the names of its tables' assets.
    """

    name: str
    given: Callable[[], SourceSettings] = field(repr=False)
    load: "Callable[[], dg.Definitions]" = field(repr=False)
    names: "Callable[[], AssetNames]" = field(repr=False)

    def environment(self) -> dict[str, str]:
        """Return the variables that a process for this source alone would have. Raises SettingError, also for an unset DSN of its own."""
        return self.given().environment()

    def settings(self) -> Settings:
        """Return its settings. Raises SettingError."""
        return self.given().whole()

    def named(self, what: str) -> str:
        """Return `what`, a job's or an op's name, with the source's name before it."""
        return f"{self.name}_{what}" if self.name else what


def choose(name: str | None = None) -> Source:
    """Return the source called `name`, else the only one.

    Raises SettingError if there is none of that name, or if there are several and none is named; PgwalError if the code location does not
    load.
    """
    place = project_file()
    if name is None and place is None and _has_one_source_of_the_environment():
        return own()
    found = [Source(component.name, component.given, component.jobs, component.names) for component in _components(place)]
    if not found and name is None:
        return own()
    if name is None and len(found) == 1:
        return found[0]
    for source in found if name is not None else ():
        if source.name == name:
            return source
    there = _listed([source.name for source in found])
    where = f"The code location of {place or _PACKAGE.parent} has {there}"
    if name is None:
        raise SettingError(f"{where}; choose one with `pgwal --source NAME`.")
    raise SettingError(f"{where}, and no source {name}; `--source` takes one of these names.")


def own() -> Source:
    """Return the source of this package: the one without a name, with the settings of the environment."""
    return Source("", SourceSettings, lambda: _own_component().jobs(), lambda: _own_component().names())


def _own_component() -> "PostgresCdcComponent":
    """Return the component in `defs/` that has no name."""
    import dagster as dg

    from pgwal_pipeline.components.cdc import PostgresCdcComponent

    tree = dg.ComponentTree.for_project(_PACKAGE)
    return next(component for component in tree.get_all_components(of_type=PostgresCdcComponent) if not component.name)


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "no source"
    shown = [name or "'' (without a name)" for name in sorted(names)]
    return f"the source{'s' if len(shown) > 1 else ''} {', '.join(shown)}"


def project_file() -> Path | None:
    """Return the file that says what the code location of the working directory is, None for this package's own.

    As `dg` does, folders above are searched too; a `workspace.yaml` counts in the working directory itself, as for `dagster`.
    """
    try:
        folder = Path.cwd()
    except OSError:  # it is gone
        return None
    for place in (folder, *folder.parents):
        for path in (place / "dg.toml", place / "pyproject.toml"):
            project = project_of(path)
            if project is not None:
                return None if project.get("root_module") == _PACKAGE.name else path
    workspace = folder / "workspace.yaml"
    return workspace if workspace.is_file() else None


def project_of(path: Path) -> Mapping[str, Any] | None:
    """Return what a file says of a Dagster project, None if it says nothing. Raises SettingError for a file that cannot be read."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:  # none, or none of this user's
        return None
    except ValueError as error:
        raise SettingError(f"{path} cannot be read ({error}); it says where the sources of this project are.") from None
    tools = content.get("tool", {}) if path.name == "pyproject.toml" else {"dg": content}
    return tools.get("dg", {}).get("project") or tools.get("dagster")


def _has_one_source_of_the_environment() -> bool:
    """Return whether this package's definitions are as they came: one source, to which nothing is given. Loading them takes a second."""
    found = [path for path in (_PACKAGE / "defs").rglob("*.*") if path.suffix in (".py", ".yaml") and _makes_sources(path)]
    if len(found) != 1 or found[0].suffix != ".yaml":
        return False
    (content, *more) = yaml.safe_load_all(found[0].read_text(encoding="utf-8"))
    return not more and not (content.get("attributes") or {}).keys() - _OF_ASSETS


def _makes_sources(path: Path) -> bool:
    text = path.read_text(encoding="utf-8", errors="replace")
    return any(name in text for name in _COMPONENTS)


@cache
def _components(place: Path | None) -> "tuple[PostgresCdcComponent, ...]":
    """Load the code location that the file at `place` names, and return its sources. Its modules are loaded once."""
    from pgwal_pipeline.components.cdc import collected
    from pgwal_pipeline.components.dagster_internals import load_code_location

    with collected() as found:
        try:
            load_code_location(place or _PACKAGE.parent / "pyproject.toml")
        except PgwalError:
            raise
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, PgwalError):
                    raise cause from error
                cause = cause.__cause__ or cause.__context__
            said = str(error).strip().splitlines()
            raise PgwalError(
                f"The code location of {place} cannot be loaded ({type(error).__name__}: {said[0] if said else 'no reason'}); "
                "`dg check defs` shows where."
            ) from error
    return tuple(found)
