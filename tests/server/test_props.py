"""GET /props: the model and its defaults."""

from pathlib import Path

import httpx

from headroom import LLM
from headroom.options import Options
from tests.server.fakes import serving


def test_the_model_and_the_settings_for_silent_clients_are_shown(tiny_path: Path) -> None:
    with (
        LLM(str(tiny_path), context=64, parallel=2, threads=1) as llm,
        serving(llm, Options(port=0)) as server,
    ):
        shown = httpx.get(server.address + "/props").json()
        assert shown["default_generation_settings"] == {
            "n_ctx": 64,
            "params": {"temperature": 0.2, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1},
            "source": "headroom's own for models below 1B parameters",
        }
        assert shown["total_slots"] == 2
        assert Path(shown["model_path"]).is_relative_to(tiny_path)
        assert shown["chat_template"] == llm.template.source if llm.template else None
        assert shown["reasoning"] == {"supported": False}
        assert shown["stop_tokens"] == ["<|end|>"]
        assert shown["runtime"]["device"] == "cpu"
