"""What the network is: sizes, norms, positions.  One frozen record, made by a converter family, stored in the file as JSON.

Field names are those of Hugging Face's config.json.  A file from a stranger goes through the same `from_json` as one of ours:
every key is known, every value in range, before anything is allocated from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.draft_stack import DraftStack, check_draft_tokens
from edgeq.network.image_config import TILED, VARYING, ImageConfig
from edgeq.network.json_records import check_flag, check_integer, check_layers, check_positive
from edgeq.network.picture_texts import PictureTexts
from edgeq.network.policy_stack import PolicyStack
from edgeq.network.pooling import Pooling
from edgeq.network.stack import MAX_SIZES, Stack
from edgeq.network.stack_json import read_stack, stack_record
from edgeq.pictures.tower_clips import Clip, LayerClips, by_part, check_clips, read_clips
from edgeq.pictures.tower_positions import check_positions
from edgeq.pictures.tower_projector import check_projector

MAX_VISION_SIZES = {
    "patch_size": 256,
    "temporal_patch_size": 16,
    "merge": 4,
    "project_size": MAX_SIZES["intermediate_size"],
    "out_hidden_size": MAX_SIZES["hidden_size"],
}
VISION_FLAGS = ("interpolated", "class_row", "class_feature", "pre_norm", "averaged", "antialiased", "positions_by_axis",
                "mean_scaled")  # fmt: skip
MAX_SEGMENTS = 2
MAX_CHANNELS = 1 << 20
"""The widest row of a tower: pixels of a patch, and patches that are joined."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig(Stack):
    """A vision tower and its projector: patches of a picture become vectors that stand in for tokens.

        x = patch(pixels) + positions ; pre_norm ; the layers, in which a patch sees all patches of its frame ; project

    image                 how a picture becomes pixels
    image_token_id        the token whose rows bring the features
    patch_size            pixels of a side of a patch;  temporal_patch_size: frames of one
    merge                 merge x merge neighbouring patches are joined into one feature
    project_norm          the norm before the projector: over every "patch", over the "joined" ones, or "none"
    project_eps           the norm over the joined is a LayerNorm with this eps, whatever norms the layers have (InternVL);
                          after a project_norm over every patch if that is set (LFM2-VL); 0: it is as theirs, or there is none
    averaged              those that are joined are not side by side in it, but their mean, which has an RMS norm of its own
                          (Gemma 3); then project_norm is "patch", or "none" (Gemma 4)
    mean_scaled           the mean is multiplied by an array, and another is added to it, before its norm (Gemma 4)
    project_size          inner channels of the projector project.1(act(project.0(joined))); 0: it is project.1(joined)
    project_act           its activation; "none" where it is one layer
    out_hidden_size       channels of a feature
    window_size           features of a side of a window: frames are cut into windows from their first feature on, those at the
                          last rows and columns perhaps smaller; 0: there are none
    window_layers         indices of layers in which a patch sees only its window, ascending (Qwen2.5-VL)
    position_rows         of a learned table that is added to the patches; 0: there is none.  The first is the class row's
    interpolated          the table is a square that is interpolated to the grid of each picture (Qwen3-VL); else it has a row
                          for each patch of the one size that pictures have
    antialiased           it is resized to the grid as a picture is, with the filter "bilinear", and nothing rotates (SigLIP 2)
    positions_by_axis     the table has an entry for every column of patches, then one for every row; a patch gets the sum of
                          its two (Gemma 4)
    class_row             a row without pixels comes before the patches, which see it (CLIP)
    class_feature         what becomes of it is the first feature; else it is dropped
    pre_norm              a norm before the first layer (CLIP)
    tap_layers            indices of layers after which the patches are also joined, normed and projected by a projector of the
                          same sizes, ascending; the results are added to the decoder's stream, the first after its first layer
                          and so on (Qwen3-VL; Meng et al. 2024, arXiv 2406.04334)
    texts                 of a prompt, beside the tokens of pictures; None: there are none
    clips                 of each layer the bounds of its linear parts, in the order of `bounded_parts`; empty: there are none
                          (Gemma 4)

    Rows of pixels are [channel, frame, row, column] of a patch, patches that are joined follow one another.
    """

    image: ImageConfig
    image_token_id: int
    patch_size: int
    temporal_patch_size: int
    merge: int
    project_norm: str
    project_size: int
    project_act: str
    out_hidden_size: int
    window_size: int = 0
    window_layers: tuple[int, ...] = ()
    position_rows: int = 0
    interpolated: bool = False
    class_row: bool = False
    class_feature: bool = False
    pre_norm: bool = False
    tap_layers: tuple[int, ...] = ()
    averaged: bool = False
    texts: PictureTexts | None = None
    project_eps: float = 0.0
    antialiased: bool = False
    positions_by_axis: bool = False
    mean_scaled: bool = False
    clips: tuple[LayerClips, ...] = ()

    prefix: ClassVar[str] = "vision."
    CHANNELS: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, limit in MAX_VISION_SIZES.items():
            check_integer(name, getattr(self, name), 0 if name == "project_size" else 1, limit)
        check_integer("window_size", self.window_size, 1 if self.window_layers else 0, MAX_CHANNELS)
        for name in ("window_layers", "tap_layers"):
            check_layers(name, getattr(self, name), self.num_hidden_layers)
        check_integer("image_token_id", self.image_token_id, 0, MAX_SIZES["vocab_size"])
        for name, width in {"patch_width": self.patch_width, "joined_size": self.joined_size}.items():
            if width > MAX_CHANNELS:
                raise FormatError(f"config vision: {name} is {width}; expected at most {MAX_CHANNELS}")
        self.image.check_token(self.token_edge)
        check_projector(self)
        for name in VISION_FLAGS:
            check_flag(name, getattr(self, name))
        check_positions(self, self._patches)
        check_clips(self.clips, self.num_hidden_layers, self.gated, self.post_norms)
        ropes = self.local_rope or self.layers_without_rope
        norms = self.parallel or self.qk_norm_kind == "rotated" or self.normed_residual != "none" or not self.pre_norms
        attention = any(self.sliding_windows) or ropes or norms or self.attention_gate or self.attention_sinks
        layers = self.state_layers or self.layer_scalars or self.num_kv_shared_layers or self.hidden_size_per_layer_input
        heads = self.global_head_dim or self.num_global_key_value_heads or self.attention_k_eq_v
        if attention or self.num_experts or layers or heads:
            raise UnsupportedError(
                "a tower with sliding windows, several ropes, experts, parallel_blocks, rotated qk norms, normed_residual, "
                "conv_layers, delta_net, ssd, attention_gate, attention_sinks, layer_scalars, attention_k_eq_v, "
                "hidden_size_per_layer_input, num_kv_shared_layers, heads of several shapes or without pre_norms is not "
                "supported"
            )

    def clips_of(self, layer: int) -> Mapping[str, Clip]:
        """The bounds of each linear part of a layer; empty: there are none."""
        return by_part(self.clips, layer, self.gated)

    def read_apart(self, layer: int, linears: Iterable[str]) -> bool:
        """Whether these linear parts, by their whole names, read the same within other bounds: then they are not one layer."""
        clips = self.clips_of(layer)
        return bool(clips) and len({clips[name.rpartition(".")[2]].inputs for name in linears}) > 1

    @property
    def placed_by_grid(self) -> bool:
        """Whether what the table adds to a patch depends on the size of its picture, or on row and column."""
        return self.interpolated or self.positions_by_axis

    @property
    def sizes_vary(self) -> bool:
        """Whether pictures differ in size."""
        return self.image.sizing in VARYING

    @property
    def tokens_vary(self) -> bool:
        """Whether pictures differ in tokens: in size, or in how many tiles they are cut into."""
        return self.image.sizing in (*VARYING, *TILED)

    def piece_tokens(self, tokens: int) -> int:
        """Tokens of a run of the tower, at most, for a picture of at most `tokens`."""
        return self.image.piece_tokens(self.token_edge) or min(tokens, self.image.largest_piece(self.token_edge))

    @property
    def _patches(self) -> int:
        """Patches of a picture, where all have one size; 0: they have not."""
        return self.image.piece_tokens(self.token_edge) * self.merge**2

    def fits(self, patches: int) -> bool:
        """Whether a picture of so many patches has positions for them."""
        return not self.position_rows or self.placed_by_grid or patches + self.class_row == self.position_rows

    @property
    def token_edge(self) -> int:
        """Pixels of a side of a token."""
        return self.patch_size * self.merge

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest picture, by the file's own limits."""
        return self.image.most_tokens(self.token_edge) + self.class_feature

    @property
    def most_text(self) -> int:
        """Characters of the texts beside the tokens of a picture, at most."""
        return sum(map(len, self.texts.before(*self.image.most_tiles))) + len(self.texts.shown) if self.texts else 0

    def token_grid(self, grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """Frames, rows and columns of the tokens of a picture whose patches have `grid`."""
        frames, rows, columns = grid
        if self.class_feature:
            return 1, 1, frames * rows * columns + 1
        return frames, rows // self.merge, columns // self.merge

    @property
    def feature_size(self) -> int:
        """Channels that the tower gives for a token: the feature, and what its taps add."""
        return self.out_hidden_size * (1 + len(self.tap_layers))

    @property
    def patch_width(self) -> int:
        """Pixels of a patch."""
        return self.CHANNELS * self.temporal_patch_size * self.patch_size**2

    @property
    def joined_size(self) -> int:
        """Channels of the patches that are joined."""
        return self.merge**2 * self.hidden_size

    @property
    def mean_arrays(self) -> tuple[str, ...]:
        """The arrays that the mean of patches goes through, in this order; none: no mean is taken."""
        scaled = ("vision.mean_scale", "vision.mean_shift") if self.mean_scaled else ()
        return (*scaled, "vision.mean_norm") if self.averaged else ()

    @property
    def token_size(self) -> int:
        """Channels of a token that the projector reads."""
        return self.hidden_size if self.averaged else self.joined_size

    @classmethod
    def read(cls, data: Any, where: str) -> VisionConfig:
        """FormatError, UnsupportedError: a key or a value that cannot be one."""
        if not isinstance(data, dict):
            raise FormatError(f"{where} is not a JSON object")
        made: dict[str, Any] = {"image": ImageConfig.from_json(data.get("image"), f"{where} image")}
        if "clips" in data:
            made["clips"] = read_clips(data["clips"], MAX_SIZES["num_hidden_layers"], f"{where} clips")
        if "texts" in data:
            made["texts"] = PictureTexts.read(data["texts"], f"{where} texts")
        return read_stack(cls, {key: value for key, value in data.items() if key not in made}, where, **made)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Stack):
    """A decoder: Llama, and the families that differ from it by a few settings.

    embedding_multiplier    factor of token embeddings, not of the tied head (Gemma 3)
    final_logit_softcapping   logits z become it * tanh(z / it); None: they stay (Gemma 2 and 4)
    vision                  the tower and projector that give it pictures; None: it reads text alone
    pooling                 it has no head and embeds texts; None: it continues them
    segments                tables of learned positions, one after another: tokens of the second text of a pair have theirs in
                            the second one (BERT)
    bidirectional           tokens see those after them too; a sliding window reaches as far on both sides (EmbeddingGemma)
    bidirectional_prompt    tokens of a prompt see each other both ways, whatever the window; those after it see what is before
                            them (PaliGemma)
    policy                  the expert beside it makes actions of what it reads; None: it continues texts (π0)
    whole_pictures          tokens of a picture see all of it, those after them too; a sliding window bounds what is before them
                            (Gemma 3)
    pictures_in_windows     they do so in layers with a sliding window alone; in others they see what is before them (Gemma 4)
    embedding_norm          token embeddings go through a norm before the first layer (BLOOM)
    draft_layers            1: a layer beside it drafts tokens; 0: there is none (Qwen3.5)
    draft_tokens            of the tokens that it drafts: where runs of them begin and end, by turns; none: it drafts all
    """

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    embedding_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    vision: VisionConfig | None = None
    pooling: Pooling | None = None
    bidirectional: bool = False
    whole_pictures: bool = False
    segments: int = 1
    draft_layers: int = 0
    draft_tokens: tuple[int, ...] = ()
    bidirectional_prompt: bool = False
    policy: PolicyStack | None = None
    embedding_norm: bool = False
    pictures_in_windows: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("bidirectional", "bidirectional_prompt", "whole_pictures", "embedding_norm", "pictures_in_windows"):
            check_flag(name, getattr(self, name))
        if self.whole_pictures and (self.vision is None or self.rope.axes > 1):
            raise UnsupportedError("whole_pictures without a vision tower, or with several rotary axes, is not supported")
        if self.pictures_in_windows and (not self.whole_pictures or not any(self.sliding_windows)):
            raise FormatError("config pictures_in_windows without whole_pictures, or without a layer with a sliding window")
        learned = self.rope.kind == "learned" and self.bidirectional
        check_integer("segments", self.segments, 1, MAX_SEGMENTS if learned else 1)
        if type(self.model_type) is not str or len(self.model_type) > 64:
            raise FormatError("config model_type is not a short text")
        check_flag("tie_word_embeddings", self.tie_word_embeddings)
        check_positive("embedding_multiplier", self.embedding_multiplier)
        if self.final_logit_softcapping is not None:
            check_positive("final_logit_softcapping", self.final_logit_softcapping)
        for rope in (self.rope, *((self.local_rope,) if self.local_rope else ())):
            if rope.kind == "axial" or (rope.sections and (rope.axes != 3 or self.vision is None)):
                raise FormatError(f"config rope has {rope.axes} axes ({rope.kind}); a decoder has 1, with a tower or 3")
        if self.local_rope is not None and self.local_rope.axes != self.rope.axes:
            raise FormatError(
                f"config rope has {self.rope.axes} axes and local_rope {self.local_rope.axes}; they must be the same"
            )
        if self.vision is not None and self.vision.out_hidden_size != self.hidden_size:
            raise FormatError(f"config vision gives {self.vision.out_hidden_size} channels; hidden_size is {self.hidden_size}")
        if self.vision is not None and self.vision.image_token_id >= self.vocab_size:
            raise FormatError(f"config image_token_id is {self.vision.image_token_id} of {self.vocab_size} tokens")
        if self.vision is not None and len(self.vision.tap_layers) > self.num_hidden_layers:
            raise FormatError(f"config vision has {len(self.vision.tap_layers)} tap_layers for {self.num_hidden_layers} layers")
        if self.vision is not None and self.vision.class_feature and self.rope.axes > 1:
            raise UnsupportedError("a class_feature for a decoder with several rotary axes is not supported")
        if self.pooling is not None and self.tie_word_embeddings:
            raise FormatError("config has pooling and tie_word_embeddings; what embeds has no head to tie")
        if self.conv_layers and (self.pooling or self.num_experts):
            raise UnsupportedError("conv_layers beside pooling or experts are not supported")
        if (self.delta_net or self.ssd) and self.pooling:
            raise UnsupportedError("delta_net or ssd beside pooling is not supported")
        if self.ssd and self.vision:
            raise UnsupportedError("ssd beside a vision tower is not supported")
        if self.final_logit_softcapping is not None and self.pooling:
            raise FormatError("config has final_logit_softcapping and pooling; what embeds has no logits")
        if (self.hidden_size_per_layer_input or not self.alike) and self.pooling:
            raise UnsupportedError(
                "value_norm, num_kv_shared_layers, hidden_size_per_layer_input or heads of several shapes beside pooling are "
                "not supported"
            )
        if self.num_hidden_layers * self.hidden_size_per_layer_input > MAX_CHANNELS:
            raise FormatError(
                f"config hidden_size_per_layer_input is {self.hidden_size_per_layer_input} in {self.num_hidden_layers} layers; "
                f"expected at most {MAX_CHANNELS} channels together"
            )
        if self.pooling is not None and self.vision is not None:
            raise UnsupportedError("pooling beside a vision tower is not supported")
        if self.bidirectional and self.pooling is None:
            raise UnsupportedError("bidirectional without pooling is not supported: what sees the end of a text embeds it")
        if self.pooling is not None and self.pooling.ranks and not self.bidirectional and self.pooling.kind != "last":
            raise UnsupportedError("pooling that ranks without bidirectional is supported with kind 'last'")
        if self.pooling is not None and self.pooling.kind == "cls" and not self.bidirectional:
            raise FormatError("config pooling is cls without bidirectional: the first token sees nothing of a text")
        if self.bidirectional_prompt and (self.pooling or self.state_layers or self.draft_layers or not self.alike):
            raise UnsupportedError(
                "bidirectional_prompt beside pooling, layers with a state, draft_layers or heads of several shapes is not "
                "supported"
            )
        if self.policy is not None:
            if not self.bidirectional_prompt or self.vision is None:
                raise UnsupportedError("policy is supported with bidirectional_prompt and a vision tower")
            self.policy.check_beside(self)
        check_integer("draft_layers", self.draft_layers, 0, 1)
        check_draft_tokens(self.draft_tokens, self.vocab_size if self.draft_layers else 0)
        if self.draft_layers:
            DraftStack.check_beside(self, self.pooling, self.whole_pictures)

    @property
    def draft(self) -> DraftStack | None:
        """The layer that drafts tokens; None: there is none."""
        return DraftStack.beside(self) if self.draft_layers else None

    @property
    def ranges(self) -> tuple[int, ...]:
        """Sliding windows that layers have, 0 for none, each once, where tokens, or those of a prompt, see both ways; else
        empty."""
        return self._windows if self.bidirectional or self.bidirectional_prompt else ()

    @property
    def picture_ranges(self) -> tuple[int, ...]:
        """The same where tokens of a picture do; with pictures_in_windows without 0."""
        found = self._windows if self.whole_pictures else ()
        return tuple(filter(None, found)) if self.pictures_in_windows else found

    @property
    def _windows(self) -> tuple[int, ...]:
        return tuple(sorted({self.window(layer) for layer in range(self.num_hidden_layers)}))

    def record(self) -> dict[str, Any]:
        found = stack_record(self) | ({"vision": stack_record(self.vision)} if self.vision else {})
        found |= {"policy": stack_record(self.policy)} if self.policy else {}
        return found | ({"pooling": self.pooling.record()} if self.pooling else {})

    def to_json(self) -> str:
        """Canonical JSON: equal configurations give equal bytes."""
        return json.dumps(self.record(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"config is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise FormatError("config is not a JSON object")
        vision, pooling, policy = (data.pop(key, None) for key in ("vision", "pooling", "policy"))
        return read_stack(
            cls,
            data,
            "config",
            vision=None if vision is None else VisionConfig.read(vision, "config vision"),
            pooling=None if pooling is None else Pooling.read(pooling, "config pooling"),
            policy=None if policy is None else PolicyStack.read(policy, "config policy"),
        )
