"""What windows told of tables besides their rows: put together, and kept in the ledger over the versions of its form."""

from pgwal_pipeline.lake.stream_facts import Refusal, StreamFacts


def test_what_windows_told_together_is_written_down() -> None:
    some = frozenset
    first, second = Refusal(3, "write", "It could not be written.", 10), Refusal(3, "decode", "It could not be decoded.", 20)
    parts = [
        StreamFacts({}, {1: some({7})}, some({1}), {5: some({51})}, some({9}), {"public.t": first}),
        StreamFacts({}, {1: some({8}), 2: some({9})}, some({2}), {5: some({52}), 6: some({61})}, some(), {"public.t": second}),
    ]
    merged = StreamFacts.merged(StreamFacts.from_json(part.to_json()) for part in parts)
    assert merged == StreamFacts(
        {}, {1: some({7, 8}), 2: some({9})}, some({1, 2}), {5: some({51, 52}), 6: some({61})}, some({9}), {"public.t": first}
    )


def test_what_the_first_version_wrote_down_is_read() -> None:
    text = '{"relations": [], "truncated": {"1": [7]}, "refused": {"public.t": [3, "It could not be written."]}}'
    refusal = Refusal(3, "write", "It could not be written.", 0)
    assert StreamFacts.from_json(text) == StreamFacts(truncated={1: frozenset({7})}, refused={"public.t": refusal})
