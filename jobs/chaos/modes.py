"""What is killed: which engine, on which Ray, writing where."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.chaos.disk import DiskOutput
from jobs.chaos.processes import LOCAL_VICTIMS
from jobs.chaos.reference import RHEO
from jobs.chaos.store import Gate, StoreOutput
from jobs.chaos.tiny_pair import build_pair

_DRIVER = (sys.executable, "-m", "jobs.chaos.driver")
_ROWS_PER_FILE = 6
_FAKE = {"engine": {"kind": "fake", "max_batch": 8}}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """kind: of the engine. command: what is started, before `run`. options: of the job file.

    make_output: from the path of a folder that is not there yet. publish: puts the input where the job reads it; returns
    the overrides for it. root, others: see `jobs.chaos.processes.Life`. victims: beside the driver. before_life: called before each start.
    """

    kind: str
    options: dict[str, Any]
    command: Sequence[str] = RHEO
    make_output: Callable[[Path], Any] = DiskOutput
    publish: Callable[[Path], list[str]] = lambda folder: [f"input.path={folder}"]
    victims: tuple[str, ...] = LOCAL_VICTIMS
    root: int | None = None
    others: Mapping[str, Callable[[], str | None]] = field(default_factory=dict)
    before_life: Callable[[], None] = lambda: None


@contextlib.contextmanager
def fake(folder: Path) -> Iterator[Mode]:
    """The fake engine, on a disk."""
    yield Mode(kind="fake", options=_with_output(_FAKE))


@contextlib.contextmanager
def real(folder: Path) -> Iterator[Mode]:
    """A real engine on a tiny model, on a disk."""
    pair = build_pair(folder / "models")
    options = {
        "engine": {"max_batch": 8, "reproducible": True},
        "model": {"target": str(pair.target), "draft": str(pair.draft)},
        "speculation": {"method": "coupled", "tree_size": 12, "depth": 4, "top_k": 4},
        "sampling": {"max_tokens": 60, "stop": ["w5 w2 w5"]},
        "ray": {"threads_per_worker": 1},
    }
    yield Mode(kind="real", options=_with_output(options))


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[Mode]:
    """The fake engine, input and output on S3, and requests that come late."""
    from infra.s3_server import S3Server  # not in the wheel, and nothing else here needs it

    gates: list[Gate] = []

    def make_gate(app: Callable) -> Gate:
        gates.append(Gate(app))
        return gates[0]

    os.environ.update(AWS_ACCESS_KEY_ID="chaos", AWS_SECRET_ACCESS_KEY="chaos", AWS_DEFAULT_REGION="us-east-1")
    server = S3Server(middleware=make_gate)
    client = server.client()
    client.create_bucket(Bucket="chaos-input")

    def publish(source: Path) -> list[str]:
        prefix = source.relative_to(folder)
        for path in source.iterdir():
            client.put_object(Bucket="chaos-input", Key=f"{prefix}/{path.name}", Body=path.read_bytes())
        return [f"input.path=s3://chaos-input/{prefix}/", f"input.storage_options.endpoint_url={server.url}"]

    def make_output(path: Path) -> StoreOutput:
        return StoreOutput(server, gates[0], path.relative_to(folder).as_posix())

    try:
        yield Mode(kind="fake", options=_with_output(_FAKE), make_output=make_output, publish=publish)
    finally:
        server.close()


@contextlib.contextmanager
def cpus2(folder: Path) -> Iterator[Mode]:
    """The fake engine in a program that has begun with ray.init(num_cpus=2)."""
    yield Mode(kind="fake", options=_with_output(_FAKE), command=(*_DRIVER, "--num-cpus", "2"))


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Mode]:
    """The fake engine on a cluster of three nodes, one of which is lost in the middle of a run."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    others = [nodes.add_node(num_cpus=2) for _ in range(2)]

    def remove_one() -> str | None:
        if not others:
            return None
        nodes.remove_node(others.pop(0), allow_graceful=False)
        return "a node"

    def complete() -> None:
        while len(others) < 2:
            others.append(nodes.add_node(num_cpus=2))

    try:
        yield Mode(
            kind="fake",
            options=_with_output({**_FAKE, "ray": {"workers": 2}}),
            command=(*_DRIVER, "--address", nodes.address),
            victims=("node",),  # with what runs on it
            root=os.getpid(),
            others={"node": remove_one},
            before_life=complete,
        )
    finally:
        nodes.shutdown()


MODES = {mode.__name__: mode for mode in (fake, real, s3, cpus2, cluster)}


def _with_output(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "output": {"rows_per_file": _ROWS_PER_FILE}}
