"""The vision tower and its projector: pixels of pictures become vectors that rows of the decoder bring in place of tokens.

Blocks are those of the decoder (decoder.py); a patch sees all patches of its frame and none of another.  A page of the tower's
cache holds the keys and values of one layer: each layer overwrites those of the layer before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError, ResourceError
from edgeq.format.codec import from_bf16
from edgeq.format.container import ModelFile
from edgeq.format.manifest import projectors
from edgeq.format.metadata import Metadata
from edgeq.format.records import KvCodec
from edgeq.network.config import VisionConfig
from edgeq.pictures.frames import FRAME, WINDOW, Frame, Grid, table_positions
from edgeq.runtime.network.block_parts import norm
from edgeq.runtime.network.decoder import attention_block, buffer_widths, cache_of, mlp_block
from edgeq.targets.family_operations import RowMean, ScaleShift
from edgeq.targets.graph import (
    Activate,
    Function,
    Graph,
    InjectVectors,
    LayerNorm,
    Linear,
    Operation,
    PositionAdd,
    RmsNorm,
    Scale,
    Select,
)
from edgeq.targets.rows import PAGE, VISION, Rows
from edgeq.targets.target import Beside, OnProgress, Options, Target, no_progress

OnPatches = Callable[[int, int], None]
"""Progress callback of a tower: (patches done, total patches)."""


def tower(metadata: Metadata) -> Graph:
    """The graph of a file's vision tower: rows bring the pixels of a patch, the result are features."""
    config = vision_of(metadata)
    operations: list[Operation] = [*patches(metadata, config)]
    for layer in range(config.num_hidden_layers):
        span = WINDOW if layer in config.window_layers else FRAME
        operations += attention_block(metadata, config, layer, cache=0, span=span)
        operations += mlp_block(metadata, config, layer)
        if layer in config.tap_layers:
            operations.append(Scale(layer, "x", 1.0, tap(config.tap_layers.index(layer))))
    operations += projection(metadata, config)
    taps = range(len(config.tap_layers))
    return Graph(
        buffers=buffer_widths(config)
        | {
            "pixels": config.patch_width,
            "joined": config.joined_size,
            **({"clipped": config.hidden_size} if config.clips else {}),
            **({"token": config.token_size} if config.averaged else {}),
            **(dict.fromkeys(("project", "projected"), config.project_size) if config.project_size else {}),
            "features": config.feature_size,
            **{tap(index): config.hidden_size for index in taps},
            **{f"joined {tap(index)}": config.joined_size for index in taps},
        },
        operations=tuple(operations),
        result="features",
        cache=(cache_of(config, 0),),
    )


def tap(index: int) -> str:
    """The buffer that keeps the residual stream after a tapped layer."""
    return f"tap {index}"


def patches(metadata: Metadata, config: VisionConfig) -> Iterator[Operation]:
    """x = patch(pixels), with learned positions added and normed where the tower has them."""
    yield InjectVectors(-1, "pixels")
    yield Linear(-1, "pixels", metadata.linears["vision.patch"], "x")
    if config.placed_by_grid:
        yield InjectVectors(-1, "x", config.patch_width, add=True)
    elif config.position_rows:
        yield PositionAdd(-1, "x", metadata.arrays["vision.positions"])
    if config.pre_norm:
        yield norm(metadata, config, -1, "x", "vision.pre_norm", "x")


def projection(metadata: Metadata, config: VisionConfig) -> Iterator[Operation]:
    """features = project.1(act(project.0(joined))), or project.1(joined): each joins neighbouring patches, whose norm comes
    before or after, or takes the mean of them, which is normed again.

    Those of the last layer, then side by side with them those of the taps.
    """
    linears, last = metadata.linears, "x"
    if config.project_norm == "patch":
        last = "normed"
        yield norm(metadata, config, -1, "x", "vision.norm", last)
    taps = [tap(index) for index in range(len(config.tap_layers))]
    outs = ("joined", *(f"joined {name}" for name in taps))
    yield Select(-1, (last, *taps), outs, config.merge**2)
    for place, (joined, (p, kind)) in enumerate(zip(outs, projectors(config), strict=True)):
        if config.project_eps:
            name = "vision.joined_norm" if kind == "patch" else f"{p}norm"
            gain, bias = (metadata.arrays[f"{name}{end}"] for end in ("", "_bias"))
            yield LayerNorm(-1, joined, gain, bias, config.project_eps, joined)
        elif kind == "joined":
            yield norm(metadata, config, -1, joined, f"{p}norm", joined)
        last = joined
        if config.averaged:
            last = "token"
            yield RowMean(-1, joined, config.merge**2, last)
            if config.mean_scaled:
                yield ScaleShift(-1, last, *(metadata.arrays[name] for name in config.mean_arrays[:2]))
            yield RmsNorm(-1, last, metadata.arrays["vision.mean_norm"], config.rms_norm_eps, last)
        if config.project_size:
            yield Linear(-1, last, linears[f"{p}project.0"], "project")
            last = "projected"
            yield Activate(-1, "project", config.project_size, last, cast(Function, config.project_act), gated=False)
        yield Linear(-1, last, linears[f"{p}project.1"], "features", place * config.out_hidden_size)


def tower_options(file: ModelFile, options: Options, patches: int) -> Options:
    """What a tower is compiled for beside a decoder of these options: a run has all `patches` of a frame, in whole tokens."""
    config = vision_of(file.metadata)
    return replace(
        options,
        mode=file.metadata.vision_mode or options.mode,
        max_rows=patches + config.class_row,
        max_logits=patches // config.merge**2 + config.class_feature,
        kv=KvCodec(),
        requantize=False,
    )


def own_bytes(file: ModelFile, graph: Graph, options: Options) -> int:
    """Bytes of a tower's weights, and of the pages of its keys and values."""
    return file.metadata.vision_bytes() + -(-options.max_rows // PAGE) * graph.page_bytes(options.kv)


def tower_beside(file: ModelFile, options: Options) -> Beside:
    """The tower of a model that always sees, beside a decoder of these options, for the largest picture that it takes."""
    config, graph = vision_of(file.metadata), tower(file.metadata)
    options = tower_options(file, options, config.piece_tokens(config.most_tokens) * config.merge**2)
    return Beside(graph, options, own_bytes(file, graph, options), shares=False)


def vision_of(metadata: Metadata) -> VisionConfig:
    """InputError: the model of the file reads text alone."""
    if metadata.config.vision is None:
        raise InputError(f"this model ({metadata.config.model_type}) reads text alone; give it no images")
    return metadata.config.vision


class Tower:
    """The compiled vision tower of a file.  One caller at a time.

    most_patches   of a frame
    """

    def __init__(
        self, file: ModelFile, target: Target, options: Options, most_patches: int, on_progress: OnProgress = no_progress
    ) -> None:
        """options       the decoder's; its mode holds where the file has none for the tower
        most_patches     of a frame, in whole tokens

        InputError: the file has no tower.  ResourceError: its buffers do not fit in memory.
        """
        self.config = vision_of(file.metadata)
        together = self.config.merge**2
        self.most_patches = most_patches // together * together
        graph, rows = tower(file.metadata), self.most_patches + self.config.class_row
        self._table = position_table(file, self.most_patches) if self.config.placed_by_grid else None
        options = tower_options(file, options, self.most_patches)
        room, pages = target.room(graph, file, options), -(-rows // PAGE)
        needed = room.needed + own_bytes(file, graph, options)
        if needed > room.available:
            raise ResourceError(
                f"pictures of {options.max_logits} tokens need {needed >> 20:,} MiB, weights included; "
                f"{room.available >> 20:,} are available; allow fewer tokens a picture"
            )
        self.program = target.compile(graph, file, options, on_progress)
        self._pages = [self.program.new_page() for _ in range(pages)]

    def encode(
        self, pixels: NDArray[np.float32], grids: Sequence[Grid], on_progress: OnPatches | None = None
    ) -> NDArray[np.float32]:
        """The features float32 [tokens, out_hidden_size] of pictures, one after another.

        pixels   float32 [patches, patch_width] of all pictures, in the order of VisionConfig
        grids    of each picture

        ValueError: pixels and grids do not agree, or a frame is larger than this tower was compiled for.
        """
        config, total = self.config, sum(t * h * w for t, h, w in grids)
        if pixels.shape != (total, config.patch_width):
            raise ValueError(f"pixels {pixels.shape} for pictures of {total} patches of {config.patch_width}")
        features, done = [], 0
        for grid in grids:
            frames, rows, columns = grid
            count = rows * columns
            if rows % config.merge or columns % config.merge or not 0 < count <= self.most_patches:
                raise ValueError(f"a picture of {rows} x {columns} patches; at most {self.most_patches}, in whole tokens")
            if not config.fits(count):
                raise ValueError(f"a picture of {rows} x {columns} patches; all have {config.position_rows - config.class_row}")
            frame = Frame.of(grid, config)
            for _ in range(frames):
                features.append(self.program.run(self._rows(pixels[done : done + count], frame, grid)).copy())
                done += count
                if on_progress is not None:
                    on_progress(done, total)
        return np.concatenate(features) if features else np.zeros((0, config.feature_size), np.float32)

    def _rows(self, pixels: NDArray[np.float32], frame: Frame, grid: Grid) -> Rows:
        """Rows whose result are the features in the order of the picture; a class row comes before them."""
        classes = int(self.config.class_row)
        count = classes + len(pixels)
        slots, spans = np.arange(count, dtype=np.int32), frame.spans
        if classes:
            # It brings zeros: what it is, the table of positions adds.
            pixels = np.concatenate([np.zeros((1, pixels.shape[1]), np.float32), pixels])
            spans = np.zeros((len(frame.spans), 2, count), np.int32)
            spans[:, 1] = count
        if self._table is not None:
            pixels = np.concatenate([pixels, table_positions(self._table, grid, self.config)], axis=1)
        return Rows(
            tokens=np.zeros(count, np.int32),
            positions=slots[None] if self.config.rope.kind == "learned" else frame.places,
            slots=slots,
            sessions=np.zeros(count, np.int32),
            pages=[self._pages],
            wanted=slots[classes - self.config.class_feature :] if classes else np.argsort(frame.order).astype(np.int32),
            vectors=pixels,
            vector_of=slots if classes else frame.order,
            modality=np.full(count, VISION, np.uint8),
            spans=spans,
        )


def position_table(file: ModelFile, most_patches: int) -> NDArray[np.float32]:
    """The learned positions of a tower, float32 [rows, hidden_size]: those that a picture of `most_patches` can have."""
    ref, config = file.metadata.arrays["vision.positions"], vision_of(file.metadata)
    stored = file.array(ref)
    if config.positions_by_axis:
        # A picture of one row of tokens is the longest.
        half, longest = ref.shape[0] // 2, most_patches // config.merge
        stored = np.concatenate([stored[:longest], stored[half : half + longest]])
    values = from_bf16(stored) if ref.dtype == "bf16" else stored.astype(np.float32)
    return np.asarray(values, np.float32)
