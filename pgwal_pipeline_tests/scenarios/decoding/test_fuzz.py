"""What a real server sent, damaged at random: refused with position and bytes, or read as the plain decoder reads it, in little memory."""

import random
import resource
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from pgwal_pipeline.decode.batch import Decoder
from pgwal_pipeline.decode.pgoutput import RelationMessage, parse_relation
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import DecodeError
from pgwal_pipeline.postgres import catalog, slot
from pgwal_pipeline.postgres.copy import ChunkBounds
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.values.relation import Column, PgType, Relation, TableName
from pgwal_pipeline_tests.decode.damage import damage, damaged
from pgwal_pipeline_tests.decode.reference import MISFIT, BrokenError, GarbageError, Reference, value_of
from pgwal_pipeline_tests.decode.streams import comparable, plain
from pgwal_pipeline_tests.decode.wire import decoded_copy
from pgwal_pipeline_tests.support import Source, copy_messages, fresh_source

QUICK = 10_000
SOAK = 1_000_000
PARTS = 4
_MEMORY = 300 << 10  # kB by which the process may grow: a length that is believed before it is checked would ask for gigabytes
_TYPES = {declared.oid: declared for declared in (PgType(25, -1, "text"), PgType(23, -1, "integer"), PgType(17, -1, "bytea"))}

_TABLES = """
    create type mood as enum ('sad', 'so so', 'happy');
    create table person (id int primary key, name text, born date, score float8);
    create table account (id bigint, region text, balance numeric(12, 2), big numeric(30, 10), primary key (id, region));
    create table event (id uuid primary key, at timestamptz, local timestamp, data bytea, body jsonb);
    create table lists (id int primary key, tags text[], numbers int[], days date[], prices numeric(6, 2)[]);
    create table small (id smallint primary key, ok bool, mood mood, whole numeric, o oid);
    create table document (id int primary key, title text, body text);
    create table bag (a int, b text);
    create table wide (id int primary key, {wide});
    alter table document alter body set storage external;
    alter table bag replica identity full;
    alter table lists replica identity full;
"""
_CHANGES = """
    insert into person values (1, 'zoë', '1990-01-02', 1.5), (2, E'a\\tb\\n', 'infinity', 'NaN'), (3, null, null, '-Infinity')
    insert into account values (1, 'north', -12.5, 1.0000000001), (2, 'südwest', 'NaN', '123456789012345678.5')
    insert into event values (gen_random_uuid(), now(), '2024-02-03 04:05:06.789', '\\x00ff', '{"a": [1, null]}')
    insert into event values (gen_random_uuid(), 'infinity', '0044-03-15 BC', '', 'null')
    insert into lists values (1, '{a,"b c",NULL,"\\\\"}', '{1,-2}', '{2024-01-01}', '{1.5}'), (2, '{}', '{{1,2},{3,4}}', null, '{NaN}')
    insert into small values (1, true, 'so so', 1e100, 4000000000), (2, false, null, 'NaN', 0)
    insert into document values (1, 'one', repeat('x', 5000)), (2, 'two', 'short')
    insert into wide (id, c3, c39) values (1, 'three', 'x'), (2, '', null)
    begin; insert into bag values (1, 'x'), (2, null); update bag set b = 'y' where a = 1; delete from bag where a = 2; commit
    update document set title = 'uno' where id = 1
    update person set id = 10 where id = 1; update person set name = 'b' where id = 2
    update account set region = 'west' where id = 2; update lists set numbers = '{7}' where id = 1
    begin; delete from person where id = 3; savepoint a; update small set ok = null; release a; delete from small where id = 2; commit
    begin; truncate bag, small; insert into bag values (3, 'again'); commit
    begin; select pg_logical_emit_message(true, 'other', 'a message'); update wide set c5 = 'five'; commit
    delete from account; delete from document where id = 2
"""


@dataclass(frozen=True)
class Recorded:
    """Transactions as a server sent them, each with the Relation messages that it needs; definitions by oid; copies of tables."""

    transactions: list[list[bytes]]
    relations: dict[int, Relation]
    messages: dict[int, RelationMessage]
    copies: list[tuple[Relation, list[bytes]]]

    def describe(self, message: RelationMessage) -> Relation:
        """The catalog's definition, or for a damaged Relation message one that fits it, with the types that its oids still name."""
        if self.messages.get(message.oid) == message:
            return self.relations[message.oid]
        types = _TYPES | {column.type.oid: column.type for relation in self.relations.values() for column in relation.columns}
        columns = tuple(
            Column(column.name, _retyped(types.get(column.type_oid, _TYPES[25]), column.typmod), identity=column.identity)
            for column in message.columns
        )
        key = () if message.replica_identity == "f" else tuple(column.name for column in columns if column.identity)
        return Relation(message.oid, TableName(message.schema, message.name), message.replica_identity, columns, key)

    def sample(self, chance: random.Random) -> list[bytes]:
        """One to three transactions that follow each other, or not quite."""
        count = chance.choice([1, 1, 1, 2, 3])
        chosen = sorted(chance.sample(range(len(self.transactions)), count))
        return [message for number in chosen for message in self.transactions[number]]


def _retyped(declared: PgType, typmod: int) -> PgType:
    return PgType(declared.oid, typmod, declared.name) if declared.oid == 1700 else declared


@pytest.fixture(scope="module")
def recorded(postgres: Postgres) -> Iterator[Recorded]:
    with fresh_source(postgres) as source:
        yield _record(source)


def _record(source: Source) -> Recorded:
    source.sql(_TABLES.format(wide=", ".join(f"c{number} text" for number in range(40))))
    source.sql("create publication everything for all tables")
    slot.create(source.dsn, f"fuzz_{source.database}", blocked_timeout=20, warn=lambda _: None)
    messages: list[bytes] = []
    with (
        connect(source.dsn) as conn,
        ReplicationStream.open(source.dsn, f"fuzz_{source.database}", "everything", 0, server_version=conn.info.server_version) as stream,
    ):
        for statement in filter(None, map(str.strip, _CHANGES.splitlines())):
            source.sql(statement)
        target = source.value("select pg_current_wal_flush_lsn() - '0/0'")
        deadline = time.monotonic() + 30
        while stream.server_position < target:
            assert time.monotonic() < deadline
            messages += stream.read(1 << 20, 0.2).payloads
            stream.request_reply()
        relations = {relation.oid: relation for relation in catalog.tables_of(conn, "everything")}
    copies = [(relation, copy_messages(source.dsn, relation, ChunkBounds(None, None))[1]) for relation in relations.values()]
    described = {message[1:5]: message for message in messages if message[:1] == b"R"}
    parsed = {message.oid: message for message in (parse_relation(octets) for octets in described.values())}
    assert parsed.keys() == relations.keys()
    return Recorded(list(_transactions(messages, described)), relations, parsed, copies)


def _transactions(messages: list[bytes], described: dict[bytes, bytes]) -> Iterator[list[bytes]]:
    """Each transaction by itself: the Relation messages that the server sent once stand in each that needs them."""
    transaction: list[bytes] = []
    for message in messages:
        match message[:1]:
            case b"B":
                transaction = [message]
                continue
            case b"I" | b"U" | b"D":
                needed = [message[1:5]]
            case b"T":
                oids = message[6:]
                needed = [oids[at : at + 4] for at in range(0, len(oids), 4)]
            case _:
                needed = []
        transaction += [described[oid] for oid in needed if described[oid] not in transaction]
        if message not in described.values() or message not in transaction:
            transaction.append(message)
        if message[:1] == b"C" and any(other[:1] in (b"I", b"U", b"D", b"T") for other in transaction):
            yield transaction


def _refer(recorded: Recorded, messages: list[bytes]) -> Reference | None:
    """The plain decoder after these messages, None where they are none."""
    reference = Reference(recorded.describe, parse_relation, 0, 1 << 62)
    try:
        for message in messages:
            reference.feed(message)
    except BrokenError:
        return None
    return reference


def _same(ours: list[Any], theirs: list[Any]) -> None:
    assert list(map(repr, ours)) == list(map(repr, theirs))


def _try_stream(recorded: Recorded, messages: list[bytes], first: int) -> bool:
    """Decode damaged messages that are whole before `first`; whether they were refused. Fails where rows are wrong."""
    decoder = Decoder(recorded.describe, 0, 1 << 62)
    if first:
        whole = _refer(recorded, messages[:first])
        assert whole is not None
        _same(comparable([decoder.feed(messages[:first])]), whole.rows)
    reference = _refer(recorded, messages)
    try:
        decoded = decoder.feed(messages[first:])
    except DecodeError as error:
        assert reference is None or reference.garbage, error
        sentence = str(error)
        assert "WAL position" in sentence
        assert len(sentence) < 2000
        assert error.payload in messages[first:]
        return True
    rows = comparable([decoded])  # sees each array's buffers through, too
    assert reference is not None
    if not reference.garbage:
        _same(rows, reference.rows[len(reference.rows) - len(rows) :])
        assert first or len(rows) == len(reference.rows)
    return False


def _fuzz(recorded: Recorded, seed: int, count: int) -> tuple[int, int, int]:
    """Damage `count` messages; how many streams that made, how many of them were refused, and by how many kB the process grew."""
    chance = random.Random(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = streams = refused = 0
    while done < count:
        messages, rounds, first = damaged(recorded.sample(chance), chance)
        done += rounds
        streams += 1
        state = f"seed {seed}, stream {streams}"
        try:
            refused += _try_stream(recorded, messages, first if chance.random() < 0.3 else 0)
        except Exception as error:
            error.add_note(f"{state}: {[message.hex() for message in messages]}")
            raise
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return streams, refused, grown


def test_what_a_server_sends_is_read_as_the_plain_decoder_reads_it(recorded: Recorded) -> None:
    for transaction in recorded.transactions:
        assert not _try_stream(recorded, transaction, 0)
    kinds = {message[:1] for transaction in recorded.transactions for message in transaction}
    assert kinds >= {b"B", b"C", b"R", b"I", b"U", b"D", b"T", b"Y"}
    assert len(recorded.transactions) > 15


def test_damaged_messages_are_refused_or_read_rightly(recorded: Recorded) -> None:
    streams, refused, grown = _fuzz(recorded, 6, QUICK)
    assert 0.3 < refused / streams < 0.98
    assert grown < _MEMORY
    assert pa.total_allocated_bytes() < 64 << 20


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_a_million_damaged_messages(recorded: Recorded, part: int) -> None:
    began = time.monotonic()
    streams, refused, grown = _fuzz(recorded, 1000 + part, SOAK // PARTS)
    print(f"part {part}: {SOAK // PARTS} messages, {streams} streams, {refused} refused, {grown} kB, {time.monotonic() - began:.0f} s")  # noqa: T201
    assert grown < _MEMORY


def test_damaged_lengths_ask_for_no_memory(recorded: Recorded) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for transaction in recorded.transactions:
        for index, message in enumerate(transaction):
            for place in range(1, min(len(message) - 4, 80)):
                for extreme in (0x7FFFFFFF, 0xFFFFFFFF, 0x00FFFFFF):
                    octets = bytearray(message)
                    struct.pack_into(">I", octets, place, extreme)
                    if place % 7 == 0:
                        _try_stream(recorded, [*transaction[:index], bytes(octets), *transaction[index + 1 :]], 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MEMORY


def _plain_copy(octets: bytes, relation: Relation) -> list[list[Any]] | None:
    """The rows of a copy, read plainly; None where it is none."""
    at = 19 + struct.unpack_from(">I", octets, 15)[0] if octets.startswith(b"PGCOPY\n\xff\r\n\0") else 0
    rows = []
    while at < len(octets):
        if octets[at:] == b"\xff\xff":
            break
        if octets[at : at + 2] != struct.pack(">H", len(relation.columns)):
            return None
        at += 2
        cells: list[Any] = []
        for column in relation.columns:
            if at + 4 > len(octets):
                return None
            (size,) = struct.unpack_from(">i", octets, at)
            at += 4
            if size < -1 or at + max(size, 0) > len(octets):
                return None
            value = None if size < 0 else value_of(octets[at : at + size], column.type)
            cells.append(None if value is MISFIT else value)
            at += max(size, 0)
        rows.append(cells)
    return rows


def test_damaged_copies_are_refused_or_read_rightly(recorded: Recorded) -> None:
    chance = random.Random(9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = compared = 0
    copies = [(relation, blocks) for relation, blocks in recorded.copies if sum(map(len, blocks)) > 40]
    for _ in range(4000):
        relation, blocks = chance.choice(copies)
        blocks = [bytes(block) for block in blocks]
        for _ in range(chance.choice([1, 1, 3])):
            index = chance.randrange(len(blocks))
            octets = bytearray(blocks[index] or b"?")
            damage(octets, chance, 0, chance.choice(blocks))
            blocks[index] = bytes(octets)
        try:
            table = decoded_copy(blocks, relation)
        except DecodeError as error:
            refused += 1
            assert str(relation.table) in str(error)
            assert len(str(error)) < 2000
            continue
        table.validate(full=True)
        try:
            wanted = _plain_copy(b"".join(blocks), relation)
        except (GarbageError, BrokenError):
            continue
        assert wanted is not None, blocks
        found = [plain(table.column(index).to_pylist()) for index in range(len(relation.columns))]
        _same([list(row) for row in zip(*found, strict=True)], wanted)
        compared += 1
    assert refused > 200
    assert compared > 50
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MEMORY
