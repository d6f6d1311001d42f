"""GET /plan: the memory of a model, as the planner wrote it and as the engine uses it."""

from pathlib import Path

import httpx
import pytest

from headroom import LLM
from headroom.options import Options
from headroom.plan.show.report import plan_json
from headroom.server.shelf import Shelf
from tests.server.fakes import serving

OPTIONS = Options(port=0, context=64, parallel=2, threads=1)


def test_the_plan_is_the_planners_and_says_what_is_in_use(tiny_path: Path) -> None:
    with (
        LLM(str(tiny_path), context=64, parallel=2, threads=1) as llm,
        serving(llm, OPTIONS) as server,
    ):
        shown = httpx.get(server.address + "/plan").json()
        assert shown.pop("name") == llm.name
        in_use = shown.pop("in_use")
        assert shown == plan_json(llm.plan)
        (memory,) = llm.engine.stats().memory
        assert in_use == {
            "memory": [
                {
                    "device": "cpu",
                    "planned_bytes": memory.planned_bytes,
                    "used_bytes": memory.used_bytes,
                }
            ],
            "cache_pages": llm.plan.settings.pages,
            "cache_pages_used": 0,
            "requests_running": 0,
            "requests_waiting": 0,
        }


def test_a_model_is_not_loaded_for_its_plan(tiny_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    models = {"one": tiny_path, "two": tiny_path, "broken": broken}
    with Shelf.of_files(models, OPTIONS) as shelf, serving(shelf, OPTIONS) as server:
        shown = httpx.get(server.address + "/plan", params={"model": "two"}).json()
        assert (shown["name"], shown["in_use"]) == ("two", None)
        assert shown["settings"]["context"] == 64
        refused = httpx.get(server.address + "/plan", params={"model": "broken"})
        assert refused.status_code == 500
        assert refused.json()["error"]["code"] == "model_not_loaded"
        unknown = httpx.get(server.address + "/plan", params={"model": "three"})
        assert unknown.status_code == 404
        assert not any(shelved.llm for shelved in shelf.models)


@pytest.mark.parametrize("params", [{}, {"model": "only"}])
def test_an_only_model_has_no_plan_before_its_first_load(
    tiny_path: Path, params: dict[str, str]
) -> None:
    with Shelf.of_files({"only": tiny_path}, OPTIONS) as shelf, serving(shelf, OPTIONS) as server:
        refused = httpx.get(server.address + "/plan", params=params)
        assert refused.status_code == 503
        assert "before it is first loaded" in refused.json()["error"]["message"]
