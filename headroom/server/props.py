"""GET /props: describes the served model and its default settings, as llama.cpp's server does."""

from typing import Any

from fastapi import APIRouter, Request

from headroom import __version__
from headroom.server.service import Service

router = APIRouter()


@router.get("/props", response_model=None)
async def props(request: Request) -> dict[str, Any]:
    """Describe a model; fields that llama.cpp has, too, have its names."""
    service: Service = request.app.state.service
    llm = await service.model(request.query_params.get("model"))
    settings, used = llm.plan.settings, llm.engine.stats().memory
    return {
        "default_generation_settings": {
            "n_ctx": llm.context,
            "params": dict(llm.default_sampling),
            "source": llm.sampling_defaults.source,
        },
        "total_slots": settings.parallel,
        "model_alias": llm.name,
        "model_path": str(llm.path),
        "chat_template": None if llm.template is None else llm.template.source,
        "bos_token": llm.tokenizer.bos_token,
        "eos_token": llm.tokenizer.eos_token,
        "stop_tokens": llm.abilities.stop_tokens(),
        "reasoning": llm.abilities.reasoning_facts(),
        "tool_format": llm.tool_format.name,
        "modalities": {"vision": False, "audio": False},
        "build_info": f"headroom {__version__}",
        "runtime": {
            "device": llm.plan.devices[0].name,
            "kernels": settings.kernels,
            "k_type": settings.k_type,
            "v_type": settings.v_type,
            "chunk": settings.chunk,
            "memory_bytes": {memory.device: memory.used_bytes for memory in used},
        },
    }
