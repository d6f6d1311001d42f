"""What a model's files say about it, against the files that transformers and gguf wrote."""

from pathlib import Path

import gguf

from headroom.families.files import open_checkpoint
from headroom.formats.facts import model_facts
from tests.synth_models import write_model


def test_the_facts_of_a_file_are_those_that_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write_model("llama", "q4_k_m", tmp_path)
    facts = model_facts(open_checkpoint(path))
    reader = gguf.GGUFReader(path)
    assert facts.parameters == sum(int(tensor.n_elements) for tensor in reader.tensors)
    sizes: dict[str, int] = {}
    for tensor in reader.tensors:
        name = tensor.tensor_type.name.lower()
        sizes[name] = sizes.get(name, 0) + int(tensor.n_bytes)
    assert dict(facts.types) == sizes
    assert facts.quant == max(sizes, key=lambda name: sizes[name])
    assert facts.tensor_bytes == sum(sizes.values())
    fields = {key: reader.fields[key].contents() for key in reader.fields}
    assert facts.architecture == fields["general.architecture"]
    assert facts.title == fields["general.name"]
    assert facts.licence == ""
    assert facts.trained_context == fields["llama.context_length"]
    assert facts.active_parameters == facts.parameters
    assert facts.changed == path.stat().st_mtime


def test_a_token_uses_all_parameters_but_those_of_experts_that_it_does_not_visit(
    tmp_path: Path,
) -> None:
    path = write_model("qwen3moe", "q8_0", tmp_path)
    facts = model_facts(open_checkpoint(path))
    reader = gguf.GGUFReader(path)
    fields = {key: reader.fields[key].contents() for key in reader.fields}
    experts, used = (fields[f"qwen3moe.expert_{word}"] for word in ("count", "used_count"))
    routed = sum(int(x.n_elements) for x in reader.tensors if "_exps" in x.name)
    assert 0 < used < experts
    assert facts.parameters - facts.active_parameters == routed * (experts - used) // experts
