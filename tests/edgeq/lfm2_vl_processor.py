"""transformers' processor of pictures for LFM2-VL, which is there for torchvision alone: with Pillow in place of that."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from transformers import image_processing_backends
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
with patch.dict(sys.modules, {name: ModuleType(name) for name in NAMES}):
    sys.modules[NAMES[-1]].functional = None  # type: ignore[attr-defined]
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

TEXTS = {"image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
TEXTS |= {"image_thumbnail_token": "<|img_thumbnail|>"}
KEYS = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "downsample_factor", "do_image_splitting",
        "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens", "max_image_tokens", "encoder_patch_size", "tile_size",
        "max_pixels_tolerance", "do_pad", "resample", "do_resize")  # fmt: skip


def processor() -> Any:
    """One without its initializer, which asks for torchvision."""
    return object.__new__(Lfm2VlImageProcessor)


def processed(settings: dict[str, Any], pictures: list[Image.Image]) -> dict[str, Any]:
    """Its pixels, shapes and masks, and rows, columns and sizes."""
    given = {key: settings.get(key, getattr(Lfm2VlImageProcessor, key)) for key in KEYS}
    # One by one: it puts all pictures of a size together, and gives the same of each.
    images = [torch.from_numpy(np.array(picture.convert("RGB"))).movedim(-1, 0) for picture in pictures]
    backend = image_processing_backends.TorchvisionBackend
    with patch.object(backend, "resize", _resize), patch.object(backend, "rescale_and_normalize", _normalized):
        found = processor()._preprocess(images, return_row_col_info=True, return_tensors=None, disable_grouping=True, **given)
    return dict(found)


def shown(settings: dict[str, Any], found: dict[str, Any], index: int, image: str) -> str:
    """What stands in a text for a picture; `image`: the image token."""
    names = SimpleNamespace(image_token=image, image_processor=SimpleNamespace(**settings), **TEXTS)
    for name in ("_compute_tokens_per_tile", "_compute_tokens_for_image"):
        setattr(names, name, getattr(Lfm2VlProcessor, name).__get__(names))
    tokens = Lfm2VlProcessor._get_image_num_tokens(names, found["image_sizes"][index], **settings)
    rows, columns = found["image_rows"][index], found["image_cols"][index]
    return Lfm2VlProcessor._build_image_tokens(names, rows, columns, *tokens, True, True)


def _resize(_: object, images: torch.Tensor, size: Any, resample: int, antialias: bool = True, **others: Any) -> torch.Tensor:
    made = [
        np.array(Image.fromarray(image.movedim(0, -1).numpy()).resize((size.width, size.height), resample)) for image in images
    ]
    return torch.from_numpy(np.stack(made)).movedim(-1, 1)


def _normalized(
    _: object, images: torch.Tensor, rescales: bool, factor: float, normalizes: bool, mean: Any, std: Any
) -> torch.Tensor:
    values = (images.double() * factor).float()
    return (values - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
