"""Sharding rules as data: which mesh axis carries which logical axis of a weight."""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from dspark_jax.errors import RequestError

Axis = Literal["vocabulary", "heads", "expert"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AxisRules:
    """Mesh axis for each logical axis; None replicates."""

    vocabulary: str | None = "tensor"
    heads: str | None = "tensor"
    expert: str | None = "expert"


RULES = AxisRules()


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
        mesh: None puts the array on the first device.
        axes: a logical axis or None for each dimension.
        shape: global shape. An axis that the mesh does not have, or that does not divide its dimension, is replicated
            (logged once).
    """
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    spec = [_mesh_axis(mesh, axis, size) for axis, size in zip(axes, shape, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*spec))


def _mesh_axis(mesh: Mesh | AbstractMesh, axis: Axis | None, size: int) -> str | None:
    name = getattr(RULES, axis) if axis else None
    if name is None or name not in mesh.shape:
        return None
    if size % mesh.shape[name]:
        _log_once(
            f"axis {axis!r} of size {size} does not divide over mesh axis {name!r} of {mesh.shape[name]}: replicated"
        )
        return None
    return name


@cache
def _log_once(message: str) -> None:
    _log.warning(message)
