"""The way from the source over TLS alone, up to verify-full with client certificates; what is wrong with a certificate is one sentence."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from psycopg2.extensions import make_dsn
from pydantic import SecretStr

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import SettingError, SourceRefused, SourceUnavailable
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline.doctor import examine
from pgwal_pipeline.pipeline.drop import drop
from pgwal_pipeline.pipeline.status import status
from pgwal_pipeline.postgres import dsn
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.settings import Settings
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.postgres.tls import Authority, Pair, start_tls_server, terminator, tls_installation
from pgwal_pipeline_tests.proxy import Proxy
from pgwal_pipeline_tests.support import Source

_PAST = timedelta(days=-1)


@dataclass(frozen=True)
class Certificates:
    """All that the tests present: `ca` signs what is trusted, `other` what is not."""

    ca: Authority
    other: Authority
    server: Pair
    client: Pair

    def dsn(self, port: int, database: str = "postgres", **changes: object) -> str:
        """A DSN with everything in order but what `changes` say; a pair of files is named as `client`."""
        client = changes.pop("client", self.client)
        files = (
            {"sslcert": client.certificate, "sslkey": client.key} if isinstance(client, Pair) else {"sslcert": "/none", "sslkey": "/none"}
        )
        parts = {"host": "127.0.0.1", "port": port, "user": "postgres", "dbname": database, "sslmode": "verify-full"}
        made = {**parts, "sslrootcert": self.ca.certificate, **files, **changes}
        return make_dsn(**{name: str(value) for name, value in made.items()})


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    ca, other = Authority(folder, "ca"), Authority(folder, "other")
    return Certificates(ca, other, ca.issue("source", hosts=("127.0.0.1", "localhost")), ca.issue("postgres"))


@pytest.fixture(scope="module", params=["server", "stand-in"])
def port(
    request: pytest.FixtureRequest, certificates: Certificates, postgres: Postgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """The port of a way to a server that takes TLS with a client certificate and nothing else."""
    with ExitStack() as stack:
        if request.param == "stand-in":
            assert postgres.port is not None
            yield stack.enter_context(terminator(postgres.port, certificates.server, certificates.ca.certificate)).port
            return
        installation = tls_installation()
        if installation is None:
            pytest.skip("no Postgres at hand was built with TLS; the stand-in speaks it")
        server = start_tls_server(tmp_path_factory.mktemp("tls") / "data", installation, certificates.server, certificates.ca.certificate)
        stack.callback(server.destroy)
        assert server.port is not None
        yield server.port


def test_everything_goes_by_tls(port: int, certificates: Certificates, tmp_path: Path) -> None:
    database = f"tls_{uuid.uuid4().hex[:8]}"
    with plain_session(certificates.dsn(port)) as admin:
        admin.execute(f"CREATE DATABASE {database}".encode())
        try:
            text = certificates.dsn(port, database)
            names = {"slot": database, "publication": database, "lake": str(tmp_path / "lake"), "busy_timeout": 20, "blocked_timeout": 20}
            pipeline = Pipeline(Source(None, database, text), Settings.from_environment({}, source_dsn=text, **names), lambda: None)
            pipeline.source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
            pipeline.source.sql("INSERT INTO t SELECT i, repeat('v', 100) FROM generate_series(1, 3000) i")
            pipeline.drain()
            pipeline.snapshot()
            # Large enough for many records of TLS, and for reads that end in the middle of one.
            pipeline.source.sql("INSERT INTO t SELECT i, repeat('w', 100) FROM generate_series(3001, 23000) i")
            assert pipeline.drain().changes == 20_000
            # And a drain through connections that are reset.
            with Proxy("127.0.0.1", port) as proxy:
                for first in range(30_001, 40_000, 1000):
                    pipeline.source.sql(f"INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series({first}, {first + 999}) i")
                proxy.reset, proxy.cut_after = True, 900_000  # in the midst of the WAL, however fast it comes
                through = pipeline.settings.model_copy(update={"source_dsn": SecretStr(certificates.dsn(proxy.port, database))})
                report = drains.drain(through, progress=Silent())
                assert proxy.cuts >= 1
                assert report.changes == 10_000
                assert report.warnings
            (state,) = pipeline.ledger.tables().values()
            assert state.state == "ready"
            (chunks,) = [pipeline.ledger.chunks(state.table, state.generation or "")]
            assert sum(chunk.rows for chunk in chunks) == 3000
            shown = status(pipeline.settings)
            assert shown["slot"]["lag_bytes"] >= 0
            found = examine(pipeline.environment(PGWAL_SOURCE_DSN=text))
            assert [check.name for check in found if not check.ok] == []
            assert len(drop(pipeline.settings)) == 2
            pipeline.source.close()
        finally:
            admin.execute(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)".encode())


def _refusal(text: str) -> str:
    sentences = set()
    for connect in (dsn.connect, dsn.replication_connection):
        with pytest.raises(SourceRefused) as caught:
            connect(text)
        assert not caught.value.transient
        sentences.add(str(caught.value))
    (sentence,) = sentences
    assert "\n" not in sentence
    assert "No TLS connection to the source postgres@" in sentence
    return sentence


def test_a_client_certificate_that_is_not_good_enough(port: int, certificates: Certificates) -> None:
    assert "without a client certificate" in _refusal(certificates.dsn(port, client=None))
    expired = certificates.ca.issue("postgres", valid=_PAST)
    assert "the client certificate in sslcert has expired" in _refusal(certificates.dsn(port, client=expired))
    foreign = certificates.other.issue("postgres")
    assert "does not trust the client certificate" in _refusal(certificates.dsn(port, client=foreign))
    stranger = Pair(certificates.client.certificate, foreign.key)
    with pytest.raises(SettingError, match="does not fit sslcert"):
        dsn.connect(certificates.dsn(port, client=stranger))
    open_key = certificates.ca.issue("postgres")
    open_key.key.chmod(0o644)
    with pytest.raises(SettingError, match="open to other users"):
        dsn.connect(certificates.dsn(port, client=open_key))


def test_a_server_that_is_not_the_one(port: int, certificates: Certificates) -> None:
    assert "not one of the authority in sslrootcert" in _refusal(certificates.dsn(port, sslrootcert=certificates.other.certificate))
    assert "not one of the authority in sslrootcert" in _refusal(
        certificates.dsn(port, sslmode="verify-ca", sslrootcert=certificates.other.certificate)
    )
    sentence = _refusal(certificates.dsn(port, host="db.example", hostaddr="127.0.0.1"))
    assert 'does not match host name "db.example"' in sentence
    assert dsn.connect(certificates.dsn(port, host="db.example", hostaddr="127.0.0.1", sslmode="verify-ca")).info.dbname == "postgres"
    with pytest.raises(SettingError, match="the file of sslrootcert is not there"):
        dsn.connect(certificates.dsn(port, sslrootcert="/nonexistent/root.crt"))


def test_a_servers_certificate_that_has_expired_or_is_another_hosts(certificates: Certificates, postgres: Postgres) -> None:
    assert postgres.port is not None
    old = certificates.ca.issue("source", hosts=("127.0.0.1",), valid=_PAST)
    elsewhere = certificates.ca.issue("source", hosts=("db.example",))
    with (
        terminator(postgres.port, old, certificates.ca.certificate) as expired,
        terminator(postgres.port, elsewhere, certificates.ca.certificate) as other,
    ):
        assert "or has expired" in _refusal(certificates.dsn(expired.port))
        assert 'certificate for "db.example"' in _refusal(certificates.dsn(other.port))


def test_a_server_without_tls(certificates: Certificates, postgres: Postgres) -> None:
    assert postgres.port is not None
    assert "it has no TLS (SSL)" in _refusal(certificates.dsn(postgres.port))


def test_a_server_that_takes_no_less(port: int, certificates: Certificates, request: pytest.FixtureRequest) -> None:
    if "stand-in" in request.node.name:  # it hangs up
        with pytest.raises(SourceUnavailable):
            dsn.connect(certificates.dsn(port, sslmode="disable"))
        return
    assert "connect with TLS (sslmode=verify-full)" in _refusal(certificates.dsn(port, sslmode="disable"))
    with pytest.raises(SourceRefused, match="the client certificate is not for postgres"):
        dsn.connect(certificates.dsn(port, client=certificates.ca.issue("alice")))
