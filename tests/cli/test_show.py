"""`headroom show`: what a model's files say, against what is published of the model."""

import hashlib
import json
from pathlib import Path

import pytest

from headroom.cli.main import run_command
from headroom.cli.show import counted_parameters, head_text


def test_json_has_what_the_file_says(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["show", str(smollm2_path), "--json", "--digest"]) == 0
    found = json.loads(capsys.readouterr().out)
    # As published: 30 layers of 3,540,096 parameters, a table of 49152 x 576, a norm of 576.
    assert found["parameters"] == found["active_parameters"] == 30 * 3_540_096 + 49152 * 576 + 576
    assert found["name"] == "SmolLM2-135M-Instruct.Q4_1"
    assert found["title"] == "Smollm2 135M 8k Lc100K Mix1 Ep2"
    assert (found["architecture"], found["licence"]) == ("llama", "apache-2.0")
    assert found["context"] == 8192
    assert found["quantisation"] == "q4_1"
    assert found["chat_template"] is True
    assert found["reasoning"] == {"supported": False}
    assert "<|im_end|>" in found["stop_tokens"]
    assert found["sampling"]["temperature"] == 0.2
    assert (found["path"], found["size_bytes"]) == (
        str(smollm2_path), smollm2_path.stat().st_size,
    )  # fmt: skip
    digest = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert found["sha256"] == {smollm2_path.name: digest}
    assert found["sha256_source"] == "computed"


def test_without_reading_the_weights_the_recorded_digest_is_shown(
    smollm2_path: Path, tiny_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["show", "--home", str(smollm2_path.parents[1]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    digest = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert found["sha256"] == {smollm2_path.name: digest}
    assert found["sha256_source"] == "recorded by pull"
    assert run_command(["show", str(tiny_path)]) == 0
    assert "not recorded; --digest computes it" in capsys.readouterr().out


def test_people_see_one_row_for_each_fact(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["show", str(smollm2_path)]) == 0
    rows = {row[:15].strip(): row[15:].strip() for row in capsys.readouterr().out.splitlines()}
    assert rows["parameters"] == "134.5 million"
    assert rows["quantisation"].startswith("q4_1 (q4_1 69 %")
    assert rows["context"] == "8,192 tokens"
    assert rows["licence"] == "apache-2.0"
    assert rows["sha256"].startswith("b179c9523d0e6a0f98a330c7562b6827")


def test_a_prediction_head_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, found in (([], False), (["--mtp"], True)):
        path = tmp_path / f"{len(flags)}.gguf"
        assert run_command(["synth", "qwen35", str(path), "--layers", "4", *flags]) == 0
        capsys.readouterr()
        assert run_command(["show", str(path), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["prediction_head"], facts["prediction_head_refused"]) == (found, None)
    facts["prediction_head_refused"] = "it has no tensor layers.4.mtp.proj"
    assert head_text(facts) == "not used: it has no tensor layers.4.mtp.proj"
    assert head_text(facts | {"prediction_head_refused": None}) == "yes, for --draft mtp"


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["show", "no-such-model"]) == 1
    assert "There is no file, folder or known model 'no-such-model'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "text"),
    [(999, "999"), (1_500_000, "1.5 million"), (30_532_122_624, "30.53 billion")],
)
def test_parameters_are_counted_as_people_do(number: int, text: str) -> None:
    assert counted_parameters(number) == text
