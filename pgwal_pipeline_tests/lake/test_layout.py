from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgwal_pipeline.lake.layout import Lake, path_segment, storage_options
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.relation import TableName

_NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(_NAMES, _NAMES)
def test_names_never_share_a_folder_even_where_case_is_ignored(one: str, other: str) -> None:
    first, second = path_segment(one), path_segment(other)
    assert (first.casefold() == second.casefold()) == (one == other)
    assert first == first.lower()
    assert set(first) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-")
    assert not first.startswith("_")


def test_plain_names_stand_as_they_are_and_others_as_bytes() -> None:
    assert path_segment("order_lines2") == "order_lines2"
    assert path_segment("Order-Lines") == "-4frder-2d-4cines"
    assert path_segment("_delta_log") == "-5fdelta_log"
    assert path_segment("é") == "-c3-a9"
    assert path_segment("..") == "-2e-2e"


def test_paths_of_a_local_lake_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = TableName("public", "orders")
    assert Lake("lake").raw(table) == f"{tmp_path}/lake/raw/public/orders"
    assert Lake("lake").snapshot(table) == f"{tmp_path}/lake/snapshot/public/orders"
    assert Lake("s3://bucket/some/lake/").current(table) == "s3://bucket/some/lake/current/public/orders"
    assert Lake("s3://bucket").ledger("windows") == "s3://bucket/_pgwal/windows"


def test_what_is_written_down_holds_after_the_lake_has_moved() -> None:
    table = TableName("public", "orders")
    kept = Lake("/old/lake").relative(Lake("/old/lake").raw(table))
    assert Lake("s3://new/place").absolute(kept) == Lake("s3://new/place").raw(table)
    assert Lake("/old/lake").relative("/old/lakes/x") == "/old/lakes/x"
    assert Lake("/old/lake").absolute("/elsewhere/x") == "/elsewhere/x"


@pytest.mark.parametrize("path", ["/data/a[1]", "/data/a|b", "/data/50%41", "/data/a\\b", "/data/a\nb", "s3://bucket/a^b"])
def test_a_path_that_delta_cannot_use_is_refused(path: str) -> None:
    with pytest.raises(LakeError, match="PGWAL_LAKE"):
        Lake(path)


def test_a_local_lake_needs_no_options_whatever_the_environment_has() -> None:
    assert storage_options("/data/lake", {"AWS_ACCESS_KEY_ID": "key"}) == {}


def test_an_endpoint_of_ones_own_is_used_with_the_bucket_in_the_path() -> None:
    options = storage_options(
        "s3://bucket/lake",
        {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_SESSION_TOKEN": "token",
            "AWS_ENDPOINT_URL": "http://127.0.0.1:9000",
            "AWS_REGION": "",
            "HOME": "/root",
        },
    )
    assert options == {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_SESSION_TOKEN": "token",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9000",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
    }


def test_settings_of_the_user_are_not_overruled() -> None:
    options = storage_options(
        "s3://bucket", {"AWS_ENDPOINT_URL": "http://store", "AWS_ALLOW_HTTP": "false", "AWS_DEFAULT_REGION": "eu-central-1"}
    )
    assert options["AWS_ALLOW_HTTP"] == "false"
    assert options["AWS_REGION"] == "eu-central-1"
    assert "AWS_REGION" not in storage_options("s3://bucket", {"AWS_ACCESS_KEY_ID": "key"})
