"""The model list in both dialects: vLLM lists its models in OpenAI's form only, and has no route for one of them.

Guarantees: the list is vLLM's own; a client that names an Anthropic version gets Anthropic's form of it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

router = APIRouter()


@router.get("/v1/models")
async def listed(request: Request) -> JSONResponse:
    models = await known(request)
    if not anthropic(request):
        return JSONResponse({"object": "list", "data": models})
    ids = [model["id"] for model in models]
    return JSONResponse({"data": models, "has_more": False, "first_id": ids[0], "last_id": ids[-1]})


@router.get("/v1/models/{model_id:path}")
async def one(model_id: str, request: Request) -> JSONResponse:
    for model in await known(request):
        if model["id"] == model_id:
            return JSONResponse(model)
    return JSONResponse({"error": {"message": f"The model `{model_id}` does not exist.", "param": "model"}}, 404)


async def known(request: Request) -> list[dict[str, Any]]:
    models = (await request.app.state.openai_serving_models.show_available_models()).model_dump()["data"]
    return [anthropic_form(model) for model in models] if anthropic(request) else models


def anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def anthropic_form(model: dict[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(model["created"], UTC).isoformat()
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created,
        "max_input_tokens": model["max_model_len"],
    }


def put_first(app: FastAPI) -> None:
    """Adds the routes before those of vLLM that they stand for."""
    app.router.routes[:0] = router.routes
