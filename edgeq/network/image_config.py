"""How a picture becomes the pixels that a vision tower was trained on: a checked record of the configuration.

The rules are those of transformers' image processors (Qwen2-VL, CLIP, SigLIP, Gemma 3, Idefics3, GOT-OCR2), whose settings are
in a checkpoint's preprocessor_config.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from edgeq.errors import FormatError, InputError, UnsupportedError
from edgeq.pictures.tiling import MAX_TILED_EDGE, Tiling

TILED = ("tiles", "aspect")
"""Sizings with tiles."""
SIZINGS = ("factor", "crop", "fixed", *TILED)
RESAMPLINGS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""By Pillow's numbers, which preprocessor_config.json has."""
MAX_PIXELS = 1 << 26
"""The most of a picture as the tower reads it: Qwen3-VL's limit is 2^24."""
MAX_EDGE = 1 << 13
MAX_ASPECT = 200
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
GEMMA = "Gemma3ImageProcessor"
"""As SigLIP's, unless it cuts long pictures ("pan and scan")."""
QWEN, CLIP, SIGLIP = "Qwen2VLImageProcessor", "CLIPImageProcessor", "SiglipImageProcessor"
PI0 = "PI0ImageProcessor"
"""As SigLIP's for pictures as wide as high; others it pads, which a policy refuses."""
LLAVA = "LlavaImageProcessor"
"""As CLIP's, unless it pads."""
IDEFICS = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
"""Which cut into tiles, and pad nothing: all tiles have one size."""
MAX_TILES_A_SIDE = 32
GOT = "GotOcr2ImageProcessor"
"""InternVL's, which always cuts into tiles with it."""
MAX_TILES = 64
"""Tiles of a picture that is cut by its aspect: a search goes through their pairs of rows and columns."""
DEFAULTS: dict[str, dict[str, Any]] = {
    QWEN: {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
    CLIP: {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": {"shortest_edge": 224}, "crop_size": 224},
    LLAVA: {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": {"shortest_edge": 224}, "crop_size": 224},
    SIGLIP: {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3, "size": {"height": 224, "width": 224}},
    PI0: {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3, "size": {"max_height": 224, "max_width": 224}, "do_pad": True},
    GEMMA: {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3, "size": {"height": 224, "width": 224}, "resample": 2},
    GOT: {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": {"height": 384, "width": 384}}
    | {"min_patches": 1, "max_patches": 12},
    **dict.fromkeys(
        IDEFICS,
        {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3, "resample": 1, "do_pad": True}
        | {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
    ),
}
"""Values of keys that a preprocessor_config.json may leave out, by `image_processor_type`."""
IGNORED = ("processor_class", "image_processor_type", "feature_extractor_type", "_valid_processor_keys", "do_convert_rgb",
           "auto_map", "data_format", "input_data_format", "device", "return_tensors", "default_to_square",
           "disable_grouping", "num_frames", "max_frames", "min_frames", "fps", "video_sampling",
           "return_row_col_info", "crop_to_patches", "image_seq_length", "pan_and_scan_min_crop_size",
           "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate")  # fmt: skip
"""Keys without influence on the pixels of a picture: it is always converted to RGB."""
NEUTRAL = {"do_resize": True, "do_pad": False, "pad_size": None, "use_square_size": False, "do_pan_and_scan": False}
SIZES = {"patch_size", "temporal_patch_size", "merge_size"}
NEWER_FIELDS = ("tile", "longest_edge", "min_tiles", "max_tiles")


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """pixel = (byte * rescale - mean) / std, of a picture that was resized before.

    sizing      "factor": height and width become multiples of a factor (of `size_of`), their product from min_pixels to
                max_pixels, in about the same proportion (Qwen2-VL); "crop": the shorter edge becomes `shortest_edge`, then
                height x width are cut out of the middle; "fixed": height x width, whatever the proportion; "tiles": the longer
                edge becomes `longest_edge`, then both become multiples of `tile`, and what is larger than one tile is cut into
                tiles, after which the whole picture comes as one (Idefics3); "aspect": it is resized to the rows and columns of
                tiles, from min_tiles to max_tiles together, whose proportion is nearest to its own, and cut into them, after
                which the whole picture comes as one where they are several (InternVL)
    resampling  the filter, by Pillow's name
    mean, std   of red, green and blue

    FormatError: a value of the wrong type or out of range.  UnsupportedError: an unknown kind.
    """

    sizing: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resampling: str = "bicubic"
    rescale: float = 1 / 255
    min_pixels: int = 0
    max_pixels: int = 0
    shortest_edge: int = 0
    height: int = 0
    width: int = 0
    tile: int = 0
    longest_edge: int = 0
    min_tiles: int = 0
    max_tiles: int = 0

    def __post_init__(self) -> None:
        for name, kinds in (("sizing", SIZINGS), ("resampling", RESAMPLINGS)):
            if (value := getattr(self, name)) not in kinds:
                raise UnsupportedError(f"image {name} {value!r:.80} is not supported; supported: {', '.join(kinds)}")
        pixels, edge, tiles = ("min_pixels", "max_pixels"), ("height", "width"), ("tile", "longest_edge")
        aspect = ("tile", "min_tiles", "max_tiles")
        used = {"factor": pixels, "crop": (*edge, "shortest_edge"), "fixed": edge, "tiles": tiles, "aspect": aspect}[
            self.sizing
        ]
        for name in (*pixels, *edge, "shortest_edge", *tiles, *aspect[1:]):
            most = (MAX_PIXELS if name in pixels else MAX_TILES if name in aspect[1:] else MAX_EDGE) if name in used else 0
            value = getattr(self, name)
            if type(value) is not int or not min(1, most) <= value <= most:
                raise FormatError(f"image {name} is {value!r}; expected an integer from {min(1, most)} to {most}")
        for what in ("pixels", "tiles"):
            least, most = (getattr(self, f"{end}_{what}") for end in ("min", "max"))
            if least > most:
                raise FormatError(f"image min_{what} is {least}, above max_{what}, {most}")
        if self.sizing == "crop" and self.shortest_edge < max(self.height, self.width):
            raise UnsupportedError(
                f"images cropped to {self.height} x {self.width} after their shorter edge became {self.shortest_edge}, with a "
                "border around them, are not supported"
            )
        if self.tile**2 * self.max_tiles > MAX_PIXELS:
            raise FormatError(
                f"image has {self.max_tiles} tiles of {self.tile} x {self.tile} pixels; expected at most {MAX_PIXELS} pixels"
            )
        if self.sizing == "tiles" and self.longest_edge > MAX_TILES_A_SIDE * self.tile:
            raise FormatError(
                f"image longest_edge is {self.longest_edge}; expected at most {MAX_TILES_A_SIDE} times tile, {self.tile}"
            )
        _number("rescale", self.rescale, 1e-6, 1e3)
        for name, least in (("mean", -1e3), ("std", 1e-6)):
            numbers = getattr(self, name)
            if type(numbers) is not tuple or len(numbers) != 3:
                raise FormatError(f"image {name} is {numbers!r:.80}; expected three numbers")
            for number in numbers:
                _number(name, number, least, 1e3)

    def most_tokens(self, factor: int) -> int:
        """Tokens of `factor` x `factor` pixels that the largest picture has, by the file's own limits."""
        if self.sizing in TILED:
            tiles = math.prod(self.most_tiles)
            return (tiles + (tiles > 1)) * self.piece_tokens(factor)
        if self.sizing != "factor":
            return self.piece_tokens(factor)
        most = max(1, self.max_pixels // factor**2)
        # Of a long narrow one the shorter edge is not rounded to zero.
        return max(most, math.isqrt(MAX_ASPECT * most))

    def check_token(self, factor: int) -> None:
        """FormatError: no picture has a token of `factor` x `factor` pixels."""
        if not self.most_tokens(factor):
            height, width = self.height or self.tile, self.width or self.tile
            raise FormatError(f"config vision: an image of {height} x {width} pixels has no token of {factor} x {factor}")

    @property
    def most_tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles of the picture that has the most of both; 0, 0: none is cut."""
        if self.sizing == "aspect":
            return self.max_tiles, 1
        edge = min(self.longest_edge, MAX_TILED_EDGE)
        # The other edge is rounded up to an even number.
        side = -(-(edge + edge % 2) // self.tile) if self.sizing == "tiles" else 0
        return side, side

    def piece_tokens(self, factor: int) -> int:
        """Tokens of a picture, or of a tile, where all have one size; 0: they have not."""
        return (self.tile // factor) ** 2 if self.tile else (self.height // factor) * (self.width // factor)

    def tiling(self, height: int, width: int, factor: int, most_tokens: int) -> Tiling:
        """How a picture is cut into tiles; `factor`, `most_tokens`: as of `size_of`.

        InputError: as `size_of`, or one tile has more tokens than may be.
        """
        _check_shape(height, width)
        each = self.piece_tokens(factor)
        for found in self._tilings(height, width):
            if found.pieces * each <= most_tokens:
                return found
        raise InputError(f"every picture has at least {each} tokens for this model, and {most_tokens} are allowed")

    def _tilings(self, height: int, width: int) -> Iterator[Tiling]:
        """The processor's, and then those that fewer tiles would give."""
        if self.sizing == "aspect":
            for most in range(self.max_tiles, 0, -1):
                yield Tiling.nearest(height, width, self.tile, min(self.min_tiles, most), most)
        else:
            for side in range(-(-self.longest_edge // self.tile), 0, -1):
                yield Tiling.of(height, width, min(self.longest_edge, side * self.tile), self.tile)

    def size_of(self, height: int, width: int, factor: int, most_tokens: int) -> tuple[int, int]:
        """Height and width to which a picture is resized, before it is cropped.

        factor       pixels of a token's edge;  most_tokens: of the picture, where `sizing` leaves a choice

        InputError: it is more than 200 times as long as it is wide, or has more tokens than may be.
        """
        _check_shape(height, width)
        if self.sizing == "factor":
            return _multiple(height, width, factor, self.min_pixels, self.max_pixels, most_tokens)
        tokens = self.most_tokens(factor)
        if tokens > most_tokens:
            raise InputError(f"every picture has {tokens} tokens for this model, and {most_tokens} are allowed")
        if self.sizing == "fixed":
            return self.height, self.width
        short, long = self.shortest_edge, self.shortest_edge * max(height, width) // min(height, width)
        return (long, short) if width <= height else (short, long)

    def record(self) -> dict[str, Any]:
        """What JSON holds of it; fields that came after the first files only where they are set."""
        return {key: value for key, value in asdict(self).items() if key not in NEWER_FIELDS or value}

    @classmethod
    def from_json(cls, data: Any, where: str) -> ImageConfig:
        """FormatError, UnsupportedError: a key or a value that cannot be one."""
        if not isinstance(data, dict):
            raise FormatError(f"{where} is not a JSON object")
        if unknown := sorted(set(data) - {f.name for f in fields(cls)}):
            raise UnsupportedError(f"{where} has unknown keys {', '.join(unknown)}; this file needs a newer edgeq")
        if missing := sorted({"sizing", "mean", "std"} - set(data)):
            raise FormatError(f"{where} lacks {', '.join(missing)}")
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**values)

    @classmethod
    def from_preprocessor(cls, data: Any, sizes: Mapping[str, int]) -> ImageConfig:
        """The settings of a preprocessor_config.json.

        sizes   `patch_size`, `temporal_patch_size` and `merge_size` of the vision tower; where the file has them too they must
                be the same

        UnsupportedError: another processor, or a key or a value that is not supported.  FormatError: not sound.
        """
        if not isinstance(data, dict):
            raise FormatError("preprocessor_config.json is not a JSON object")
        found = data.get("image_processor_type", data.get("feature_extractor_type"))
        kind = str(found).removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
        if kind not in DEFAULTS:
            raise UnsupportedError(
                f"preprocessor_config.json: image_processor_type {found!r:.80} is not supported; supported: "
                f"{', '.join(DEFAULTS)}"
            )
        given = {**DEFAULTS[kind], **{key: value for key, value in data.items() if key not in IGNORED and value is not None}}
        neutral = NEUTRAL | ({"do_pad": True, "do_image_splitting": True} if kind in IDEFICS else {})
        if kind == PI0:
            size = given["size"] if isinstance(given["size"], dict) else {}
            neutral |= {"do_pad": True, "pad_size": given.get("pad_size")}
            given["size"] = {key: size.get(f"max_{key}") for key in ("height", "width")}
        for key, expected in [*neutral.items(), *((key, sizes.get(key, 1)) for key in sorted(SIZES))]:
            if (value := given.pop(key, expected)) != expected:
                raise UnsupportedError(f"preprocessor_config.json: {key} {value!r:.80} is not supported; only {expected!r} is")
        rescale, normalize = given.pop("do_rescale", True), given.pop("do_normalize", True)
        factor, mean, std = given.pop("rescale_factor", 1 / 255), given.pop("image_mean"), given.pop("image_std")
        number = given.pop("resample", 3)
        if type(number) is not int or not 0 <= number < len(RESAMPLINGS):
            raise UnsupportedError(f"preprocessor_config.json: resample {number!r:.80} is not supported; expected 0 to 5")
        size = _sizes(kind, given)
        if given:
            raise UnsupportedError(f"preprocessor_config.json: keys {', '.join(sorted(map(str, given)))} are not supported")
        return cls(
            mean=_three(mean) if normalize else (0.0,) * 3,
            std=_three(std) if normalize else (1.0,) * 3,
            resampling=RESAMPLINGS[number],
            rescale=factor if rescale else 1.0,
            **size,
        )


def _sizes(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """Fields that say what size a picture gets, from keys that are removed from `given`."""
    size = given.pop("size")
    if kind in IDEFICS:
        edges = {"size": size, "max_image_size": given.pop("max_image_size")}
        for key, value in edges.items():
            if not isinstance(value, dict) or set(value) != {"longest_edge"}:
                raise UnsupportedError(f"preprocessor_config.json: {key} {value!r:.80} is not supported; expected longest_edge")
        longest, tile = (value["longest_edge"] for value in edges.values())
        return {"sizing": "tiles", "longest_edge": longest, "tile": tile}
    if kind == QWEN:
        # Files before transformers 5 have the limits outside `size`.
        edges = size if isinstance(size, dict) else {}
        least, most = (edges.get(key, DEFAULTS[QWEN]["size"][key]) for key in ("shortest_edge", "longest_edge"))
        least = given.pop("min_pixels", edges.get("min_pixels", least))
        most = given.pop("max_pixels", edges.get("max_pixels", most))
        return {"sizing": "factor", "min_pixels": least, "max_pixels": most}
    if kind == GOT:
        # Keys without use here that its published files have.
        for key in ("crop_size", "do_center_crop"):
            if given.get(key) is None:
                given.pop(key, None)
        height, width = _edges("size", size)
        if height != width:
            raise UnsupportedError(f"preprocessor_config.json: size {height} x {width} is not supported; expected a square")
        least, most = given.pop("min_patches"), given.pop("max_patches")
        return {"sizing": "aspect", "tile": height, "min_tiles": least, "max_tiles": most}
    crop, crops = given.pop("crop_size", None), given.pop("do_center_crop", kind in (CLIP, LLAVA))
    if not crops:
        height, width = _edges("size", size)
        return {"sizing": "fixed", "height": height, "width": width}
    edge = size.get("shortest_edge") if isinstance(size, dict) and set(size) == {"shortest_edge"} else size
    height, width = _edges("crop_size", crop)
    return {"sizing": "crop", "shortest_edge": edge, "height": height, "width": width}


def _check_shape(height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise InputError(f"{width} x {height} pixels: more than {MAX_ASPECT} times as long as wide; crop it")


def _edges(key: str, size: Any) -> tuple[Any, Any]:
    """Height and width of {"height": h, "width": w}, or of a number."""
    if isinstance(size, dict) and set(size) == {"height", "width"}:
        return size["height"], size["width"]
    if type(size) is int:
        return size, size
    raise UnsupportedError(f"preprocessor_config.json: {key} {size!r:.80} is not supported; expected height and width")


def _three(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,) * 3


def _multiple(height: int, width: int, factor: int, least: int, most: int, most_tokens: int) -> tuple[int, int]:
    """The rule of Qwen2-VL's processor, but never more than `most_tokens`."""
    most = min(most, most_tokens * factor**2)
    least = min(least, most)
    # Python's `round`, to even, is that of the processor.
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > most:
        beta = math.sqrt((height * width) / most)
        rows = max(1, math.floor(height / beta / factor))
        columns = max(1, math.floor(width / beta / factor))
    elif rows * columns * factor**2 < least:
        beta = math.sqrt(least / (height * width))
        rows, columns = math.ceil(height * beta / factor), math.ceil(width * beta / factor)
    rows, columns = max(1, rows), max(1, columns)
    if rows * columns > most_tokens:
        # A picture so long and narrow that one row of tokens has too many, or one enlarged to the least size.
        if rows > columns:
            rows = max(1, most_tokens // columns)
        else:
            columns = max(1, most_tokens // rows)
    return rows * factor, columns * factor


def _number(name: str, value: object, least: float, most: float) -> None:
    """FormatError: not a number from `least` to `most`.  NaN is none."""
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise FormatError(f"image {name} is {value!r:.80}; expected a number from {least:g} to {most:g}")
