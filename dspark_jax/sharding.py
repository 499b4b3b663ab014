"""Sharding rules as data: which mesh axes split which logical axis.

Three mesh axes have a meaning. "data" splits the sequences of a batch: each group of devices along it holds a whole
model. "tensor" splits the large weights: heads, vocabulary, the shared expert's hidden axis, and the set of routed
experts. "expert" splits the set of routed experts and nothing else. A mesh may lack any of them.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from dspark_jax.errors import RequestError, check_count

Axis = Literal["batch", "vocabulary", "heads", "hidden", "expert"]
MeshAxes = tuple[str, ...]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AxisRules:
    """Mesh axes for each logical axis, which is split over their product; () replicates.

    Where the product does not divide an axis, the first of its mesh axes that does splits it alone. Routed experts,
    93 % of the bytes, are split over "tensor" too, so that they are divided whichever axis a mesh has.
    """

    batch: MeshAxes = ("data",)
    vocabulary: MeshAxes = ("tensor",)
    heads: MeshAxes = ("tensor",)
    hidden: MeshAxes = ("tensor",)
    expert: MeshAxes = ("expert", "tensor")


RULES = AxisRules()


def make_mesh(data: int = 1, expert: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh for `load`.

    Args:
        data: groups of devices, each with a whole model and its share of the sequences.
        expert: ways to split the routed experts.
        tensor: ways to split everything large, routed experts included (then over expert x tensor devices).
        devices: None for all of them, of every process; the first data x expert x tensor are used.

    Raises:
        RequestError: a size below 1, or fewer devices than the product.
    """
    shape = {"data": data, "expert": expert, "tensor": tensor}
    for name, size in shape.items():
        check_count(size, name)
    devices = jax.devices() if devices is None else devices
    needed = math.prod(shape.values())
    if needed > len(devices):
        sizes = " x ".join(f"{name} {size}" for name, size in shape.items())
        raise RequestError(f"a mesh of {sizes} needs {needed} devices; there are {len(devices)}.")
    types = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), types, devices=devices[:needed])


def automatic(mesh: Mesh | None) -> Mesh | None:
    """The same mesh with automatic axes; `jax.make_mesh` makes explicit ones, under which layers would not trace."""
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        raise RequestError(f"mesh is {mesh!r}; expected a jax.sharding.Mesh or None.")
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def sharding_of(mesh: Mesh | AbstractMesh | None, axes: tuple[Axis | None, ...], shape: tuple[int, ...]) -> Sharding:
    """Where an array with these logical axes lives.

    Args:
        mesh: None puts the array on the first device of this process.
        axes: a logical axis or None for each dimension.
        shape: global shape. An axis that the mesh does not have is replicated; so is one that does not divide its
            dimension (logged once).
    """
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    spec = [mesh_axes(mesh, axis, size) or None for axis, size in zip(axes, shape, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*spec))


def mesh_axes(mesh: Mesh | AbstractMesh, axis: Axis | None, size: int) -> MeshAxes:
    """The mesh axes that split a logical axis of this size; () for none."""
    names = tuple(name for name in getattr(RULES, axis) if mesh.shape.get(name, 1) > 1) if axis else ()
    choices = (names, *((name,) for name in names if len(names) > 1), ())
    chosen = next(choice for choice in choices if size % _devices(mesh, choice) == 0)
    if chosen != names:
        outcome = f"split over {_sizes(mesh, chosen)} alone" if chosen else "replicated"
        _log_once(f"axis {axis!r} of size {size} does not divide over {_sizes(mesh, names)}: {outcome}")
    return chosen


def _devices(mesh: Mesh | AbstractMesh, names: MeshAxes) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _sizes(mesh: Mesh | AbstractMesh, names: MeshAxes) -> str:
    return "mesh axis " + " x ".join(f"{name!r} of {mesh.shape[name]}" for name in names)


@cache
def _log_once(message: str) -> None:
    _log.warning(message)
