"""Take the README's picture: `python -m pgwal_pipeline_tests.demo.picture http://127.0.0.1:3000` while `make demo` runs."""

import sys
from pathlib import Path

from pgwal_pipeline_tests.browser import GROUPS, opened

PICTURE = Path(__file__).parents[2] / "docs" / "lineage.png"


def main(address: str) -> None:
    """Write the lineage of all assets, with the groups open, to `docs/lineage.png`."""
    expanded = ",".join(f"global@global:{group}" for group in GROUPS)
    with opened(address, width=2400, height=3200) as page:
        page.goto(f"/asset-groups?expanded={expanded}")
        nodes = page.locator("foreignObject:not(.group)")
        nodes.get_by_text("revenue_by_day").wait_for()
        nodes.get_by_text("Materialized").nth(12).wait_for()
        page.screenshot(path=PICTURE)


if __name__ == "__main__":
    main(sys.argv[1])
