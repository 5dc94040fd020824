"""Argument records of the kernels, by the name of the kernel."""

from __future__ import annotations

from collections.abc import Mapping

from edgeq.targets.cuda.arguments import experts, heads, products, rows, states
from edgeq.targets.cuda.arguments.record import Arguments

RECORDS: Mapping[str, type[Arguments]] = {
    "matvec": products.ProductArguments,
    "matmul": products.ProductArguments,
    "fused_rows": products.FusedArguments,
    "fused_activate": products.FusedArguments,
    "fused_heads": products.FusedArguments,
    "quantize_input": products.QuantizeInputArguments,
    "quantize_input_token": products.QuantizeInputTokenArguments,
    "quantize_input_static": products.QuantizeInputStaticArguments,
    "float_product": products.FloatProductArguments,
    "low_rank": products.LowRankArguments,
    "low_rank_add": products.LowRankAddArguments,
    "arrange": products.ArrangeArguments,
    "butterflies": products.ButterfliesArguments,
    "split_row": products.SplitRowArguments,
    "add_squares": products.AddSquaresArguments,
    "requantize": products.RequantizeArguments,
    "embed": rows.EmbedArguments,
    "embed_float": rows.EmbedFloatArguments,
    "rms_norm": rows.RmsNormArguments,
    "layer_norm": rows.LayerNormArguments,
    "activate": rows.ActivateArguments,
    "activate_clamped": rows.ActivateClampedArguments,
    "scale": rows.ScaleArguments,
    "array_scale": rows.ArrayScaleArguments,
    "soft_cap": rows.SoftCapArguments,
    "gate": rows.GateArguments,
    "inject": rows.InjectArguments,
    "select": rows.SelectArguments,
    "largest": rows.LargestArguments,
    "read_memory": rows.ReadMemoryArguments,
    "head_norm": heads.HeadNormArguments,
    "value_norm": heads.ValueNormArguments,
    "rope": heads.RopeArguments,
    "head_rotate": heads.HeadRotateArguments,
    "cache_write": heads.CacheWriteArguments,
    "cache_write_int8": heads.CacheWriteArguments,
    "cache_write_int4": heads.CacheWriteArguments,
    "attend": heads.AttendArguments,
    "route": experts.RouteArguments,
    "share_scale": experts.ShareScaleArguments,
    "scatter": experts.ScatterArguments,
    "gather_add": experts.GatherAddArguments,
    "gated_add": experts.GatedAddArguments,
    "short_conv": states.ShortConvArguments,
    "row_before": states.RowBeforeArguments,
    "state_scan": states.StateScanArguments,
    "state_keep": states.StateScanArguments,
    "gated_norm": states.GatedNormArguments,
}
