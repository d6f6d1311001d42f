"""The list of models in Anthropic's format."""

import httpx
from anthropic import Anthropic
from anthropic.types import ModelInfo

from headroom.server.anthropic_models import models_page
from tests.server.fakes import CONTEXT


def test_the_official_client_lists_and_shows_the_model(shared: httpx.Client) -> None:
    with Anthropic(base_url=str(shared.base_url), api_key="none", max_retries=0) as client:
        (model,) = client.models.list()
        assert (model.id, model.max_input_tokens) == ("fake", CONTEXT)
        assert client.models.retrieve("fake") == model
    headers = {"anthropic-version": "2023-06-01"}
    (entry,) = shared.get("/v1/models", headers=headers).json()["data"]
    ModelInfo.model_validate_json(shared.get("/v1/models/fake", headers=headers).text, strict=True)
    assert entry["type"] == "model"


def test_other_clients_get_openai_s_list(shared: httpx.Client) -> None:
    assert shared.get("/v1/models").json()["object"] == "list"
    assert shared.get("/v1/models/fake").json()["object"] == "model"


def test_an_empty_list_has_no_first_model() -> None:
    page = models_page([])
    assert (page["data"], page["first_id"], page["last_id"]) == ([], None, None)
