"""What people paste names a repository, a file of it, or a quantisation."""

import pytest
from huggingface_hub import constants

from headroom.errors import FormatError
from headroom.formats.hub_names import (
    HubName,
    choose_file,
    first_files,
    parse_hub_name,
    quant_of_file,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("org/repo", HubName("org/repo")),
        ("org/repo:Q4_K_M", HubName("org/repo", quant="Q4_K_M")),
        ("org/repo:q4_k_m", HubName("org/repo", quant="Q4_K_M")),
        ("org/repo:UD-IQ2_XXS", HubName("org/repo", quant="UD-IQ2_XXS")),
        ("org/repo:bf16", HubName("org/repo", quant="BF16")),
        ("org/repo:a.gguf", HubName("org/repo", file="a.gguf")),
        ("org/repo:q8/a.gguf", HubName("org/repo", file="q8/a.gguf")),
        ("hf.co/org/repo", HubName("org/repo")),
        ("hf.co/org/repo:Q4_K_M", HubName("org/repo", quant="Q4_K_M")),
        ("https://hf.co/org/repo:IQ4_XS", HubName("org/repo", quant="IQ4_XS")),
        ("huggingface.co/org/repo/", HubName("org/repo")),
        ("https://huggingface.co/org/repo", HubName("org/repo")),
        ("https://huggingface.co/org/repo/tree/main", HubName("org/repo")),
        ("https://huggingface.co/org/repo?library=x#files", HubName("org/repo")),
        (
            "https://huggingface.co/org/repo/blob/main/Q4/m-Q4_0.gguf",
            HubName("org/repo", file="Q4/m-Q4_0.gguf"),
        ),
        (
            "https://huggingface.co/org/repo/resolve/main/a%20b.gguf?download=true",
            HubName("org/repo", file="a b.gguf"),
        ),
        ("nonsense", None),
        ("a/b/c", None),
        ("org/repo:", None),
        ("org/repo:x.bin", None),
        ("org/repo:a:b.gguf", None),
        ("../x", None),
        ("https://example.org/org/repo", None),
        ("https://[broken", None),
    ],
)
def test_what_people_paste_is_understood(text: str, found: HubName | None) -> None:
    assert parse_hub_name(text) == found


def test_addresses_of_the_mirror_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://mirror.example:8080")
    assert parse_hub_name("http://mirror.example:8080/org/repo") == HubName("org/repo")
    assert parse_hub_name("http://mirror.example:9090/org/repo") is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("https://huggingface.co/datasets/org/data", "not the address of a model's repository"),
        ("https://huggingface.co/org", "not the address of a model's repository"),
        ("hf.co/org/repo/tree/v2", "of the revision v2, and only the revision main is pulled"),
        ("hf.co/org/repo:fast", "names neither a GGUF file nor a quantisation"),
    ],
)
def test_addresses_of_something_else_are_refused(text: str, told: str) -> None:
    with pytest.raises(FormatError, match=told):
        parse_hub_name(text)


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("Model-7B-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q8_0.gguf", "Q8_0"),
        ("Model-UD-Q2_K_XL.gguf", "UD-Q2_K_XL"),
        ("UD-IQ1_M/Model-UD-IQ1_M-00001-of-00003.gguf", "UD-IQ1_M"),
        ("Model-BF16.gguf", "BF16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Q8_0.gguf", "Q8_0"),
        ("Model-Q4_K_M-imat.gguf", None),
        ("model.gguf", None),
    ],
)
def test_the_quantisation_is_what_a_file_s_name_ends_with(file: str, quant: str | None) -> None:
    assert quant_of_file(file) == quant


FILES = [
    "README.md", "mmproj-F16.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf",
    "BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf",
]  # fmt: skip


def test_a_split_file_is_one_model_and_a_projector_none() -> None:
    assert first_files(FILES) == ["BF16/m-BF16-00001-of-00002.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf"]


def test_a_quantisation_chooses_its_file_and_no_name_the_usual_one() -> None:
    assert choose_file(HubName("o/r", quant="BF16"), FILES) == "BF16/m-BF16-00001-of-00002.gguf"
    assert choose_file(HubName("o/r", quant="Q8_0"), FILES) == "m-Q8_0.gguf"
    assert choose_file(HubName("o/r"), FILES) == "m-Q4_K_M.gguf"
    assert choose_file(HubName("o/r"), ["odd.gguf", "mmproj.gguf"]) == "odd.gguf"


@pytest.mark.parametrize(
    ("name", "files", "told"),
    [
        (HubName("o/r", quant="Q2_K"), FILES, r"no GGUF file of Q2_K. There are BF16, Q4_K_M, Q8"),
        (HubName("o/r"), ["a.gguf", "b.gguf"], "no GGUF file of Q4_K_M. Its GGUF files: a.gguf, b"),
        (HubName("o/r"), ["README.md"], "holds no safetensors and no GGUF files"),
        (
            HubName("o/r", quant="Q8_0"),
            ["a-Q8_0.gguf", "b-Q8_0.gguf"],
            "2 files of o/r are of Q8_0. Name one of them: o/r:a-Q8_0.gguf, o/r:b-Q8_0.gguf",
        ),
    ],
)
def test_a_choice_that_cannot_be_made_says_what_there_is(
    name: HubName, files: list[str], told: str
) -> None:
    with pytest.raises(FormatError, match=told):
        choose_file(name, files)
