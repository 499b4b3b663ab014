"""Rules about the code itself: imports only go down, nothing points out of the repository, weights are a plain tree."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import dspark_jax
from dspark_jax.model.linear import linear, rms_norm
from dspark_jax.model.model import Model
from dspark_jax.model.weights import Packed, Table

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"

# The floors, from the ground up; the package's own front door opens onto everything but the command line.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("config", "formats", "assets"),
    ("model",),
    ("checkpoint", "sharding", "placement", "chat"),
    ("decoding",),
    ("data", "crosscheck", "jobs", "bench"),
    ("training", "evaluation"),
    ("__init__",),
    ("cli",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
PLACES = {"dspark_jax", "pallas_kernels", "tests", "notebooks", ".ci"}
KERNEL_IMPORTS = {"jax", "numpy", "pallas_kernels"}
UNKNOWN_TO_THE_MODEL = {"io", "json", "os", "pathlib", "safetensors", "shutil", "tempfile"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {
    module_name(path): path
    for package in ("dspark_jax", "pallas_kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in FILES.items()}
IN_PACKAGE = [name for name in FILES if name.startswith("dspark_jax")]
IN_KERNELS = [name for name in FILES if name.startswith("pallas_kernels")]


def imports(name: str) -> Iterator[str]:
    """Modules that a file imports, at its top or inside a function; of our own packages down to the file."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(name, node)
            yield from (f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base for alias in node.names)


def absolute(name: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = name.split(".") if FILES[name].name == "__init__.py" else name.split(".")[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


class TestFloors:
    @pytest.mark.parametrize("name", IN_PACKAGE)
    def test_a_file_has_a_floor_and_imports_from_it_or_from_below(self, name: str) -> None:
        assert room(name) in FLOOR_OF, f"{room(name)} is a new room: give it a floor"
        ours = [other for other in imports(name) if other.split(".")[0] == "dspark_jax"]
        assert [other for other in ours if FLOOR_OF[room(other)] > FLOOR_OF[room(name)]] == []

    @pytest.mark.parametrize("name", IN_KERNELS)
    def test_kernels_import_jax_numpy_and_themselves(self, name: str) -> None:
        roots = {other.split(".")[0] for other in imports(name)}
        assert roots - sys.stdlib_module_names <= KERNEL_IMPORTS

    def test_no_file_imports_itself_through_others(self) -> None:
        graph = {name: {other for other in imports(name) if other in FILES} for name in FILES}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"imports go in a circle: {' <- '.join(error.args[1])}")

    @pytest.mark.parametrize("name", [name for name in IN_PACKAGE if room(name) == "model"])
    def test_the_model_knows_neither_files_nor_meshes(self, name: str) -> None:
        known = list(imports(name))
        assert {other.split(".")[0] for other in known} & UNKNOWN_TO_THE_MODEL == set()
        assert [other for other in known if other.startswith("jax.sharding")] == []


def project_files() -> Iterator[Path]:
    """The files of the project, found without git, so that an unpacked archive passes, too."""
    places = [path for path in ROOT.iterdir() if path.name in PLACES]
    for path in chain(ROOT.iterdir(), *(place.rglob("*") for place in places)):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


class TestText:
    @pytest.mark.parametrize(
        "pattern",
        [rb"[.][.]/shared\b", rb"[.]library\b", rb"(?<![\w.])/(work|home|root|Users|mnt)/"],
        ids=["the project's shared folder", "the workplace's library", "an absolute path"],
    )
    def test_no_file_points_out_of_the_repository(self, pattern: bytes) -> None:
        found = {str(path.relative_to(ROOT)): re.search(pattern, path.read_bytes()) for path in project_files()}
        assert {*found} > {"README.md", "pyproject.toml", "tests/test_architecture.py", "dspark_jax/config.py"}
        assert {name: match[0] for name, match in found.items() if match} == {}

    @pytest.mark.parametrize("name", FILES)
    def test_everything_public_has_a_docstring(self, name: str) -> None:
        tree = TREES[name]
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        definitions = chain(tree.body, *(node.body for node in classes))
        public = [
            node
            for node in definitions
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
        ]
        assert [node.name for node in public if not ast.get_docstring(node)] == []
        assert ast.get_docstring(tree)


@contextmanager
def tree_mode() -> Iterator[None]:
    """NNX without object graphs, as it will be by default."""
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        yield


@pytest.fixture(scope="module")
def model() -> Model:
    with tree_mode():
        return dspark_jax.load(GOLDEN / "tiny-a")


def assert_same(tree: object, other: object) -> None:
    leaves, structure = jax.tree.flatten(tree)
    others, other_structure = jax.tree.flatten(other)
    assert structure == other_structure
    assert all(a.dtype == b.dtype and bool((a == b).all()) for a, b in zip(leaves, others, strict=True))


PARTS: dict[str, Callable[[Model], object]] = {
    "model": lambda model: model,
    "target": lambda model: model.target,
    "drafter": lambda model: model.drafter,
    "vocabulary": lambda model: model.vocabulary,
}


class TestPlainTrees:
    @pytest.fixture(autouse=True)
    def without_graphs(self) -> Iterator[None]:
        with tree_mode():
            yield

    @pytest.mark.parametrize("part", PARTS)
    def test_flatten_and_unflatten(self, part: str, model: Model) -> None:
        tree = PARTS[part](model)
        leaves, structure = jax.tree.flatten(tree)
        assert leaves and all(isinstance(leaf, jax.Array) for leaf in leaves)
        assert_same(jax.tree.unflatten(structure, leaves), tree)
        assert_same(jax.tree.map(lambda leaf: leaf, tree), tree)

    @pytest.mark.parametrize("part", ["drafter", "vocabulary"])
    def test_in_and_out_of_jit(self, part: str, model: Model) -> None:
        tree = PARTS[part](model)
        assert_same(jax.jit(lambda x: x)(tree), tree)

    def test_a_whole_model_goes_through_jit_as_one_argument(self, model: Model) -> None:
        traced = []

        @jax.jit
        def vocabulary_of(model: Model) -> jax.Array:
            traced.append(model.config)
            return model.vocabulary.embed[...]

        assert_same(vocabulary_of(model), model.vocabulary.embed[...])
        leaves, structure = jax.tree.flatten(model)
        vocabulary_of(jax.tree.unflatten(structure, leaves))
        assert traced == [model.config]

    @pytest.mark.parametrize("part", PARTS)
    def test_split_and_merge(self, part: str, model: Model) -> None:
        tree = PARTS[part](model)
        definition, parameters, rest = nnx.split(tree, nnx.Param, ...)
        counts = [len(jax.tree.leaves(state)) for state in (parameters, rest)]
        assert sum(counts) == len(jax.tree.leaves(tree))
        assert_same(nnx.merge(definition, parameters, rest), tree)

    def test_parameters_are_the_floats_and_nothing_packed(self, model: Model) -> None:
        _, parameters, packed, tables, rest = nnx.split(model, nnx.Param, Packed, Table, ...)
        dtypes = [{str(leaf.dtype) for leaf in jax.tree.leaves(state)} for state in (parameters, packed, tables, rest)]
        assert dtypes == [{"bfloat16", "float32"}, {"uint8"}, {"int32"}, set()]
        assert not issubclass(Packed, nnx.Param) and not issubclass(Table, nnx.Param)


class TestGradients:
    """Fine-tuning differentiates a function of the parameters; packed weights pass through as they are."""

    def test_of_the_parameters_beside_packed_weights(self, model: Model) -> None:
        with tree_mode():
            definition, parameters, rest = nnx.split(model.drafter, nnx.Param, ...)

            def loss(parameters: nnx.State, rest: nnx.State) -> jax.Array:
                drafter = nnx.merge(definition, parameters, rest)
                taps = jnp.ones((1, model.config.taps_width), jnp.float32)
                features = linear(taps, drafter.main_proj, model.setting(1))
                return jnp.sum(rms_norm(features, drafter.main_norm, model.config.rms_norm_eps, model.numerics) ** 2)

            gradients = jax.grad(loss)(parameters, rest)
        assert jax.tree.structure(gradients) == jax.tree.structure(parameters)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(gradients)} == {"bfloat16", "float32"}
        moved = [jax.tree_util.keystr(path) for path, g in jax.tree.leaves_with_path(gradients) if bool((g != 0).any())]
        assert len(moved) == 1 and "main_norm" in moved[0]

    def test_of_the_whole_tree_are_refused_by_jax(self, model: Model) -> None:
        with tree_mode(), pytest.raises(TypeError, match="uint8"):
            jax.grad(lambda drafter: jnp.sum(drafter.main_norm[...]))(model.drafter)
