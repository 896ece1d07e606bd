"""Points on several devices: split along one axis of a mesh, with candidates along the others.

A mesh may span several processes. Then all of them make the same calls, and an array may have parts
that this process cannot see.
"""

import hashlib
import math
import pickle
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcmle.problem import inputs

__all__ = [
    "POINTS",
    "Placed",
    "Placement",
    "ProcessLostError",
    "agreed",
    "everywhere",
    "from_first",
    "is_first",
    "is_placed",
    "on_host",
    "on_one_device",
    "padded_stack",
    "place",
    "placement_of",
    "replicate",
    "same_in_all",
    "spans_processes",
    "split_points",
    "split_stack",
    "takes_mesh",
    "to_host",
    "to_mesh",
    "without_extra",
]

# The axis of a mesh that points are split along; the first one if none is called so.
POINTS = "points"


P = ParamSpec("P")
T = TypeVar("T")


class ProcessLostError(RuntimeError):
    """Another process that shared the work has ended, or cannot be reached."""


def takes_mesh(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that leaves axes to the compiler, also where `jax.set_mesh` says otherwise.

    And that says in plain words when another process is no more.
    """

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        mesh = _explicit_mesh()
        try:
            if mesh is None:
                return function(*args, **kwargs)
            with jax.set_mesh(Mesh(mesh.devices, mesh.axis_names)):
                return _returned_to(mesh, function(*args, **kwargs))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error) or jax.process_count() == 1:
                raise
            words = str(error).splitlines()[0]
            raise ProcessLostError(
                f"another of the {jax.process_count()} processes has ended, or cannot be reached: "
                "start all of them again (with a checkpoint they go on from there). JAX says: "
                f"{words[:300]}"
            ) from error

    return wrapped


def _explicit_mesh() -> Mesh | None:
    """Return the mesh that is set, if it has axes that are not the compiler's to use."""
    if all(kind == AxisType.Auto for kind in jax.sharding.get_abstract_mesh().axis_types):
        return None
    try:
        return jax.sharding.get_mesh()
    except ValueError:
        # Under jit, where no other can be set.
        return None


def _returned_to(mesh: Mesh, tree: T) -> T:
    """Return a tree with the arrays that are on the devices of a mesh as its own."""

    def one(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.device_set != set(mesh.devices.flat):
            return leaf
        if sharding.mesh.axis_names != mesh.axis_names:
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, sharding.spec))

    return jax.tree.map(one, tree)


class Placement(NamedTuple):
    """Which axes of a mesh split the points, and which the candidates; hashable.

    Attributes:
        mesh: the devices.
        points: names of the axes along which points are split.
        others: names of all other axes.
    """

    mesh: Mesh
    points: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def parts(self) -> int:
        """Into how many parts the points are split."""
        return math.prod(self.mesh.shape[name] for name in self.points)

    @property
    def lanes(self) -> int:
        """Into how many parts candidates are split."""
        return math.prod(self.mesh.shape[name] for name in self.others)

    @property
    def along_points(self) -> PartitionSpec:
        """How arrays `[n, ...]` are split."""
        return PartitionSpec(self.points)

    @property
    def along_others(self) -> PartitionSpec:
        """How stacks `[m, ...]` are split."""
        return PartitionSpec(self.others) if self.others else PartitionSpec()

    def only_others(self) -> "Placement":
        """Return the placement with points whole on every device, and all axes for candidates."""
        return Placement(self.mesh, (), self.mesh.axis_names)


class Placed(NamedTuple):
    """Points on the devices of a mesh.

    Attributes:
        x: `[n + extra, d]`; the extra points make the parts equal, and weigh nothing.
        weight: `[n + extra]`, or None where all weights are 1.
        n: how many points there are.
        placement: where they are.
    """

    x: Array
    weight: Array | None
    n: int
    placement: Placement


def is_placed(x: Any, mesh: Any) -> bool:
    """Tell whether x is, or is to be, on several devices."""
    if mesh is not None:
        return True
    if isinstance(x, Tracer) or not isinstance(x, jax.Array):
        return False
    return len(x.sharding.device_set) > 1


def to_mesh(mesh: Any) -> Mesh:
    """Return a mesh whose axes are the compiler's to use; explicit ones would be the user's."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            "mesh must be a jax.sharding.Mesh, as from jax.make_mesh((8,), ('points',)), got "
            f"{type(mesh).__name__}"
        )
    processes = {device.process_index for device in mesh.devices.flat}
    if 1 < len(processes) < jax.process_count():
        raise ValueError(
            f"mesh has devices of {len(processes)} of the {jax.process_count()} processes: use "
            "those of one process, or of all"
        )
    return Mesh(mesh.devices, mesh.axis_names)


def placement_of(x: Any, mesh: Any) -> Placement:
    """Return where the points are, or where they go: along the axis `"points"`, or the first."""
    chosen: tuple[str, ...] = ()
    if mesh is None:
        sharding = x.sharding
        if isinstance(sharding, NamedSharding):
            mesh = sharding.mesh
            first = sharding.spec[0] if len(sharding.spec) else None
            chosen = () if first is None else (first,) if isinstance(first, str) else tuple(first)
        else:
            # Some other way of splitting: the same devices in a row.
            devices = sorted(sharding.device_set, key=lambda device: device.id)
            mesh = Mesh(np.array(devices), (POINTS,))
    mesh = to_mesh(mesh)
    names = mesh.axis_names
    if not chosen:
        chosen = (POINTS if POINTS in names else names[0],)
    return Placement(mesh, chosen, tuple(name for name in names if name not in chosen))


def place(x: Any, sample_weight: Any, mesh: Any) -> Placed:
    """Return the checked points on the devices of a mesh, or of x itself.

    In several processes each passes all points (and takes its own part), or one global array.
    """
    placement = placement_of(x, mesh)
    array, points, weight = inputs.to_floats(x, sample_weight, partial(split_points, placement))
    n = array.shape[0]
    if weight is None and points.shape[0] > n:
        weight = split_points(placement, np.ones(n, points.dtype))
    if not isinstance(points, Tracer):
        inputs.check_values(array, points, weight)
    return Placed(points, weight, n, placement)


def replicate(x: Any, sample_weight: Any, mesh: Any) -> tuple[Array, Array | None, Mesh]:
    """Return the checked points whole on every device of a mesh, or of x itself; and the mesh.

    For work whose candidates or rows are split, and which has few points.
    """
    mesh = placement_of(x, mesh).mesh
    array, points, weight = inputs.to_floats(x, sample_weight, lambda each: everywhere(each, mesh))
    if not isinstance(points, Tracer):
        inputs.check_values(array, points, weight)
    return points, weight, mesh


def split_points(placement: Placement, array: Any) -> Array:
    """Return an array `[n, ...]` split along the points, with zeros where parts are short."""
    extra = -array.shape[0] % placement.parts
    sharding = NamedSharding(placement.mesh, placement.along_points)
    padding = [(0, extra)] + [(0, 0)] * (array.ndim - 1)
    if isinstance(array, Tracer):
        return jax.lax.with_sharding_constraint(jnp.pad(array, padding), sharding)
    if isinstance(array, jax.Array):
        if not array.is_fully_addressable and extra:
            raise ValueError(
                f"an array of {array.shape[0]} points over several processes cannot be split into "
                f"{placement.parts} equal parts; pass NumPy arrays, or one that can"
            )
        return jax.device_put(jnp.pad(array, padding) if extra else array, sharding)
    array = np.pad(array, padding) if extra else array
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def everywhere(tree: Any, mesh: Mesh) -> Any:
    """Return the arrays of a tree whole on every device of a mesh, also those of other processes.

    What this process alone holds must be the same in all of them.
    """
    sharding = NamedSharding(mesh, PartitionSpec())

    def one(leaf: Any) -> Array:
        if isinstance(leaf, Tracer):
            return leaf
        if isinstance(leaf, jax.Array):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                data = one(jax.random.key_data(leaf))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            if leaf.is_fully_addressable and leaf.sharding.device_set != set(mesh.devices.flat):
                leaf = np.asarray(leaf)
        if isinstance(leaf, jax.Array):
            return _copied_to(sharding)(leaf)
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(one, tree)


@lru_cache
def _copied_to(sharding: NamedSharding) -> Callable[[Array], Array]:
    """Return a program that copies arrays; one for all calls, as it is compiled."""
    return jax.jit(lambda array: array, out_shardings=sharding)


def to_host(array: Any) -> np.ndarray:
    """Return the whole of an array; in several processes, all of them have to ask."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if not array.is_fully_replicated:
            array = everywhere(array, array.sharding.mesh)  # type: ignore[attr-defined]
        array = array.addressable_data(0)
    return np.asarray(array)


def on_host(placed: Placed, weighted: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the points, and their weights if they have any; all processes have to ask."""
    weight = None if placed.weight is None or not weighted else to_host(placed.weight)[: placed.n]
    return to_host(placed.x)[: placed.n], weight


def without_extra(labels: Array, n: int) -> Array:
    """Return labels `[..., n + extra]` of the points alone, still split if the parts are equal."""
    return labels if labels.shape[-1] == n else _first(labels, n)


@partial(jax.jit, static_argnames="n")
def _first(labels: Array, n: int) -> Array:
    return labels[..., :n]


def padded_stack(stack: Any, parts: int) -> Any:
    """Return a stack with its last entry repeated until it can be split into equal parts."""
    m = jax.tree.leaves(stack)[0].shape[0]
    index = np.minimum(np.arange(m + -m % parts), m - 1)
    return jax.tree.map(lambda leaf: leaf[index], stack)


def split_stack(function: Callable[..., Any], mesh: Mesh | None, shared: Any, *stacks: Any) -> Any:
    """Return what `function(shared, *stacks)` gives for stacks `[m, ...]`, split over all devices.

    What becomes of one entry must not depend on the others. The results are whole on every device,
    so that work on them is that of one device. For use under jit; the function must close over no
    array. Without a mesh it is just called.
    """
    if mesh is None:
        return function(shared, *stacks)
    m = jax.tree.leaves(stacks)[0].shape[0]
    split, same = PartitionSpec(mesh.axis_names), PartitionSpec()
    results = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(same, *[split] * len(stacks)),
        out_specs=split,
        check_vma=False,
    )(shared, *padded_stack(stacks, mesh.size))
    results = jax.lax.with_sharding_constraint(results, NamedSharding(mesh, same))
    return jax.tree.map(lambda leaf: leaf[:m], results)


def on_one_device(tree: Any) -> Any:
    """Return arrays that are whole on every device where other arrays are; all else as it is."""

    def one(leaf: Any) -> Any:
        return jnp.asarray(to_host(leaf)) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(one, tree)


def agreed(value: float, mesh: Mesh | None) -> float:
    """Return the number that the first process has: decisions by the clock must be the same."""
    if not spans_processes(mesh):
        return float(value)
    return float(_broadcast(np.float32(value)))


def from_first(tree: Any, mesh: Mesh | None) -> Any:
    """Return what the first process has, where a mesh spans several: arrays, and all else."""
    if not spans_processes(mesh):
        return tree
    # As bytes: what others have may be of other shapes, or say other words.
    own = np.frombuffer(pickle.dumps(on_one_device(tree)), np.uint8)
    length = int(_broadcast(np.int32(len(own))))
    return pickle.loads(_broadcast(np.resize(own, length)).tobytes())


def same_in_all(text: str, mesh: Mesh | None) -> bool:
    """Tell whether all processes have the same text, where a mesh spans several."""
    if not spans_processes(mesh):
        return True
    from jax.experimental import multihost_utils

    own = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=4).digest(), np.uint32)
    found = np.asarray(multihost_utils.process_allgather(own))
    return bool((found == own).all())


def _broadcast(array: Any) -> np.ndarray:
    """Return the array of the first process; those of the others have the same shape."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.broadcast_one_to_all(array))


def is_first(mesh: Mesh | None) -> bool:
    """Tell whether this is the process to write files, where a mesh spans several."""
    return not spans_processes(mesh) or jax.process_index() == 0


def spans_processes(mesh: Mesh | None) -> bool:
    """Tell whether several processes work together."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1
