"""A cluster by its preset's name and size, such as `h800x2048`, or from a YAML file.

    node: h800              # a preset, or a mapping as the presets' files have it
    nodes: 256              # or gpus: 2048
    oversubscription: 1.5   # 1 where it is left out
    between: {bandwidth: 200 Gb/s, latency: 5 us}    # what differs from the node's

A mixed cluster lists its groups of equal nodes, each in the same way:

    groups:
      - {node: h100, nodes: 16}
      - {node: a100-80g, nodes: 8}

A node has a `gpu` (name, memory, peak by input type, bandwidth of its memory), `gpus_per_node`, and the links
`inside` and `between` nodes (bandwidth of one GPU in one direction, latency). An amount is a number in bytes,
bytes/s, flop/s and seconds, or a number with its unit.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, cast

from stageloom.errors import InputError
from stageloom.files import read_mapping
from stageloom.plan import presets
from stageloom.plan.cluster import DTYPES, Cluster, Gpu, Link, NodeGroup, cluster
from stageloom.plan.fields import Fields, at, fields
from stageloom.plan.quantities import MEMORY, RATE, SPEED, TIME

MOST_GPUS = 10_000_000

MOST_FP8 = 2.1
"""Times the peak of bf16 that fp8 has at most. MFU is told of bf16's, and would be above 100 % with sparsity's."""


def load_cluster(text: str | Path) -> Cluster:
    """The cluster named `text`, or of the YAML or JSON file there.

    Raises InputError naming the file, the key, its value and what would be right.
    """
    name = str(text)
    known = presets.names("nodes")
    sized = re.fullmatch(r"(.+?)x([0-9]+)", name.lower())
    path = Path(name)
    if sized and sized[1] in known:
        return _preset(name, sized[1], sized[2])
    if not name:
        raise presets.nothing("node", name, known, "a cluster's YAML file; a name takes a number of GPUs")
    if os.path.isdir(path):
        raise InputError(f"{name}: is a folder; a cluster's YAML file is needed, or a name such as h800x2048")
    if not os.path.exists(path) and path.suffix not in (".json", ".yaml", ".yml"):
        if name.lower() in known:
            raise InputError(f"{name!r} says no number of GPUs; write {name.lower()}x64 for 64 of them")
        given = sized[1] if sized else name
        raise presets.nothing(
            "node", given, known, "a cluster's YAML file; a name takes a number of GPUs, as in h800x2048"
        )
    return cluster_from(read_mapping(path, "node: h800"), str(path), path.stem)


def cluster_from(data: dict[str, Any], place: str, name: str) -> Cluster:
    """The cluster a mapping describes. Raises InputError with `place`, key and value."""
    given = fields(data, place)
    name, source = given.text("name", name), given.text("source", place)
    oversubscription = given.number("oversubscription", 1.0, least=1.0, most=100.0)
    if not given.has("groups"):
        groups = (_group(given),)
        given.done()
        return Cluster(name, groups, oversubscription, source)
    listed = given.list("groups")
    given.done()
    found: list[NodeGroup] = []
    for index, entry in enumerate(listed):
        group = fields(entry, f"{place}: groups.{index}")
        found.append(_group(group))
        group.done()
    return Cluster(name, tuple(found), oversubscription, source)


def _preset(name: str, node: str, digits: str) -> Cluster:
    gpus = int(digits) if len(digits) < 100 else MOST_GPUS + 1  # thousands of digits are more than int() takes
    if not 1 <= gpus <= MOST_GPUS:
        raise InputError(f"{name}: {digits} GPUs; a number from 1 to {MOST_GPUS:,} is needed")
    data = presets.read("nodes", node)
    gpu, per_node, inside, between = _node(fields(data, node))
    with at(name):
        found = cluster(name, gpus, per_node, gpu, inside, between)
    return Cluster(name, found.groups, found.oversubscription, source=str(data["source"]))


def _group(given: Fields) -> NodeGroup:
    node: dict[str, Any] = {}
    if isinstance(given.data.get("node"), str):
        known = presets.names("nodes")
        node = presets.read("nodes", given.choice("node", known))
    elif given.has("node"):
        inner = given.inner("node")
        _node(inner)
        inner.done()
        node = dict(inner.data)
    elif not given.has("gpu"):
        known = ", ".join(presets.names("nodes"))
        raise InputError(f"{given.place}: node is missing; a preset ({known}) or a mapping is needed")
    merged = dict(node)
    for key in ("gpu", "inside", "between", "gpus_per_node"):
        if given.has(key):
            merged[key] = _over(node.get(key), given.data[key])
    gpu, per_node, inside, between = _node(Fields(merged, given.place))
    if given.has("nodes") == given.has("gpus"):
        raise InputError(f"{given.place}: {_both(given)}; the number of nodes or of gpus is needed, one of them")
    if given.has("nodes"):
        return NodeGroup(given.whole("nodes", most=MOST_GPUS // per_node), per_node, gpu, inside, between)
    gpus = given.whole("gpus", most=MOST_GPUS)
    with at(f"{given.place}: gpus"):
        return cluster("", gpus, per_node, gpu, inside, between).groups[0]


def _both(given: Fields) -> str:
    return "nodes and gpus are both given" if given.has("nodes") else "nodes and gpus are missing"


def _over(base: object, given: object) -> object:
    """`given` over what the preset has: a mapping replaces key by key."""
    if isinstance(base, dict) and isinstance(given, dict):
        return {**cast("dict[str, Any]", base), **cast("dict[str, Any]", given)}
    return given


def _node(node: Fields) -> tuple[Gpu, int, Link, Link]:
    node.text("source", "-")
    gpu = node.inner("gpu")
    per_node = node.whole("gpus_per_node", most=1024)
    peak = gpu.inner("peak")
    speeds = {dtype: peak.amount(dtype, SPEED) for dtype in DTYPES if peak.has(dtype)}
    peak.done()
    if not speeds:
        raise InputError(f"{peak.place}: is empty; a speed for at least one of {', '.join(DTYPES)} is needed")
    if speeds.get("fp8", 0.0) > MOST_FP8 * speeds.get("bf16", math.inf):
        raise peak.wrong("fp8", "no more than twice what bf16 has is needed: the peak without sparsity")
    found = Gpu(gpu.text("name"), gpu.amount("memory", MEMORY), speeds, gpu.amount("bandwidth", RATE))
    gpu.done()
    return found, per_node, _link(node.inner("inside")), _link(node.inner("between"))


def _link(link: Fields) -> Link:
    found = Link(link.amount("bandwidth", RATE), link.amount("latency", TIME))
    link.done()
    return found
