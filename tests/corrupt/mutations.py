"""Saved files made wrong, each in one of many ways, by a number."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

Document = dict[str, Any]
HUGE = (2**31, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, -1, 10**18)


def mutated_text(text: str, rng: random.Random) -> tuple[str, bytes]:
    """The name of what was done to a JSON text, and the bytes that came of it."""
    name, change = rng.choice(list(OF_BYTES.items()) + 3 * list(OF_NODES.items()))
    if name in OF_BYTES:
        return name, mutated_bytes(text.encode(), rng, name)
    document = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 3)) if change is not _other_top else 1):
        change(document, rng)
    return name, json.dumps(document).encode("utf-8", "surrogatepass")


def mutated_bytes(data: bytes, rng: random.Random, name: str | None = None) -> bytes:
    """Any bytes made wrong, by one of `OF_BYTES`."""
    return OF_BYTES[name or rng.choice(list(OF_BYTES))](data, rng)


def _truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut_out(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.randrange(1, 40) :]


def _repeated(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return data[: start + rng.randrange(1, 200)] + data[start:]


def _other_digit(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    digits = [index for index, byte in enumerate(changed) if chr(byte).isdigit()]
    for index in rng.sample(digits, min(len(digits), rng.choice((1, 1, 3)))):
        changed[index] = ord(rng.choice("0123456789"))
    return bytes(changed)


OF_BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "truncated": _truncated,
    "bits flipped": _flipped,
    "cut out": _cut_out,
    "repeated": _repeated,
    "other digits": _other_digit,
}


def _references(document: Document) -> list[tuple[Any, Any]]:
    """Every place that may hold the number of a node: its container and its key."""
    places: list[tuple[Any, Any]] = []
    for node in document["nodes"]:
        data = node.get("data")
        if isinstance(data, dict):
            places += [(data, key) for key, value in data.items() if type(value) is int]
        elif isinstance(data, list):
            places += [(data, index) for index in range(len(data)) if type(data[index]) is int]
    return places


def _put(document: Document, rng: random.Random, values: Callable[[int], Any]) -> None:
    container, key = rng.choice(_references(document))
    container[key] = values(len(document["nodes"]))


def _out_of_range(document: Document, rng: random.Random) -> None:
    _put(document, rng, lambda count: rng.choice((count, count + 1, -1, -count, 2**31, 2**63 - 1, -(2**40))))


def _another_node(document: Document, rng: random.Random) -> None:
    _put(document, rng, lambda count: rng.randrange(count))


def _node_of_same_type(document: Document, rng: random.Random) -> None:
    nodes = document["nodes"]
    places = [place for place in _references(document) if 0 <= place[0][place[1]] < len(nodes)]
    container, key = rng.choice(places)
    wanted = nodes[container[key]].get("type")
    container[key] = rng.choice([index for index, node in enumerate(nodes) if node.get("type") == wanted])


def _no_node(document: Document, rng: random.Random) -> None:
    _put(document, rng, lambda count: next(i for i, n in enumerate(document["nodes"]) if n["type"] == "None"))


def _wrong_kind(document: Document, rng: random.Random) -> None:
    _put(document, rng, lambda count: rng.choice(("3", None, 1.5, [], {}, True, [1, 2], "\ud800", float("nan"))))


def _cycle(document: Document, rng: random.Random) -> None:
    nodes = document["nodes"]
    index = rng.choice([i for i, n in enumerate(nodes) if n.get("data") and isinstance(n["data"], (dict, list))])
    data = nodes[index]["data"]
    key = rng.choice(list(data) if isinstance(data, dict) else range(len(data)))
    data[key] = rng.choice((index, document["root_index"], len(nodes) - 1))


def _deep(document: Document, rng: random.Random) -> None:
    nodes = document["nodes"]
    container, key = rng.choice(_references(document))
    below = container[key] if 0 <= container[key] < len(nodes) else 0
    null = next(i for i, n in enumerate(nodes) if n["type"] == "None")
    for _ in range(rng.choice((600, 5_000, 20_000))):
        made = rng.choice(("ffi.Array", "tirx.Not"))
        data = [below] if made == "ffi.Array" else {"span": null, "dtype": "bool", "a": below}
        nodes.append({"type": made, "data": data})
        below = len(nodes) - 1
    container[key] = below


def _wide(document: Document, rng: random.Random) -> None:
    """Every node uses the one before twice: few nodes, and more in all than can be walked."""
    nodes = document["nodes"]
    below = rng.randrange(len(nodes))
    for _ in range(rng.choice((20, 60, 200))):
        nodes.append({"type": "ffi.Array", "data": [below, below]})
        below = len(nodes) - 1
    container, key = rng.choice(_references(document))
    container[key] = below


def _huge(document: Document, rng: random.Random) -> None:
    numbers = [n["data"] for n in document["nodes"] if n["type"] == "ir.IntImm" and isinstance(n.get("data"), dict)]
    rng.choice(numbers)["value"] = rng.choice(HUGE)


def _huge_field(document: Document, rng: random.Random) -> None:
    _put(document, rng, lambda count: rng.choice(HUGE))


def _not_a_number(document: Document, rng: random.Random) -> None:
    _put(document, rng, lambda count: rng.choice((float("nan"), float("inf"))))


def _swapped(document: Document, rng: random.Random) -> None:
    nodes = document["nodes"]
    one, other = rng.randrange(len(nodes)), rng.randrange(len(nodes))
    nodes[one], nodes[other] = nodes[other], nodes[one]


def _other_type(document: Document, rng: random.Random) -> None:
    types = sorted({node["type"] for node in document["nodes"]})
    others = ["ffi.Module", "ffi.Function", "no.such.type", "ir.Op", "ffi.Tensor", "DataType", "", "ir.PrimExpr"]
    rng.choice(document["nodes"])["type"] = rng.choice(types + others)


def _field_removed(document: Document, rng: random.Random) -> None:
    node = rng.choice(document["nodes"])
    if isinstance(node.get("data"), dict) and node["data"]:
        del node["data"][rng.choice(sorted(node["data"]))]
    else:
        node.pop("data", None)


def _other_data(document: Document, rng: random.Random) -> None:
    rng.choice(document["nodes"])["data"] = rng.choice(("", "x", [], {}, None, 3, [0], {"span": 0}, "AAAA" * 30))


def _other_text(document: Document, rng: random.Random) -> None:
    texts = [n for n in document["nodes"] if n["type"] in ("ffi.String", "ir.Op", "ffi.Tensor", "ir.SourceName")]
    if texts:
        rng.choice(texts)["data"] = rng.choice(("", "relax.add", "\x00", "a" * 5_000, "\ud800", "tirx.exp", "é\n\"'"))


def _other_dtype(document: Document, rng: random.Random) -> None:
    typed = [n["data"] for n in document["nodes"] if isinstance(n.get("data"), dict) and "dtype" in n["data"]]
    rng.choice(typed)["dtype"] = rng.choice(
        (
            "float32x0",
            "int0",
            "float64",
            "int8",
            "bool",
            "handle",
            "custom[x]64",
            "float32x65535",
            "",
            "float8_e4m3fn",
            "x",
        )
    )


def _other_shape_of_tensor(document: Document, rng: random.Random) -> None:
    for node in document["nodes"]:
        if node["type"] == "ffi.Tensor" and isinstance(node.get("data"), str):
            place = rng.randrange(min(80, len(node["data"])))
            node["data"] = node["data"][:place] + rng.choice("ABCDw/+9") + node["data"][place + 1 :]


def _other_root(document: Document, rng: random.Random) -> None:
    document["root_index"] = rng.choice((-1, len(document["nodes"]), rng.randrange(len(document["nodes"])), None, "0"))


def _other_top(document: Document, rng: random.Random) -> None:
    change = rng.choice(("nodes", "root_index", "metadata"))
    document[change] = rng.choice((None, [], {}, "x", 0, [[]], copy.copy(document["nodes"])[:3]))


OF_NODES: dict[str, Callable[[Document, random.Random], None]] = {
    "an index out of range": _out_of_range,
    "another node": _another_node,
    "another node of the same type": _node_of_same_type,
    "no node": _no_node,
    "a value of the wrong kind": _wrong_kind,
    "a cycle": _cycle,
    "too deep": _deep,
    "too wide": _wide,
    "a huge size": _huge,
    "a huge field": _huge_field,
    "NaN": _not_a_number,
    "nodes swapped": _swapped,
    "another type": _other_type,
    "a field removed": _field_removed,
    "other data": _other_data,
    "another text": _other_text,
    "another dtype": _other_dtype,
    "another tensor": _other_shape_of_tensor,
    "another root": _other_root,
    "another document": _other_top,
}
