"""What benches that load one engine begin with: their options, checked before torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specpool.cli.options import checks
from specpool.cli.options.groups import ModelOptions, PlaceOptions, loading_of
from specpool.cli.options.shapes import shape_of
from specpool.cli.results import check_plot


def checked_loading(
    *, target: str, draft: str | None, shape: str | None, place: PlaceOptions, plot: Path | None
) -> dict[str, Any]:
    """Check the options, set torch up, and return the arguments of `Engine.from_pretrained`.

    Raises:
        ConfigError: an option cannot work.
    """
    checks.check_place(device=place.device, threads=place.threads)
    if plot is not None:
        check_plot(plot)
    models = ModelOptions(target=target, draft=None if draft is None else [draft])
    options = {"shape": shape_of(shape)}
    loading = loading_of(models, place, options)
    checks.check_engine_config(models.drafts(), options)
    checks.check_models(target, models.drafts())
    checks.start_torch(place.threads)
    return loading
