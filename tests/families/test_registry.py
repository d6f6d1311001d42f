"""A family is one file and one line: the rest of the code knows no family by name."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import headroom
from headroom.families.config import AttentionConfig
from headroom.families.files import open_checkpoint
from headroom.families.registry import FAMILIES, FILES, KNOWN, NAMINGS, RUNNABLE
from headroom.families.tables import tensor_table
from headroom.families.tensors import inner_name
from headroom.formats.checkpoint import Checkpoint
from headroom.formats.metadata import config_architecture
from headroom.plan.describe import describe
from tests.families.oracles import VARIANTS, variant

ROOT = Path(headroom.__file__).parent
# Some tokenizer rules in GGUF files have the name of a family.
NAMED_FOR_A_FAMILY = (
    "formats/vocabulary.py",
    *("text/pre_tokenizers.py", "text/tokenizer.py", "text/vocabulary_coder.py"),
)
GENERAL = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if not path.relative_to(ROOT).as_posix().startswith(("families/", *NAMED_FOR_A_FAMILY))
]
SYNTH = sorted((ROOT / "families" / "synth").glob("*.py"))
SHARED = [
    path
    for path in sorted((ROOT / "families").glob("*.py"))
    if path.stem not in (*FILES, "registry")
]
NAMES = {
    name
    for naming in NAMINGS.values()
    for name in (naming.architecture, *naming.model_types, *naming.classes)
}


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the string literals of a file with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.mark.parametrize(
    "path", [*GENERAL, *SYNTH, *SHARED], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_general_code_names_no_family(path: Path) -> None:
    assert [(line, text) for line, text in strings(path) if text in NAMES] == []


def tensors_of_single_files() -> set[str]:
    """The tensors of layers and models that only one family file has."""
    files: dict[str, set[str]] = {}
    for file in FILES:
        for family in import_module(f"headroom.families.{file}").FAMILIES:
            for dims in family.synthesis.tiny.values():
                for name in tensor_table(dims):
                    files.setdefault(inner_name(name), set()).add(file)
    # Files of several families have rotary frequencies, which one family cannot do without.
    return {name for name, found in files.items() if len(found) == 1} - {"rope_freqs.weight"}


def test_general_code_names_no_tensor_of_a_single_family() -> None:
    single = tensors_of_single_files()
    assert {"inp_gate.weight", "ssm_out.weight", "attn_sinks.weight"} < single
    for path in [*GENERAL, *SYNTH]:
        assert [(line, text) for line, text in strings(path) if text in single] == [], path


def test_every_family_file_is_registered() -> None:
    general = {"__init__", "config", "dims", "family", "files", "registry", "rope", "tables"}
    general.add("tensors")
    files = {path.stem for path in (ROOT / "families").glob("*.py")}
    assert files - general == set(FILES)


def test_names_of_models_and_types_belong_to_one_family() -> None:
    types = [name for naming in NAMINGS.values() for name in naming.model_types]
    assert len(set(types)) == len(types)
    assert sum(len(family.known) for family in FAMILIES.values()) == len(KNOWN)
    for name, family in FAMILIES.items():
        sizes = {**family.synthesis.tiny, **family.known}
        assert {dims.architecture for dims in sizes.values()} == {name}
        synthesis = family.synthesis
        config = {"model_type": synthesis.model_type, "architectures": [synthesis.model_class]}
        assert config_architecture(config, Path("config.json"), NAMINGS) == name
        assert next(iter(family.synthesis.tiny)) == "tiny"


def test_drafts_do_not_run_by_themselves() -> None:
    drafts = {name for name, family in FAMILIES.items() if family.synthesis.tiny["tiny"].taps}
    assert set(RUNNABLE) == FAMILIES.keys() - drafts


@pytest.fixture(params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    return open_checkpoint(variant(request.param).save_gguf(tmp_path / "m.gguf"))


def test_plan_and_model_agree_on_whether_the_embedding_is_kept(checkpoint: Checkpoint) -> None:
    found = describe(checkpoint)
    assert found.config.keeps_embedding == FAMILIES[checkpoint.architecture].keeps_embedding
    assert found.shape.staging_buffers == (3 if found.config.keeps_embedding else 2)


def test_plan_and_model_agree_on_the_parts_of_layers(checkpoint: Checkpoint) -> None:
    found = describe(checkpoint)
    for index, layer in enumerate(found.shape.layers):
        config = found.config.layers[index]
        assert (layer.post_norms, layer.side_width) == (config.post_norms, config.per_layer_width)
        assert layer.shared_gate == (config.experts is not None and config.experts.shared_gate)
        if not isinstance(config.mixer, AttentionConfig):
            continue
        mixer = config.mixer
        assert layer.owns_kv == (mixer.shares is None)
        assert layer.keys_are_values == (mixer.keys_are_values and layer.owns_kv)
        assert layer.gate_in_queries == (mixer.gate == "query")
        # The outputs of the matrices that attention loads.
        names = ("q", "k", "v", "gate") if layer.owns_kv else ("q", "gate")
        tensors = (checkpoint.tensors.get(f"layers.{index}.attn.{name}") for name in names)
        assert layer.projections == tuple(x.shape[0] for x in tensors if x is not None)
