"""A conversion as data: what will be read, quantized and written, in which steps, how large and with how much memory.

`edgeq.converters.planning.preflight` makes a plan after all checks; `edgeq.converters.convert` carries it out.

Memory promise, beside Python and torch themselves (BASELINE): one slab of rows of at most 64 MB in float32, working arrays of
its size, and the scales of one matrix; with calibration text also the inputs of a decoder layer for the whole text, twice the
layer in float32, and in place of the slab, where that is more, what the layer computes from a batch; or, where that is more
than all these, what the last measurements take; and what the method declares (`Method.memory_bytes`).  A GPU has a promise of
its own (`ConversionPlan.device_bytes`); that of the host then holds all the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

from edgeq.converters.budget.budget import MAX_TOKENS
from edgeq.converters.budget.menu import Menu
from edgeq.converters.budget.part_names import TABLE
from edgeq.converters.budget.parts import AllocationPart, parts_of
from edgeq.converters.budget.prediction import AllocationPrediction
from edgeq.converters.calibration.compute import BATCH_ROWS, LOGIT_BYTES, MEASURED_ROWS, Compute, measurement_bytes
from edgeq.converters.checkpoint.checkpoint import Checkpoint
from edgeq.converters.checkpoint.slabs import BASELINE, SLAB_BYTES, Tensors
from edgeq.converters.checkpoint.tokenizer import TextAssets
from edgeq.converters.method import Method
from edgeq.converters.planning.code_digest import quantizing_code
from edgeq.converters.planning.items import Contents
from edgeq.converters.planning.options import HEADS, ConvertOptions, HeadBits
from edgeq.converters.planning.output import JOURNAL
from edgeq.converters.planning.steps import WriteStep, head_codec, write_steps
from edgeq.converters.rounding.linears import LinearItem
from edgeq.converters.rounding.tuning_cost import tuning_bytes
from edgeq.format.adapter import SOURCE_CHANNELS
from edgeq.format.codec import Codec
from edgeq.format.container import DATA_OFFSET
from edgeq.format.metadata import Metadata
from edgeq.format.records import Mode
from edgeq.network.config import ModelConfig, VisionConfig
from edgeq.network.policy_stack import PolicyStack
from edgeq.version import __version__

if TYPE_CHECKING:
    from edgeq.converters.calibration.dataset import Calibration
    from edgeq.converters.calibration.samples import PictureSamples

JUDGED, FITTED = 1024, 8192
"""Tokens of the calibration text on which it is tried what massive tokens count, and that GPTQ has there, or a row of each."""
DEVICE_BASELINE = 64 << 20
"""Workspaces of a GPU's libraries, and what is lost between the blocks that torch takes of its memory."""


@dataclass(frozen=True)
class PrecisionChoice:
    """Bits of the head, the mode, and the measurements that chose them, which go into the provenance."""

    head: int
    mode: Mode
    measured: dict[str, object]


@dataclass(frozen=True)
class ConversionPlan:
    """What will be written and how; `options` are those asked for, `method.options` have the defaults filled in.

    method, tower   of the decoder, and of the vision tower where there is one
    draft           method of the layer that drafts, where there is one
    draft_tokens    those that it drafts, as the configuration has them
    choice          what was measured for the head and the mode
    prediction      of the allocation that the budget led to
    compute         where the calibration text runs
    divergence      mean KL divergence of the finished file on calibration text, in nats; measured with an allocation
    """

    options: ConvertOptions
    checkpoint: Checkpoint
    method: Method
    tower: Method | None
    text: TextAssets
    calibration: Calibration | PictureSamples | None
    choice: PrecisionChoice | None = None
    prediction: AllocationPrediction | None = None
    divergence: float | None = None
    compute: Compute = Compute()
    draft: Method | None = None
    draft_tokens: tuple[int, ...] = ()

    @cached_property
    def steps(self) -> tuple[WriteStep, ...]:
        """What is written, in order."""
        return write_steps(self.checkpoint, self.method, self.tower, self.draft, self.text)

    @cached_property
    def contents(self) -> Contents:
        return Contents.of([item for step in self.steps for item in step.items])

    def heads(self) -> dict[int, Codec | None]:
        """The candidates for the head's codec, by bits: only one where the options or the allocation give it."""
        if allocated := self.method.allocated("head"):
            return {allocated.bits or 16: allocated if allocated.bits else None}
        candidates: tuple[int, ...] = (self.options.head,) if self.options.head else HEADS[:-1]
        return {bits: head_codec(bits, self.method.config.hidden_size) for bits in candidates}

    def parts(self) -> tuple[AllocationPart, ...]:
        """The parts that an allocation gives a codec each."""
        return parts_of((item for step in self.steps for item in step.items), self.method.config, self.menu)

    @property
    def menu(self) -> Menu:
        """What a budget chooses from."""
        budget = self.options.budget
        if budget is None:
            return Menu()
        return Menu(budget.half_grids, budget.trellises, fast=budget.unit == "seconds")

    @property
    def model(self) -> Tensors:
        """The unquantized model that is rounded: the checkpoint, changed as a method without a study changes it."""
        return self.method.tensors(self.checkpoint, {})

    def codecs(self) -> dict[str, Codec]:
        """The codec of every weight of a decoder layer, by tensor; of one with two blocks that of the first."""
        items = (item for step in self.steps if step.layer is not None for item in step.items if isinstance(item, LinearItem))
        return {tensor: item.recipe.codec for item in items for tensor, _ in item.tensors}

    def with_options(self, options: ConvertOptions) -> ConversionPlan:
        """This plan under other options of the same method."""
        return replace(self, options=options, method=type(self.method)(options, self.method.family, self.method.config))

    def with_choice(self, choice: PrecisionChoice) -> ConversionPlan:
        """This plan with what was measured; only its last step can change."""
        chosen = replace(self, choice=choice)
        if self.options.allocation is not None:
            return chosen
        return chosen.with_options(replace(self.options, head=cast(HeadBits, choice.head)))

    @property
    def output_bytes(self) -> int:
        """Size of the file, its metadata estimated at 512 bytes a segment."""
        return DATA_OFFSET + self.contents.nbytes + 512 * self.contents.segments

    @property
    def tries_massive(self) -> bool:
        """Whether it is tried what massive tokens count (probing/massive.py): there is a text, and a pass back through every
        layer, none of which has a state or reads what another one kept."""
        from edgeq.converters.calibration.samples import PictureSamples

        c = self.method.stack
        if not self.method.weighs_tokens or self.calibration is None or isinstance(self.calibration, PictureSamples):
            return False
        if not isinstance(c, ModelConfig) or c.pooling is not None or c.policy is not None or c.bidirectional:
            return False
        shares = any(c.shares_cache(layer) for layer in range(c.num_hidden_layers))
        return not (shares or c.hidden_size_per_layer_input or c.state_layers)

    @property
    def memory_bytes(self) -> int:
        """The promise: anonymous memory that the conversion will not exceed."""
        scales = max(item.scale_bytes for step in self.steps for item in step.items if isinstance(item, LinearItem))
        tokens = 0 if self.calibration is None else self.calibration.tokens
        always, writing = BASELINE + self.method.memory_bytes(tokens), 6 * SLAB_BYTES + scales
        if self.calibration is None:
            return always + writing
        from edgeq.converters.calibration.forward import kept_numbers
        from edgeq.converters.calibration.samples import PictureSamples

        c, length = self.method.config, self.calibration.longest
        layer, batch = self.layer_bytes, self.batch_bytes(BATCH_ROWS)
        # When all layers are written, a few rows are run again for what the head and the whole file lose.
        allocates = self.options.budget is not None or self.options.allocation is not None
        measured = min(tokens, max(self.calibration.few(MEASURED_ROWS).tokens, MAX_TOKENS + length if allocates else 0))
        states, logits = measurement_bytes(c, measured)
        # One after another: a layer is tuned, run, written, run again for its report; those few rows, and the head.
        tunes, tuning = bool(self.method.options.tune), tuning_bytes(layer, self.largest_bytes, batch)
        work = (2 * layer + max(batch, tunes * tuning), 2 * layer + writing, layer + batch + states, states + logits + writing)
        pictures = self._picture_bytes(self.calibration) if isinstance(self.calibration, PictureSamples) else 0
        if self.draft and self.draft.calibrates:
            pictures += self._expert_bytes(layer)
        # Tuning has inputs and targets beside the outputs.
        kept = (1 + tunes) * 4 * kept_numbers(c, tokens)
        found = always + pictures + kept + (1 + 2 * tunes) * 4 * tokens * c.hidden_size + max(work)
        return max(found, always + self._trial_bytes()) if self.tries_massive else found

    def _trial_bytes(self) -> int:
        """Memory that it takes to try what massive tokens count: states and gradients of every layer over the rows that are
        judged on, the states of the others, and a layer on its way back, a row at a time; or the logits at the end."""
        assert self.calibration is not None
        c, length = self.method.config, self.calibration.longest
        judged, fitted = (min(max(most, length), self.calibration.tokens) for most in (JUDGED, FITTED))
        _, logits = measurement_bytes(c, judged)
        states = 4 * c.hidden_size * (2 * (c.num_hidden_layers + 1) * judged + fitted)
        work = self.layer_bytes + self.largest_bytes + max(2 * self.batch_bytes(1), self.batch_bytes(BATCH_ROWS))
        return states + max(work, logits + 6 * SLAB_BYTES)

    def device_bytes(self, rows: int) -> int:
        """The promise for a GPU that computes so many rows of tokens at a time: the most memory that is taken of it.

        A decoder layer in float32 and its largest matrix once more, what the method declares, and what is computed from a
        batch; or, when head and mode are chosen, slabs of the head, what enters it and its logits.
        """
        from edgeq.converters.calibration.moments import MOMENT_BYTES

        assert self.calibration is not None
        c, largest = self.method.config, self.largest_bytes
        # A probe has the moments of all parts of a layer at hand.
        moments = self.method.memory_bytes(self.calibration.tokens) + MOMENT_BYTES * (self.options.budget is not None)
        batch = self.batch_bytes(rows)
        tuning = bool(self.method.options.tune) * tuning_bytes(self.layer_bytes, largest, batch)
        layer = self.layer_bytes + max(largest + moments + batch, tuning)
        tokens = self.calibration.few(MEASURED_ROWS).tokens
        slab = min(c.vocab_size, SLAB_BYTES // (4 * c.hidden_size), LOGIT_BYTES // (4 * tokens))
        head = 4 * (2 * tokens * c.hidden_size + 2 * slab * c.hidden_size + 5 * tokens * slab)
        return max(layer, head) + DEVICE_BASELINE

    @property
    def layer_bytes(self) -> int:
        """The largest decoder layer in float32."""
        return 4 * sum(math.prod(shape) for _, shape in self.method.family.largest_layer().values())

    @property
    def largest_bytes(self) -> int:
        """Its largest matrix."""
        return 4 * max(math.prod(shape) for _, shape in self.method.family.largest_layer().values())

    def batch_bytes(self, rows: int) -> int:
        """Scores of attention, where torch keeps them whole, and what a layer computes from so many rows of tokens."""
        from edgeq.converters.calibration.forward import token_activations

        assert self.calibration is not None
        c, length = self.method.config, self.calibration.longest
        return 4 * rows * length * (3 * c.num_attention_heads * length + token_activations(c))

    def _picture_bytes(self, samples: PictureSamples) -> int:
        """Memory that a tower takes over calibration pictures."""
        from edgeq.converters.calibration.forward import token_activations

        assert self.tower is not None and isinstance(self.tower.stack, VisionConfig)
        c, patches = self.tower.stack, [math.prod(picture.grid) for picture in samples.pictures]
        widest = max(c.patch_width, c.hidden_size)
        layer = 4 * sum(math.prod(shape) for _, shape in self.tower.family.largest_layer().values())
        most = max(patches)
        batch = 4 * most * (3 * c.num_attention_heads * most + token_activations(c) + 2 * c.joined_size)
        kept = widest + len(c.tap_layers) * c.hidden_size
        return 4 * sum(patches) * kept + 2 * layer + batch + self.tower.memory_bytes(sum(patches))

    def _expert_bytes(self, decoder_layer: int) -> int:
        """Memory that an expert takes over a few texts: their states in the decoder, a layer of which is run beside it, keys
        and values of one layer, and the rows of the expert."""
        from edgeq.converters.calibration.expert_forward import TEXTS
        from edgeq.converters.calibration.forward import token_activations

        assert self.draft is not None and isinstance(self.draft.stack, PolicyStack) and self.calibration is not None
        c, e, texts = self.method.config, self.draft.stack, self.calibration.few(TEXTS)
        count, length = 1 + e.actions, texts.longest
        seen = count * (3 * e.num_attention_heads * (length + count) + token_activations(e) + 2 * e.kv_size * length)
        rows = texts.tokens // length * e.steps * count * (2 * e.hidden_size + e.action_size)
        return decoder_layer + 4 * (texts.tokens * (c.hidden_size + 2 * c.kv_size) + BATCH_ROWS * seen + rows)

    def metadata(self, split_rows: Mapping[str, object] | None = None) -> Metadata:
        """Metadata of the finished file.  Nothing in it depends on when, where or in how many runs it was made.

        split_rows   what linear layers say of the columns that are kept apart, by name
        """
        provenance: dict[str, object] = {
            "source": self.checkpoint.name,
            "source_digest": self.checkpoint.digest(),
            **({"origin": dict(origin)} if (origin := self.checkpoint.source.origin) else {}),
            **({"adapter": {"name": a.name, "digest": a.digest}} if (a := self.checkpoint.adapter) else {}),
            "method": self.method.name,
            "options": {key: value for key, value in self.method.options.recorded().items() if key != "method"},
            "calibration": self.calibration and {key: getattr(self.calibration, key) for key in ("source", "sha256", "tokens")},
            **({SOURCE_CHANNELS: True} if self.method.keeps_channels and not self.checkpoint.rearranged else {}),
            "edgeq": __version__,
            "code": quantizing_code(),
            "measured": self._measured(),
            "quantizer": None
            if self.method.options.bits is None
            else self.method.preset.title(self.method.codec(self.method.config.hidden_size)),
            **({"details": self.method.details} if self.method.details else {}),
            **({"split_rows": dict(split_rows)} if split_rows else {}),
            **({"vision": {"method": self.tower.name, **self.tower.options.recorded()}} if self.tower else {}),
            **({"draft": {"method": self.draft.name, **self.draft.options.recorded()}} if self.draft else {}),
        }
        contents = self.contents
        return Metadata(
            config=self.stored_config,
            generation=self.text.generation,
            provenance=provenance,
            default_mode=self.choice.mode if self.choice else self.method.mode or "a16",
            linears=contents.linears,
            arrays=contents.arrays,
            blobs=contents.blobs,
            kv=self.method.kv,
            vision_mode=self.tower.mode if self.tower else None,
        )

    @property
    def stored_config(self) -> ModelConfig:
        """The network of the file, its tower as that is stored."""
        config = replace(self.method.stored_config, draft_tokens=self.draft_tokens)
        if self.tower is None:
            return config
        assert isinstance(self.tower.stack, VisionConfig)
        return replace(config, vision=self.tower.stack)

    def _measured(self) -> dict[str, object] | None:
        if self.choice is None:
            return None
        found = dict(self.choice.measured)
        if self.prediction:
            found |= {"kl_predicted": self.prediction.kl, "kl_of_parts": self.prediction.measured}
        return found if self.divergence is None else found | {"kl": self.divergence}

    def fingerprint(self) -> dict[str, object]:
        """Everything the bytes of the result depend on, flat, so that a difference can be named."""
        found: dict[str, object] = {"edgeq": __version__, "code": quantizing_code()}
        if not self.method.keeps_integers:
            import torch

            found["torch"] = torch.__version__
        found["source"] = self.checkpoint.name
        found["adapter"] = self.checkpoint.adapter.digest if self.checkpoint.adapter else None
        for path in self.checkpoint.files():
            if path.name.endswith(JOURNAL):
                # That of an output beside the checkpoint's own files.
                continue
            status = path.stat()
            found[f"file {path.name}"] = [status.st_size, status.st_mtime_ns]
        config = json.dumps(self.checkpoint.config, sort_keys=True)
        found["config.json"] = hashlib.sha256(config.encode()).hexdigest()
        found["calibration text"] = self.calibration.sha256 if self.calibration else None
        if pooling := self.method.config.pooling:
            # In a folder of its own, beside the files above.
            found["pooling"] = [pooling.kind, pooling.normalize, *map(astuple, pooling.dense)]
        options = self.method.options.recorded()
        if self.options.allocation is not None:
            text = json.dumps(self.options.allocation)
            options["allocation"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        if options.get("group_size") and not self.method.group_size_given:
            options["group_size"] = f"at most {options['group_size']}"
        return found | {f"option {key}": value for key, value in options.items()}

    def notes(self) -> list[str]:
        """Lines for the user: why a GPU is not used; what of the model is left out; that weights are rounded twice, or to
        nearest though nobody asked for that; the layers whose columns the group size does not divide, and their groups.
        """
        device = [self.compute.note] if self.compute.note else []
        again = [*self.checkpoint.source.notes]
        if self.method.config.tie_word_embeddings and not self.method.stored_config.tie_word_embeddings:
            contents = self.contents
            table = contents.linears.get(TABLE) or contents.arrays[TABLE]
            again.append(
                f"the gain of the last norm goes into the head, which was the embedding too: the file has both, and "
                f"{table.nbytes / 1e6:,.1f} MB for the embedding; no more is read for a token"
            )
        again += [f"{self.checkpoint.name}: left out: {part}" for part in self.method.family.description.left_out]
        if self.checkpoint.source.quantized and self.method.options.bits is not None:
            again.append(
                f"{self.checkpoint.name} is quantized already: --method {self.method.name} rounds it a second time, and loses "
                "more than either alone; leave out --method, --bits and --calibration to keep its weights as they are"
            )
        elif self.options.open_method and self.method.name == "rtn" and (self.method.options.bits or 16) < LOSSLESS_BITS:
            again.append(QUICK)
        size = self.method.options.group_size
        if not size or self.options.allocation is not None:
            return device + again
        # (columns, their group size) -> the layers' names without numbers, in order
        layers: dict[tuple[int, int], dict[str, None]] = {}
        for item in (item for step in self.steps if step.layer is not None for item in step.items):
            if isinstance(item, LinearItem) and item.recipe.codec.integer:
                codec, block = item.recipe.blocks(item.columns)[0]
                columns = block.stop - block.start
                if columns % size:
                    part = ".".join(x for x in item.name.split(".")[2:] if not x.isdigit())
                    layers.setdefault((columns, codec.group_size), {})[part] = None
        found = [_groups_note(size, columns, taken, ", ".join(parts)) for (columns, taken), parts in layers.items()]
        return device + again + found


LOSSLESS_BITS = 7
"""Weights of so many bits are as good by any method."""
QUICK = (
    "without --method weights are rounded to nearest, which is quick; --method gptq, which reads a text through the model, "
    "loses a fifth of that at 4 bits on a published model of 135 M parameters, and takes some seventy times as long"
)
"""docs/quality.md has the numbers: KL divergence and time."""


def _groups_note(size: int, columns: int, taken: int, layers: str) -> str:
    """What the groups of `layers` are, where `size` does not divide their columns and `taken` is their group size."""
    rest = columns % taken
    ends = f", the last group of each output channel has {rest}" if rest else ""
    return f"{layers}: group size {size} does not divide {columns} input channels: groups of {taken}{ends}"
