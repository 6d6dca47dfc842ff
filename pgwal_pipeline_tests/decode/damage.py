"""Streams and copies damaged at random, as no server sends them: flipped, lost and inserted bytes, wrong lengths and counts, odd orders."""

import random
import re

_LENGTHS = re.compile(rb"t(?=\0\0)|(?=\xff\xff\xff\xff)|(?=\0\0\0)")  # where a text's length is likely to stand: after the match
_COUNTS = re.compile(rb"[NKO](?=\0)")
_EXTREMES = [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\x80\0\0\0", b"\x00\x7f\xff\xff", b"\0\0\0\1", b"\xff\xff\xff\xfe"]


def damaged(messages: list[bytes], chance: random.Random, most: int = 5) -> tuple[list[bytes], int, int]:
    """The messages with up to `most` of them damaged; how many were, and the index before which all are as they were."""
    messages = list(messages)
    rounds = min(most, chance.choice([1, 1, 1, 2, 5]))
    first = len(messages)
    for _ in range(rounds):
        if not messages:
            break
        index = chance.randrange(len(messages))
        octets = bytearray(messages[index] or b"?")
        damage(octets, chance, 0, messages[chance.randrange(len(messages))])
        match chance.randrange(24):
            case 0:
                del messages[index]
            case 1:
                messages.insert(index, bytes(octets))
            case 2:
                messages.insert(index, messages[index])
            case 3:
                other = chance.randrange(len(messages))
                messages[index], messages[other] = messages[other], messages[index]
                index = min(index, other)
            case _:
                messages[index] = bytes(octets)
        first = min(first, index)
    return messages, rounds, min(first, len(messages))


def damage(octets: bytearray, chance: random.Random, least: int, other: bytes) -> None:
    """Damage one message, or block of a copy, in place, at or behind `least`; pieces may come from `other`."""
    place = chance.randrange(least, len(octets))
    match chance.randrange(12):
        case 0:
            octets[place] ^= 1 << chance.randrange(8)
        case 1:
            octets[place] = chance.randrange(256)
        case 2:
            octets[place] = chance.choice(b'tnuKNOIUD{}",\\0129-\0\xff')
        case 3:
            del octets[place:]
        case 4:
            del octets[place]
        case 5:
            octets.insert(place, chance.randrange(256))
        case 6:
            octets[place:] = other[chance.randrange(len(other)) :] if other else b""
        case 7:
            octets[place : place + 4] = chance.choice(_EXTREMES)
        case 8:
            octets[place:place] = chance.randbytes(chance.randrange(1, 40))
        case 9:
            del octets[place : place + chance.randrange(1, 40)]
        case 10:
            _change_number(octets, chance, _LENGTHS, 4, least)
        case _:
            _change_number(octets, chance, _COUNTS, 2, least)


def _change_number(octets: bytearray, chance: random.Random, where: re.Pattern[bytes], size: int, least: int) -> None:
    """Change a length or a count where one seems to stand: by little, by a lot, or to an extreme."""
    found = [match.end() for match in where.finditer(octets, least) if match.end() + size <= len(octets)]
    if not found:
        return
    place = chance.choice(found)
    before = int.from_bytes(octets[place : place + size])
    after = chance.choice([before + 1, before - 1, before * 2, before + chance.randrange(1 << 8 * size), chance.choice([0, -1, 1 << 31])])
    octets[place : place + size] = (after % (1 << 8 * size)).to_bytes(size)
