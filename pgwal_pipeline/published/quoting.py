"""Write names and texts in DuckDB's SQL."""


def name(found: str) -> str:
    """Return a name quoted."""
    return '"' + found.replace('"', '""') + '"'


def text(found: str) -> str:
    """Return a text as a literal."""
    return "'" + found.replace("'", "''") + "'"
