"""What Dagster's UI says of the demo's marts: asked as the UI asks, and seen in a browser where there is one."""

import json
import urllib.request
from typing import Any

from pgwal_pipeline.demo import marts
from pgwal_pipeline_tests.browser import find_browser, group_marks, opened, text_of
from pgwal_pipeline_tests.support import wait_for

SECONDS = 600.0  # a machine that does other things too
HEALTHY = {"green", "blue"}  # materialized, or being made
_MARTS = """{ assetNodes(group: {groupName: "marts", repositoryName: "__repository__", repositoryLocationName: "pgwal_pipeline"}) {
    assetKey { path } assetMaterializations(limit: 1) { runOrError { ... on Run { status tags { key value } } } }
    assetChecksOrError { ... on AssetChecks { checks { name executionForLatestMaterialization { status } } } }
} }"""


def await_marts(address: str) -> None:
    """Wait until an automation condition has made each mart, and all its checks have passed."""
    wanted = {tuple(asset.key.path) for asset in marts.MARTS}

    def made() -> bool:
        found = {tuple(node["assetKey"]["path"]): node for node in _ask(address, _MARTS)["assetNodes"]}
        assert set(found) == wanted
        events = [event for node in found.values() for event in node["assetMaterializations"]]
        tags = [{tag["key"]: tag["value"] for tag in event["runOrError"]["tags"]} for event in events]
        assert all(tag.get("dagster/from_automation_condition") == "true" for tag in tags)
        checks = [check for node in found.values() for check in node["assetChecksOrError"]["checks"]]
        said = [(check["executionForLatestMaterialization"] or {}).get("status") for check in checks]
        assert "FAILED" not in said
        return len(events) == len(wanted) and said == ["SUCCEEDED"] * len(said)

    wait_for(made, seconds=SECONDS, pause=1, what="the marts")


def look_at_marts(address: str) -> None:
    """See that no mart is marked as wrong, and what Postgres's comments say. Nothing without a browser."""
    if find_browser() is None:
        return
    with opened(address) as page:

        def all_made() -> bool:
            found = group_marks(page)["marts"]
            assert set(found) <= HEALTHY, found
            return found == {"green": len(marts.MARTS)}

        wait_for(all_made, seconds=SECONDS, pause=0.5, what="a moment without a run")
        said = text_of(page, "/assets/current/shop/payments", "what was paid back is negative")
        assert "Its day (UTC) is the day of the revenue." in said
        assert "revenue_by_day" in said


def _ask(address: str, query: str) -> dict[str, Any]:
    request = urllib.request.Request(f"{address}/graphql", json.dumps({"query": query}).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["data"]
