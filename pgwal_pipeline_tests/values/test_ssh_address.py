"""Addresses of hosts that are reached by SSH: what they say, and that nothing else passes."""

import pytest

from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.ssh_address import SshAddress


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ssh://me@bastion", SshAddress("bastion", "me")),
        ("ssh://me@bastion.example.com:2222", SshAddress("bastion.example.com", "me", 2222)),
        ("ssh://bastion", SshAddress("bastion")),
        ("ssh://ec2-user@10.0.0.1:22", SshAddress("10.0.0.1", "ec2-user", 22)),
        ("ssh://me@[fe80::1]:22", SshAddress("fe80::1", "me", 22)),
    ],
)
def test_an_address_is_what_its_text_says(text: str, address: SshAddress) -> None:
    assert SshAddress.parse(text) == address
    assert str(address) == text
    assert Settings.from_environment({"PGWAL_SSH_TUNNEL": text}).ssh_tunnel == text


@pytest.mark.parametrize(
    "text",
    [
        "bastion",
        "ssh://",
        "ssh://me:s3cretZq7@bastion",
        "ssh://-oProxyCommand=touch@bastion",
        "ssh://-oProxyCommand=touch",
        "ssh://me@-bastion",
        "ssh://me@$(touch x)",
        "ssh://me@bastion:0",
        "ssh://me@bastion:99999",
        "ssh://me@bastion/path",
        "ssh://me@bastion\n",
        "http://bastion",
    ],
)
def test_nothing_else_is_one(text: str) -> None:
    with pytest.raises(ValueError, match="no address"):
        SshAddress.parse(text)
    with pytest.raises(
        SettingError, match=r"PGWAL_SSH_TUNNEL.* takes ssh://user@host or ssh://user@host:port, without a password\."
    ) as told:
        Settings.from_environment({"PGWAL_SSH_TUNNEL": text})
    assert "Zq7" not in str(told.value)
