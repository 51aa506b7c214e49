"""The server that is measured, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import httpx2

from server.loadtest.client import ServerError
from server.loadtest.workload import Arm


@dataclass(frozen=True, slots=True)
class Target:
    """None is what a server does not tell."""

    model: str
    window: int | None
    device: str | None
    dtype: str | None
    version: str | None
    arms: tuple[Arm, ...]

    @classmethod
    def at(cls, url: str, api_key: str | None = None) -> Target:
        """Raises ServerError where no models are served."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        with httpx2.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as http:
            try:
                reply = http.get("/v1/models").raise_for_status()
                card = reply.json()["data"][0]
                model, window = str(card["id"]), card.get("max_model_len")
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                raise ServerError(f"{url}: {error}") from error
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ServerError(f"{url}/v1/models: not a list of models") from error
            cache, version = _answer(http, "/v1/cache"), _answer(http, "/version")
            # A server may take the field and ignore it; one that does as it says documents it.
            knows = "use_cache" in str(_answer(http, "/openapi.json"))
        return cls(
            model=model,
            window=None if window is None else int(window),
            device=cache.get("device"),
            dtype=cache.get("dtype"),
            version=version.get("version"),
            arms=(Arm.CACHED, Arm.UNCACHED) if knows else (Arm.AS_SERVED,),
        )

    def alone(self, arm: Arm) -> Target:
        """With one arm only. Raises ServerError where it is not known."""
        if arm not in self.arms:
            raise ServerError("the server does not know use_cache, so it has no such arm")
        return replace(self, arms=(arm,))


def _answer(http: httpx2.Client, path: str) -> dict[str, Any]:
    """An object that not every server has; else an empty one."""
    try:
        answer = http.get(path).raise_for_status().json()
    except (httpx2.HTTPError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}
